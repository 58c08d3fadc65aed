"""`accept-head bench` as a user runs it: a table, a JSON file and plots; interrupted runs; traces; wrong input."""

from __future__ import annotations

import json
import shlex
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from accept_head import cli
from accept_head.cli import main
from accept_head.inference.bench import run as run_module
from accept_head.inference.bench.cells import Job
from accept_head.inference.bench.figures import TWIN
from tests.runs import besides_progress

PROMPTS, NEW_TOKENS, REPEATS = 12, 8, 2
REFERENCE = ["none", "fixed:1", "fixed:3"]
RULES = ["confidence:0.3,k_max=5", "bandit:2"]
COSTS = {"t_draft": 0.01, "t_target": 0.1}
SMALL = ("--fixed", 1, 3, "--max_new_tokens", NEW_TOKENS)
PNG = b"\x89PNG"


class Interrupted(Exception):
    pass


@pytest.fixture(autouse=True)
def verb(monkeypatch):
    monkeypatch.setitem(cli.VERBS, "bench", ("accept_head.inference.verbs.bench", "bench", "policies side by side"))


@pytest.fixture(scope="module")
def made(tmp_path_factory, random_llama, byte_tokenizer):
    """A draft that is its target with a bent output layer, and prompts of two domains."""
    folder = tmp_path_factory.mktemp("bench")
    target, draft = random_llama(1), random_llama(1)
    with torch.no_grad():
        draft.lm_head.weight += 0.2 * torch.randn(
            draft.lm_head.weight.shape, generator=torch.Generator().manual_seed(1)
        )
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    lines = [{"id": f"p{i}", "domain": "ab"[i % 2], "prompt": "word " * (1 + i % 4) + str(i)} for i in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "costs.json").write_text(json.dumps(COSTS))
    return folder


@pytest.fixture(scope="module")
def run(made):
    """run(folder, *words) → exit code, and the result if there is one. What is said is left to capsys."""

    def call(folder, *words, prompts=None, out="out.json"):
        models = ("--target", made / "target", "--draft", made / "draft")
        arguments = ["bench", *models, "--prompts", prompts or made / "prompts.jsonl", "--out", folder / out, *words]
        code = main([str(word) for word in arguments])
        path = folder / out
        return SimpleNamespace(
            code=code, folder=folder, result=json.loads(path.read_text()) if path.is_file() else None
        )

    return call


@pytest.fixture(scope="module")
def measured(made, run, tmp_path_factory):
    """Two batch sizes, greedy and sampled, with everything on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cli.VERBS, "bench", ("accept_head.inference.verbs.bench", "bench", ""))
        done = run(
            tmp_path_factory.mktemp("measured"), *SMALL, "--policy", *RULES, "--batch_size", 1, 3,
            "--temperature", 0, 1, "--repeats", REPEATS, "--costs", made / "costs.json", "--slo", "true",
        )  # fmt: skip
    assert done.code == 0
    return done


def arms(cell):
    return [row["name"] for row in cell["policies"]]


def test_there_is_a_cell_for_each_batch_size_and_temperature(measured):
    cells = measured.result["cells"]
    assert [(cell["batch_size"], cell["temperature"]) for cell in cells] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    for cell in cells:
        *names, twin = arms(cell)
        assert names == REFERENCE + RULES
        assert twin == cell["noise"]["name"] + TWIN and cell["noise"]["name"] in REFERENCE[1:]
        assert cell["best_fixed"] in REFERENCE[1:]
        assert set(cell["best_fixed_by_domain"]["names"]) == {"a", "b"}
        assert sum(cell["chunks"]["prompts"]) == PROMPTS
        assert set(cell["chunks"]["domains"]) == {"a", "b"}
        assert cell["cpu_share"] > 0


def test_the_file_says_how_and_where_it_was_measured(measured):
    result = measured.result
    assert shlex.split(result["command"])[1:] == sys.argv[1:]
    assert {"accept-head", "torch", "transformers"} == set(result["versions"])
    assert result["device"] and result["date"] and result["threads"] == torch.get_num_threads()
    assert result["settings"]["dtype"] == "float32" and set(result["settings"]["policies"]) == {*REFERENCE, *RULES}


def test_on_each_chunk_every_policy_ran_in_turn(measured):
    for cell in measured.result["cells"]:
        everyone = list(range(len(cell["policies"])))
        assert len(cell["order"]) == REPEATS * len(cell["chunks"]["prompts"])
        assert all(sorted(order) == everyone for order in cell["order"])
        assert len(set(map(tuple, cell["order"]))) > 1


def test_figures_follow_from_the_chunks(measured):
    for cell in measured.result["cells"]:
        found = {row["name"]: row for row in cell["policies"]}
        speeds = {n: sum(r["chunks"]["generated"]) / sum(r["chunks"]["seconds"]) for n, r in found.items()}
        best = max(speeds[name] for name in REFERENCE[1:])
        for name, row in found.items():
            assert row["counts"]["generated"] == sum(row["chunks"]["generated"])
            assert row["throughput"] == pytest.approx(speeds[name])
            assert row["speedup"] == pytest.approx(speeds[name] / speeds["none"])
            assert row["gain_over_best_fixed"] == pytest.approx(speeds[name] / best - 1)
            low, high = row["ci95"]["throughput"]
            assert low <= row["throughput"] * 1.001 and high >= row["throughput"] * 0.999
            assert 0 < row["time_per_token"]["p50"] <= row["time_per_token"]["p99"]
            assert row["counts"]["accepted"] <= row["counts"]["submitted"] <= row["counts"]["drafted"]
            assert (row["noise_floor"], set(row["domains"])) == (cell["noise"]["floor"], {"a", "b"})
        assert found["none"]["counts"]["drafted"] == 0 and found["none"]["mean_live_rows"] <= cell["batch_size"]
        assert found["fixed:3"]["counts"]["accepted"] > 0


def test_greedy_tokens_are_the_targets_own_and_sampled_ones_are_not_compared(measured):
    for cell in measured.result["cells"]:
        expected = 0 if cell["temperature"] == 0 else None
        assert {row["differs_from_none"] for row in cell["policies"]} == {expected}


def test_a_twin_emits_what_its_original_does_even_sampled(measured):
    for cell in measured.result["cells"]:
        found = {row["name"]: row for row in cell["policies"]}
        first, second = (found[cell["noise"]["name"] + suffix] for suffix in ("", TWIN))
        assert first["counts"] == second["counts"] and first["chunks"]["generated"] == second["chunks"]["generated"]
        assert first["chunks"]["seconds"] != second["chunks"]["seconds"]


def test_attainment_is_there_for_every_policy(measured):
    for cell in measured.result["cells"]:
        limits = list(cell["slo_limits"].values())
        assert np.allclose(np.array(limits) / limits[2], [0.8, 0.9, 1.0, 1.1, 1.2])
        for row in cell["policies"]:
            shares = list(row["slo_attainment"].values())
            assert list(row["slo_attainment"]) == list(cell["slo_limits"])
            assert shares == sorted(shares) and min(shares) >= 0 and max(shares) <= 1
        alone = cell["policies"][0]["slo_attainment"]["1"]
        assert abs(alone - 0.9) <= 1 / (PROMPTS * REPEATS)  # by the limit's definition


def test_counts_are_priced_and_the_oracle_is_the_fastest(measured):
    for cell in measured.result["cells"]:
        prices = {row["name"]: row["priced"] for row in cell["policies"] if row["priced"]}
        assert set(prices) == {*REFERENCE, *RULES}
        assert prices["none"]["throughput"] == pytest.approx(1 / COSTS["t_target"])
        if cell["temperature"] == 0:
            assert cell["oracle"]["throughput"] > max(price["throughput"] for price in prices.values())
        assert max(prices[name]["oracle_gap_closed"] for name in REFERENCE[1:]) == pytest.approx(0)
    # Greedy counts depend on no clock, and not on the batch either.
    first, second = (cell for cell in measured.result["cells"] if cell["temperature"] == 0)
    for name in REFERENCE:
        one, other = (next(row for row in cell["policies"] if row["name"] == name) for cell in (first, second))
        assert one["priced"] == other["priced"]
    assert first["oracle"] == second["oracle"]


def test_there_is_a_plot_for_each_temperature(measured):
    for name in ("throughput-T0", "throughput-T1", "slo-T0", "slo-T1"):
        assert (measured.folder / f"out-{name}.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in measured.folder.iterdir() if path.suffix != ".png") == ["out.json"]


def test_a_table_a_cell_is_printed(run, tmp_path, capsys):
    done = run(tmp_path, *SMALL, "--batch_size", 2, "--temperature", 0, "--repeats", 1)
    said = capsys.readouterr()
    assert (done.code, besides_progress(said.err)) == (0, [])
    (cell,) = done.result["cells"]
    assert "batch 2, temperature 0: best fixed fixed:" in said.out and "noise floor" in said.out
    for row in cell["policies"]:
        assert row["name"] in said.out and f"{row['throughput']:.1f}" in said.out
    assert f"wrote {tmp_path / 'out.json'}" in said.out.replace("\n", "")
    assert (tmp_path / "out-throughput-T0.png").read_bytes().startswith(PNG)
    assert cell["slo_limits"] is None and cell["oracle"] is None
    assert all(row["slo_attainment"] is None and row["priced"] is None for row in cell["policies"])


def test_under_match_even_sampled_tokens_are_the_targets_own(run, tmp_path):
    done = run(
        tmp_path, *SMALL, "--batch_size", 3, "--temperature", 1, "--repeats", 1, "--verifier", "match",
        "--policy", "confidence:0.3", "--max_prompts", 6,
    )  # fmt: skip
    assert {row["differs_from_none"] for row in done.result["cells"][0]["policies"]} == {0}


def test_a_policy_can_be_given_the_limit_of_the_batch_at_hand(run, made, tmp_path):
    spec = f"adaspec:{made / 'costs.json'},slo_ms=p90"
    done = run(tmp_path, *SMALL, "--batch_size", 2, "--temperature", 0, "--repeats", 1, "--policy", spec)
    assert done.code == 0
    assert spec in arms(done.result["cells"][0])


def test_domains_that_do_not_fill_a_batch_are_mixed(run, tmp_path):
    done = run(tmp_path, *SMALL, "--temperature", 0, "--repeats", 1, "--batch_size", 7)
    (cell,) = done.result["cells"]
    assert done.result["settings"]["chunks"] == "mixed"
    assert cell["best_fixed_by_domain"] == {"names": {}, "throughput": None}
    assert cell["chunks"] == {"prompts": [12], "domains": [None]}


# --- interrupted runs -------------------------------------------------------------------------------------------------


TWO_CELLS = (*SMALL, "--batch_size", 1, 3, "--temperature", 0, "--repeats", 1, "--max_prompts", 6)


@pytest.fixture
def calls(monkeypatch, measured):
    """The batch sizes that were measured (here: another run's cell stands for the figures); the run breaks off at those
    in `calls.broken`."""
    seen = SimpleNamespace(batches=[], broken=set())
    cell = measured.result["cells"][0]

    def measure(self, batch, sampling):
        if batch in seen.broken:
            raise Interrupted
        seen.batches.append(batch)
        figures = {name: value for name, value in cell.items() if name not in ("cell", "batch_size", "temperature")}
        return {**figures, "cpu_share": 1 / (7 + len(seen.batches))}

    monkeypatch.setattr(Job, "measure", measure)
    monkeypatch.setattr(run_module, "draw_plots", lambda result: [])
    return seen


@pytest.fixture
def interrupted(run, calls, tmp_path):
    calls.broken = {3}
    with pytest.raises(Interrupted):
        run(tmp_path, *TWO_CELLS)
    hidden = tmp_path / ".out.json.unfinished"
    assert calls.batches == [1] and hidden.is_file() and not (tmp_path / "out.json").exists()
    calls.broken, calls.batches = set(), []
    return hidden


def test_an_interrupted_run_goes_on_with_the_next_cell(run, calls, interrupted, tmp_path, capsys):
    kept = json.loads(interrupted.read_text().splitlines()[1])
    done = run(tmp_path, *TWO_CELLS)
    assert done.code == 0 and calls.batches == [3]
    assert "going on: 1 cells are there" in capsys.readouterr().out
    del kept["index"]
    assert done.result["cells"][0] == kept  # to the last digit
    assert [cell["batch_size"] for cell in done.result["cells"]] == [1, 3]
    assert all("index" not in cell for cell in done.result["cells"])
    assert not interrupted.exists()


def test_other_batch_sizes_may_be_asked_for_in_between(run, calls, interrupted, tmp_path):
    done = run(tmp_path, *TWO_CELLS, "--batch_size", 2)  # lists add up: 1, 3 and 2
    assert calls.batches == [2, 3]
    assert [cell["batch_size"] for cell in done.result["cells"]] == [1, 2, 3]


@pytest.mark.parametrize("change", [("--seed", 1), ("--policy", "fixed:2"), ("--max_prompts", 5), ("--slo", "true")])
def test_cells_of_other_settings_are_not_used(run, calls, interrupted, tmp_path, change):
    run(tmp_path, *TWO_CELLS, *change)
    assert calls.batches == [1, 3]


def test_a_line_that_was_being_written_is_measured_again(run, calls, interrupted, tmp_path):
    interrupted.write_text(interrupted.read_text()[:-200])
    assert run(tmp_path, *TWO_CELLS).code == 0
    assert calls.batches == [1, 3]


# --- traces -----------------------------------------------------------------------------------------------------------

TRACES = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    + "".join(f"2023-11-16 18:17:{i:02d}.5000000,{12 + i},{1 + 3 * (i % 3)}\n" for i in range(8)),
    "burst.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    + "".join(f"{i},m,{12 + i},{1 + 3 * (i % 3)},1,x\n" for i in range(8)),
    "mooncake.jsonl": "".join(
        json.dumps({"timestamp": 1000 * i, "input_length": 12 + i, "output_length": 1 + 3 * (i % 3), "hash_ids": [i]})
        + "\n"
        for i in range(8)
    ),
}


@pytest.fixture
def trace_files(tmp_path):
    for name, text in TRACES.items():
        (tmp_path / name).write_text(text)
    return [tmp_path / name for name in TRACES]


def test_traces_of_three_formats_are_replayed(run, trace_files, tmp_path, capsys):
    done = run(
        tmp_path, *SMALL, "--trace", *trace_files, "--batch_size", 2, "--temperature", 0, "--repeats", 1,
        "--trace_requests", 7, "--policy", "confidence:0.3",
    )  # fmt: skip
    said = capsys.readouterr()
    assert (done.code, besides_progress(said.err)) == (0, [])
    assert "cells" not in done.result
    assert [cell["trace"] for cell in done.result["traces"]] == list(map(str, trace_files))
    for cell in done.result["traces"]:
        assert arms(cell)[:-1] == [*REFERENCE, "confidence:0.3"] and arms(cell)[-1].endswith(TWIN)
        assert (cell["requests"], cell["prompts_by"]) == (7, "length")
        assert cell["trace_seconds"] == pytest.approx(6)
        assert cell["load"] == pytest.approx(0.8)  # busy seconds of the target alone / (scale x span)
        assert sorted(cell["order"]) == sorted(arms(cell))
        assert cell["noise"]["floor"] >= 0
        for row in cell["policies"]:
            generated = row["counts"]["generated"]
            assert 7 <= generated <= sum(1 + 3 * (i % 3) for i in range(7))
            assert row["differs_from_none"] == 0
            assert 0 <= row["queueing"]["mean"] < row["latency"]["mean"] <= row["latency"]["p99"]
            assert len(row["timeline"]["seconds"]) == len(row["timeline"]["live_rows"]) == 40
            live = [value for value in row["timeline"]["live_rows"] if value is not None]
            assert live and all(0 < value <= 2 for value in live)
            assert set(row["slo_attainment"]) == set(cell["slo_limits"])
        assert cell["policies"][0]["latency_speedup"] == 1
        stem = cell["trace"].rpartition("/")[2].partition(".")[0]
        assert f"{stem}" in said.out
        for plot in ("latency", "slo", "speculation"):
            assert (tmp_path / f"out-{plot}-{stem}-b2-T0.png").read_bytes().startswith(PNG)
    # The same arrivals in three notations are the same requests.
    counts = [[row["counts"] for row in cell["policies"]][:3] for cell in done.result["traces"]]
    assert counts[0] == counts[1] == counts[2]


def test_the_load_can_be_given(run, trace_files, tmp_path):
    done = run(tmp_path, *SMALL, "--trace", trace_files[0], "--temperature", 0, "--repeats", 1, "--load", 50)
    (cell,) = done.result["traces"]
    assert (cell["batch_size"], cell["requests"]) == (8, 8) and cell["load"] == pytest.approx(50)


def test_a_trace_run_goes_on_too(run, trace_files, tmp_path, monkeypatch):
    seen = []

    def replay(self, arrivals, batch, sampling):
        seen.append(len(arrivals))
        if len(seen) == 2:
            raise Interrupted
        return {"noise": {"name": "fixed:1", "floor": 0}, "load": 1, "requests": 8, "time_scale": 1, "policies": []}

    monkeypatch.setattr(Job, "replay", replay)
    monkeypatch.setattr(run_module, "draw_plots", lambda result: [])
    words = (*SMALL, "--trace", *trace_files[:2], "--batch_size", 2, "--temperature", 0, "--repeats", 1)
    with pytest.raises(Interrupted):
        run(tmp_path, *words)
    assert run(tmp_path, *words).code == 0
    assert seen == [8, 8, 8]


# --- wrong input ------------------------------------------------------------------------------------------------------

WRONG = {
    "unknown policy": (["--policy", "magic"], "policy 'magic': unknown"),
    "policy twice": (["--policy", "confidence", "confidence"], "--policy confidence: given twice"),
    "no rows": (["--batch_size", 0], "batch_size is [0], expected integers from 1 to 4096"),
    "more rows than prompts": (["--batch_size", 1, 40], "batch_size is 40, but there are 12 prompts"),
    "K of 0": (["--fixed", 0, 1], "fixed is [0, 1], expected integers from 1 to 64"),
    "no K": (["--fixed", "[]"], "fixed is [], expected integers"),
    "temperature": (["--temperature", -1], "temperature is -1"),
    "repeats": (["--repeats", 0], "repeats is 0, expected a positive integer"),
    "tokens": (["--max_new_tokens", 0], "max_new_tokens is 0"),
    "load": (["--load", 0], "load is 0"),
    "no trace": (["--trace", "nowhere.csv"], "nowhere.csv: no such file"),
    "no costs": (["--costs", "nowhere.json"], "nowhere.json: no such file"),
    "long responses": (["--max_new_tokens", 126], "the models' context leaves room for 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_sentence_and_leaves_nothing(run, tmp_path, capsys, name):
    words, message = WRONG[name]
    done = run(tmp_path, *words)
    said = capsys.readouterr()
    assert done.code == 2 and done.result is None
    assert message in said.err and said.err.count("\n") == 1 and said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_line_of_a_trace_is_named(run, trace_files, tmp_path, capsys):
    trace_files[1].write_text(TRACES["burst.csv"] + "later,m,1,1,1,x\n")
    assert run(tmp_path, "--trace", trace_files[0], trace_files[1]).code == 2
    assert f"{trace_files[1]}, line 10: Timestamp is 'later'" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:adaspec lossy")
def test_a_lossy_policy_is_refused_under_sampling_before_anything_runs(run, made, tmp_path, capsys):
    spec = f"adaspec:{made / 'costs.json'},lossy=true"
    words = (*SMALL, "--policy", spec, "--batch_size", 2, "--repeats", 1, "--max_prompts", 2)
    assert run(tmp_path, *words, "--temperature", 0, 1).code == 2
    assert "lossy" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert run(tmp_path, *words, "--temperature", 0).code == 0
    assert run(tmp_path, *words, "--temperature", 1, "--allow_lossy", "true").code == 0
