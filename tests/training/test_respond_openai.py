"""`collect --backend openai` against a local server that fails in every way, and through the command line."""

from __future__ import annotations

import email.utils
import json
import threading
import time

import pyarrow.parquet as pq
import pytest

from accept_head import InputError, Sampling
from accept_head.cli import main
from accept_head.prompts import Prompt
from accept_head.trace.config import TraceConfig
from accept_head.training.respond.openai import ServerResponder, check_endpoint, delay, retry_after
from accept_head.training.respond.request import EngineRequest, request_seed
from accept_head.training.respond.vllm import is_installed
from tests.training.completions_server import serving
from tests.training.generated import generated

KEY = "sk-loopback-1234567890"
PROMPTS = [Prompt(index, f"p{index}", "", (1, 5 + index, 7)) for index in range(12)]
CONFIG = TraceConfig(
    target="folder/target", target_fingerprint="", draft="", draft_fingerprint="", vocabulary_fingerprint="",
    prompts_fingerprint="", vocab_size=261, end_token_ids=(2,), num_prompts=12, sampling=Sampling(temperature=0.8),
    max_new_tokens=6, seed=4, batch_size=5, shard_size=12,
)  # fmt: skip


def answered(body):
    """Any function of all that decides a response."""
    return [5 + (body["seed"] + 7 * place + sum(body["prompt"])) % 250 for place in range(body["max_tokens"])]


@pytest.fixture
def server():
    with serving(answered) as running:
        yield running


@pytest.fixture
def make(random_pair, server, monkeypatch):
    """Makes responders to the server that do not wait but note how long they would have."""

    def responder(config=CONFIG, **options):
        made = ServerResponder(random_pair, config, **{"endpoint": server.endpoint, "concurrency": 4, **options})
        made.waits = []
        is_set = made.failed.is_set
        monkeypatch.setattr(made.failed, "wait", lambda seconds: made.waits.append(seconds) or is_set())
        return made

    return responder


def responses(responder):
    batches = list(responder.batches(0, PROMPTS))
    assert [len(batch.prompts) for batch in batches] == [5, 5, 2]
    assert [prompt for batch in batches for prompt in batch.prompts] == PROMPTS
    return [row for batch in batches for row in batch.responses]


def test_each_prompt_gets_its_own_response_whatever_is_in_flight_together(make, server):
    one, many = responses(make(concurrency=1)), responses(make(concurrency=8))
    assert one == many and len({tuple(row) for row in one}) == len(PROMPTS)
    for prompt, row in zip(PROMPTS, one, strict=True):
        assert row == answered({"seed": request_seed(4, prompt.index), "prompt": prompt.ids, "max_tokens": 6})


def test_requests_say_all_that_decides_a_response(make, server, random_pair):
    responses(make(served_name="big"))
    body = next(body for body in server.bodies if body["prompt"] == list(PROMPTS[3].ids))
    assert body == {
        "model": "big",
        "prompt": [1, 8, 7],
        "return_token_ids": True,
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "max_tokens": 6,
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": request_seed(4, 3),
        "ignore_eos": True,
        "stop_token_ids": [2],
    }
    assert len({body["seed"] for body in server.bodies}) == len(PROMPTS)
    narrow = TraceConfig(**{**vars(CONFIG), "vocab_size": 259})
    assert EngineRequest.of(random_pair, narrow).fields(0)["logit_bias"] == {"259": -100.0, "260": -100.0}


def test_concurrency_bounds_what_is_in_flight(random_pair):
    gate = threading.Barrier(3)  # passes when three are being answered at once

    def slowly(body):
        gate.wait(timeout=20)
        time.sleep(0.05)  # a fourth request would come now
        return answered(body)

    with serving(slowly) as server:
        rows = ServerResponder(random_pair, CONFIG, endpoint=server.endpoint, concurrency=3)
        assert len(responses(rows)) == 12
        assert server.most_at_once == 3


def test_whatever_passes_is_tried_again_until_it_passes(make, server):
    calm = responses(make())
    in_a_while = email.utils.formatdate(time.time() + 30, usegmt=True)
    server.failures += [
        429, 500, 502, 503, 504, "drop", "cut", b"<html>no JSON</html>", 408,
        (429, {"Retry-After": "17"}), (503, {"Retry-After": in_a_while}), (429, {"Retry-After": "soon"}),
    ]  # fmt: skip
    failing = make(concurrency=1, retries=12)
    assert responses(failing) == calm
    assert server.failures == [] and len(failing.waits) == 12
    spans = [min(0.5 * 2**attempt, 60) for attempt in range(12)]
    asked = [0.0] * 9 + [17, 25, 0]  # what a server asks for is the least
    assert all(
        least <= seconds <= least + 5 + span for least, seconds, span in zip(asked, failing.waits, spans, strict=True)
    )
    assert 17 <= failing.waits[9] <= 17 + 30


def test_pauses_double_and_are_never_alike():
    for attempt, span in enumerate((0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60)):
        drawn = [delay(attempt, None) for _ in range(200)]
        assert span / 2 <= min(drawn) < 0.6 * span and 0.9 * span < max(drawn) <= span
        assert len(set(drawn)) > 190
        assert all(9 <= delay(attempt, 9.0) <= 9 + span / 2 for _ in range(50))


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, None), ("3", 3), ("0.5", 0.5), ("-4", 0), ("1e9", 600), ("soon", None), ("nan", None), ("", None)],
)
def test_retry_after_is_read_and_bounded(header, seconds):
    assert retry_after(header) == seconds


def test_it_gives_up_after_the_last_attempt_and_says_what_was_wrong(make, server):
    server.failures += [503] * 1000
    with pytest.raises(InputError, match=r"gave up after 4 attempts \(HTTP 503: no luck: 503\).*goes on from there"):
        responses(make(retries=3, concurrency=1))
    assert len(server.requests) == 4


def test_a_server_that_is_not_there(make):
    gone = make(endpoint="http://127.0.0.1:9/v1", retries=2)
    with pytest.raises(InputError, match=r"127\.0\.0\.1:9.*gave up after 3 attempts \(ConnectError"):
        responses(gone)


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 422])
def test_a_refusal_is_not_tried_again(make, server, status, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.failures += [status] * 1000
    with pytest.raises(InputError, match=f"HTTP {status}: no luck") as caught:
        responses(make(concurrency=2))
    assert len(server.requests) <= len(PROMPTS)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"choices": [{"text": "hello"}]}, "no token_ids"),
        ({"choices": []}, "no completion"),
        ({"choices": [{"token_ids": [5] * 6}] * 2}, "no completion"),
        ([1, 2], "no completion"),
        ({"choices": [{"token_ids": [5, 6], "prompt_token_ids": [9]}]}, "other token ids"),
        ({"choices": [{"token_ids": [5, 261]}]}, "another model"),
        ({"choices": [{"token_ids": [5, -1]}]}, "another model"),
        ({"choices": [{"token_ids": [5, "6"]}]}, "another model"),
        ({"choices": [{"token_ids": []}]}, "0 tokens"),
        ({"choices": [{"token_ids": [5] * 7}]}, "7 tokens"),
    ],
)
def test_an_answer_that_is_none_of_this_pairs_is_refused(make, server, wrong, said):
    server.failures += [json.dumps(wrong).encode()] * 12
    with pytest.raises(InputError, match=said):
        responses(make())


def test_a_response_ends_with_its_first_end_token(make, server):
    server.answer = lambda body: [5, 2, 9]
    assert responses(make()) == [[5, 2]] * 12


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(make, server, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    responses(make())
    assert not any("Authorization" in headers for headers, _ in server.requests)
    server.requests.clear()
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    responses(make())
    assert all(headers["Authorization"] == f"Bearer {KEY}" for headers, _ in server.requests)
    assert all(KEY not in json.dumps(body) for _, body in server.requests)


@pytest.mark.parametrize(
    ("endpoint", "named"),
    [
        (None, "--endpoint"),
        ("127.0.0.1:8000", "127.0.0.1:8000"),
        ("ftp://host/v1", "ftp"),
        ("http://", "--endpoint"),
        ("http://user:secret@host/v1", "OPENAI_API_KEY"),
    ],
)
def test_addresses_that_are_none(endpoint, named):
    with pytest.raises(InputError, match=named) as caught:
        check_endpoint(endpoint, None, None)
    assert "secret" not in str(caught.value)


def test_settings_that_engines_understand_otherwise_are_refused(random_pair):
    both = TraceConfig(**{**vars(CONFIG), "sampling": Sampling(top_p=0.9, min_p=0.1)})
    with pytest.raises(InputError, match="min_p and top_p"):
        ServerResponder(random_pair, both, endpoint="http://127.0.0.1:9")


def test_seeds_are_their_own_and_survive_any_json_reader():
    seeds = {request_seed(seed, index) for seed in range(20) for index in range(500)}
    assert len(seeds) == 10_000 and max(seeds) < 1 << 53
    assert all(int(float(seed)) == seed for seed in seeds)


# --- the command line, with a server that runs a model ----------------------------------------------------------------

TOKENS, SHARD = 8, 4
OPTIONS = ("--max_new_tokens", TOKENS, "--batch_size", 2, "--shard_size", SHARD, "--top_k", 5)


def model_answers(model, tokenizer):
    """answer(body): that model's own response, sampled as the request says."""
    lock = threading.Lock()

    def answer(body):
        sampling = Sampling(temperature=body["temperature"], top_k=body["top_k"])
        with lock:
            return generated(
                model, tokenizer, [body["prompt"]], sampling, max_new_tokens=body["max_tokens"], seed=body["seed"]
            )[0]

    return answer


@pytest.fixture
def arguments(random_pair_folder):
    def make(out, endpoint, *more):
        pair = random_pair_folder
        models = ("--target", pair / "target", "--draft", pair / "draft")
        backend = ("--backend", "openai", "--endpoint", endpoint, *more)
        return ["collect", *models, "--prompts", pair / "prompts" / "train.jsonl", "--out", out, *OPTIONS, *backend]

    return make


def records(folder):
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_an_interrupted_run_goes_on_where_it_was_and_asks_for_nothing_twice(random_pair, arguments, run_warm, tmp_path):
    with serving(model_answers(random_pair.target, random_pair.tokenizer)) as server:
        whole = run_warm(*arguments(tmp_path / "whole", server.endpoint, "--concurrency", 3))
        assert whole.returncode == 0, whole.stderr
        answer, left = server.answer, [10]

        def for_a_while(body):
            with server.lock:
                left[0] -= 1
            if left[0] < 0:
                raise ConnectionError
            return answer(body)

        server.answer = for_a_while
        command = arguments(tmp_path / "out", server.endpoint, "--concurrency", 1, "--retries", 0)
        broken = run_warm(*command, env={"OPENAI_API_KEY": KEY})
        assert (broken.returncode, len(broken.stderr.splitlines()[-1:])) == (2, 1)
        assert "gave up after 1 attempts" in broken.stderr.splitlines()[-1] and "Traceback" not in broken.stderr
        assert len(list((tmp_path / "out").glob("*.parquet"))) == 2
        server.answer = answer
        server.bodies.clear()
        refused = run_warm(*arguments(tmp_path / "out", server.endpoint)[:-4])
        assert refused.returncode == 2 and "backend (openai, now loop)" in refused.stderr
        done = run_warm(*command, env={"OPENAI_API_KEY": KEY})
        assert done.returncode == 0, done.stderr
        assert len(server.bodies) == 24 - 2 * SHARD
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert json.loads(files["trace_config.json"])["backend"] == "openai"
    assert not any(KEY.encode() in data for data in files.values()) and KEY not in broken.stderr + done.stderr
    for row in records(tmp_path / "out"):
        (own,) = generated(
            random_pair.target, random_pair.tokenizer, [row["prompt_ids"]], Sampling(top_k=5), max_new_tokens=TOKENS,
            seed=request_seed(0, row["index"]),
        )  # fmt: skip
        assert row["response_ids"] == own


def test_a_server_with_another_model_is_found_out(random_pair, arguments, run_warm, tmp_path):
    with serving(model_answers(random_pair.draft, random_pair.tokenizer)) as server:
        done = run_warm(*arguments(tmp_path / "out", server.endpoint, "--shard_size", 24))
    assert done.returncode == 2
    assert "another model" in done.stderr.splitlines()[-1] and not list((tmp_path / "out").glob("*.parquet"))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (("--backend", "vllm"), ["--endpoint", "openai"]),
        (("--backend", "loop"), ["--endpoint", "openai"]),
        (("--tensor_parallel_size", 2), ["tensor_parallel_size", "vllm"]),
        (("--concurrency", 0), ["concurrency", "0"]),
        (("--retries", -1), ["retries", "-1"]),
        (("--backend", "mlx"), ["mlx", "openai"]),
        (("--model_shapes", "configs"), ["model_shapes", "--dry_run"]),
        (("--max_memory", '{"cpu": "1GB"}'), ["max_memory", "--device_map"]),
    ],
)
def test_options_that_would_be_ignored_are_refused(arguments, tmp_path, changed, named, capsys):
    assert main([*map(str, arguments(tmp_path / "out", "http://127.0.0.1:9/v1", *changed))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in named), line
    assert not (tmp_path / "out").exists()


def test_without_vllm_its_backend_says_so(arguments, tmp_path, capsys):
    if is_installed():
        pytest.skip("vLLM is installed here")
    command = [word for word in arguments(tmp_path / "out", "x") if word not in ("--endpoint", "x")]
    assert main([*map(str, command), "--backend", "vllm"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "not installed" in line and "accept-head[vllm]" in line
