"""compile="steps": each policy drafts as without it. The compiler itself is tested in engine/test_compiled.py."""

from __future__ import annotations

import shutil
from functools import partial

import pytest

from accept_head import InputError
from accept_head.inference import generate
from accept_head.inference.decode import steps
from accept_head.inference.decode.loop import Decoder
from accept_head.inference.engine.memory import plan_memory
from accept_head.inference.policies import reader
from tests.examples import make_eagle3
from tests.inference.support.decoders import GREEDY, LLAMA, POLICIES, PROMPTS, SAMPLED, decode, new_decoder, run
from tests.inference.support.toy import VOCAB, one_layer_pair

AT_ONCE = "head before", "head gain", "base alone", "head with a base"  # score and signals are one call


@pytest.fixture
def calls(monkeypatch):
    """For each call that stands for a compiled one, the shapes of its inputs. In place of compiling, the function."""
    made = []

    def counted(function, *inputs):
        made.append([None if each is None else tuple(each.shape) for each in inputs])
        return function(*inputs)

    monkeypatch.setattr(reader, "compiled", lambda function, *_, **__: partial(counted, function))
    return made


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_drafts_as_without(name, sampling, calls):
    plain, compiled = (
        decode(LLAMA, POLICIES[name](LLAMA[1]), PROMPTS, sampling=sampling, compile=compile)
        for compile in ("none", "steps")
    )
    assert compiled == plain
    if name in AT_ONCE:
        vocab = [shapes[0] for shapes in calls]
        assert len(calls) > 10 and all(shape[1] == VOCAB for shape in vocab)


def test_a_drafters_own_tokens_are_read_where_they_lie(random_llama, calls, monkeypatch):
    """The signals are of a token's place among the drafter's tokens, which is not its id."""
    target = random_llama(1, layers=4)
    drafter = make_eagle3(target)
    how = {"policy": "confidence:0.05,k_max=5", "max_new_tokens": 20, "batch_size": 2, "sampling": SAMPLED}
    plain = generate(target, drafter, PROMPTS, **how)
    drafted = sum(stats.drafted for stats in plain.stats)
    assert sum(stats.rounds for stats in plain.stats) < drafted
    assert generate(target, drafter, PROMPTS, compile="steps", **how).tokens == plain.tokens
    assert {shapes[0][1] for shapes in calls} == {len(drafter.d2t)} != {target.config.vocab_size}
    monkeypatch.setattr(steps, "step_of", None)  # not needed any more
    assert generate(target, drafter, PROMPTS, compile="steps", **how).tokens == plain.tokens


def test_a_decoder_compiles_once_for_a_policy_and_a_kind_of_sampling(monkeypatch):
    compilations = []
    monkeypatch.setattr(reader, "compiled", lambda function, *_, name, **__: compilations.append(name) or function)
    monkeypatch.setattr(reader.SignalReader, "compile", lambda *_, **how: compilations.append(how["sampled"]) or False)
    decoder, policies = new_decoder("steps"), [POLICIES["max-prob"](LLAMA[1]), POLICIES["entropy"](LLAMA[1])]
    for sampling in (GREEDY, GREEDY, SAMPLED, SAMPLED):
        for policy in policies:
            run(decoder, policy, sampling=sampling)
    assert compilations == [False, False, True, True]


def test_models_that_are_not_on_a_cpu_are_refused():
    models = one_layer_pair()
    plan = plan_memory(*models, batch=1, max_length=8, max_draft_tokens=2, vocab_size=VOCAB, greedy=True)
    models = [model.to("meta") for model in models]
    with pytest.raises(InputError, match="compile is 'steps', which is for a CPU, but the models are on meta"):
        Decoder(*models, plan, compile="steps")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")
@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_a_policy_drafts_as_without_by_compiled_steps(sampling, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for compile in ("none", "steps"):
        found.append(decode(LLAMA, POLICIES["head with a base"](LLAMA[1]), PROMPTS, sampling=sampling, compile=compile))
        monkeypatch.setattr(steps, "step_of", None)  # not needed any more
    assert found[0] == found[1]
