"""`accept-head collect` on the trained pair gives the same records when divided over processes, killed, and rerun."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from tests.runs import content, records, shards, start_and_kill, visible

PROMPTS, TOKENS, SHARD = 24, 12, 3
SHARDS = PROMPTS // SHARD
OPTIONS = ("--max_prompts", PROMPTS, "--max_new_tokens", TOKENS, "--batch_size", SHARD, "--shard_size", SHARD)


@pytest.fixture(scope="module")
def arguments(embedded_pair_folder):
    """Arguments of collect for an output folder."""

    def make(out, *more):
        pair = embedded_pair_folder
        models = ("--target", pair / "target", "--draft", pair / "draft")
        return ["collect", *models, "--prompts", pair / "prompts" / "train.jsonl", "--out", out, *OPTIONS, *more]

    return make


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, arguments, run_warm):
    """A folder collected by one process in one go."""
    out = tmp_path_factory.mktemp("collect") / "undisturbed"
    done = run_warm(*arguments(out))
    assert done.returncode == 0, done.stderr
    assert f"{PROMPTS}/{PROMPTS}" in done.stderr and "tokens/s" in done.stderr, "no progress was shown"
    return out


def test_folder_holds_its_config_and_one_record_a_prompt_in_their_order(undisturbed, embedded_pair_folder):
    assert set(content(undisturbed)) == {
        "trace_config.json",
        *(f"shard-{shard:05d}.parquet" for shard in range(SHARDS)),
    }
    lines = (embedded_pair_folder / "prompts" / "train.jsonl").read_text().splitlines()[:PROMPTS]
    prompts = [json.loads(line) for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(embedded_pair_folder / "target")
    rows = records(undisturbed)
    assert [row["index"] for row in rows] == list(range(PROMPTS))
    for row, prompt in zip(rows, prompts, strict=True):
        assert (row["id"], row["domain"]) == (prompt["id"], prompt["domain"])
        assert row["prompt_ids"] == tokenizer(prompt["prompt"])["input_ids"]
        assert 1 <= len(row["response_ids"]) <= TOKENS
        assert row["finished"] == (row["response_ids"][-1] == tokenizer.eos_token_id)
        assert len(row["alternative_ids"]) == 4 * len(row["response_ids"])
    config = json.loads((undisturbed / "trace_config.json").read_text())
    assert (config["num_prompts"], config["seed"], config["max_new_tokens"]) == (PROMPTS, 0, TOKENS)
    assert config["sampling"] == {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}


@pytest.mark.slow  # two processes are in test_train.py as well
def test_two_processes_under_accelerate_launch_write_the_same_bytes(undisturbed, arguments, run_launched, tmp_path):
    done = run_launched(*arguments(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "two") == content(undisturbed)


def test_another_seed_writes_other_records(undisturbed, arguments, run_warm, tmp_path):
    """So that equal bytes mean something."""
    done = run_warm(*arguments(tmp_path / "seed", "--seed", 1, "--max_prompts", 6))
    assert done.returncode == 0, done.stderr
    pairs = list(zip(records(undisturbed)[:6], records(tmp_path / "seed"), strict=True))
    assert all(one["prompt_ids"] == other["prompt_ids"] for one, other in pairs)
    assert sum(one["response_ids"] == other["response_ids"] for one, other in pairs) <= 2


@pytest.fixture(scope="module")
def killed(tmp_path_factory, arguments, console_script, cli_environment):
    """A folder whose run was killed with SIGKILL once its first shard was there."""
    out = tmp_path_factory.mktemp("collect") / "killed"
    start_and_kill([console_script, *arguments(out)], cli_environment, lambda: shards(out))
    assert 1 <= len(shards(out)) < SHARDS, "it was killed too late to prove anything"
    return out


def test_a_rerun_after_kill_9_finishes_the_folder_and_leaves_finished_shards_alone(
    killed, undisturbed, arguments, run_warm
):
    finished = {path: path.stat() for path in shards(killed)}
    refused = run_warm(*arguments(killed, "--temperature", 0.5))
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    assert str(killed) in refused.stderr and "temperature" in refused.stderr

    done = run_warm(*arguments(killed))
    assert done.returncode == 0, done.stderr
    for path, before in finished.items():
        assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    ids = [row["id"] for row in records(killed)]
    assert len(ids) == len(set(ids)) == PROMPTS
    assert visible(killed) == content(undisturbed)


def test_a_shard_that_a_kill_left_half_written_is_made_anew(undisturbed, arguments, run_warm, tmp_path):
    """A kill between writing a shard's temporary file and renaming it leaves that file; nothing may read it."""
    out = tmp_path / "out"
    out.mkdir()
    for name, data in content(undisturbed).items():
        if name != "shard-00003.parquet":
            (out / name).write_bytes(data)
    half = content(undisturbed)["shard-00003.parquet"][:500]
    (out / ".shard-00003.parquet.0123abcd.partial").write_bytes(half)
    done = run_warm(*arguments(out))
    assert done.returncode == 0, done.stderr
    assert visible(out) == content(undisturbed)


def test_traces_without_alternatives_are_finished_without_them(undisturbed, arguments, run_warm, tmp_path):
    """As older ones are. All else in them is as with alternatives."""
    out = tmp_path / "older"
    done = run_warm(*arguments(out, "--alternatives", 0))
    assert done.returncode == 0, done.stderr
    whole = content(out)
    assert "alternatives" not in json.loads(whole["trace_config.json"])
    shards(out)[-1].unlink()
    done = run_warm(*arguments(out))
    assert done.returncode == 0, done.stderr
    assert content(out) == whole
    for plain, row in zip(records(out), records(undisturbed), strict=True):
        assert plain == {name: values for name, values in row.items() if not name.startswith("alternative_")}


def test_a_rerun_of_a_finished_run_changes_nothing(undisturbed, arguments, run_warm):
    before = {path: path.stat().st_mtime_ns for path in undisturbed.iterdir()}
    done = run_warm(*arguments(undisturbed))
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in undisturbed.iterdir()} == before


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (("--temperature", 0.5), "temperature"),
        (("--top_k", 0), "top_k"),
        (("--seed", 1), "seed"),
        (("--max_new_tokens", 6), "max_new_tokens"),
        (("--batch_size", 2), "batch_size"),
        (("--shard_size", 8), "shard_size"),
        (("--max_prompts", 6), "prompts"),
        (("--alternatives", 2), "alternatives"),
        (("--temperature", 0), "temperature"),
    ],
)
def test_a_rerun_with_another_setting_is_refused_by_its_name(undisturbed, arguments, run_warm, changed, named):
    before = content(undisturbed)
    done = run_warm(*arguments(undisturbed, *changed))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert str(undisturbed) in done.stderr and named in done.stderr
    assert content(undisturbed) == before


def test_a_rerun_with_other_models_is_refused(random_traces_folder, random_pair_folder, run_warm, tmp_path):
    """The draft swapped for the target: same tokenizer, other weights."""
    before = content(random_traces_folder)
    models = ("--target", random_pair_folder / "target", "--draft", random_pair_folder / "target")
    prompts = ("--prompts", random_pair_folder / "prompts" / "train.jsonl")
    options = ("--max_new_tokens", 12, "--batch_size", 4, "--shard_size", 4)
    done = run_warm("collect", *models, *prompts, "--out", random_traces_folder, *options)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "draft" in done.stderr
    assert content(random_traces_folder) == before


def test_a_model_used_as_its_own_draft_is_always_accepted(random_pair_folder, run_warm, tmp_path):
    models = ("--target", random_pair_folder / "target", "--draft", random_pair_folder / "target")
    prompts = ("--prompts", random_pair_folder / "prompts" / "train.jsonl")
    done = run_warm("collect", *models, *prompts, "--out", tmp_path / "own", "--max_new_tokens", 12, "--max_prompts", 8)
    assert done.returncode == 0, done.stderr
    for row in records(tmp_path / "own"):
        assert row["response_ids"] == row["draft_ids"] and all(row["accepted"])
        # p as it was decoded, q as it is scored: they round differently, by some 1e-5 on some machines
        assert row["acceptance"] == pytest.approx([1] * len(row["acceptance"]), abs=1e-4)
        assert row["overlap"] == pytest.approx([1] * len(row["overlap"]), abs=1e-4)


@pytest.mark.slow
def test_a_run_of_two_processes_killed_and_finished_by_one_is_the_same(
    undisturbed, arguments, console_script, cli_environment, run_cli, tmp_path
):
    out = tmp_path / "out"
    accelerate = console_script.replace("accept-head", "accelerate")
    launch = [accelerate, "launch", "--cpu", "--num_processes", 2, "-m", "accept_head"]
    start_and_kill([*launch, *arguments(out)], cli_environment, lambda: shards(out))
    done = run_cli(*arguments(out))
    assert done.returncode == 0, done.stderr
    assert visible(out) == content(undisturbed)
