"""The most tokens that a request lets us draft in a round: 0 switches drafts off for it alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from accept_head import InputError, Sampling
from accept_head.cli import main
from accept_head.inference import generate
from accept_head.inference.adapters.transformers import generate as custom_generate
from tests.inference.support.toy import toy_pair, transformers_greedy

PROMPTS = [[1], [2, 3, 4, 0], [4, 4], [0, 1, 2], [3], [1, 1, 0, 4, 2, 3]]
K_MAX = [0, 2, None, 1, 0, 9]
POLICY = "max-prob:0.2,k_max=5"


def decode(policy=POLICY, sampling=None, **options):
    """→ tokens and statistics of each prompt, but for the clock."""
    pair = toy_pair()
    found = generate(
        pair.target, pair.draft, PROMPTS, policy=policy, sampling=sampling or Sampling(temperature=3.0, top_k=0),
        max_new_tokens=24, end_token_ids=[], **options,
    )  # fmt: skip
    return [(ids, replace(stats, seconds=0.0)) for ids, stats in zip(found.tokens, found.stats, strict=True)]


CASES = [("fixed:5", 1), (POLICY, 3), (POLICY, None)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in (("fixed:5", 3), ("fixed:5", None), (POLICY, 1))]


@pytest.mark.parametrize(("policy", "batch_size"), CASES)
def test_each_request_is_as_with_a_policy_of_that_bound(policy, batch_size):
    """Rows come and go, and each is decoded as alone, by the policy with the request's own bound."""
    found = decode(policy, k_max=K_MAX, batch_size=batch_size)
    for place, bound in enumerate(K_MAX):
        most = 5 if bound is None else min(5, bound)
        alone = f"fixed:{most}" if policy.startswith("fixed") or not most else f"max-prob:0.2,k_max={most}"
        assert found[place] == decode(alone)[place], bound
    assert found[0][1].drafted == found[0][1].draft_forwards == 0 and found[1][1].drafted > 0
    assert found != decode(policy)


def test_nobody_drafts_where_nobody_wants_to():
    """No forward of the draft is run, though the policy would have asked for one."""
    found = decode(k_max=[0] * len(PROMPTS))
    assert found == decode("none")
    assert decode(k_max=[None] * len(PROMPTS)) == decode()


def test_greedy_text_is_the_targets():
    pair = toy_pair()
    greedy = decode(sampling=Sampling(temperature=0), k_max=K_MAX)
    for prompt, (ids, _) in zip(PROMPTS, greedy, strict=True):
        assert ids == transformers_greedy(pair.target, prompt, 24)


def test_transformers_generate_takes_it():
    pair, input_ids = toy_pair(), torch.tensor([[1, 2, 3], [4, 0, 1], [2, 2, 2]])
    options = {"attention_mask": torch.ones_like(input_ids), "max_new_tokens": 12, "do_sample": False}
    options |= {"custom_generate": custom_generate, "draft": pair.draft, "return_dict_in_generate": True}
    found = pair.target.generate(input_ids, policy="fixed:3", k_max=[0, None, 2], pad_token_id=0, **options)
    assert [stats.drafted > 0 for stats in found.stats] == [False, True, True]


def test_a_prompts_record_says_it(random_pair_folder, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    records = [{"prompt": f"word {i}", **({} if most is None else {"k_max": most})} for i, most in enumerate(K_MAX)]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    pair = ("--target", random_pair_folder / "target", "--draft", random_pair_folder / "draft", "--policy", "fixed:3")
    words = ("generate", *pair, "--prompts", prompts, "--out", out, "--max_new_tokens", 8, "--stream", "false")
    assert main([*map(str, words)]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["drafted"] > 0 for line in found] == [most != 0 for most in K_MAX]
    for line, most in zip(found, K_MAX, strict=True):
        assert line["drafted"] <= line["rounds"] * (3 if most is None else min(3, most))


@pytest.mark.parametrize("value", [-1, 1.5, "off", True])
def test_what_is_no_number_of_tokens_is_named(value, random_pair_folder, tmp_path, capsys):
    with pytest.raises(InputError, match="prompt 0: k_max is"):
        decode(k_max=[value, *K_MAX[1:]])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "word", "k_max": value}) + "\n")
    pair = ("--target", random_pair_folder / "target", "--draft", random_pair_folder / "draft")
    words = ("generate", *pair, "--prompts", prompts, "--out", tmp_path / "out.jsonl", "--max_new_tokens", 8)
    assert main([*map(str, words)]) == 2
    assert f"prompts.jsonl, line 1: k_max is {value!r}" in capsys.readouterr().err


def test_one_is_expected_for_each_prompt():
    with pytest.raises(InputError, match="there are 2 k_max and 6 prompts"):
        decode(k_max=[1, 2])
