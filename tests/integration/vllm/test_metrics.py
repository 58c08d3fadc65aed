"""The workers' counts in the front end's Prometheus registry and in vLLM's own metrics, across processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.reader import Counter, Gauge, get_metrics_snapshot

from accept_head.inference.adapters.vllm import metrics as module
from accept_head.inference.adapters.vllm.counts import VerifiedRound
from accept_head.inference.adapters.vllm.metrics import FOLDER, DraftMetrics
from accept_head.inference.adapters.vllm.scrape import PREFIX, CountsCollector, share_metrics

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    share_metrics()
    return tmp_path


def record(metrics: DraftMetrics) -> None:
    """Three rows: 2 of 2 accepted, 0 of 2, and one without a draft."""
    verified = VerifiedRound(
        live=[True] * 3,
        drafted=[2, 2, 0],
        verified=[2, 2, 0],
        accepted=[2, 0, 0],
        stopped=[True, False, False],
        predicted=[[0.5, 0.75, 0.0]],
    )
    metrics.record(verified, 3, 0.25)


def snapshot(name: str) -> list[Counter | Gauge]:
    return [metric for metric in get_metrics_snapshot() if metric.name == PREFIX + name]


def test_vllms_reader_takes_them_as_they_are_now():
    """`LLM.get_metrics()`; the engine is in this process, so not even a second has to pass."""
    metrics = DraftMetrics(3)
    record(metrics)
    (drafted,) = snapshot("num_drafted_tokens")
    assert isinstance(drafted, Counter) and drafted.value == 4
    assert drafted.labels == {"engine": metrics.engine}
    record(metrics)
    assert snapshot("num_drafted_tokens")[0].value == 8
    judged = {metric.labels["position"]: metric.value for metric in snapshot("num_judged_tokens_per_pos")}
    assert judged == {"0": 4, "1": 2, "2": 0}
    ended = {metric.labels["ended"]: metric.value for metric in snapshot("num_row_rounds")}
    assert ended == {"policy": 2, "limit": 2, "none": 2}
    (rate,) = snapshot("predicted_acceptance_per_pos")
    assert isinstance(rate, Gauge) and rate.value == 0.625 and rate.labels["position"] == "0"


def test_the_text_that_is_scraped():
    metrics = DraftMetrics(2)
    record(metrics)
    text = generate_latest(REGISTRY).decode()
    assert f'vllm:accept_head_policy_seconds_total{{engine="{metrics.engine}"}} 0.25\n' in text
    assert f'vllm:accept_head_num_accepted_tokens_per_pos_total{{engine="{metrics.engine}",position="1"}} 1.0\n' in text
    assert "# TYPE vllm:accept_head_num_rounds_total counter\n" in text
    assert "# TYPE vllm:accept_head_observed_acceptance_per_pos gauge\n" in text


def test_there_is_one_collector_however_often_the_plugin_is_registered():
    share_metrics()
    mine = [collector for collector in REGISTRY._collector_to_names if isinstance(collector, CountsCollector)]
    assert len(mine) == 1
    unregister_vllm_metrics()  # what a second engine in the process does; ours has none of the first engine's numbers
    assert mine[0] in REGISTRY._collector_to_names


def test_a_bad_file_does_not_stop_the_scrape(folder):
    metrics = DraftMetrics(2)
    record(metrics)
    metrics.flush()
    whole = (folder / f"{metrics.engine}.json").read_text()
    (folder / "half.json").write_text(whole[:100])
    (folder / "wrong.json").write_text(
        whole.replace(metrics.engine, "wrong").replace('"accepted": 2', '"accepted": "x"')
    )
    assert {metric.labels["engine"] for metric in snapshot("num_rounds")} == {metrics.engine}
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert snapshot("num_rounds") == []


def worker(ready, leave):
    """Another process, as vLLM's are: spawned."""
    module.WRITE_EVERY = 0.01
    metrics = DraftMetrics(2)
    record(metrics)
    metrics.timer.join()
    ready.put(metrics.engine)
    leave.get()


def test_a_worker_in_another_process():
    spawn = multiprocessing.get_context("spawn")
    ready, leave = spawn.Queue(), spawn.Queue()
    child = spawn.Process(target=worker, args=(ready, leave))
    child.start()
    engine = ready.get(timeout=300)
    assert engine == str(child.pid)
    (drafted,) = snapshot("num_drafted_tokens")
    assert (drafted.value, drafted.labels) == (4, {"engine": engine})
    leave.put(None)
    child.join(timeout=300)
    assert child.exitcode == 0 and snapshot("num_drafted_tokens") == []


def counted(name: str) -> int:
    """A counter of vLLM's own, or of ours."""
    return sum(metric.value for metric in get_metrics_snapshot() if metric.name == f"vllm:{name}")


def test_an_engine_counts_as_vllm_does(make_llm, generate, prompts):
    """What vLLM calls draft tokens are the verified ones."""
    llm = make_llm({"num_speculative_tokens": 5}, additional_config={"accept_head": {"policy": "online-logistic:0.4"}})
    generate(llm, prompts[:6], max_tokens=40, temperature=0)
    drafts, accepted = counted("spec_decode_num_draft_tokens"), counted("spec_decode_num_accepted_tokens")
    assert counted("accept_head_num_verified_tokens") == drafts > accepted > 0
    assert counted("accept_head_num_accepted_tokens") == accepted
    (vector,) = [m.values for m in get_metrics_snapshot() if m.name.endswith("spec_decode_num_accepted_tokens_per_pos")]
    ours = {int(m.labels["position"]): m.value for m in snapshot("num_accepted_tokens_per_pos")}
    assert [ours[position] for position in range(5)] == vector
    rounds = {metric.labels["ended"]: metric.value for metric in snapshot("num_row_rounds")}
    assert rounds["policy"] > 0 and rounds["policy"] + rounds["limit"] == counted("spec_decode_num_drafts")
    assert all(0 < metric.value < 1 for metric in snapshot("predicted_acceptance_per_pos"))


FRONT_END = """
import json, os, sys
from accept_head.inference.adapters.vllm.metrics import FOLDER
from accept_head.inference.adapters.vllm.scrape import share_metrics
share_metrics()
made = os.environ[FOLDER]
share_metrics()
if os.fork() == 0:
    sys.exit()  # runs what atexit has, which belongs to the parent
os.wait()
print(json.dumps([made, os.environ[FOLDER], os.path.isdir(made), oct(os.stat(made).st_mode)]))
"""


@pytest.mark.parametrize("own", [True, False], ids=["made", "given"])
def test_the_front_end_makes_a_private_folder_and_removes_it(own, folder):
    environment = {name: value for name, value in os.environ.items() if name != FOLDER or not own}
    done = subprocess.run(
        [sys.executable, "-c", FRONT_END], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    made, again, there, mode = json.loads(done.stdout)
    assert made == again and there and mode.endswith("700")
    assert (made != str(folder)) is own and Path(made).exists() is not own
