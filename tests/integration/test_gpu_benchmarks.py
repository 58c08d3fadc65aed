"""benchmarks/gpu on a CPU: recorded acceptance gives the lengths of replay, cells survive, aims are computed."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aims
import cells
import greedy_divergence
import head_cost
import head_sweep
import numpy as np
import overhead
import pytest
import recorded_loop
import recorded_rounds
import torch
import train_pair
import whole_flow

from accept_head import Sampling, load_pair
from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.inference.decode.generate import make_requests
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.replay.coupled import load_coupled
from accept_head.inference.replay.thresholds import Setting, replay_thresholds
from accept_head.inference.replay.walk import replay_fixed
from accept_head.pair import Pair
from accept_head.prompts import load_prompts
from accept_head.trace.config import TraceConfig
from accept_head.trace.shards import write_shard
from tests.inference.support.replayed import standing_in

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "benchmarks" / "gpu"
PLAIN = overhead.Way("none")
FLOORS = {"draft 1": 2.0} | {f"target {width}": 10.0 for width in range(1, 10)}
PARTING = (15, 21)  # test prompts at which it was seen


# --- recorded acceptance ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(
    random_pair: Any,
    random_pair_folder: Path,
    make_traces: Callable[..., list[dict[str, Any]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """(record, coupled traces, responses that are in it, head policy) of random traces and an untrained head, which
    reads real states and signals of the random draft."""
    head = recorded_loop.random_head(random_pair.draft)
    fingerprint = checkpoint_fingerprint(random_pair_folder / "draft")
    names = ("target", "target_fingerprint", "draft", "vocabulary_fingerprint", "prompts_fingerprint")
    numbers = {"vocab_size": 261, "num_prompts": 20, "max_new_tokens": 14, "seed": 0, "batch_size": 4, "shard_size": 20}
    config = TraceConfig(
        **dict.fromkeys(names, "x"),
        **numbers,
        draft_fingerprint=fingerprint,
        end_token_ids=(2,),
        sampling=Sampling(),  # type: ignore[arg-type]
    )
    folder = tmp_path_factory.mktemp("recorded")
    write_shard(folder, 0, make_traces([(3 + index % 4, 14 - index % 5 // 4) for index in range(20)]))
    config.save(folder)
    traces = load_coupled(folder, random_pair.draft, fingerprint, k_max=12)
    # The middle of what this head says of one token: rounds end early, late, and at their budget.
    policy = HeadPolicy(head, 0.9, k_min=1, k_max=recorded_rounds.K_MAX)
    record = recorded_rounds.extract(traces, policy, responses=100, about={})
    return record, traces, recorded_rounds.endless(traces), policy


def decoded(record: Any, pair: Any, name: str, batch: int = 5, way: Any = PLAIN) -> list[Any]:
    """Statistics of each response of the record, decoded by the recorded loop with models of another seed."""
    head = recorded_loop.random_head(pair.draft, seed=3)
    scene = overhead.Scene(pair, head, record, Sampling(temperature=0), 7, True)
    decoder = overhead.make_recorded(scene, batch, way)
    requests = recorded_loop.recorded_requests(record, record.responses, prompt_tokens=7, vocab_size=pair.vocab_size)
    run = decoder.run(
        requests,
        policy=overhead.make(name, decoder, scene, batch, FLOORS),
        processing=Processing(scene.sampling, pair.vocab_size),
        stopping=Stopping([], [], torch.device("cpu")),
    )
    return [done.stats for done in sorted(run, key=lambda done: done.request.index)]


@pytest.mark.parametrize("name", ["fixed:3", "head"])
def test_the_recorded_loop_is_the_same_in_graphs(recorded: Any, other_pair: Any, name: str) -> None:
    """As compile="graphs" runs it, with a stand-in for CUDA graphs: what the record replaces is captured with the rest,
    and moves with the rows."""
    record = recorded[0]
    few = replace(record, leading=record.leading[: 5 * record.tokens], scores=record.scores[: 5 * record.tokens])
    plain = counts_of(decoded(few, other_pair, name, batch=2))
    with standing_in():
        captured = counts_of(decoded(few, other_pair, name, batch=2, way=overhead.Way("graphs")))
    np.testing.assert_array_equal(captured, plain)


@pytest.fixture(scope="module")
def other_pair(random_llama: Callable[..., Any]) -> Any:
    """A pair that has nothing to do with the traces."""
    return Pair(random_llama(8), random_llama(9, hidden=24, layers=1), None, 261)  # type: ignore[arg-type]


def counts_of(stats: list[Any]) -> np.ndarray:
    return np.array([[row.generated, row.discarded, row.rounds, row.draft_forwards] for row in stats])


@pytest.mark.parametrize("name", ["none", "fixed:1", "fixed:3", "fixed:8", "head"])
def test_the_recorded_loop_has_the_lengths_of_replay(recorded: Any, other_pair: Any, name: str) -> None:
    record, traces, chosen, policy = recorded
    assert record.responses == len(chosen) >= 5
    if name == "head":
        setting = Setting(threshold=policy.threshold, k_min=1, k_max=policy.max_draft_tokens)
        (expected,) = replay_thresholds(traces, policy, [setting], "head")
        lengths = np.flatnonzero(expected.draft_lengths)
        assert len(lengths) > 2  # the rule does decide
    else:
        (expected,) = replay_fixed(traces, [0 if name == "none" else int(name.partition(":")[2])])
    found = counts_of(decoded(record, other_pair, name))
    np.testing.assert_array_equal(found, expected.counts[chosen])


def test_rounds_that_capture_are_counted_apart(recorded: Any, other_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("none", "fixed:8", "head")
    head = recorded_loop.random_head(other_pair.draft, seed=3)
    scene = overhead.Scene(other_pair, head, recorded[0], Sampling(temperature=0), 7, True)
    plain = overhead.measure_loop(scene, 2, PLAIN, FLOORS, names)["policies"]
    before = overhead.captures()
    with standing_in():
        overhead.measure_loop(scene, 2, overhead.Way("graphs"), FLOORS, names)
    assert overhead.captures() > before + 10  # they are counted where they are made
    asked = itertools.count()
    monkeypatch.setattr(overhead, "captures", lambda: next(asked) // 5)  # as if every fifth round made one
    captured = overhead.measure_loop(scene, 2, PLAIN, FLOORS, names)["policies"]
    for one, other in zip(plain, captured, strict=True):
        # Of each wave all rounds but the first, as far as both rows are live; the first wave is a warm-up.
        assert one["rounds_with_captures"] == 0 < one["rounds"]
        assert other["rounds"] + other["rounds_with_captures"] == one["rounds"]
        assert other["rounds_with_captures"] == pytest.approx(one["rounds"] / 5, abs=2)
        assert other["rounds_with_captures"] == 0 or other["seconds_of_rounds_with_captures"] > 0
        assert one["forward_seconds"] == 2 * one["draft_forwards"] + 10 * one["rounds"]
        assert np.sum(one["tokens_and_seconds_of_waves"], 0).tolist() == pytest.approx(
            [one["tokens"], one["wall_seconds"]]
        )
        assert one["overhead"] == pytest.approx(one["wall_seconds"] / one["forward_seconds"])
    none, longest, _ = plain
    assert none["draft_forwards"] == 0 and none["rounds"] == none["tokens"] / 2 == recorded[0].tokens - 1
    assert longest["draft_forwards"] > 4 * longest["rounds"]


def test_another_record_gives_other_lengths(recorded: Any, other_pair: Any) -> None:
    """It is the record that decides, not the models."""
    record = recorded[0]
    none = counts_of(decoded(replace(record, leading=torch.zeros_like(record.leading)), other_pair, "fixed:3"))
    assert (none[:, 2] == record.tokens).all()  # a round a token
    surest = replace(record, scores=torch.zeros_like(record.scores))
    assert (counts_of(decoded(surest, other_pair, "head"))[:, 3] <= record.tokens).all()


def test_a_shuffled_record_has_the_same_responses() -> None:
    leading = torch.arange(5)[:, None] * 10 + torch.arange(3)
    scores = leading.reshape(-1, 1).expand(-1, 8).float()
    record = recorded_rounds.RecordedRounds(tokens=3, leading=leading.reshape(-1), scores=scores, about={})
    other = record.shuffled()
    assert other.leading.tolist() != record.leading.tolist() and torch.equal(other.scores[:, 0].long(), other.leading)
    assert sorted(other.leading.view(5, 3).tolist()) == leading.tolist()


@pytest.mark.parametrize("name", ["sampled", "greedy"])
def test_committed_records_are_whole(name: str) -> None:
    record = recorded_rounds.RecordedRounds.load(FOLDER / "recorded" / f"{name}.npz")
    assert record.responses == record.about["responses"] >= 100
    assert record.scores.shape == (len(record.leading), recorded_rounds.K_MAX)
    assert ((record.scores >= 0) & (record.scores <= 1)).all()
    left = torch.arange(record.tokens - 1, -1, -1).clamp(max=recorded_rounds.K_MAX).repeat(record.responses)
    assert (
        (record.leading <= left).all()
        and (record.leading == 0).any()
        and (record.leading == recorded_rounds.K_MAX).any()
    )
    assert not Path(record.about["traces"]).is_absolute()


# --- greedy divergence ------------------------------------------------------------------------------------------------


def test_first_difference_and_its_margin() -> None:
    assert greedy_divergence.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert greedy_divergence.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert greedy_divergence.first_difference([1, 2, 3], [1, 2]) == 2
    margins = [np.array([4.0, 3.0, 0.5]), np.array([2.0, 0.25, 1.0])]
    found = greedy_divergence.divergence([None, None], [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 7, 8]], margins)
    assert (found["different"], found["rate"], found["which"], found["first_positions"]) == (1, 0.5, [1], [1])
    assert found["margins_there"] == [0.25]
    assert found["rate_a_token"] == 1 / 5  # three tokens were equal, and two up to the difference


def test_in_bf16_texts_part_where_two_tokens_are_nearly_as_good(embedded_pair: Any, embedded_pair_folder: Path) -> None:
    """Which texts part depends on the processor, whether they may does not: never in float32, and in bf16 only where
    rounding decides. With AVX512-bf16 they do at each of these prompts, at margins of 0.03 and 0."""
    loaded = load_prompts(str(embedded_pair_folder / "prompts" / "test.jsonl"), embedded_pair.tokenizer, max_prompts=40)
    folders = (embedded_pair_folder / "target", embedded_pair_folder / "draft")
    for dtype in ("float32", "bfloat16"):
        pair = embedded_pair if dtype == "float32" else load_pair(*folders, dtype=dtype, device="cpu")
        requests = make_requests([loaded[index].ids for index in PARTING], 10)
        found = greedy_divergence.compare(pair, requests, policies=("fixed:4",))
        for row in [*found["autoregressive"], *found["speculative"]]:
            assert row["different"] == len(row["first_positions"]) == len(row["margins_there"])
            assert row["different"] == 0 or dtype == "bfloat16"
            assert all(margin <= 0.125 for margin in row["margins_there"]), row  # two steps of bf16 from 8 to 16
        assert found["margin_of_all_positions"]["p95"] > 1


# --- cells ------------------------------------------------------------------------------------------------------------


def test_a_cell_is_measured_once_and_says_why_it_was_not(tmp_path: Path) -> None:
    calls: list[str] = []

    def measure(name: str) -> Callable[[], dict[str, Any]]:
        return lambda: calls.append(name) or {"value": len(calls)}  # type: ignore[func-returns-value]

    def broken() -> dict[str, Any]:
        raise ValueError("no such kernel")

    def begin(minutes: float = 1.0, tiny: bool = False) -> Any:
        return cells.Cells("part", tmp_path / "part.json", minutes=minutes, tiny=tiny)

    first = begin()
    first.measure("a", {"batch": 1}, measure("a"))
    first.measure("b", {}, broken)
    first.measure("c", {}, measure("c"), needs=100)
    first.measure("d", {}, measure("d"), after=[first.cells["b"]])
    assert calls == ["a"] and first.status == 1
    written = {cell["cell"]: cell for cell in json.loads((tmp_path / "part.json").read_text())["cells"]}
    assert written["b"]["error"] == "ValueError: no such kernel"
    assert "takes about 100 s" in written["c"]["not_run"] and written["d"]["not_run"] == "needs b"

    again = begin()
    assert again.measure("a", {"batch": 1}, measure("a"))["value"] == 1
    assert again.measure("c", {}, measure("c"))["value"] == 2
    assert calls == ["a", "c"] and again.status == 0
    again.measure("a", {"batch": 2}, measure("other settings"))
    again.measure("c", {}, measure("what it made is gone"), made=tmp_path / "gone")
    assert calls[2:] == ["other settings", "what it made is gone"]

    # Where the results are gone, the copy under WORK is gone on from.
    copied = cells.Cells("part", tmp_path / "out.json", minutes=1, tiny=False, copy=tmp_path / "part.json")
    assert copied.measure("a", {"batch": 2}, measure("copied"))["value"] == 3 and "copied" not in calls

    (tmp_path / "part.json").write_text('{"cells": [')  # nobody's: not ours, which are written whole
    assert begin().cells == {}
    begin(minutes=0).measure("a", {"batch": 2}, measure("no time"))
    assert "no time" not in calls
    begin(tiny=True).measure("c", {}, measure("guesses are of the large models"), needs=100)
    assert calls[-1] == "guesses are of the large models"


def test_the_learning_rate_ends_with_the_clock() -> None:
    rates = [train_pair.rate_at(share) for share in (0, 0.015, 0.03, 0.5, 1, 1.2)]
    assert rates[0] > 0 and rates[2] == 1 and rates[1] == pytest.approx(0.5)
    assert rates[2] > rates[3] > rates[4] == rates[5] == pytest.approx(train_pair.LOWEST)


def test_windows_never_run_out_of_text() -> None:
    windows = train_pair.Windows(torch.arange(1000, dtype=torch.int32), rows=2, context=50)
    parts = [windows[index] for index in range(200)]
    assert all(part.shape == (2, 50) and (part.flatten().diff() == 1).all() for part in parts)
    assert len({int(part[0, 0]) for part in parts}) > 50  # passes cut the text elsewhere


# --- the cost of a head -----------------------------------------------------------------------------------------------


def test_a_tiny_run_of_the_heads_cost_measures_what_a_cpu_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--tiny", "--replays", "4", "--batches", "1", "3", "--temperatures", "0", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["head_cost.py", *options])
    assert head_cost.main() == 0
    result = json.loads((tmp_path / "head_cost.json").read_text(encoding="utf-8"))
    assert len(result["cells"]) == 4 and result["attention"] == "sdpa"
    for cell in result["cells"]:
        assert cell["settings"]["mode"] == "eager" and cell["settings"]["way"] == "torch"
        assert set(cell["added"]) == {"signals", "default", "paper"} and cell["forward_seconds"] > 0
        assert cell["added"]["paper"]["bytes"] > 3 * 32 * 32 * 4
        assert cell["default_share"] == cell["added"]["default"]["share"]
    assert "no CUDA device" in result["fallback"]  # aims.py takes a GPU's cells alone: a CPU's share is no answer


# --- aims -------------------------------------------------------------------------------------------------------------


def results(*, overhead: float, ratio: float, head: float, gain: float, speedup: float, sweep: float) -> dict[str, Any]:
    """What the parts would have written."""
    noise = {"noise_floor": 0.01, "ci95": {"gain_over_best_fixed": [gain - 0.01, gain + 0.01]}}
    bench = [
        {
            "cell": f"bench, batch {batch}, temperature {temperature:g}",
            "settings": {"batch": batch, "temperature": temperature},
            "head": "head:H",
            "recommended": "head:H,costs=C",
            "best_fixed": "fixed:3",
            "policies": [
                {"name": "head:H", "gain_over_best_fixed": gain, "speedup": 0.5, **noise},
                {"name": "head:H,costs=C", "gain_over_best_fixed": gain, "speedup": speedup, **noise},
            ],
        }
        for batch in (1, 8, 32, 128)
        for temperature in (1.0, 0.0)
    ]
    loops = [
        {
            "cell": f"{mode}, batch 1, temperature {temperature}",
            "settings": {"batch": 1, "temperature": temperature},
            "policies": [{"policy": "none", "overhead": 1.0}, {"policy": "head", "overhead": value}],
        }
        for mode, value in (("graphs", overhead), ("none", 9.0))
        for temperature in (0, 1)
    ]
    against = [
        {"cell": f"assisted, temperature {t}", "settings": {}, "policies": [{"policy": "fixed:4", "ratio": ratio}]}
        for t in (0, 1)
    ]
    costed = [
        {
            "cell": f"graph, kernels, batch {batch}, temperature {temperature}",
            "settings": {"batch": batch, "temperature": temperature},
            "default_share": head if batch == 8 else 0.001,
        }
        for batch in (1, 8, 32)
        for temperature in (0, 1)
    ]
    return {
        "overhead": {"cells": loops},
        "whole_flow": {"cells": [*bench, *against]},
        "head_sweep": {"compared": {"1B shape": {"sweep_over_singles": sweep, "sweep_over_plain": 20.0}}},
        "head_cost": {"cells": [*costed, {**costed[0], "cell": "eager, kernels, batch 1", "default_share": 9.0}]},
    }


def test_each_aim_is_computed_and_can_fail() -> None:
    good = aims.aims(results(overhead=1.04, ratio=3.1, head=0.009, gain=0.02, speedup=1.0, sweep=10.5))
    assert [row["holds"] for row in good] == [True] * 7
    bad = aims.aims(results(overhead=1.06, ratio=2.9, head=0.011, gain=-0.01, speedup=0.99, sweep=9.5))
    assert [row["holds"] for row in bad] == [False] * 7
    assert [row["measured"] for row in bad] == [1.06, 2.9, 0.011, -0.01, -0.01, 0.99, 9.5]
    empty = aims.aims({})
    assert [(row["measured"], row["holds"]) for row in empty] == [(None, None)] * 7


def test_an_aim_fails_by_one_cell_and_holds_by_all() -> None:
    """Where only T = 0 was measured, or not at all batch sizes, good figures say nothing and bad ones enough."""
    good = {"overhead": 1.04, "ratio": 3.1, "head": 0.009, "gain": 0.02, "speedup": 1.0, "sweep": 10.5}
    bad = {"overhead": 1.06, "ratio": 2.0, "head": 0.02, "gain": 0.02, "speedup": 0.9, "sweep": 9.0}
    for numbers, verdict in ((good, None), (bad, False)):
        part = results(**numbers)
        part["overhead"]["cells"] = part["overhead"]["cells"][:1]
        part["head_cost"]["cells"] = part["head_cost"]["cells"][:5]
        cells = part["whole_flow"]["cells"]
        part["whole_flow"]["cells"] = [
            {"cell": cell["cell"], "error": "…"} if "32" in cell["cell"] or cell["cell"].endswith("ature 1") else cell
            for cell in cells
        ]
        rows = aims.aims(part)
        assert [row["holds"] for row in rows] == [verdict, verdict, verdict, None, True, verdict, numbers is good]
        said = [row["of"].rpartition("; ")[2] for row in rows]
        assert said == [f"{k} of {n} cells" for k, n in ((1, 2), (1, 2), (5, 6), (0, 1), (1, 1), (3, 8), (4, 4))]


def test_the_aims_want_what_the_parts_measure() -> None:
    assert set(itertools.product(whole_flow.BENCH_PROMPTS, whole_flow.TEMPERATURES)) == aims.BENCHED
    assert set(itertools.product(head_cost.BATCHES, head_cost.TEMPERATURES)) == aims.HEAD_COSTED
    assert 1 + len(head_sweep.SINGLES) == aims.SWEEP_CELLS


def test_a_bench_row_says_whether_the_policys_steps_are_graphs(embedded_pair_folder: Path) -> None:
    flow = SimpleNamespace(target=embedded_pair_folder / "target", draft=embedded_pair_folder / "draft")
    head = f"head:{embedded_pair_folder / 'heads' / 'sampled'}"
    names = ["none", "fixed:4", "fixed:4 again", head, "hf-heuristic", "hf-confidence"]
    found = whole_flow.Flow._captured(flow, names)
    assert found == {**dict.fromkeys(names, True), "hf-confidence": False}


# --- the whole thing --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_part_runs_and_goes_on_where_it_was(tmp_path: Path, cli_environment: dict[str, str]) -> None:
    out, parts = tmp_path / "out", ("overhead", "whole_flow", "head_sweep", "collect_speed", "greedy_divergence")
    command = [sys.executable, str(FOLDER / "run.py"), "--tiny", "--out", str(out), "--part", *"abcde"]

    def run() -> str:
        done = subprocess.run([*command, "--minutes", "9"], env=cli_environment, capture_output=True, text=True)
        said = [line for line in done.stdout.splitlines() if line.startswith(("---", "not whole", *parts))]
        assert done.returncode == 0, "\n".join([*said, done.stderr[-1000:]])
        return done.stdout

    run()
    written = {part: json.loads((out / f"{part}.json").read_text()) for part in parts}
    for part, values in written.items():
        assert values["device"] and values["versions"]["torch"] == torch.__version__, part
        assert values["cells"] and not [cell for cell in values["cells"] if {"error", "not_run"} & set(cell)], part
    rows = {row["aim"]: row for row in json.loads((out / "aims.json").read_text())["aims"]}
    assert len(rows) == 7
    # On a CPU there are no CUDA graphs, and head_cost.py was not asked for: these are not measured, and say so.
    missing = [aim for aim, row in rows.items() if row["measured"] is None]
    assert len(missing) == 2 and "graphs" in missing[0] and "head + signals" in missing[1]

    assert run().count(": is there") == sum(len(values["cells"]) for values in written.values())
