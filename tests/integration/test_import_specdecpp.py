"""`accept-head import-specdecpp`: traces in the research code's format are imported unchanged, and can train a head."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from accept_head.trace.shards import read_traces

FROM_FILE = ("prompt_ids", "response_ids", "draft_ids", "acceptance")
BY_MODELS = ("overlap", "target_logprob", "divergence", "draft_logprob", "draft_entropy", "draft_max_prob")
OF_TARGET = BY_MODELS[:3]
THEIR_NAMES = dict(zip(("prefix", "tokens", "draft", "p_acc"), FROM_FILE, strict=True))


def their_data(traces, **more):
    """The research code's JSON: records whose lists are texts. more: name → column of each record."""
    records = []
    for place, trace in enumerate(traces):
        columns = {name: trace[column] for name, column in THEIR_NAMES.items()}
        columns |= {name: values[place] for name, values in more.items()}
        texts = {name: str([float(v) if isinstance(v, float) else int(v) for v in c]) for name, c in columns.items()}
        records.append({"prompt": "text", "continuation": "text", **texts})
    return json.dumps(records, indent=2)


@pytest.fixture(scope="module")
def originals(random_traces_folder):
    return read_traces(random_traces_folder)


@pytest.fixture(scope="module")
def imported(tmp_path_factory, random_pair_folder, originals, run_warm):
    """imported(name, *flags, data=None) → the finished command and the folder. The traces have top-k 50."""
    folder = tmp_path_factory.mktemp("imported")

    def run(name, *flags, data=None):
        path = folder / f"{name}.json"
        path.write_text(data if data is not None else their_data(originals[1]))
        models = ("--target", random_pair_folder / "target", "--draft", random_pair_folder / "draft")
        settings = ("--top_k", 50, "--shard_size", 4)
        done = run_warm("import-specdecpp", "--data", path, *models, "--out", folder / name, *settings, *flags)
        return done, folder / name

    return run


@pytest.fixture(scope="module")
def scored(imported):
    done, folder = imported("scored")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def unscored(imported):
    done, folder = imported("unscored", "--score", "false")
    assert done.returncode == 0, done.stderr
    return folder


def assert_same(found, original, computed):
    assert len(found) == len(original)
    for one, other in zip(found, original, strict=True):
        for name in FROM_FILE:
            assert list(one[name]) == list(other[name]), name
        assert list(one["accepted"]) == [x == y for x, y in zip(one["response_ids"], one["draft_ids"], strict=True)]
        assert (one["index"], one["finished"]) == (other["index"], other["finished"])
        for name in computed:
            np.testing.assert_allclose(one[name], other[name], atol=2e-4, rtol=2e-4, err_msg=name)


def test_traces_come_back_as_they_were(scored, originals):
    config, found = read_traces(scored)
    assert_same(found, originals[1], BY_MODELS)
    before = originals[0]
    for name in ("target_fingerprint", "draft_fingerprint", "vocabulary_fingerprint", "vocab_size", "end_token_ids",
                 "num_prompts", "sampling", "dtype"):  # fmt: skip
        assert getattr(config, name) == getattr(before, name), name
    assert config.responses.startswith("specdecpp:") and before.responses is None


def test_what_only_the_target_knows_is_left_unknown_without_it(unscored, originals):
    _, found = read_traces(unscored)
    assert_same(found, originals[1], [name for name in BY_MODELS if name not in OF_TARGET])
    for name in OF_TARGET:
        assert np.isnan(np.concatenate(found.with_format("numpy")[name][:])).all(), name


def train(run_warm, traces, dev, draft, out, *flags):
    options = ("--recipe", "specdecpp", "--depth", 1, "--batch_size", 8, "--epochs", 2)
    return run_warm("train", "--traces", traces, "--dev_traces", dev, "--draft", draft, "--out", out, *options, *flags)


def test_the_same_head_is_learned_from_them(
    scored, unscored, random_traces_folder, random_pair_folder, run_warm, tmp_path
):
    """A token head reads ids and labels alone, which are the very same: so are its weights, bit by bit."""
    weights = set()
    for name, folder in {"original": random_traces_folder, "scored": scored, "unscored": unscored}.items():
        done = train(run_warm, folder, random_traces_folder, random_pair_folder / "draft", tmp_path / name)
        assert done.returncode == 0, done.stderr
        weights.add((tmp_path / name / "model.safetensors").read_bytes())
    assert len(weights) == 1


def test_a_head_that_looks_ahead_needs_the_overlap(
    scored, unscored, random_traces_folder, random_pair_folder, run_warm, tmp_path
):
    draft, flags = random_pair_folder / "draft", ("--packing", "exact", "--predicts", "both")
    done = train(run_warm, scored, random_traces_folder, draft, tmp_path / "a", *flags)
    assert done.returncode == 0, done.stderr
    done = train(run_warm, unscored, random_traces_folder, draft, tmp_path / "b", *flags)
    assert done.returncode == 2 and "unscored: was imported" in done.stderr and "token only" in done.stderr
    assert not (tmp_path / "b").exists() and not (tmp_path / "b-run").exists()


@pytest.mark.parametrize("verb", ["tune", "train --dev_traces", "collect --responses"])
def test_they_are_not_taken_for_what_a_decoding_round_would_go_along(
    verb, scored, random_traces_folder, random_pair_folder, run_warm, tmp_path
):
    draft = random_pair_folder / "draft"
    if verb == "tune":
        costs = ("--t_draft", 1, "--t_target", 5, "--out", tmp_path / "tuned.json")
        done = run_warm("tune", "--traces", scored, "--draft", draft, *costs)
    elif verb == "collect --responses":
        models = ("--target", random_pair_folder / "target", "--draft", draft)
        done = run_warm("collect", *models, "--responses", scored, "--out", tmp_path / "traces")
    else:
        done = train(run_warm, random_traces_folder, scored, draft, tmp_path / "head")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and str(scored) in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_import_that_was_cut_off_goes_on(imported, scored):
    before = {path.name: path.read_bytes() for path in scored.iterdir()}
    (scored / "shard-00002.parquet").unlink()
    done, folder = imported("scored")
    assert done.returncode == 0 and {path.name: path.read_bytes() for path in folder.iterdir()} == before


def raw_logprobs(model, traces):
    """log q(Y) of the plain softmax, as the research code records it."""
    columns = []
    for trace in traces:
        start = len(trace["prompt_ids"])
        ids = torch.tensor([[*trace["prompt_ids"], *trace["response_ids"]]])
        logits = model(input_ids=ids).logits[0, start - 1 : -1].log_softmax(-1)
        columns.append(logits.gather(-1, torch.tensor(trace["draft_ids"])[:, None])[:, 0].tolist())
    return columns


def test_data_of_another_pair_are_refused_before_anything_is_written(imported, originals, random_pair):
    other = [[1 - p for p in column] for column in originals[1]["acceptance"]]
    done, folder = imported("other pair", data=their_data(originals[1], p_acc=other))
    assert done.returncode == 2 and "p_acc is not what --target and --draft give" in done.stderr
    assert not folder.exists()
    mine, other = (raw_logprobs(model, originals[1]) for model in (random_pair.draft, random_pair.target))
    data = their_data(originals[1], log_p_70b=other, log_p_7b=mine)
    done, folder = imported("known", "--score", "false", data=data)
    assert done.returncode == 0, done.stderr
    data = their_data(originals[1], log_p_70b=other)
    done, folder = imported("unknown", "--score", "false", data=data)
    assert done.returncode == 2 and "--draft must be the draft" in done.stderr
    assert not folder.exists()


def test_data_are_named_when_they_do_not_fit(imported, originals):
    record = json.loads(their_data(originals[1].select([0])))[0]
    for changes, said in (
        ({"tokens": "[3] * 4"}, "record 0: field 'tokens'"),
        ({"draft": "[999999]", "tokens": "[5]", "p_acc": "[1.0]"}, "ids from 0 to 260"),
        ({name: str([5] * 130) for name in ("tokens", "draft")} | {"p_acc": str([1.0] * 130)}, "context has 128"),
    ):
        done, folder = imported("wrong", data=json.dumps([record | changes]))
        assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1
        assert not folder.exists()


def test_an_imported_head_decodes_tunes_and_calibrates_like_any_other(
    random_pair, random_pair_folder, random_traces_folder, run_warm, tmp_path
):
    hidden = random_pair.draft.config.hidden_size
    torch.manual_seed(0)
    shapes = {"model.0.linear.weight": (hidden, hidden), "model.0.linear.bias": (hidden,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {"model.3.weight": torch.randn(2, hidden), "model.3.bias": torch.randn(2)}
    (tmp_path / "theirs").mkdir()
    save_file(
        tensors, tmp_path / "theirs" / "model.safetensors", metadata={"model.1.linear.bias": "model.0.linear.bias"}
    )
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({"hidden_size": hidden, "num_layers": 3}))
    head = tmp_path / "head"
    done = run_warm("import-specdecpp", "--checkpoint", tmp_path / "theirs", "--out", head)
    assert (done.returncode, done.stderr) == (0, "")
    pair = ("--target", random_pair_folder / "target", "--draft", random_pair_folder / "draft")
    prompts = ("--prompts", random_pair_folder / "prompts" / "train.jsonl", "--max_prompts", 2, "--max_new_tokens", 6)
    traces = tmp_path / "traces"
    traces.mkdir()
    for path in random_traces_folder.glob("*.*"):
        (traces / path.name).write_bytes(path.read_bytes())
    costs = ("--t_draft", 1, "--t_target", 5, "--out", tmp_path / "tuned.json")
    done = run_warm("tune", "--traces", traces, *pair[2:], "--head", head, *costs, "--rules", "max-prob")
    assert done.returncode == 0, done.stderr
    assert json.loads((head / "decoding.json").read_text())["lag"] in (0, 1)
    for spec in (f"head:{head}:0.7,k_min=2,k_max=20", f"head:{head}"):
        done = run_warm("generate", *pair, *prompts, "--out", tmp_path / "o.jsonl", "--policy", spec)
        assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert sum(line["drafted"] for line in lines) > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "neither of them is"),
        (["--data", "x", "--checkpoint", "y"], "both are"),
        (["--data", "x", "--draft", "d"], "--target is missing"),
        (["--checkpoint", "nowhere", "--draft", "d"], "are of --data"),
        (["--checkpoint", "nowhere"], "nowhere"),
        (["--data", "x", "--target", "t", "--draft", "d", "--shard_size", 0], "shard_size"),
    ],
)
def test_wrong_options_are_refused(run_warm, tmp_path, flags, said):
    done = run_warm("import-specdecpp", "--out", tmp_path / "out", *flags)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
