"""`collect --backend vllm` and `--backend openai` with vLLM itself: the responses are the target's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accept_head import InputError, Sampling
from accept_head.pair import end_ids
from accept_head.prompts import load_prompts
from accept_head.trace.config import TraceConfig
from accept_head.trace.shards import read_traces
from accept_head.training.respond.openai import ServerResponder
from accept_head.training.respond.vllm import VllmResponder, engine_environment
from tests.integration.vllm.zstat import p_value, z_statistics
from tests.training.generated import generated

GREEDY, SAMPLED = Sampling(temperature=0), Sampling(temperature=1.0, top_k=50)
TOKENS = 40
FALSE_ALARM = 1e-4  # of a right sampler; the seeds are fixed, so a pass stays a pass


@pytest.fixture(scope="module")
def loaded(embedded_pair, embedded_pair_folder):
    return load_prompts(str(embedded_pair_folder / "prompts" / "test.jsonl"), embedded_pair.tokenizer)


@pytest.fixture(scope="module")
def config(embedded_pair, embedded_pair_folder, loaded):
    return TraceConfig(
        target=str(embedded_pair_folder / "target"), target_fingerprint="", draft="", draft_fingerprint="",
        vocabulary_fingerprint="", prompts_fingerprint="", vocab_size=embedded_pair.vocab_size,
        end_token_ids=tuple(end_ids(embedded_pair.target, embedded_pair.tokenizer)), num_prompts=len(loaded),
        sampling=GREEDY, max_new_tokens=TOKENS, seed=7, batch_size=16, shard_size=len(loaded),
    )  # fmt: skip


def said(responder, prompts):
    return [row for batch in responder.batches(0, prompts) for row in batch.responses]


def greedy_by_transformers(pair, prompts):
    ids = [prompt.ids for prompt in prompts]
    options = {"max_new_tokens": TOKENS, "seed": 0, "vocab_size": pair.vocab_size}
    return generated(pair.target, pair.tokenizer, ids, GREEDY, **options)


def p_value_of(pair, prompts, outputs, sampling=SAMPLED):
    ids = [prompt.ids for prompt in prompts]
    return p_value(z_statistics(pair.target, pair.draft, ids, outputs, sampling))


@pytest.fixture(scope="module")
def engine(embedded_pair, config, loaded):
    """engine(sampling): a responder with that setting; all share one vLLM engine."""
    longest = max(len(prompt.ids) for prompt in loaded)
    first = VllmResponder(embedded_pair, config, longest=longest)
    first.options |= {"enforce_eager": True, "max_num_seqs": 64}

    def make(sampling, seed=7):
        made = VllmResponder(embedded_pair, replace(config, sampling=sampling, seed=seed), longest=longest)
        made.llm = first._engine()
        return made

    yield make
    first.close()
    assert first.llm is None


@pytest.mark.slow
def test_greedy_responses_are_those_of_transformers(engine, embedded_pair, loaded):
    assert said(engine(GREEDY), loaded[:48]) == greedy_by_transformers(embedded_pair, loaded[:48])


@pytest.mark.slow
def test_sampled_responses_follow_the_processed_target(engine, embedded_pair, loaded):
    outputs = said(engine(SAMPLED), loaded)
    assert p_value_of(embedded_pair, loaded, outputs) >= FALSE_ALARM
    assert p_value_of(embedded_pair, loaded, outputs, Sampling(temperature=0.9, top_k=50)) < FALSE_ALARM, "no power"


@pytest.mark.slow
def test_a_response_depends_on_its_prompt_and_the_seed_alone(engine, loaded):
    together = said(engine(SAMPLED), loaded[:12])
    alone = [said(engine(SAMPLED), [prompt])[0] for prompt in reversed(loaded[:12])][::-1]
    assert together == alone
    assert (
        sum(one == other for one, other in zip(together, said(engine(SAMPLED, seed=8), loaded[:12]), strict=True)) < 6
    )


@pytest.mark.slow
def test_ids_beyond_the_shared_vocabulary_are_not_said(engine, loaded):
    """As if a third of the target's outputs were padding: without the bias they would be drawn at once."""
    plain, narrow = engine(Sampling(temperature=1.0, top_k=0)), engine(Sampling(temperature=1.0, top_k=0))
    limit = narrow.request.outputs * 2 // 3
    assert max(max(row) for row in said(plain, loaded[:24])) >= limit
    narrow.request = replace(narrow.request, vocab_size=limit)
    assert max(max(row) for row in said(narrow, loaded[:24])) < limit
    plain.request = replace(plain.request, vocab_size=limit, outputs=limit)
    with pytest.raises(InputError, match="another model"):
        said(plain, loaded[:24])


def test_an_engine_of_a_launched_process_sees_no_launcher_and_its_own_gpus(monkeypatch):
    monkeypatch.setattr("accept_head.training.respond.vllm.use_cpu_only", lambda: False)
    before = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "h", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    with engine_environment(2):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"
        assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(os.environ)
    assert {name: os.environ[name] for name in before} == before
    everything = dict(os.environ)
    with pytest.raises(InputError, match=r"tensor_parallel_size is 3.*fewer processes"), engine_environment(3):
        pass
    assert dict(os.environ) == everything


# --- the command line -------------------------------------------------------------------------------------------------


ONE = (sys.executable,)
TWO = (Path(sys.executable).parent / "accelerate", "launch", "--cpu", "--num_processes", 2)


def collect(pair: Path, out: Path, *more: object, launcher: Any = ONE) -> subprocess.CompletedProcess[str]:
    words = ["--target", pair / "target", "--draft", pair / "draft", "--prompts", pair / "prompts" / "test.jsonl"]
    words += ["--out", out, "--max_prompts", 24, "--max_new_tokens", 24, "--batch_size", 8, "--shard_size", 12, *more]
    command = [*map(str, launcher), "-m", "accept_head", "collect", *map(str, words)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=700)


@pytest.fixture(scope="module")
def by_our_loop(embedded_pair_folder, tmp_path_factory):
    """Greedy traces of the default backend."""
    out = tmp_path_factory.mktemp("respond") / "loop"
    done = collect(embedded_pair_folder, out, "--temperature", 0)
    assert done.returncode == 0, done.stderr
    return out


def assert_same_records(one: Path, other: Path, backend: str) -> None:
    (config, first), (default, second) = read_traces(one), read_traces(other)
    assert (config.backend, default.backend) == (backend, "loop")
    assert config.fingerprint() != default.fingerprint() == replace(config, backend="loop").fingerprint()
    for row, expected in zip(first, second, strict=True):
        for name, values in expected.items():
            numbers = isinstance(values, list) and isinstance(values[0], float)  # the loop scores while it decodes
            assert row[name] == (pytest.approx(values, abs=1e-4) if numbers else values)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_collect_with_vllm_makes_the_greedy_records_of_our_loop(embedded_pair_folder, by_our_loop, tmp_path):
    out = tmp_path / "vllm"
    done = collect(embedded_pair_folder, out, "--temperature", 0, "--backend", "vllm")
    assert done.returncode == 0, done.stderr[-4000:]
    assert_same_records(out, by_our_loop, "vllm")
    again = collect(embedded_pair_folder, out, "--temperature", 0, "--backend", "vllm")  # no engine is started
    assert again.returncode == 0 and "Initializing" not in again.stderr + again.stdout
    other = collect(embedded_pair_folder, out, "--temperature", 0)
    assert other.returncode == 2 and "backend (vllm, now loop)" in other.stderr


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_processes_with_an_engine_each_write_the_same_sampled_bytes_as_one(embedded_pair_folder, tmp_path):
    for out, launcher in (("one", ONE), ("two", TWO)):
        done = collect(embedded_pair_folder, tmp_path / out, "--backend", "vllm", launcher=launcher)
        assert done.returncode == 0, done.stderr[-4000:]
    files = [{path.name: path.read_bytes() for path in (tmp_path / out).iterdir()} for out in ("one", "two")]
    assert files[0] == files[1] and len(files[0]) == 3


@pytest.fixture(scope="module")
def endpoint(embedded_pair_folder, tmp_path_factory):
    """A real vLLM server of the target, in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    options = ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "16", "--dtype", "float32"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    command += [str(embedded_pair_folder / "target"), "--served-model-name", "tiny", "--host", "127.0.0.1"]
    with log.open("w") as file:
        process = subprocess.Popen([*command, "--port", str(port), *options], stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 400
        while not healthy(port):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(timeout=60)


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.slow
def test_a_vllm_servers_responses_are_the_targets(endpoint, embedded_pair, config, loaded):
    options = {"endpoint": endpoint, "served_name": "tiny", "concurrency": 16}
    greedy = ServerResponder(embedded_pair, config, **options)
    assert said(greedy, loaded[:48]) == greedy_by_transformers(embedded_pair, loaded[:48])
    sampled = ServerResponder(embedded_pair, replace(config, sampling=SAMPLED), **options)
    outputs = said(sampled, loaded)
    assert p_value_of(embedded_pair, loaded, outputs) >= FALSE_ALARM
    one_at_a_time = ServerResponder(embedded_pair, replace(config, sampling=SAMPLED), **{**options, "concurrency": 1})
    assert said(one_at_a_time, loaded[:8]) == outputs[:8]


@pytest.mark.slow
def test_collect_with_a_vllm_server_makes_the_greedy_records_of_our_loop(
    endpoint, embedded_pair_folder, by_our_loop, tmp_path
):
    out = tmp_path / "openai"
    server = ("--backend", "openai", "--endpoint", endpoint, "--concurrency", 8)
    wrong = collect(embedded_pair_folder, out, "--temperature", 0, *server)
    assert wrong.returncode == 2 and "HTTP 404" in wrong.stderr.splitlines()[-1], "the model has another name there"
    done = collect(embedded_pair_folder, out, "--temperature", 0, *server, "--served_name", "tiny")
    assert done.returncode == 0, done.stderr[-4000:]
    assert_same_records(out, by_our_loop, "openai")
    assert json.loads((out / "trace_config.json").read_text())["backend"] == "openai"
