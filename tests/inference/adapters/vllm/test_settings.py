"""Settings in vLLM's configuration that accept_head refuses, each with one sentence that names the option."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from accept_head import InputError
from accept_head.inference.adapters.vllm import settings
from accept_head.inference.adapters.vllm.settings import Settings, check, check_hooks, is_supported, is_the_tested


def config(accept_head=None, *, spec=(), parallel=(), **scheduler):
    """A VllmConfig as far as the adapter looks at it."""
    speculative = {
        "method": "draft_model",
        "rejection_sample_method": "standard",
        "parallel_drafting": False,
        "use_heterogeneous_vocab": False,
        "use_local_argmax_reduction": False,
        "enable_adaptive_verification": False,
        **dict(spec),
    }
    return SimpleNamespace(
        additional_config={} if accept_head is None else {"accept_head": accept_head},
        speculative_config=SimpleNamespace(**speculative) if speculative["method"] else None,
        parallel_config=SimpleNamespace(**{"data_parallel_size": 1, "pipeline_parallel_size": 1, **dict(parallel)}),
        scheduler_config=SimpleNamespace(**{"async_scheduling": False, **scheduler}),
    )


@pytest.fixture(autouse=True)
def known_version(monkeypatch):
    monkeypatch.setattr(settings, "installed_version", lambda: "0.32.1")


ASKED = {"policy": "head:PATH"}


def test_nothing_is_looked_at_until_it_is_asked_for():
    assert check(config(spec={"method": "eagle"}, parallel={"data_parallel_size": 8}, async_scheduling=True)) is None
    assert check(SimpleNamespace(additional_config=None)) is None
    assert check(config(ASKED)) == Settings(policy="head:PATH")
    assert check(config(ASKED, spec={"method": "eagle3"})) == Settings(policy="head:PATH")
    assert check(config({**ASKED, "log_every": 0})) == Settings(policy="head:PATH", log_every=0.0)


@pytest.mark.parametrize(
    ("accept_head", "words"),
    [
        ([], "additional_config.accept_head is"),
        ({}, "accept_head.policy is None"),
        ({"policy": 3}, "accept_head.policy is 3"),
        ({"policy": "fixed:1", "treshold": 0.5}, "unknown field 'treshold'"),
        ({"policy": "fixed:1", "compile": 1}, "compile is 1"),
        ({"policy": "fixed:1", "log_every": -1}, "log_every is -1"),
        ({"policy": "fixed:1", "log_every": True}, "log_every is True"),
    ],
)
def test_what_is_asked_must_make_sense(accept_head, words):
    with pytest.raises(InputError, match=words.replace("[", r"\[")):
        check(config(accept_head))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spec": {"method": "eagle"}}, "speculative_config.method is 'eagle'"),
        ({"spec": {"method": None}}, "speculative_config.method is None"),
        ({"spec": {"rejection_sample_method": "block"}}, "rejection_sample_method is 'block'"),
        ({"spec": {"parallel_drafting": True}}, "parallel_drafting is True"),
        ({"spec": {"use_heterogeneous_vocab": True}}, "use_heterogeneous_vocab is True"),
        ({"spec": {"use_local_argmax_reduction": True}}, "use_local_argmax_reduction is True"),
        ({"parallel": {"data_parallel_size": 2}}, "data_parallel_size is 2"),
        ({"parallel": {"pipeline_parallel_size": 4}}, "pipeline_parallel_size is 4"),
        ({"async_scheduling": True}, "async_scheduling is on.*--no-async-scheduling"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(change, words):
    with pytest.raises(InputError, match=words):
        check(config(ASKED, **change))


def test_asynchronous_scheduling_goes_with_adaptive_verification():
    adaptive = {"enable_adaptive_verification": True}
    assert check(config(ASKED, spec=adaptive, async_scheduling=True)) == Settings(policy="head:PATH")


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.320.0", "1.0", None])
def test_a_vllm_that_was_not_tested_is_named(monkeypatch, version):
    monkeypatch.setattr(settings, "installed_version", lambda: version)
    assert not is_supported(version)
    with pytest.raises(InputError, match=f"vLLM {version} is installed.*0.32 and 0.33, tested with 0.32.0"):
        check(config(ASKED))
    assert check(config()) is None


@pytest.mark.parametrize(
    ("version", "tested"), [("0.32.0", True), ("0.32.0+cpu", True), ("0.32.1", False), ("0.33.0", False), (None, False)]
)
def test_another_release_of_the_range_is_supported_but_not_the_tested_one(version, tested):
    assert is_the_tested(version) is tested and is_supported(version) is (version is not None)


def test_a_hook_that_is_gone_is_named():
    class Proposer:
        def propose(self):
            pass

    check_hooks(Proposer, ("propose",))
    with pytest.raises(InputError, match=r"vLLM 0.32.1 has no Proposer._sample_draft_tokens"):
        check_hooks(Proposer, ("propose", "_sample_draft_tokens"))


def test_a_method_of_ours_does_not_hide_that_vllms_is_gone():
    theirs = type("Proposer", (), {"__module__": "vllm.v1.spec_decode"})
    ours = type("OurProposer", (theirs,), {"propose": lambda self: None})
    with pytest.raises(InputError, match=r"has no Proposer.propose"):
        check_hooks(ours, ("propose",))
