"""Sizes follow the prompts and the budget, and the prompts are split once, all domains alike."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from accept_head import InputError
from accept_head.fit.plan import FEWEST_HELD_OUT, FEWEST_TRAIN, HELD_OUT, TRAIN, Speed, planned, seconds_of
from accept_head.fit.prompts import read_all, write_splits
from accept_head.prompts import Prompt

SPEED = Speed(prefill=1e-3, draft_prefill=2e-4, draft_in_full=6e-4, alone=0.1, batch=0.5, draft=0.02)


def plan(prompts=1000, budget=None, speed=SPEED, processes=1):
    return planned(speed, prompts=prompts, prompt_tokens=50, new_tokens=64, budget=budget, processes=processes)


def test_enough_prompts_and_time_give_the_full_size():
    assert plan().sizes == {"train": TRAIN, "dev": HELD_OUT, "test": HELD_OUT}
    assert set(plan().seconds) == {"collect", "train", "profile and tune", "decode", "report"}


@pytest.mark.parametrize("prompts", [44, 60, 100, 419, 420])
def test_few_prompts_are_all_used_or_nearly(prompts):
    sizes = plan(prompts).sizes
    assert prompts - 3 <= sum(sizes.values()) <= prompts
    assert sizes["dev"] == sizes["test"] >= FEWEST_HELD_OUT and sizes["train"] >= FEWEST_TRAIN


def test_a_budget_is_kept_and_used():
    for minutes in (8, 15, 30):
        found = plan(budget=60 * minutes)
        assert 0.9 * 60 * minutes < found.total <= 60 * minutes or found.sizes == plan().sizes
    assert plan(budget=480).train < plan(budget=900).train


def test_more_processes_collect_and_train_sooner():
    one, four = plan(), plan(processes=4)
    assert four.seconds["collect"] == pytest.approx(one.seconds["collect"] / 4)
    assert four.seconds["decode"] == one.seconds["decode"]


def test_what_is_too_small_is_refused():
    with pytest.raises(InputError, match="43 different prompts are there, expected at least 44"):
        plan(prompts=43)
    with pytest.raises(InputError, match=r"the budget of 10 s is too short: the smallest fit takes about \d"):
        plan(budget=10)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("1.5h", 5400)])
def test_budgets(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["20", "m", "-5m", "0s", "1d", "20 m"])
def test_what_is_no_budget(text):
    with pytest.raises(InputError, match="expected a time like 90s, 20m or 2h"):
        seconds_of(text)


def prompts(count):
    return [Prompt(i, f"p{i}", "abc"[min(i % 5, 2)], (i, 1), f"text {i}") for i in range(count)]


def test_splits_have_all_domains_and_no_prompt_twice(tmp_path):
    sizes = {"train": 60, "dev": 15, "test": 15}
    write_splits(prompts(90), sizes, tmp_path, seed=0)
    found = {name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()] for name in sizes}
    assert {name: len(records) for name, records in found.items()} == sizes
    texts = [record["prompt"] for records in found.values() for record in records]
    assert len(set(texts)) == 90
    shares = Counter(record["domain"] for record in found["test"])
    assert shares == {"a": 3, "b": 3, "c": 9}  # as in all of them
    before = (tmp_path / "test.jsonl").read_text()
    write_splits(prompts(90), sizes, tmp_path, seed=0)
    assert (tmp_path / "test.jsonl").read_text() == before
    write_splits(prompts(90), sizes, tmp_path, seed=1)
    assert (tmp_path / "test.jsonl").read_text() != before


def test_equal_prompts_are_one_and_long_ones_are_left_out(byte_tokenizer, tmp_path):
    file = tmp_path / "prompts.jsonl"
    texts = ["short", "short", "another", "x" * 60]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    found, left_out = read_all(str(file), byte_tokenizer(), field="prompt", room=20, folder=tmp_path)
    assert [prompt.value for prompt in found] == ["short", "another"] and left_out == 1
    with pytest.raises(InputError, match="no prompt fits: the shortest has"):
        read_all(str(file), byte_tokenizer(), field="prompt", room=2, folder=tmp_path)


@pytest.mark.parametrize("chat", [True, False])
def test_the_shipped_mix_is_for_chat_models_and_others(byte_tokenizer, tmp_path, chat):
    tokenizer = byte_tokenizer() if chat else byte_tokenizer(chat_template=None)
    found, _ = read_all(None, tokenizer, field="text", room=4000, folder=tmp_path)
    assert len(found) > 420 + 100 and len({prompt.domain for prompt in found}) == 5
    assert isinstance(found[0].value, list if chat else str)
