"""Our overrides fit the methods of each vLLM release that we take, as their source has them."""

from __future__ import annotations

import ast
import json

import pytest

from accept_head.inference.adapters.vllm.settings import is_supported
from tests.inference.adapters.vllm.signatures import HOOKED, RECORD, accepts, changes, functions, read, signature

RELEASES = json.loads(RECORD.read_text())
SPEC = "v1/worker/gpu/spec_decode"
# Our file and class, and theirs that it extends.
OVERRIDES = [
    ("v1.py", "PolicyRounds", "v1/spec_decode/llm_base_proposer.py SpecDecodeBaseProposer"),
    ("v2.py", "PolicyRounds", f"{SPEC}/speculator.py DraftModelSpeculator"),
    ("v2.py", "PolicyRounds", f"{SPEC}/standalone_ar/speculator.py StandaloneARSpeculator"),
    ("v2.py", "PolicyRounds", f"{SPEC}/target_dependent_ar/speculator.py TargetDependentARSpeculator"),
    ("ragged.py", "RaggedDraftTokensHandler", f"{SPEC}/utils.py DraftTokensHandler"),
    ("v1.py", "Sampler", "v1/sample/rejection_sampler.py RejectionSampler"),
]


@pytest.mark.parametrize("release", RELEASES)
def test_every_hook_is_there(release):
    wanted = {f"{file} {owner}.{name}" for (file, owner), names in HOOKED.items() for name in names}
    assert set(RELEASES[release]) == wanted
    assert is_supported(release)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("file", "ours", "theirs"), OVERRIDES)
def test_overrides_take_all_that_theirs_take(repository, release, file, ours, theirs):
    mine = functions(repository / "inference" / "adapters" / "vllm" / file, ours)
    shared = [name for name in mine if f"{theirs}.{name}" in RELEASES[release] and name != "__init__"]
    assert shared
    for name in shared:
        its = RELEASES[release][f"{theirs}.{name}"]
        assert accepts(mine[name], its), f"{file} {name}({mine[name]}) for {name}({its})"


@pytest.mark.parametrize("release", RELEASES)
def test_inputs_are_where_our_rounds_look_for_them(release):
    for kind in ("standalone_ar/speculator.py StandaloneARSpeculator", "target_dependent_ar/speculator.py "
                 "TargetDependentARSpeculator"):  # fmt: skip
        names = list(signature(RELEASES[release][f"{SPEC}/{kind}.propose"]).parameters)
        assert names[:2] == ["self", "input_batch"] and names[2 + 4 : 2 + 6] == ["num_sampled", "num_rejected"]
        assert {"dummy_run", "num_speculative_tokens"} <= set(names)
    names = signature(
        RELEASES[release]["v1/spec_decode/llm_base_proposer.py SpecDecodeBaseProposer.propose"]
    ).parameters
    assert "common_attn_metadata" in names


@pytest.mark.parametrize("release", RELEASES)
def test_the_metadata_of_a_forward_that_catches_up_has_the_fields_it_is_given(repository, release):
    tree = ast.parse((repository / "inference" / "adapters" / "vllm" / "unfed.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "type(now)"]
    (given,) = [[each.arg for each in call.keywords] for call in calls]
    its = signature(RELEASES[release]["v1/attention/backend.py CommonAttentionMetadata.__init__"])
    its.bind("self", **dict.fromkeys(given))
    with pytest.raises(TypeError):
        its.bind("self", **dict.fromkeys(given[1:]))


def test_a_parameter_that_an_override_does_not_take_is_found():
    assert accepts("self, a, **options", "self, a, b=None") and accepts("self, a, *rest", "self, a, b")
    assert not accepts("self, a, b", "self, a, b, c=None")
    assert not accepts("self, a, *rest", "self, b, *, a=None, c=None")


def test_a_change_is_named(tmp_path):
    file = tmp_path / "vllm" / "config" / "vllm.py"
    file.parent.mkdir(parents=True)
    file.write_text("class VllmConfig:\n    def __post_init__(self, fast: bool = False, *, k: int = 1): ...\n")
    assert read(tmp_path) == {"config/vllm.py VllmConfig.__post_init__": "self, fast=None, *, k=None"}
    assert changes({"x": "self"}, read(tmp_path)) == [
        "config/vllm.py VllmConfig.__post_init__: not there → self, fast=None, *, k=None",
        "x: self → gone",
    ]
