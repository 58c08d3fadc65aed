"""Batch maps: vLLM's rules for a table, making a table, its files, and decoding with it."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.interpolate import RegularGridInterpolator
from transformers import LlamaConfig, LlamaForCausalLM

from accept_head import InputError
from accept_head.inference import generate
from accept_head.inference.costs.batch_table import (
    FIELD,
    best_table,
    checked_table,
    interpolate,
    read_batch_table,
    tokens_per_round,
    vllm_option,
)
from accept_head.inference.policies.batch_map import BatchMapPolicy
from accept_head.inference.policies.drafting import Drafting
from accept_head.inference.profile.rounds import count_accepted
from tests.inference.support.rounds import Given, Reference, compare
from tests.inference.support.toy import ragged_prompts, two

TABLE = [(1, 1, 4), (2, 3, 2), (4, 5, 0), (6, 9, 1)]


def spread(table):
    """K of batch sizes 1, 2, … up to the last of the table."""
    return [k for first, last, k in table for _ in range(first, last + 1)]


# --- vLLM's rules (vllm/v1/spec_decode/dynamic/utils.py, as of 0.32) ------------------------------------------------


def vllm_lookup(schedule, largest):
    """Index B: what vLLM drafts at batch size B, 1 ≤ B ≤ largest; 0 at index 0. ValueError where vLLM raises it."""
    if not isinstance(schedule, list) or not schedule:
        raise ValueError("a list that is not empty")
    if any(not isinstance(entry, list | tuple) or len(entry) != 3 for entry in schedule):
        raise ValueError("3-item entries")
    if any(first <= 0 or last <= 0 or first > last or k < 0 for first, last, k in schedule):
        raise ValueError("ranges and K")
    ordered = sorted(schedule, key=lambda entry: entry[0])
    ends = [0, *(last for _, last, _ in ordered)]
    if any(entry[0] <= end for entry, end in zip(ordered, ends, strict=False)):
        raise ValueError("overlap")
    if ordered[0][0] != 1:
        raise ValueError("starts at 1")
    lookup = [0]
    for size in range(1, largest + 1):  # a gap and the tail carry the K before them forward
        inside = [k for first, last, k in ordered if first <= size <= last]
        lookup.append(inside[0] if inside else lookup[-1])
    return lookup


class Lookup(Reference):
    def __init__(self, table, largest):
        self.lengths = vllm_lookup(table, largest)

    def drafts(self, live, given, lengths):
        return [self.lengths[len(live)]] * len(live)


def every_batch_size(policy, reference, largest):
    """A round with 0, 1, 2, … rows that are live."""

    def given(count, random):
        live = np.arange(largest) < count
        return Given(live[::-1].copy() if count % 2 else live, np.zeros((largest, 1)))

    return compare(policy, reference, given, largest + 1, [3] * largest).drafted.max(1)


def random_table(random):
    ranges, first = [], 1
    for _ in range(random.integers(1, 5)):
        last = first + int(random.integers(0, 4))
        ranges.append((first, last, int(random.integers(0, 5))))
        first = last + 1 + int(random.integers(0, 3))  # a gap, sometimes
    random.shuffle(ranges)
    return [tuple(int(value) for value in row) for row in ranges]


def test_the_policy_drafts_what_vllm_drafts_at_every_batch_size():
    random, gaps, unsorted = np.random.default_rng(0), 0, 0
    for _ in range(200):
        table = random_table(random)
        every_batch_size(BatchMapPolicy(table), Lookup(table, 24), 24)
        gaps += sum(last - first + 1 for first, last, _ in table) < max(last for _, last, _ in table)
        unsorted += table != sorted(table)
    assert gaps > 50 and unsorted > 50


def test_vllms_own_example_of_gaps_and_a_tail():
    table = [(1, 16, 3), (32, 64, 2), (80, 90, 0)]
    said = every_batch_size(BatchMapPolicy(table), Lookup(table, 100), 100)
    assert [said[size] for size in (0, 1, 16, 17, 31, 32, 64, 79, 80, 100)] == [0, 3, 3, 3, 3, 2, 2, 2, 0, 0]


WRONG = {
    "no rows": ([], "[]"),
    "not a list": (None, "None"),
    "two numbers": ([(1, 16, 3), (32, 64)], "[32, 64]"),
    "with contexts": ([(1, 8, 1, 512, 3)], "[1, 8, 1, 512, 3]"),
    "not a row": ([(1, 16, 3), 7], "row 7"),
    "batch size 0": ([(0, 16, 3)], "[0, 16, 3]"),
    "ends before it starts": ([(1, 4, 1), (8, 6, 3)], "[8, 6, 3]"),
    "fewer than no tokens": ([(1, 4, -1)], "[1, 4, -1]"),
    "no batch size 1": ([(4, 8, 1), (2, 3, 3)], "[2, 3, 3]"),
    "an overlap": ([(1, 16, 3), (16, 32, 2)], "[16, 32, 2] of a batch map overlaps row [1, 16, 3]"),
    "the same twice": ([(1, 16, 3), (1, 16, 3)], "overlaps row [1, 16, 3]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_vllm_refuses_is_refused_by_naming_the_row(name):
    table, named = WRONG[name]
    with pytest.raises(ValueError):
        vllm_lookup(table, 24)
    with pytest.raises(InputError) as error:
        BatchMapPolicy(table)
    assert named in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("value", [2.5, "3", True, None])
def test_numbers_that_are_not_integers_are_refused(value):
    for place in range(3):
        row = [1, 4, 2]
        row[place] = value
        with pytest.raises(InputError, match="not three integers"):
            checked_table([row])


def test_idle_rows_do_not_count_and_no_rows_draft_nothing():
    policy = BatchMapPolicy(TABLE)
    assert (policy.max_draft_tokens, Drafting(policy).stops_early, policy.needs) == (4, False, frozenset())
    for live, k in (([False, True, False, True, True, False], 2), ([False] * 6, 0), ([True], 4)):
        assert policy.start_round(torch.tensor(live)).tolist() == [k] * len(live)


# --- making a table --------------------------------------------------------------------------------------------------


def made_up(random, sizes, lengths):
    """Seconds that grow with both, with noise; survival that falls."""
    size, k = np.meshgrid(sizes, lengths, indexing="ij")
    steep = 10 ** random.uniform(-4.5, -2)
    seconds = (0.01 + 0.002 * k + steep * size * (k + 1)) * random.lognormal(0, 0.1, size.shape)
    return seconds, np.cumprod(random.uniform(0.6, 1.0, lengths[-1]))


def test_interpolation_is_scipys():
    random, sizes, lengths = np.random.default_rng(1), [1, 2, 5, 12], [0, 1, 4, 6]
    values = random.random((4, 4))
    between = interpolate(values, sizes, lengths)
    points = np.stack(np.meshgrid(np.arange(1, 13), np.arange(7), indexing="ij"), axis=-1)
    assert between == pytest.approx(RegularGridInterpolator((sizes, lengths), values, method="linear")(points))
    assert between.shape == (12, 7)
    assert between[np.array(sizes) - 1][:, lengths] == pytest.approx(values)


def test_a_grid_of_one_size_or_one_length_has_nothing_between():
    assert interpolate(np.array([[3.0, 5.0]]), [1], [0, 2]).tolist() == [[3.0, 4.0, 5.0]]
    assert interpolate(np.array([[3.0], [5.0]]), [1, 3], [0]).tolist() == [[3.0], [4.0], [5.0]]


def scalar_best(seconds, sizes, lengths, survival, size):
    """K*(B) by the formulas, one number after the other."""

    def bracket(axis, value):
        low = max(place for place, entry in enumerate(axis) if entry <= value)
        return (
            (low, low, 0.0) if axis[low] == value else (low, low + 1, (value - axis[low]) / (axis[low + 1] - axis[low]))
        )

    goodputs = []
    for k in range(lengths[-1] + 1):
        i, j, right = bracket(lengths, k)
        above, below, share = bracket(sizes, size)
        at = [(1 - right) * seconds[row][i] + right * seconds[row][j] for row in (above, below)]
        al = 1 + math.fsum(survival[:k])
        goodputs.append(al / ((1 - share) * at[0] + share * at[1]))
    return max(range(len(goodputs)), key=lambda k: (goodputs[k], -k))


def test_the_table_is_the_argmax_at_every_batch_size():
    random, chosen = np.random.default_rng(2), set()
    for _ in range(40):
        sizes, lengths = [1, 2, 4, 9, 16], [0, 1, 2, 4, 7]
        seconds, survival = made_up(random, sizes, lengths)
        table = best_table(seconds, sizes, lengths, tokens_per_round(survival))
        assert spread(table) == [scalar_best(seconds, sizes, lengths, survival, size) for size in range(1, 17)]
        assert checked_table(table) == table and table[-1][1] == 16
        assert all(before[2] != row[2] for before, row in itertools.pairwise(table))
        chosen |= set(spread(table))
    assert {0, 7} < chosen and chosen & {3, 5, 6}, "lengths that were not measured are chosen too"


def test_of_two_lengths_that_are_as_good_the_shorter_is_taken():
    assert best_table(np.array([[1.0, 2.0, 4.0]]), [1], [0, 1, 2], np.array([1.0, 2.0, 4.0])) == [(1, 1, 0)]


def test_lengths_whose_acceptance_is_not_known_are_not_chosen():
    falling = np.array([[4.0, 3.0, 0.1, 0.1]])
    assert best_table(falling, [1], [0, 1, 2, 3], np.array([1.0, 1.5])) == [(1, 1, 1)]


# --- acceptance ------------------------------------------------------------------------------------------------------


def test_acceptance_is_of_the_tokens_at_risk():
    """Three rounds of 3: all accepted, one accepted, none accepted. The second token was at risk twice."""
    at_risk, accepted = count_accepted(np.array([3, 3, 3]), np.array([3, 1, 0]), 3)
    assert at_risk.tolist() == [3, 2, 1]
    assert accepted.tolist() == [2, 1, 1]


def test_acceptance_is_counted_as_by_hand_in_rounds_of_any_length():
    random = np.random.default_rng(3)
    drafted = random.integers(0, 6, 400)
    accepted = random.integers(0, drafted + 1)
    at_risk, kept = count_accepted(drafted, accepted, 6)
    for position in range(1, 7):
        tested = [row for row in range(400) if drafted[row] >= position and accepted[row] + 1 >= position]
        assert at_risk[position - 1] == len(tested)
        assert kept[position - 1] == sum(accepted[row] >= position for row in tested)
    assert at_risk[-1] == kept[-1] == 0


def test_rounds_of_one_length_emit_al_tokens():
    """Π acc_i telescopes: AL(K) is the mean of accepted + 1. With all drafted tokens below the line it is not."""
    random = np.random.default_rng(4)
    accepted = np.minimum(random.geometric(0.3, 1000) - 1, 5)
    at_risk, kept = count_accepted(np.full(1000, 5), accepted, 5)
    assert tokens_per_round(np.cumprod(kept / at_risk))[5] == pytest.approx(1 + accepted.mean())
    assert kept / at_risk == pytest.approx(np.full(5, 0.7), abs=0.05)
    assert tokens_per_round(np.cumprod(kept / 1000))[5] < 0.9 * (1 + accepted.mean())


# --- files -----------------------------------------------------------------------------------------------------------


def write(folder, value):
    path = folder / "table.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_a_table_is_read_from_a_speculative_config_of_vllm(tmp_path):
    config = {"method": "draft_model", "model": "d", FIELD: [[4, 8, 1], [1, 2, 5]]}
    assert read_batch_table(write(tmp_path, config)) == [(1, 2, 5), (4, 8, 1)]
    assert read_batch_table(write(tmp_path, {**config, "num_speculative_tokens": 3})) == [(1, 2, 3), (4, 8, 1)]


BAD_FILES = {
    "nothing that is a table": ({"t_draft": 1}, [FIELD, "None"]),
    "not JSON": ("[[1, 2", ["not readable as JSON"]),
    "a list": ([[1, 2, 3]], ["expected a JSON object"]),
    "a bad row": ({FIELD: [[1, 4]]}, [FIELD, "[1, 4]"]),
    "a most of 0": ({FIELD: [[1, 4, 2]], "num_speculative_tokens": 0}, ["'num_speculative_tokens' is 0"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_table_is_refused_by_name_and_field(name, tmp_path):
    content, named = BAD_FILES[name]
    path = write(tmp_path, content)
    with pytest.raises(InputError) as error:
        read_batch_table(path)
    message = str(error.value)
    assert message.startswith(str(path)) and all(words in message for words in named)
    assert len(message.splitlines()) == 1


def test_a_missing_file_is_named():
    with pytest.raises(InputError, match=r"nowhere\.json: no such file"):
        read_batch_table(Path("nowhere.json"))


def test_what_is_printed_for_vllm_says_the_same_table(tmp_path):
    words = shlex.split(vllm_option(TABLE, "models/it's a draft") or "")
    assert words[0] == "--speculative-config" and len(words) == 2
    config = json.loads(words[1])
    assert (config["method"], config["model"]) == ("draft_model", "models/it's a draft")
    assert config["num_speculative_tokens"] == 4
    assert read_batch_table(write(tmp_path, config)) == TABLE
    assert vllm_lookup(config[FIELD], 12) == [0, *spread(TABLE), 1, 1, 1]


def test_a_table_that_never_speculates_needs_no_option():
    """vLLM asks for a num_speculative_tokens above 0."""
    assert vllm_option([(1, 4, 0), (5, 8, 0)], "draft") is None


# --- decoding --------------------------------------------------------------------------------------------------------


def test_decoding_by_a_table_while_the_batch_shrinks_changes_no_greedy_token():
    target, draft = two(LlamaForCausalLM, LlamaConfig)
    prompts = ragged_prompts(9, longest=12)
    plain = generate(target, draft, prompts, policy="none", max_new_tokens=24).tokens
    lookup, seen = vllm_lookup(TABLE, 7), []

    def watch(round_):
        drafted, live = round_.outcome.drafted, round_.outcome.live
        left = round_.rows.max_lengths - (round_.outcome.lengths - round_.outcome.accepted - 1)
        k = lookup[int(live.sum())]
        assert drafted[live].tolist() == torch.minimum(left - 1, torch.tensor(k))[live].tolist()
        assert not drafted[~live].any()
        seen.append((int(live.sum()), k))

    ends = [7]  # some stop early
    early = generate(target, draft, prompts, policy="none", max_new_tokens=24, end_token_ids=ends).tokens
    for expected, end in ((plain, []), (early, ends)):
        policy = BatchMapPolicy(TABLE)
        options = {"policy": policy, "max_new_tokens": 24, "batch_size": 7, "end_token_ids": end}
        assert generate(target, draft, prompts, watch=watch if not end else None, **options).tokens == expected
    assert {k for _, k in seen} == {0, 1, 2, 4}
    assert {count for count, _ in seen} >= {1, 2, 7} and len({count for count, _ in seen}) > 3
