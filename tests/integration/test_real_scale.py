"""Models with the vocabulary and the large states of a published one, which toys of 4,096 tokens do not have."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from accept_head import Sampling
from accept_head.base import base_functions
from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.pair import base_model, load_model
from accept_head.signals import SIGNALS
from accept_head.trace.config import TraceConfig
from accept_head.trace.shards import read_traces, write_shard
from accept_head.training.learn.recipe import RECIPES, Recipe
from accept_head.training.learn.verb import train

VOCAB, HIDDEN = 151_936, 448
TRACES, LENGTH = 48, 40
# Weights of base_functions, as they were fitted on Qwen2.5-Coder 0.5B and 1.5B, rounded.
TRUTH = torch.tensor([0.1, 0.2, -1.5, 0.2, 0.6, 0.0, -1.0, 0.0, -0.6], dtype=torch.float64)
# The default recipe as it was before heads had a base.
BEFORE = Recipe(depth=2, signals=True, embedding=True, width="auto", packing="prefix", epochs=6, batch_size="auto")


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """Random, of two layers, in bfloat16; its states have root mean square 6, a mean far from 0 in some channels, and
    some that are many times as loud as others."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=7,
            num_key_value_heads=1,
            max_position_embeddings=128,
            tie_word_embeddings=True,
        )
    )
    scale = torch.logspace(-1.5, 0.7, HIDDEN)[torch.randperm(HIDDEN)]
    scale[:2] = torch.tensor([20.0, -15.0])
    with torch.no_grad():
        model.model.embed_tokens.weight[:, :4] += 0.04
        model.model.norm.weight.copy_(scale * 6 / scale.square().mean().sqrt())
    folder = tmp_path_factory.mktemp("loud") / "draft"
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def traces(draft, tmp_path_factory):
    """Random text whose acceptance is a function of the draft's signals, and of nothing else."""
    folder = tmp_path_factory.mktemp("loud") / "traces"
    folder.mkdir()
    config = TraceConfig(
        target="target", target_fingerprint="0", draft=str(draft), draft_fingerprint=checkpoint_fingerprint(draft),
        vocabulary_fingerprint="0", prompts_fingerprint="0", vocab_size=VOCAB, end_token_ids=(0,), num_prompts=TRACES,
        sampling=Sampling(top_k=0), max_new_tokens=LENGTH, seed=0, batch_size=TRACES, shard_size=TRACES,
    )  # fmt: skip
    config.save(folder)
    generator = torch.Generator().manual_seed(0)
    records = []
    for index in range(TRACES):
        ids = torch.randint(1, VOCAB, (3, LENGTH), generator=generator)
        largest = torch.rand(LENGTH, generator=generator).pow(0.3).clamp(0.02, 0.9999)
        other = torch.rand(LENGTH, generator=generator) > largest
        logprob = torch.where(other, (1 - largest).log() - torch.rand(LENGTH, generator=generator), largest.log())
        entropy = -3 * largest.log() + 0.3 * torch.rand(LENGTH, generator=generator)
        signals = torch.stack([logprob, entropy, largest], dim=-1)
        acceptance = torch.sigmoid(base_functions(signals.double()) @ TRUTH + 2.0)
        accepted = torch.rand(LENGTH, generator=generator) < acceptance
        columns = dict(zip(SIGNALS, signals.unbind(-1), strict=True))
        columns |= {"response_ids": torch.where(accepted, ids[1], ids[0]), "draft_ids": ids[1], "accepted": accepted}
        columns |= {"acceptance": acceptance, "overlap": acceptance, "divergence": entropy, "target_logprob": logprob}
        record = {name: values.tolist() for name, values in columns.items()}
        record |= {"index": index, "id": str(index), "domain": "", "finished": False, "prompt_ids": ids[2, :8].tolist()}
        records.append(record)
    write_shard(folder, 0, records)
    return folder


def dev_kl(out):
    return json.loads((out / "metrics.json").read_text())["dev"]["token"]["binary_kl"]


def test_the_states_are_as_loud_as_a_published_drafts(draft):
    model = load_model(draft, "--draft", dtype="bfloat16")
    states = base_model(model)(torch.randint(1, VOCAB, (8, 48)))[0].float().flatten(0, 1)
    assert 4 < states.square().mean().sqrt() < 9
    assert states.std(0).max() / states.std(0).min() > 50 and states.mean(0).abs().max() > 10


@pytest.mark.parametrize("recipe", ["default", "signals"])
def test_what_depends_on_the_signals_alone_is_learnt_to_the_end(draft, traces, tmp_path, recipe):
    """The labels are the true probabilities, so that the divergence from the truth is the dev KL itself."""
    precision = {"precision": "bf16"} if recipe == "default" else {}
    train(str(traces), str(draft), str(tmp_path / "head"), recipe=recipe, **precision)
    assert dev_kl(tmp_path / "head") < 0.01


def test_a_head_without_a_base_does_not_learn_it(draft, traces, tmp_path, monkeypatch):
    """Its signals drown in the state: the test above can fail."""
    monkeypatch.setitem(RECIPES, "default", BEFORE)
    train(str(traces), str(draft), str(tmp_path / "head"), precision="bf16")
    found = json.loads((tmp_path / "head" / "metrics.json").read_text())["dev"]["token"]
    assert found["binary_kl"] > 0.01 and np.isfinite(found["binary_kl"])
    assert found["constant_kl"] > 0.05, "there was something to learn"


@pytest.fixture(scope="module")
def pair(draft, byte_tokenizer, tmp_path_factory):
    """--target and --draft: the draft, and a target that is much like it."""
    folder = tmp_path_factory.mktemp("loud") / "target"
    model = AutoModelForCausalLM.from_pretrained(draft, dtype="float32")
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.1 * weights.std() * torch.randn(weights.shape, generator=noise)
    model.to(torch.bfloat16).save_pretrained(folder)
    for each in (folder, draft):
        byte_tokenizer().save_pretrained(each)
    return "--target", folder, "--draft", draft


def test_a_pair_goes_through_every_verb(pair, run_warm, tmp_path):
    files = train, dev = [tmp_path / f"{name}.jsonl" for name in ("train", "dev")]
    for file, word in zip(files, ("word ", "other "), strict=True):
        file.write_text("".join(json.dumps({"prompt": word * (1 + each)}) + "\n" for each in range(6)))
    traces, dev_traces, head, out = (tmp_path / name for name in ("traces", "dev_traces", "head", "out.jsonl"))
    draft, tokens, costs = pair[2:], ("--max_new_tokens", 16), ("--t_draft", 1, "--t_target", 5)
    for arguments in (
        ("collect", *pair, "--prompts", train, "--out", traces, *tokens, "--shard_size", 3),
        ("collect", *pair, "--prompts", dev, "--out", dev_traces, *tokens),
        ("train", "--traces", traces, "--dev_traces", dev_traces, *draft, "--out", head, "--epochs", 2),
        ("tune", "--traces", dev_traces, *draft, "--head", head, *costs, "--out", tmp_path / "tuned.json"),
        ("generate", *pair, "--prompts", train, "--out", out, *tokens, "--policy", f"head:{head}"),
    ):
        done = run_warm(*arguments)
        assert done.returncode == 0, done.stderr

    record = read_traces(traces)[1][0]
    ids = torch.tensor([record["prompt_ids"] + record["response_ids"]])
    logits = load_model(pair[1], "--target", dtype="bfloat16")(ids[:, :-1]).logits[0, -16:]
    expected = Sampling().filter(logits).log_softmax(-1).gather(-1, ids[0, -16:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(record["target_logprob"]), expected, atol=0.1, rtol=0)
    assert 0.3 < np.mean(record["overlap"]) < 0.99
    assert [len(json.loads(line)["token_ids"]) for line in out.read_text().splitlines()] == 6 * [16]
