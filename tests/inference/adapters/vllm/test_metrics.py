"""The adapter's counts against a reference that loops over rows and depths, and their output to file and log."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest
import torch

from accept_head.inference.adapters.vllm import metrics as module
from accept_head.inference.adapters.vllm.counts import COLUMNS, ENDS, VerifiedRound
from accept_head.inference.adapters.vllm.metrics import FOLDER, DraftMetrics, log_line, observed, predicted, since
from accept_head.inference.adapters.vllm.scrape import read_folder, samples
from tests.inference.support.rounds import outcome

K_MAX = 5
FALSE_ALARM = 3.89  # standard deviations: p < 1e-4, two-sided


def random_round(random):
    """(outcome, predicted, stopped): submitted < drafted, dead rows, and predictions that end early or lack rows."""
    batch = int(random.integers(1, 9))
    drafted = random.integers(0, K_MAX + 1, batch)
    submitted = random.integers(0, drafted + 1)
    accepted = random.integers(0, submitted + 1)
    predictions = random.random((int(random.integers(0, K_MAX + 1)), batch))
    predictions[random.random(predictions.shape) < 0.2] = np.nan
    told = outcome(drafted, accepted, random.random(batch) < 0.8, submitted=submitted)
    return told, [torch.tensor(row) for row in predictions], torch.tensor(random.random(batch) < 0.5)


def reference(rounds):
    """What `read` says of the depths and of what ended the drafts, row by row."""
    depths = [dict.fromkeys(COLUMNS, 0) for _ in range(K_MAX)]
    ends = dict.fromkeys(ENDS, 0)
    for told, predictions, stopped in rounds:
        for row in range(len(told.live)):
            if not told.live[row]:
                continue
            drafted, submitted, accepted = (int(x[row]) for x in (told.drafted, told.submitted, told.accepted))
            ends["none" if not drafted else "policy" if stopped[row] else "limit"] += 1
            for depth in range(1, drafted + 1):
                column = depths[depth - 1]
                column["drafted"] += 1
                column["verified"] += depth <= submitted
                column["accepted"] += depth <= accepted
                if depth > submitted or depth > accepted + 1:
                    continue
                column["judged"] += 1
                p = float(predictions[depth - 1][row]) if depth <= len(predictions) else math.nan
                if not math.isnan(p):
                    column["scored"] += 1
                    column["scored_accepted"] += depth <= accepted
                    column["predicted"] += p
    return depths, ends


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


class Alarm:
    """threading.Timer that goes off when the test says so."""

    set: ClassVar[list[Alarm]] = []

    def __init__(self, delay, function):
        self.delay, self.function = delay, function

    def start(self):
        Alarm.set.append(self)

    @classmethod
    def ring(cls):
        due, cls.set = cls.set, []
        for alarm in due:
            alarm.function()
        return len(due)


@pytest.fixture
def alarm(monkeypatch):
    monkeypatch.setattr(Alarm, "set", [])
    monkeypatch.setattr(module.threading, "Timer", Alarm)
    return Alarm


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def logger():
    made = logging.Logger("test")
    made.addHandler(Lines())
    return made


def record(metrics, outcome, predictions, stopped, steps=3, seconds=0.5):
    rows = (outcome.live, outcome.drafted, outcome.submitted, outcome.accepted, stopped)
    verified = VerifiedRound(*(values.tolist() for values in rows), [p.tolist() for p in predictions])
    metrics.record(verified, steps, seconds)


def one_round(drafted=(2,), accepted=(1,), predictions=(), stopped=None, live=None):
    stopped = torch.tensor(stopped or [False] * len(drafted))
    return outcome(drafted, accepted, live), [torch.tensor(p) for p in predictions], stopped


# --- counting --------------------------------------------------------------------------------------------------------


def test_counts_are_those_of_the_reference():
    random = np.random.default_rng(0)
    rounds = [random_round(random) for _ in range(300)]
    metrics = DraftMetrics(K_MAX, publish=False)
    for one in rounds:
        record(metrics, *one)
    counts = metrics.read()
    depths, ends = reference(rounds)
    assert counts["row_rounds"] == ends and min(ends.values()) > 0
    for got, expected in zip(counts["depths"], depths, strict=True):
        assert got.pop("predicted") == pytest.approx(expected.pop("predicted"), rel=1e-12)
        assert got == expected
    # The case is worth having: trimmed, dead and unscored rows all occur, and each would be seen.
    assert all(d["drafted"] > d["verified"] > d["judged"] > d["scored"] > 0 for d in depths[1:])
    assert counts["drafted"] == sum(int((o.drafted * o.live).sum()) for o, _, _ in rounds)
    assert counts["drafted"] < sum(int(o.drafted.sum()) for o, _, _ in rounds)
    assert counts["verified"] == sum(int((o.submitted * o.live).sum()) for o, _, _ in rounds)
    assert counts["accepted"] == sum(int((o.accepted * o.live).sum()) for o, _, _ in rounds)
    assert (counts["rounds"], counts["draft_forwards"], counts["policy_seconds"]) == (300, 900, 150.0)


def test_what_follows_a_rejection_is_not_at_risk():
    metrics = DraftMetrics(4, publish=False)
    record(metrics, *one_round(drafted=(4,), accepted=(1,), predictions=[[0.5], [0.25], [0.125], [0.75]]))
    assert [depth["judged"] for depth in metrics.read()["depths"]] == [1, 1, 0, 0]
    assert [depth["predicted"] for depth in metrics.read()["depths"]] == [0.5, 0.25, 0, 0]


@pytest.mark.parametrize("bias", [1.0, 1.15], ids=["calibrated", "biased"])
def test_a_biased_prediction_is_seen(bias):
    """Tokens are accepted with probability p; the policy predicts p or 1.15·p."""
    random = np.random.default_rng(1)
    metrics = DraftMetrics(2, publish=False)
    for _ in range(50):
        p = random.uniform(0.3, 0.8, (2, 64))
        hits = random.random((2, 64)) < p
        accepted = np.where(hits[0], 1 + hits[1], 0)
        predictions = [torch.tensor(row * bias, dtype=torch.float32) for row in p]
        record(metrics, *one_round((2,) * 64, accepted.tolist())[:1], predictions, torch.ones(64, dtype=torch.bool))
    for depth in metrics.read()["depths"]:
        mean = observed(depth)
        z = (predicted(depth) - mean) / math.sqrt(mean * (1 - mean) / depth["scored"])
        assert abs(z) < FALSE_ALARM if bias == 1.0 else z > FALSE_ALARM


def test_drafts_beyond_the_limit_and_half_precision_do_no_harm():
    metrics = DraftMetrics(2, publish=False)
    p = [torch.tensor([0.5], dtype=torch.bfloat16)] * 5
    record(metrics, one_round(drafted=(4,), accepted=(4,))[0], p, torch.tensor([False]))
    assert [(d["accepted"], d["predicted"]) for d in metrics.read()["depths"]] == [(1, 0.5), (1, 0.5)]


def test_the_sums_survive_inference_mode():
    """vLLM's workers run in it, the thread that reads does not."""
    with torch.inference_mode():
        metrics = DraftMetrics(2, publish=False)
        record(metrics, *one_round())
        record(metrics, *one_round())
    assert metrics.read()["accepted"] == 2


# --- to a file -------------------------------------------------------------------------------------------------------


def test_many_rounds_make_one_write_and_the_last_of_them_is_in_it(folder, alarm):
    metrics = DraftMetrics(K_MAX)
    for _ in range(7):
        record(metrics, *one_round())
    assert not list(folder.iterdir())
    assert [one.delay for one in alarm.set] == [module.WRITE_EVERY]
    assert alarm.ring() == 1 and not alarm.set
    (counts,) = read_folder().values()
    assert counts["rounds"] == 7
    assert alarm.ring() == 0  # nothing new, nothing to write
    record(metrics, *one_round())
    assert alarm.ring() == 1
    assert next(iter(read_folder().values()))["rounds"] == 8


def test_a_real_timer_writes_without_a_round_after_the_last(folder, monkeypatch):
    monkeypatch.setattr(module, "WRITE_EVERY", 0.01)
    metrics = DraftMetrics(K_MAX)
    record(metrics, *one_round())
    assert metrics.timer is not None and metrics.timer.daemon
    metrics.timer.join(timeout=60)
    assert next(iter(read_folder().values()))["rounds"] == 1


def test_engines_of_a_process_have_names_of_their_own_and_leave_with_it(folder, alarm):
    engines = [DraftMetrics(K_MAX) for _ in range(2)]
    for count, metrics in enumerate(engines, start=1):
        for _ in range(count):
            record(metrics, *one_round(), steps=1, seconds=0.0)
    alarm.ring()
    assert sorted(counts["rounds"] for counts in read_folder().values()) == [1, 2]
    del metrics, engines
    assert not list(folder.iterdir())


def test_nothing_is_written_without_a_folder_or_by_other_ranks(folder, alarm, monkeypatch):
    record(DraftMetrics(K_MAX, publish=False), *one_round())
    monkeypatch.delenv(FOLDER)
    record(DraftMetrics(K_MAX), *one_round())
    assert not alarm.set and not list(folder.iterdir())
    assert read_folder() == {}


def test_a_folder_that_is_gone_stops_nothing(folder, alarm):
    metrics = DraftMetrics(K_MAX)
    record(metrics, *one_round())
    folder.rmdir()
    assert alarm.ring() == 1
    record(metrics, *one_round())
    assert metrics.flush()["rounds"] == 2
    assert read_folder() == {}


def gone():
    """A process id that was in use and is not."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda text: text[: len(text) // 2], id="half-written"),
        pytest.param(lambda text: "", id="empty"),
        pytest.param(lambda text: "[1, 2]", id="a list"),
        pytest.param(lambda text: "\ud83d", id="not text"),
        pytest.param(lambda text: "[" * 100_000, id="deep"),
        pytest.param(lambda text: json.dumps({"version": 1}), id="another program's"),
        pytest.param(lambda text: text.replace('"version": 1', '"version": 2'), id="another version"),
        pytest.param(lambda text: text.replace('"accepted": 1', '"accepted": "x"'), id="a word"),
        pytest.param(lambda text: text.replace('"accepted": 1', '"accepted": NaN'), id="no number"),
        pytest.param(lambda text: text.replace('"accepted": 1', '"accepted": null'), id="null"),
        pytest.param(lambda text: text.replace('"depths": [', '"depths": [7,'), id="a depth that is none"),
        pytest.param(lambda text: text.replace(f'"pid": {os.getpid()}', f'"pid": {gone()}'), id="of a dead process"),
        pytest.param(lambda text: text.replace(f'"pid": {os.getpid()}', '"pid": "me"'), id="no process"),
    ],
)
def test_files_that_are_not_ours_or_not_whole_are_passed_over(folder, spoil):
    metrics = DraftMetrics(K_MAX)
    record(metrics, *one_round())
    metrics.flush()
    (file,) = folder.iterdir()
    text = file.read_text()
    assert list(read_folder()) == [file.stem]
    other = folder / "other.json"
    renamed = text.replace(f'"engine": "{file.stem}"', '"engine": "other"')
    other.write_text(renamed)
    assert list(read_folder()) == [file.stem, "other"]  # read for what it is, before it is spoilt
    other.write_bytes(spoil(renamed).encode("utf-8", "surrogatepass"))
    assert other.read_bytes() != renamed.encode()
    assert list(read_folder()) == [file.stem]


def test_a_folder_named_like_a_file_is_passed_over(folder):
    (folder / "1.json").mkdir()
    assert read_folder() == {}


def test_what_is_published_is_what_was_counted(folder):
    metrics = DraftMetrics(2)
    record(metrics, *one_round((2, 2, 1), (2, 0, 1), [[0.5, 0.25, 0.75]], [True, False, True]))
    values = {(sample.name, *sample.labels): sample.value for sample in samples(metrics.read())}
    expected = {
        ("num_rounds",): 1,
        ("num_draft_forwards",): 3,
        ("num_drafted_tokens",): 5,
        ("num_verified_tokens",): 5,
        ("num_accepted_tokens",): 3,
        ("policy_seconds",): 0.5,
        ("num_row_rounds", "policy"): 2,
        ("num_row_rounds", "limit"): 1,
        ("num_row_rounds", "none"): 0,
        ("num_judged_tokens_per_pos", "0"): 3,
        ("num_judged_tokens_per_pos", "1"): 1,
        ("num_accepted_tokens_per_pos", "0"): 2,
        ("predicted_accepted_tokens_per_pos", "0"): 1.5,
        ("predicted_acceptance_per_pos", "0"): 0.5,
        ("observed_acceptance_per_pos", "0"): pytest.approx(2 / 3),
    }
    assert {key: values[key] for key in expected} == expected
    assert ("predicted_acceptance_per_pos", "1") not in values  # nothing was predicted there


# --- to the log ------------------------------------------------------------------------------------------------------


def test_a_line_every_so_many_seconds_of_the_rounds_since_the_last(alarm, logger, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    metrics = DraftMetrics(2, publish=False, logger=logger, log_every=10)
    lines = logger.handlers[0].lines
    for second in range(1, 26):
        now[0] += 1
        if second <= 12 or second == 14:
            record(metrics, *one_round(accepted=(second % 2,)))
        alarm.ring()
    assert [line.partition("Drafted: ")[2].partition(" tokens")[0] for line in lines] == [
        "22",
        "4",
    ]  # as many rounds as 10 seconds had, from the first one on
    assert not alarm.set  # an idle engine has nothing to say


def test_log_every_0_logs_nothing(alarm, logger):
    record(DraftMetrics(2, publish=False, logger=logger, log_every=0), *one_round())
    assert not alarm.set


def test_the_line_says_what_was_counted():
    metrics = DraftMetrics(3, publish=False)
    before = metrics.read()
    record(metrics, *one_round((2, 2, 0), (2, 0, 0), [[0.5, 0.75, 0.0]], [True, False, False]), seconds=0.25)
    line = log_line(since(metrics.read(), before), seconds=4.0)
    assert line == (
        "accept_head metrics: Tokens per target step: 1.67, Drafted: 4 tokens in 3 forwards, Verified: 4 tokens, "
        "Accepted: 2 tokens (0.50 tokens/s), Per-position accepted/judged: 1/2, 1/1, "
        "Per-position predicted/observed acceptance: 0.625/0.500, Drafts ended by: policy 1, limit 1, none 1, "
        "Policy: 250.00 ms/round"
    )


def test_importing_it_is_cheap():
    code = "import sys, accept_head.inference.adapters.vllm.metrics, accept_head.inference.adapters.vllm.scrape;"
    code += "print(sorted({'torch', 'vllm', 'prometheus_client', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
