"""`fit` and the demo, whole, on a few prompts of the embedded pair."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import time

import pytest

from accept_head.cli import main
from accept_head.cost import ForwardCosts, throughput
from accept_head.files import locked
from accept_head.fit.verdict import KINDS

ROW = {
    "name",
    "params",
    "discard_rate",
    "verification_rate",
    "throughput",
    "speedup",
    "gain_over_best_fixed",
    "oracle_gap_closed",
    "block_efficiency",
    "ci95",
}
SIZES = ("--max_prompts", "60", "--max_new_tokens", "16")


@pytest.fixture(scope="module")
def demo(run_cli, embedded_pair_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out of it"
    command = ["demo", "--pair", str(embedded_pair_folder), "--out", str(out), *SIZES]
    done = run_cli(*command)
    assert done.returncode == 0, done.stderr
    return command, out, done.stdout


def test_it_leaves_a_summary_in_the_public_form(demo):
    _, out, _ = demo
    summary = json.loads((out / "summary.json").read_text())
    rows = {row["name"]: row for row in summary["policies"]}
    head, rule = summary["chosen_on_dev"]
    assert head.startswith("head:") and not rule.startswith(("head:", "fixed:"))
    assert {"none", *(f"fixed:{k}" for k in (1, 2, 3, 4, 6, 8)), head, rule, "oracle"} == set(rows)
    costs = ForwardCosts(**summary["costs"])
    for row in rows.values():
        assert set(row) == ROW
        if row["name"] != "none":
            rates = {name: row[name] for name in ("discard_rate", "verification_rate")}
            # Eq. 5.1 does not know that a response can end with a drafted token.
            assert row["throughput"] == pytest.approx(throughput(costs, **rates), rel=0.03)
    assert rows["none"]["speedup"] == pytest.approx(1) and rows["oracle"]["oracle_gap_closed"] == pytest.approx(1)
    assert max(row["gain_over_best_fixed"] for name, row in rows.items() if name.startswith("fixed")) == 0


def test_it_says_before_what_it_will_do_and_ends_with_a_verdict(demo):
    _, out, printed = demo
    verdict = json.loads((out / "summary.json").read_text())["verdict"]
    assert verdict["use"] in KINDS and set(verdict["gains"]) == set(verdict["names"]) == set(KINDS)
    words = " ".join(printed.split())
    assert "of a target forward" in words and "answers of at most 16 tokens" in words
    assert all(" ".join(line.split()) in words for line in verdict["text"])
    assert words.index("about") < words.index("Verdict") < words.index("Next:")


def test_the_verdict_is_of_what_was_decoded(demo):
    """Each policy's tokens, rounds and forwards on the test prompts, counted anew from the kept runs."""
    _, out, _ = demo
    summary = json.loads((out / "summary.json").read_text())
    lines = [json.loads(line) for line in (out / "decoded.jsonl").read_text().splitlines() if line]
    costs, seconds = summary["costs"], {}
    for _, _, arm, *_, responses in lines:
        for _, ids, stats in responses:
            spent = costs["t_draft"] * stats["draft_forwards"] + costs["t_target"] * stats["rounds"]
            spent = costs["t_autoregressive"] * len(ids) if arm == "none" else spent
            total = seconds.setdefault(arm, [0.0, 0])
            seconds[arm] = [total[0] + spent, total[1] + len(ids)]
    speed = {arm: tokens / spent for arm, (spent, tokens) in seconds.items()}
    for kind in KINDS[1:]:
        assert summary["verdict"]["gains"][kind]["none"][0] == pytest.approx(speed[kind] / speed["none"] - 1, abs=1e-6)


def test_it_leaves_a_tuned_head_and_a_report(demo):
    _, out, _ = demo
    decoding, tuned = (json.loads((out / name).read_text()) for name in ("head/decoding.json", "tuned.json"))
    (row,) = (row for row in tuned["policies"] if row["name"].startswith("head:"))
    assert {name: decoding[name] for name in ("threshold", "k_min", "k_max")} == row["params"]
    page = (out / "report.html").read_text()
    assert "http-equiv" in page and "<script src" not in page


def test_what_it_prints_next_can_be_pasted(demo, run_cli):
    _, _, printed = demo
    lines = [line.strip() for line in printed.splitlines() if line.startswith("  accept-head generate")]
    if not lines:
        assert "decode with the target alone" in printed
        return
    words = shlex.split(lines[0])
    done = run_cli(*words[1:], "--max_new_tokens", "8", "--max_prompts", "2")
    assert done.returncode == 0, done.stderr


def test_the_same_command_again_repeats_the_verdict(demo):
    command, out, printed = demo
    before = (out / "decoded.jsonl").read_bytes()
    assert main(command) == 0
    assert (out / "decoded.jsonl").read_bytes() == before
    verdict = json.loads((out / "summary.json").read_text())["verdict"]
    assert all(" ".join(line.split()) in " ".join(printed.split()) for line in verdict["text"])


def test_other_options_in_the_same_folder_are_refused(demo, capsys):
    command, _, _ = demo
    assert main([*command[:-1], "17"]) == 2
    assert "begun with max_new_tokens 16, not 17; give another --out" in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_another_process_works_in_is_refused(demo, run_warm):
    command, out, _ = demo
    with locked(out):
        done = run_warm(*command)
    assert done.returncode == 2 and "another accept-head process is at work there" in done.stderr


@pytest.mark.slow
def test_two_processes_make_the_same_traces(demo, run_launched, tmp_path):
    """The dev and test traces are one shard each, so that one of the processes has nothing to make."""
    command, out, _ = demo
    done = run_launched(*command[:4], tmp_path / "out", *SIZES)
    assert done.returncode == 0, done.stderr
    paths = sorted(out.glob("traces/*/*.parquet"))
    assert paths and all((tmp_path / "out" / path.relative_to(out)).read_bytes() == path.read_bytes() for path in paths)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["verdict"]["use"] in KINDS


@pytest.mark.slow
def test_an_eagle3_drafter(embedded_pair_folder, tmp_path, capsys):
    models = ("--target", embedded_pair_folder / "target", "--draft", embedded_pair_folder / "eagle3")
    assert main([*map(str, ("fit", *models, "--out", tmp_path, *SIZES))]) == 0
    verdict = json.loads((tmp_path / "summary.json").read_text())["verdict"]
    assert verdict["use"] in KINDS and (tmp_path / "report.html").is_file()


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_the_same(
    demo, console_script, cli_environment, embedded_pair_folder, tmp_path
):
    """Traces, head and decoded text have the bits of an undisturbed run; costs and thresholds are by the clock."""
    command, out, _ = demo
    other = tmp_path / "out"
    again = [*command[:4], str(other), *SIZES]
    moments = random.Random(0)
    for _ in range(5):
        process = subprocess.Popen(
            [console_script, *again], env=cli_environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(moments.uniform(3, 25))
        process.kill()
        process.wait()
    assert main(again) == 0
    for pattern in ("prompts/*.jsonl", "traces/*/*.parquet", "head/model.safetensors"):
        paths = sorted(out.glob(pattern))
        assert paths and all(
            (tmp_path / "out" / path.relative_to(out)).read_bytes() == path.read_bytes() for path in paths
        )
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["verdict"]["use"] in KINDS
