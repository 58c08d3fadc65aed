"""checkpoints/recipe/make_eagle3.py: from a target to a drafter that our loop takes."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import pytest
import torch

from accept_head import load_pair
from accept_head.inference import generate
from accept_head.pair import load_tokenizer
from accept_head.prompts import load_prompts


def test_a_run_that_goes_on_reads_what_is_left_of_the_pass(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "checkpoints" / "recipe")
    from make_eagle3 import Order

    order = Order(7, 1, rounds_done=0)
    first, second = list(order), list(order)
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert list(Order(7, 1, rounds_done=3)) == first[3:]
    assert list(Order(7, 1, rounds_done=7 + 3)) == second[3:]
    shares = []
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        shares.append(list(Order(7, 2, rounds_done=0)))
        assert list(Order(7, 2, rounds_done=1)) == shares[rank][1:]
    assert [len(share) for share in shares] == [4, 4]  # the last round has one batch again
    assert set(shares[0] + shares[1]) == set(range(7))


@pytest.mark.slow
def test_a_drafter_is_trained_and_a_run_goes_on(embedded_pair_folder, repository, tmp_path):
    prompts = embedded_pair_folder / "prompts"
    for split, count in (("train", 48), ("dev", 12)):
        lines = (prompts / f"{split}.jsonl").read_text("utf-8").splitlines()[:count]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines), "utf-8")
    command = [sys.executable, repository / "checkpoints" / "recipe" / "make_eagle3.py", "--temperatures", 1, 0]
    command += ["--target", embedded_pair_folder / "target", "--out", tmp_path / "drafter", "--layers", 1, 5, 8]
    command += ["--prompts", tmp_path / "train.jsonl", "--held_out", tmp_path / "dev.jsonl", "--new_tokens", 24]
    command += ["--draft_vocab", 512, "--intermediate", 64, "--steps", 3, "--batch_tokens", 512, "--own_prompts", 64]
    losses = []
    for epochs in (1, 3):  # the second run goes on where the first one ended
        subprocess.run([str(word) for word in (*command, "--epochs", epochs)], check=True, capture_output=True)
        with (tmp_path / "drafter" / "work" / "log" / "metrics.csv").open() as file:
            losses.append([float(row["held_out_0"]) for row in csv.DictReader(file) if row["held_out_0"]])
    work = tmp_path / "drafter" / "work"
    own, said = (
        [json.loads(line) for line in (work / name).read_text("utf-8").splitlines()]
        for name in ("own_prompts.jsonl", "own1.jsonl")
    )
    texts = [record["prompt"][0]["content"] for record in own]
    assert 16 < len(texts) == len(set(texts)) == len(said)  # a prompt each, and an answer
    assert not any("<|" in text for text in texts)
    tokenizer = load_tokenizer(str(embedded_pair_folder / "target"), "--target")
    begun, prompt = (load_prompts(str(work / f"{name}.jsonl"), tokenizer)[0].ids for name in ("begun", "own_prompts"))
    assert prompt[: len(begun)] == begun  # one beginning-of-text, as in a conversation
    assert [len(each) for each in losses] == [1, 2]
    assert losses[1][1] < losses[1][0] < losses[0][0] - 0.1
    pair = load_pair(embedded_pair_folder / "target", tmp_path / "drafter", device="cpu")
    ids = [list(prompt.ids) for prompt in load_prompts(str(tmp_path / "dev.jsonl"), pair.tokenizer)]
    stats = generate(pair.target, pair.draft, ids, policy="fixed:2", max_new_tokens=24, batch_size=4).stats
    assert sum(row.accepted for row in stats) > 10
