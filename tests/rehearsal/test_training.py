"""collect and train on a simulated GPU: traces and heads equal those of a CPU, and each micro-batch waits once."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from accept_head.cli import main
from accept_head.files import read_json
from accept_head.head.network import AcceptanceHead
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.online.signals import prior_base
from accept_head.inference.replay.scores import score_tokens
from accept_head.trace.shards import read_traces
from accept_head.training.learn.module import HeadTraining
from tests.inference.support.made_up import HIDDEN, make_sample
from tests.inference.support.toy import random_head
from tests.rehearsal.pretend_cuda import pretend_cuda

TINY = Path(__file__).parents[2] / "checkpoints" / "tiny"
COLLECT = ["--prompts", str(TINY / "prompts" / "train.jsonl"), "--max_prompts", "24", "--max_new_tokens", "12"]
COLLECT += ["--temperature", "1", "--alternatives", "3", "--batch_size", "12"]
TRAIN = ["--epochs", "1", "--batch_size", "8", "--micro_batch_size", "4"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The pair in float32: of its own bfloat16 a CPU makes that, and a GPU does not."""
    folder = tmp_path_factory.mktemp("pair")
    for role in ("target", "draft"):
        AutoModelForCausalLM.from_pretrained(TINY / role, dtype=torch.float32).save_pretrained(folder / role)
        AutoTokenizer.from_pretrained(TINY / role).save_pretrained(folder / role)
    return folder


@pytest.fixture(scope="module")
def traces(models, tmp_path_factory):
    """Collected on the CPU, and there."""
    folder = tmp_path_factory.mktemp("traces")
    for name, device in (("here", nullcontext), ("there", pretend_cuda)):
        with device():
            pair = ["--target", str(models / "target"), "--draft", str(models / "draft")]
            assert main(["collect", *pair, *COLLECT, "--out", str(folder / name)]) == 0
    return folder


def test_traces_are_those_of_a_cpu(traces):
    here, there = (read_traces(traces / name)[1] for name in ("here", "there"))
    assert len(here) == 24 and here.column_names == there.column_names
    for name in here.column_names:
        if isinstance(here[name][0], str):
            assert here[name][:] == there[name][:], name
            continue
        for one, other in zip(here[name], there[name], strict=True):
            # Attention is added up in another order there; nothing else is different.
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-3, atol=1e-4, msg=name)


@pytest.fixture
def train(traces, models):
    def run(out, *options):
        draft = ["--draft", str(models / "draft"), "--traces", str(traces / "here")]
        assert main(["train", *draft, *TRAIN, "--out", str(out), *options]) == 0
        return out

    return run


KINDS = {
    "default": [],
    "the paper's": ["--recipe", "specdecpp"],
    "sweep": ["--recipe", "specdecpp", "--depth", "[0,2]"],
    "cached": ["--cache", "true"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_those_of_a_cpu(kind, train, traces, tmp_path):
    here = train(tmp_path / "here", *KINDS[kind])
    shutil.rmtree(traces / "here" / "features", ignore_errors=True)  # states made there, too
    with pretend_cuda():
        there = train(tmp_path / "there", *KINDS[kind])
    folders = [""] if kind != "sweep" else ["depth0-w_rej6", "depth2-w_rej6"]
    for name in folders:
        one, other = (AcceptanceHead.from_pretrained(folder / name) for folder in (here, there))
        for (part, weight), (_, same) in zip(one.named_parameters(), other.named_parameters(), strict=True):
            torch.testing.assert_close(weight, same, rtol=1e-4, atol=1e-4, msg=part)
        assert not torch.equal(weight, torch.zeros_like(weight))
    dev = [read_json(folder / folders[0] / "metrics.json") for folder in (here, there)]
    assert dev[0]["steps"] == dev[1]["steps"] > 1


@pytest.mark.parametrize("kind", ["default", "the paper's", "sweep"])
def test_a_micro_batch_waits_once_for_its_loss(kind, train, tmp_path, monkeypatch, waits):
    """Besides that, its inputs come before the draft has begun, and what is learnt is sent behind it."""
    step, read, seen, reads = HeadTraining.training_step, HeadTraining.read, [], []

    def reading(self, batch):
        reads.append(batch)
        return read(self, batch)

    def counting(self, batch, index):
        before = Counter(waits)
        loss = step(self, batch, index)
        seen.append(Counter(place.split(":")[0] for _, place in (waits - before).elements()))
        return loss

    monkeypatch.setattr(HeadTraining, "read", reading)
    monkeypatch.setattr(HeadTraining, "training_step", counting)
    train(tmp_path / "head", *KINDS[kind])
    assert len(seen) > 3
    assert seen[0] - seen[1] == {"training/learn/module.py": 1}  # its sums come to the device
    assert all(each == {"training/learn/module.py": 1} for each in seen[1:])
    inputs = sum(count for (_, place), count in waits.items() if place.startswith("training/learn/batches.py"))
    assert len(reads) > len(seen)  # of dev traces, too
    assert inputs == 3 * len(reads)


@pytest.mark.parametrize("kind", ["base", "state"])
def test_traces_are_scored_as_on_a_cpu(kind, tmp_path, waits):
    """A head that is a base alone reads no states."""
    head = prior_base() if kind == "base" else random_head(HIDDEN, reads="before", signals=True)
    traces = make_sample(5, responses=30).couple(tmp_path)
    here = score_tokens(traces, HeadPolicy(head, 0.5))
    there = score_tokens(traces, HeadPolicy(copy.deepcopy(head).to("cuda"), 0.5))
    assert there.device.type == "cpu" and len(here.unique()) > 20
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_traces_and_heads_of_a_drafter_are_those_of_a_cpu(models, tmp_path):
    """Collected, trained and tuned here and there."""
    draft, exact = ["--draft", str(TINY / "eagle3")], ["--dtype", "float32"]
    target, made = ["--target", str(models / "target")], []
    for name, device in (("here", nullcontext), ("there", pretend_cuda)):
        traces, dev, head = (tmp_path / name / part for part in ("traces", "dev", "head"))
        with device():
            assert main(["collect", *target, *draft, *exact, *COLLECT, "--out", str(traces)]) == 0
            unseen = ["--prompts", str(TINY / "prompts" / "dev.jsonl"), "--max_prompts", "6", "--out", str(dev)]
            assert main(["collect", *target, *draft, *exact, *COLLECT, *unseen]) == 0
            assert main(["train", *draft, "--traces", str(traces), *TRAIN, "--out", str(head)]) == 0
            costs = ["--t_draft", "0.1", "--t_target", "1", "--rules", "confidence", "--out", str(head / "tuned.json")]
            assert main(["tune", *draft, *exact, "--traces", str(dev), "--head", str(head), *costs]) == 0
        table = read_json(head / "tuned.json")["policies"]
        made.append((read_traces(traces)[1], AcceptanceHead.from_pretrained(head), table))
    (here, one, table), (there, other, same) = made
    for name in ("acceptance", "overlap", "response_ids", "draft_ids"):
        for left, right in zip(here[name], there[name], strict=True):
            torch.testing.assert_close(torch.tensor(left), torch.tensor(right), rtol=1e-3, atol=1e-4, msg=name)
    for weight, again in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(weight, again, rtol=1e-3, atol=1e-3)
    assert [row["name"].partition(":")[0] for row in table] == [row["name"].partition(":")[0] for row in same]
    assert {row["name"]: row["throughput"] for row in table}["fixed:2"] == pytest.approx(
        {row["name"]: row["throughput"] for row in same}["fixed:2"], rel=0.01
    )
