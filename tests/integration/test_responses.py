"""`accept-head collect --responses` on the trained pair: sampled text is scored greedily, killed and rerun.

Such traces can train a head, but not be replayed.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.runs import content, records, shards, start_and_kill, visible

PROMPTS, TOKENS = 24, 12
SAMPLES = ("--batch_size", 3)


@pytest.fixture(scope="module")
def said(tmp_path_factory, embedded_pair_folder, collect):
    """Ordinary traces at temperature 1, a shard a prompt triple."""
    options = {"max_prompts": PROMPTS, "max_new_tokens": TOKENS, "batch_size": 3, "shard_size": 3}
    return collect(embedded_pair_folder, tmp_path_factory.mktemp("responses") / "said", **options)


@pytest.fixture(scope="module")
def arguments(embedded_pair_folder, said):
    """Arguments of collect for an output folder."""

    def make(out, *more, responses=said):
        models = ("--target", embedded_pair_folder / "target", "--draft", embedded_pair_folder / "draft")
        return ["collect", *models, "--responses", responses, "--out", out, *SAMPLES, *more]

    return make


@pytest.fixture(scope="module")
def greedy(tmp_path_factory, arguments, run_warm):
    """The same text, scored at temperature 0."""
    out = tmp_path_factory.mktemp("responses") / "greedy"
    done = run_warm(*arguments(out, "--temperature", 0))
    assert done.returncode == 0, done.stderr
    return out


def test_prompts_and_text_are_kept_and_labels_are_agreement_of_two_argmaxes(greedy, said, embedded_pair_folder):
    """Against one ordinary forward of each model a text. A near tie may fall either way in another batch."""
    target, draft = (AutoModelForCausalLM.from_pretrained(embedded_pair_folder / name) for name in ("target", "draft"))
    wrong = total = agreed = 0
    for row, source in zip(records(greedy), records(said), strict=True):
        kept = ("index", "id", "domain", "prompt_ids", "response_ids", "finished")
        assert [row[name] for name in kept] == [source[name] for name in kept]
        ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
        begin = len(row["prompt_ids"]) - 1
        with torch.no_grad():
            best, drawn = (model(ids).logits[0, begin:-1].float().argmax(-1).numpy() for model in (target, draft))
        same = (best == drawn).astype(float)
        wrong += (np.array(row["draft_ids"]) != drawn).sum() + (np.array(row["acceptance"]) != same).sum()
        assert row["acceptance"] == row["overlap"]
        assert row["accepted"] == (np.array(row["draft_ids"]) == np.array(row["response_ids"])).tolist()
        total, agreed = total + len(same), agreed + same.sum()
    assert total > 150 and wrong <= total // 100
    assert 0.2 < agreed / total < 0.95
    assert any(y != x for row in records(greedy) for y, x in zip(row["draft_ids"], row["response_ids"], strict=True))


def test_the_config_says_where_the_text_came_from(greedy, said):
    config, source = (json.loads((folder / "trace_config.json").read_text()) for folder in (greedy, said))
    assert len(config.pop("responses")) == 64 and "responses" not in source
    assert config.pop("sampling") == {"temperature": 0.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
    source.pop("sampling"), source.pop("backend")
    assert source.pop("alternatives") == 4 and "alternatives" not in config, "greedily there are none"
    assert config == source, "prompts, models, sizes and seed are the source's"


def test_scored_as_it_was_said_it_is_the_same_traces(said, arguments, run_warm, tmp_path):
    done = run_warm(*arguments(tmp_path / "again"))
    assert done.returncode == 0, done.stderr
    assert differences(tmp_path / "again", said, "draft_ids") < 0.02
    other = run_warm(*arguments(tmp_path / "seed", "--seed", 1))
    assert other.returncode == 0, other.stderr
    assert differences(tmp_path / "seed", said, "draft_ids") > 0.05


def differences(folder, other, name):
    """The share of positions with another value of this column. Texts are the same, and so is what is known of them but
    for rounding: the target's logits are those that it drew from, or those of a pass over what it said."""
    different = []
    for one, two in zip(records(folder), records(other), strict=True):
        assert one["response_ids"] == two["response_ids"]
        for column in ("overlap", "target_logprob", "divergence"):
            np.testing.assert_allclose(one[column], two[column], rtol=0.02, atol=0.02)
        different += [value != same for value, same in zip(one[name], two[name], strict=True)]
    return np.mean(different)


@pytest.mark.slow
def test_a_rerun_after_kill_9_leaves_the_same_shards(
    greedy, arguments, console_script, cli_environment, run_warm, tmp_path
):
    out = tmp_path / "killed"
    command = arguments(out, "--temperature", 0)
    start_and_kill([console_script, *command], cli_environment, lambda: shards(out))
    assert 1 <= len(shards(out)) < PROMPTS // 3, "it was killed too late to prove anything"
    finished = {path: path.stat().st_mtime_ns for path in shards(out)}
    refused = run_warm(*command, "--seed", 1)
    assert refused.returncode == 2 and "seed" in refused.stderr
    done = run_warm(*command)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert visible(out) == content(greedy)


@pytest.mark.slow  # two processes are in test_train.py as well
def test_two_processes_under_accelerate_launch_write_the_same_bytes(greedy, arguments, run_launched, tmp_path):
    done = run_launched(*arguments(tmp_path / "two", "--temperature", 0))
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "two") == content(greedy)


def test_the_first_prompts_only(greedy, arguments, run_warm, tmp_path):
    done = run_warm(*arguments(tmp_path / "some", "--temperature", 0, "--max_prompts", 7))
    assert done.returncode == 0, done.stderr
    text = [(row["id"], row["response_ids"], row["draft_ids"]) for row in records(tmp_path / "some")]
    assert text == [(row["id"], row["response_ids"], row["draft_ids"]) for row in records(greedy)[:7]]


def test_what_cannot_be_scored_is_refused_in_one_line(
    arguments, said, greedy, embedded_pair_folder, run_warm, tmp_path
):
    prompts = embedded_pair_folder / "prompts" / "train.jsonl"
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for name, data in content(said).items():
        (damaged / name).write_bytes(data[: len(data) // 2] if name == "shard-00005.parquet" else data)
    for command, named in (
        (arguments(tmp_path / "out", "--prompts", prompts), ["--prompts", "--responses", "both"]),
        ([word for word in arguments(tmp_path / "out") if word not in ("--responses", said)], ["--prompts", "neither"]),
        (arguments(tmp_path / "out", "--max_new_tokens", 8), ["max_new_tokens", "8", "12"]),
        (arguments(tmp_path / "out", "--shard_size", 4), ["shard_size", "4", "3"]),
        (arguments(tmp_path / "out", responses=greedy), [str(greedy), "--responses itself"]),
        (arguments(tmp_path / "out", responses=tmp_path / "nowhere"), ["nowhere"]),
        (arguments(tmp_path / "out", responses=damaged), ["damaged/shard-00005.parquet"]),
        (arguments(said), ["--out", str(said), "responses"]),
        (arguments(tmp_path / "out", "--draft", embedded_pair_folder / "target"), ["another pair", "--draft"]),
    ):
        done = run_warm(*command)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert all(word in done.stderr for word in named), done.stderr
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["tune", "report"])
def test_replay_refuses_scored_text_in_one_line(verb, greedy, embedded_pair_folder, run_warm, tmp_path):
    before = content(greedy)
    costs = ("--t_draft", 0.1, "--t_target", 1)
    out = tmp_path / ("tuned.json" if verb == "tune" else "report.html")
    done = run_warm(verb, "--traces", greedy, "--draft", embedded_pair_folder / "draft", "--out", out, *costs)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert str(greedy) in line and "collect --responses" in line and "replayed" in line
    assert content(greedy) == before, "rollouts were made"
    assert not out.exists()


def test_it_trains_a_head_beside_ordinary_traces_and_judges_none(
    greedy, said, embedded_pair_folder, collect, run_warm, tmp_path
):
    options = {"max_prompts": PROMPTS, "max_new_tokens": TOKENS, "batch_size": 12, "shard_size": 12, "temperature": 0}
    ordinary = collect(embedded_pair_folder, tmp_path / "ordinary", **options)
    draft = ("--draft", embedded_pair_folder / "draft")
    short = ("--batch_size", 8, "--epochs", 1)
    done = run_warm("train", "--traces", f"[{ordinary},{greedy}]", *draft, "--out", tmp_path / "head", *short)
    assert done.returncode == 0, done.stderr
    used = json.loads((tmp_path / "head" / "training_config.json").read_text())["traces"]
    assert [part["folder"] for part in used] == [str(ordinary), str(greedy)]
    assert [bool(part["responses"]) for part in used] == [False, True]
    metrics = json.loads((tmp_path / "head" / "metrics.json").read_text())
    held_out = metrics["dev_traces"]
    assert 0 < held_out < PROMPTS and metrics["train_traces"] == 2 * (PROMPTS - held_out)

    for wrong, named in (
        (("--traces", greedy), "--dev_traces"),
        (("--traces", ordinary, "--dev_traces", greedy), "dev traces"),
        (("--traces", ordinary, said), "--traces"),
        (("--traces", ordinary, ordinary), "once"),
    ):
        refused = run_warm("train", *wrong, *draft, "--out", tmp_path / "other", *short)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1), refused.stderr
        assert str(wrong[-1]) in refused.stderr and named in refused.stderr
        assert not (tmp_path / "other").exists()
