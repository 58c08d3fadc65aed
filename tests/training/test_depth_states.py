"""Heads on traces with depths: which places they learn from, how much each counts, and that they decode as replayed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from accept_head import Sampling, load_pair
from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.cli import main
from accept_head.inference import generate
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.replay.asking import replay
from accept_head.inference.replay.coupled import load_coupled
from accept_head.prompts import load_prompts
from accept_head.signals import SIGNALS
from accept_head.trace.shards import read_traces
from accept_head.training.collect.verb import collect
from accept_head.training.learn.base import Labelled
from accept_head.training.learn.depth_states import DepthStates, places_by_depth
from accept_head.training.learn.draws import draws
from accept_head.training.learn.splits import read_splits

DEPTHS, TOKENS = 5, 24


def random_trace(count, depths, seed=0):
    random = np.random.default_rng(seed)
    numbers = {name: random.random((count, depths)).astype(np.float32) for name in ("acceptance", "overlap", *SIGNALS)}
    numbers["acceptance"][random.random((count, depths)) < 0.2] = 0.0
    accepted = random.random((count, depths)) < 0.6
    trace = {name: torch.from_numpy(values).flatten() for name, values in numbers.items()}
    trace |= {"accepted": torch.from_numpy(accepted).flatten(), "draft_ids": torch.arange(count * depths)}
    return trace, numbers | {"accepted": accepted}


def places_one_by_one(table, count, depths):
    """(position, depth) → (weight of the token label, label after, its weight), round after round."""
    found = {}
    for start in range(count):
        chance = 1.0
        for depth in range(min(depths, count - start)):
            here = start + depth, depth
            weight = after = 0.0
            if depth + 1 < depths and start + depth + 1 < count and table["acceptance"][here] > 0:
                weight, after = chance * table["accepted"][here], table["overlap"][start + depth + 1, depth + 1]
            found[here] = chance, after, weight
            chance *= table["overlap"][here]
    return found


@pytest.mark.parametrize("count", [1, 3, 9])
def test_places_are_those_of_rounds_from_every_position(count):
    trace, table = random_trace(count, DEPTHS)
    places = places_by_depth(trace, DEPTHS)
    expected = places_one_by_one(table, count, DEPTHS)
    for position in range(count):
        for depth in range(DEPTHS):
            place = position * DEPTHS + depth
            weights, labels = places.weights[place].tolist(), places.labels[place].tolist()
            if (position, depth) not in expected:  # no round begins before the response
                assert weights == [0, 0, 0]
                continue
            chance, after, of_after = expected[position, depth]
            assert weights == pytest.approx([chance, chance, of_after])
            assert labels[:2] == [table["acceptance"][position, depth], table["overlap"][position, depth]]
            assert not of_after or labels[2] == pytest.approx(after)


def test_a_place_that_counts_half_adds_half_to_the_sums():
    trace, _ = random_trace(9, DEPTHS)
    places = places_by_depth(trace, DEPTHS)
    sums = draws(places, [0])
    assert torch.allclose(sums.accept + sums.reject, places.weights[:, :1])
    places.weights *= 0.5
    halves = draws(places, [0])
    assert torch.allclose(2 * halves.accept, sums.accept) and torch.allclose(2 * halves.reject, sums.reject)


# --- with a trained drafter ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafter(embedded_pair_folder):
    return embedded_pair_folder / "eagle3"


@pytest.fixture(scope="module")
def collected(embedded_pair_folder, drafter, tmp_path_factory):
    """A folder of traces: of training prompts at T = 1, or of test prompts greedily."""
    folder = tmp_path_factory.mktemp("depths")

    def make(part, temperature, count):
        collect(
            str(embedded_pair_folder / "target"), str(drafter), str(folder / part),
            str(embedded_pair_folder / "prompts" / f"{part}.jsonl"), depths=DEPTHS, max_new_tokens=TOKENS,
            temperature=temperature, max_prompts=count, batch_size=20, shard_size=20,
        )  # fmt: skip
        return folder / part

    return make


@pytest.fixture(scope="module")
def training(collected):
    return collected("train", 1.0, 50)


def train(traces, drafter, out, *words):
    return main([*map(str, ("train", "--traces", traces, "--draft", drafter, "--out", out, *words))])


@pytest.fixture(scope="module")
def head(training, drafter, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "head"
    assert train(training, drafter, out, "--epochs", 2, "--width", 32, "--keep", "last", "--lr", 3e-3) == 0
    return out


def test_a_head_predicts_better_than_a_constant(head, training, drafter):
    """On dev traces, where each place counts as often as rounds reach it."""
    dev = json.loads((head / "metrics.json").read_text())["dev"]["token"]
    splits = read_splits([training], None, draft_fingerprint=checkpoint_fingerprint(drafter), seed=0)
    states = DepthStates(splits.parts)
    traces = [states.folders[0].trace(index) for index in splits.dev["index"]]
    assert dev["count"] == round(sum(float(trace.weights[:, 0].sum()) for trace in traces))
    assert dev["binary_kl"] < 0.9 * dev["constant_kl"]


def test_a_head_decodes_as_its_replay(head, collected, embedded_pair_folder, drafter):
    """So the states that it learned from are those that decoding gives it: greedily every count is equal."""
    folder = collected("test", 0.0, 20)
    pair = load_pair(embedded_pair_folder / "target", drafter, device="cpu")
    policy = make_policy(f"head:{head}:0.5,k_max={DEPTHS}", pair)
    coupled = load_coupled(folder, pair.draft, checkpoint_fingerprint(drafter))
    counts = replay(coupled, policy, "head", batch=1).counts
    prompts = load_prompts(str(embedded_pair_folder / "prompts" / "test.jsonl"), pair.tokenizer, max_prompts=20)
    stats = generate(
        pair.target, pair.draft, [list(prompt.ids) for prompt in prompts], policy=policy,
        sampling=Sampling(temperature=0), max_new_tokens=TOKENS, batch_size=1,
    ).stats  # fmt: skip
    decoded = np.array([[s.generated, s.discarded, s.rounds, s.draft_forwards] for s in stats], dtype=float)
    assert np.array_equal(counts, decoded)
    lengths = decoded[:, 3] / decoded[:, 2]
    assert lengths.std() > 0.2, "the head always drafts the same: the test has no power"


def test_a_trace_has_the_states_that_were_collected_with_it(training, drafter):
    """Places that a round can reach, in order, of every trace."""
    config, records = read_traces(training)
    splits = read_splits([training], None, draft_fingerprint=checkpoint_fingerprint(drafter), seed=0)
    states, place = DepthStates(splits.parts), 0
    for index in range(2 * config.shard_size):
        shard, row = divmod(index, config.shard_size)
        place = 0 if row == 0 else place
        count = len(records[index]["draft_ids"])
        fed = load_file(training / "rollouts" / f"shard-{shard:05d}.safetensors")["fed_hidden"][place : place + count]
        found = states.folders[0].trace(index)
        first_round = torch.arange(count).view(-1, DEPTHS)
        reached = torch.cat([row[: position + 1] for position, row in enumerate(first_round)])
        assert set(map(bytes, found.hidden.numpy())) <= set(map(bytes, fed[reached].numpy()))
        assert torch.equal(found.hidden[0], fed[0]) and found.counts.tolist() == [len(found.hidden)]
        place += count


def test_a_base_alone_needs_no_states(training, drafter, tmp_path):
    assert train(training, drafter, tmp_path / "head", "--recipe", "signals") == 0
    dev = json.loads((tmp_path / "head" / "metrics.json").read_text())["dev"]["token"]
    assert dev["binary_kl"] < 0.95 * dev["constant_kl"]


def test_states_of_other_traces_are_refused(training, drafter, tmp_path):
    """Here one response is a token shorter than the file of states says."""
    splits = read_splits([training], None, draft_fingerprint=checkpoint_fingerprint(drafter), seed=0)
    states = DepthStates(splits.parts)
    states.folders[0].starts[0][-1] -= DEPTHS
    with pytest.raises(ValueError, match=r"shard-00000.safetensors: was not made with the traces beside it"):
        states.folders[0].trace(0)


def test_what_such_traces_cannot_serve_is_refused(training, drafter, tmp_path, capsys):
    for words, named in (
        (("--recipe", "specdecpp"), "packing is 'mixing'"),
        (("--packing", "exact"), "packing is 'exact'"),
        (("--cache", "true"), "leave --cache out"),
        (("--dry_run", "true"), "--dry_run does not work with an EAGLE-3 drafter yet"),
        (("--embedding", "true"), "has no embeddings of its own"),
    ):
        assert train(training, drafter, tmp_path / "head", *words) == 2
        assert named in capsys.readouterr().err
    assert not (tmp_path / "head").exists()


def test_labels_of_a_base_are_those_of_the_traces(training, drafter):
    splits = read_splits([training], None, draft_fingerprint=checkpoint_fingerprint(drafter), seed=0)
    states = DepthStates(splits.parts)
    found = Labelled.of((states.folders[0].trace(row) for row in range(3)), [0])
    _, records = read_traces(training)
    expected = 0.0
    for row in range(3):
        table = {
            name: np.array(records[row][name], dtype=np.float64).reshape(-1, DEPTHS)
            for name in ("acceptance", "overlap", "accepted")
        }
        places = places_one_by_one(table, len(table["overlap"]), DEPTHS)
        expected += sum(chance * table["acceptance"][here] for here, (chance, *_) in places.items())
    assert float(found.accept.sum()) == pytest.approx(expected, rel=1e-4)
