"""The command `accept-head tune`: from traces, a draft and heads to tuned.json and decoding.json."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from accept_head import Sampling, load_pair
from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.cli import main
from accept_head.inference import generate, make_policy
from accept_head.inference.replay import rollouts as rollouts_module
from accept_head.inference.tune.rules import EVERY, RULES
from accept_head.trace.shards import read_traces
from tests.inference.support.collected import collected
from tests.inference.support.toy import random_head
from tests.runs import besides_progress

COSTS = {"t_draft": 0.01, "t_target": 0.1}
QUICK = (*RULES, "adaedl")
SMALL = ("--k_max", 4, 20)  # a grid that is quick to walk


@pytest.fixture(scope="module")
def made(tmp_path_factory, random_llama, byte_tokenizer):
    """A draft that is its target with a bent output layer, its traces with rollouts, and heads that fit it."""
    folder = tmp_path_factory.mktemp("tune")
    target, draft = random_llama(1), random_llama(1)
    with torch.no_grad():
        draft.lm_head.weight += 0.2 * torch.randn(
            draft.lm_head.weight.shape, generator=torch.Generator().manual_seed(1)
        )
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    pair = load_pair(folder / "target", folder / "draft", device="cpu")
    prompts = [[1, *range(20 + i, 24 + 2 * i)] for i in range(24)]
    options = {"max_new_tokens": 24, "ends": (2,), "shard_size": 8, "domains": ("code", "prose")}
    fingerprint = checkpoint_fingerprint(folder / "draft")
    models = (pair.target, pair.draft)
    collected(models, prompts, folder / "traces", sampling=Sampling(), fingerprint=fingerprint, **options)
    spoil(folder, "traces/trace_config.json", {"target_fingerprint": checkpoint_fingerprint(folder / "target")})
    random_head(32, signals=True, std=0.1).save_pretrained(folder / "drawn")
    random_head(32, reads="before", std=0.1).save_pretrained(folder / "before")
    (folder / "costs.json").write_text(json.dumps(COSTS))
    code = main(["tune", "--traces", str(folder / "traces"), "--draft", str(folder / "draft"), "--max_prompts", "24",
                 "--costs", str(folder / "costs.json"), "--out", str(folder / "first.json"),
                 "--rules", "entropy"])  # fmt: skip
    assert code == 0
    return SimpleNamespace(folder=folder, pair=pair, prompts=prompts)


@pytest.fixture
def place(made, tmp_path):
    """A copy of all that a run may write to or read, of this test's own."""
    for name in ("traces", "drawn", "before", "target"):
        shutil.copytree(made.folder / name, tmp_path / name)
    shutil.copy(made.folder / "costs.json", tmp_path)
    return tmp_path


@pytest.fixture
def tune(made, place, capsys):
    """tune(*words) → code, stderr, stdout and the tuned file, if there is one."""

    def run(*words, costs=("--costs", "costs.json"), draft=made.folder / "draft", out="tuned.json", rules=QUICK):
        words = [*words, "--rules", *rules] if rules else words
        costs = [str(place / word) if word == "costs.json" else word for word in costs]
        arguments = ["tune", "--traces", place / "traces", "--draft", draft, "--out", place / out, *costs, *words]
        capsys.readouterr()
        code = main([str(word) for word in arguments])
        captured = capsys.readouterr()
        path = place / out
        tuned = json.loads(path.read_text()) if path.is_file() else None
        return SimpleNamespace(code=code, err=captured.err, out=captured.out, tuned=tuned)

    return run


def row(done, start):
    return next(row for row in done.tuned["policies"] if row["name"].startswith(start))


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- what it writes --------------------------------------------------------------------------------------------------


def test_it_compares_all_policies_and_writes_a_choice_for_each_head(made, tune, place):
    done = tune("--head", place / "drawn", place / "before", rules=None)
    assert (done.code, besides_progress(done.err)) == (0, [])
    names = [row["name"] for row in done.tuned["policies"]]
    assert names[:21] == ["none", *(f"fixed:{k}" for k in range(1, 21))] and names[-1] == "oracle"
    starts = [f"head:{place / 'drawn'}:", f"head:{place / 'before'}:", *EVERY]
    assert all(name.startswith(start) for name, start in zip(names[21:-1], starts, strict=True))
    assert done.tuned["costs"] == {**COSTS, "t_autoregressive": 0.1}
    assert done.tuned["objective"] == "mean"
    _, traces = read_traces(place / "traces")
    assert done.tuned["traces"]["prompts"] == 24
    assert done.tuned["traces"]["tokens"] == sum(map(len, traces["response_ids"]))
    for one in done.tuned["policies"]:
        assert set(one["ci95"]) <= set(one)
    assert "wrote" in done.out and "decoding.json" in done.out and "oracle" in done.out


def test_a_heads_name_is_shown_as_it_is(tune, place):
    shutil.copytree(place / "before", place / "ship")  # between two colons, rich's name of a ship's picture
    assert "head:ship:" in tune("--head", place / "ship", *SMALL).out


def test_decoding_json_is_what_make_policy_reads(made, tune, place):
    done = tune("--head", place / "drawn", "--head", place / "before", *SMALL)
    for name in ("drawn", "before"):
        values = json.loads((place / name / "decoding.json").read_text())
        tuned = row(done, f"head:{place / name}")
        assert {key: values[key] for key in tuned["params"]} == tuned["params"]
        assert values["expected"]["throughput"] == tuned["throughput"]
        policy = make_policy(f"head:{place / name}", made.pair)
        assert (policy.threshold, policy.k_min, policy.max_draft_tokens) == (
            values["threshold"],
            values["k_min"],
            values["k_max"],
        )
        assert policy.lag == values.get("lag", 0) and ("lag" in values) == (name == "drawn")
        result = generate(
            made.pair.target, made.pair.draft, made.prompts[:2], policy=f"head:{place / name}", max_new_tokens=4
        )
        assert all(stats.generated <= 4 for stats in result.stats)


def test_rates_and_throughput_are_those_of_eq_3_1(tune):
    done = tune(*SMALL, costs=("--t_draft", 0.02, "--t_target", 0.1))
    rows = done.tuned["policies"]
    best = max(row["throughput"] for row in rows if row["name"].startswith("fixed:"))
    oracle = row(done, "oracle")["throughput"]
    for one in rows:
        if one["name"].startswith("adaedl"):  # which spends a draft forward on each token that it declines to draw
            continue
        drafts = 1 + one["discard_rate"] - one["verification_rate"]  # N_draft / N: none of these reads at lag 0
        seconds = 0.02 * drafts + 0.1 * one["verification_rate"]
        # A drafted end token that is accepted leaves no token of the target's behind it.
        assert one["throughput"] == pytest.approx(1 / seconds, rel=2e-3)
        assert one["speedup"] == pytest.approx(0.1 * one["throughput"])
        assert one["gain_over_best_fixed"] == pytest.approx(one["throughput"] / best - 1)
        assert one["oracle_gap_closed"] == pytest.approx((one["throughput"] - best) / (oracle - best))
        assert one["throughput"] <= oracle * (1 + 1e-9)


def test_the_oracle_is_that_of_theorem_4_1_on_the_parquet_files(tune, place):
    done = tune(*SMALL)
    _, traces = read_traces(place / "traces")
    rejections = sum(1 + sum(not kept for kept in flags[:-1]) for flags in traces["accepted"])
    assert row(done, "oracle")["verification_rate"] == pytest.approx(rejections / done.tuned["traces"]["tokens"])
    assert row(done, "oracle")["discard_rate"] == 0


def best_fixed(done):
    rows = [one for one in done.tuned["policies"] if one["name"].startswith("fixed:")]
    return max(rows, key=lambda one: one["throughput"])["params"]["k"]


def test_a_target_5_times_as_slow_wants_longer_drafts_and_no_new_rollouts(tune, place, monkeypatch):
    def refuse(*_):
        raise AssertionError("rolled out again")

    monkeypatch.setattr(rollouts_module, "roll_out_records", refuse)
    before = files_in(place / "traces")
    done = [tune("--head", place / "drawn", "--target_times", times) for times in (1, 5)]
    assert files_in(place / "traces") == before
    assert [one.tuned["costs"]["t_target"] for one in done] == pytest.approx([0.1, 0.5])
    assert best_fixed(done[0]) < best_fixed(done[1])
    for start in (f"head:{place / 'drawn'}", "confidence", "entropy"):
        one, other = (row(each, start) for each in done)
        assert one["verification_rate"] > other["verification_rate"] and one["discard_rate"] < other["discard_rate"]


def test_worst_domain_is_an_objective(tune):
    done = [tune("--objective", objective, *SMALL) for objective in ("mean", "worst-domain")]
    assert [one.tuned["objective"] for one in done] == ["mean", "worst-domain"]
    for start in ("confidence", "entropy"):
        assert row(done[0], start)["throughput"] >= row(done[1], start)["throughput"]


def test_least_discard_is_an_objective(tune, place):
    """Of settings that call the target no more often than the best fixed length; said where there is none."""
    fast, lean = (
        tune("--objective", objective, "--search", "grid", "--head", place / "drawn", *SMALL)
        for objective in ("mean", "discard")
    )
    assert lean.tuned["objective"] == "discard"
    fixed = row(lean, f"fixed:{best_fixed(lean)}")
    for start in (f"head:{place / 'drawn'}", "confidence", "entropy"):
        chosen = row(lean, start)
        told = f"no setting calls the target as seldom as {fixed['name']}" in lean.out
        assert chosen["verification_rate"] <= fixed["verification_rate"] or told
        assert chosen["throughput"] <= row(fast, start)["throughput"]


def test_lags_and_bounds_are_those_asked_for(tune, place):
    done = tune("--head", place / "drawn", "--lag", 0, "--k_min", 3, "--k_max", 5)
    for name, lag in (("head", {"lag": 0}), ("confidence", {})):
        params = row(done, name)["params"]
        assert params == {"threshold": params["threshold"], "k_min": 3, "k_max": 5, **lag}


def test_longer_rounds_than_the_rollouts_have_are_rolled_out_anew(tune, place):
    done = tune("--k_max", 24)
    assert done.code == 0 and row(done, "fixed:24")["discard_rate"] >= row(done, "fixed:20")["discard_rate"]
    assert json.loads((place / "traces" / "rollouts" / "rollout_config.json").read_text())["k_max"] == 24


def test_fewer_prompts(tune):
    done = tune("--max_prompts", 10, *SMALL)
    assert done.tuned["traces"]["prompts"] == 10


def test_the_same_run_gives_the_same_file(tune, place):
    first, again = tune(*SMALL), tune(*SMALL)
    assert first.tuned == again.tuned
    other = tune("--seed", 1, *SMALL)
    assert row(other, "oracle")["ci95"] != row(first, "oracle")["ci95"]


def test_of_a_heads_folder_only_decoding_json_is_written(tune, place):
    (place / "drawn" / "decoding.json").write_text('{"threshold": 0.4}')
    before = files_in(place / "drawn")
    assert tune("--head", place / "drawn", *SMALL).code == 0
    after = files_in(place / "drawn")
    assert [path.name for path in after if after[path] != before.get(path)] == ["decoding.json"]


def test_the_tuned_file_repeats_costs_that_tune_can_read(tune, place):
    tune(*SMALL)
    again = tune(*SMALL, costs=("--costs", str(place / "tuned.json")), out="again.json")
    assert again.code == 0 and again.tuned["costs"] == {**COSTS, "t_autoregressive": 0.1}


def test_a_draft_that_is_its_own_target_can_be_tuned_for(made, tune, place):
    folder = place / "same"
    fingerprint = checkpoint_fingerprint(made.folder / "draft")
    models = (made.pair.draft, made.pair.draft)
    collected(models, made.prompts[:4], folder, sampling=Sampling(), max_new_tokens=6, fingerprint=fingerprint)
    assert tune("--traces", folder, *SMALL).code == 0


def test_a_head_whose_decoding_json_cannot_be_written_is_refused_before_the_work(tune, place):
    (place / "drawn" / "decoding.json").mkdir()
    done = tune("--head", place / "drawn", *SMALL)
    assert done.code == 2 and "--head" in done.err and done.tuned is None


def test_what_to_expect_is_figures_only(tune, place):
    tune("--head", place / "drawn", *SMALL)
    expected = json.loads((place / "drawn" / "decoding.json").read_text())["expected"]
    assert all(isinstance(value, float | dict) for value in expected.values()), expected


def test_the_target_adds_the_informed_bound_once_and_for_all(made, tune, place):
    plain = tune("--head", place / "before", *SMALL)
    assert not any(one["name"] == "informed" for one in plain.tuned["policies"])
    asked = tune("--head", place / "before", *SMALL, "--target", place / "target")
    assert asked.code == 0 and "informed" in asked.out
    rows = asked.tuned["policies"]
    assert [one["name"] for one in rows[-2:]] == ["informed", "oracle"]
    for one, old in zip([*rows[:-2], rows[-1]], plain.tuned["policies"], strict=True):
        assert {name: value for name, value in one.items() if name not in ("informed_gap_closed", "ci95")} == {
            name: value for name, value in old.items() if name != "ci95"
        }
        assert {"informed_gap_closed", *old["ci95"]} == set(one["ci95"])
    assert row(asked, "informed")["informed_gap_closed"] == 1
    before = files_in(place / "traces")
    again = tune("--head", place / "before", *SMALL)  # the tables are there: no target needs to be
    assert again.tuned == asked.tuned and files_in(place / "traces") == before


def test_the_search_by_cost_writes_a_decoding_json_as_the_grid_does(made, tune, place):
    keys = []
    for search in ("grid", "cost"):
        done = tune("--head", place / "before", "--search", search, "--k_max", 4, 12, "--rules", "entropy", rules=None)
        values = json.loads((place / "before" / "decoding.json").read_text())
        assert (
            done.code == 0
            and {key: values[key] for key in row(done, "head:")["params"]} == row(done, "head:")["params"]
        )
        keys.append(set(values))
    assert keys[0] == keys[1] and (values["k_min"], values["k_max"]) == (1, 12)
    assert make_policy(f"head:{place / 'before'}", made.pair).threshold == values["threshold"]


# --- what it refuses -------------------------------------------------------------------------------------------------


def spoil(place, name, change):
    path = place / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def other_draft(place):
    config = {"draft": "their/draft", "vocab_size": 99_999, "version": 2}
    (place / "drawn" / "trace_config.json").write_text(json.dumps(config))
    return ["--head", place / "drawn"]


def of_these_traces(place):
    """A head that learnt from what it is tuned on; they have moved since."""
    config = json.loads((place / "traces" / "trace_config.json").read_text())
    (place / "drawn" / "trace_config.json").write_text(json.dumps({**config, "draft": "elsewhere/draft"}))
    return ["--head", place / "drawn"]


def of_these_and_other_traces(place):
    config = {**json.loads((place / "traces" / "trace_config.json").read_text()), "seed": 7}
    (place / "drawn" / "trace_config.json").write_text(json.dumps(config))
    folders = [{"fingerprint": "another"}, {"fingerprint": read_traces(place / "traces")[0].fingerprint()}]
    (place / "drawn" / "training_config.json").write_text(json.dumps({"traces": folders}))
    return ["--head", place / "drawn"]


def not_a_head(place):
    (place / "empty").mkdir()
    return ["--head", place / "empty"]


def damaged_rollouts(place):
    (place / "traces" / "rollouts" / "shard-00001.safetensors").write_bytes(b"damaged")
    return []


WRONG = {
    "no costs": (lambda p: [], ["--costs", "--t_draft", "--t_target"], ()),
    "half of the costs": (lambda p: [], ["--t_target"], ("--t_draft", 0.1)),
    "costs twice": (lambda p: ["--t_draft", 0.1], ["--costs", "--t_draft"], ("--costs", "costs.json")),
    "costs that do not exist": (lambda p: [], ["nowhere.json"], ("--costs", "nowhere.json")),
    "a cost of 0": (lambda p: [], ["t_draft", "0"], ("--t_draft", 0, "--t_target", 0.1)),
    "a negative cost": (lambda p: [], ["t_target", "-1"], ("--t_draft", 0.1, "--t_target", -1)),
    "a cost that is no number": (lambda p: [], ["t_draft", "fast"], ("--t_draft", "fast", "--t_target", 1)),
    "target_times 0": (lambda p: ["--target_times", 0], ["target_times", "0"], None),
    "no k_min": (lambda p: ["--k_min", "[]"], ["k_min"], None),
    "k_min 0": (lambda p: ["--k_min", 0], ["k_min", "0"], None),
    "k_max 0": (lambda p: ["--k_max", 0, 4], ["k_max", "0"], None),
    "k_max 65": (lambda p: ["--k_max", 65], ["k_max", "65", "64"], None),
    "k_min above k_max": (lambda p: ["--k_min", 5, "--k_max", 4], ["k_min", "k_max", "5", "4"], None),
    "lag 2": (lambda p: ["--lag", 0, 2], ["lag", "2"], None),
    "half a lag": (lambda p: ["--lag", 0.5], ["lag"], None),
    "an unknown objective": (lambda p: ["--objective", "best"], ["objective", "best"], None),
    "a search by cost for the worst domain": (
        lambda p: ["--search", "cost", "--objective", "worst-domain"],
        ["search", "objective", "worst-domain", "mean"],
        None,
    ),
    "an unknown search": (lambda p: ["--search", "best"], ["search", "best"], None),
    "a target that does not exist": (lambda p: ["--target", p / "nowhere"], ["--target", "nowhere"], None),
    "another target": (
        lambda p: [spoil(p, "traces/trace_config.json", {"target_fingerprint": "x"}), "--target", p / "target"][1:],
        ["another pair", "--target"],
        None,
    ),
    "no prompts": (lambda p: ["--max_prompts", 0], ["max_prompts", "0"], None),
    "traces that do not exist": (lambda p: ["--traces", p / "nowhere"], ["nowhere"], None),
    "traces of another draft": (
        lambda p: [spoil(p, "traces/trace_config.json", {"draft_fingerprint": "other"})][1:],
        ["another pair", "--draft"],
        None,
    ),
    "traces of another version": (
        lambda p: [spoil(p, "traces/trace_config.json", {"version": 1})][1:],
        ["version", "1", "collect"],
        None,
    ),
    "damaged rollouts": (damaged_rollouts, ["shard-00001.safetensors", "remove it"], None),
    "a head of more token ids than the draft has": (other_draft, ["99999 token ids", "drawn"], None),
    "a head that was trained on the traces": (of_these_traces, ["traces", "drawn", "was trained on these"], None),
    "a head that was trained on them and others": (of_these_and_other_traces, ["was trained on these"], None),
    "a lag of heads that have none": (lambda p: ["--head", p / "before", "--lag", 1], ["lag", "1"], None),
    "a lag without heads": (lambda p: ["--lag", 1], ["lag", "1"], None),
    "k_min of heads that are tuned by cost": (
        lambda p: ["--head", p / "before", "--search", "cost", "--k_min", 3, "--rules", "adaedl"],
        ["k_min is [3]", "--search grid", "entropy"],
        None,
    ),
    "k_min without heads or rules that have any": (
        lambda p: ["--k_min", 3, "--rules", "goodput"],
        ["k_min is [3]"],
        None,
    ),
    "a head that does not exist": (lambda p: ["--head", p / "nowhere"], ["nowhere"], None),
    "a folder that is no head": (not_a_head, ["empty"], None),
    "a head given twice": (lambda p: ["--head", p / "drawn", p / "drawn"], ["--head", "twice"], None),
    "an output that is a folder": (lambda p: ["--out", p / "traces"], ["--out", "traces"], None),
    "an output below a file": (lambda p: ["--out", p / "costs.json" / "x.json"], ["--out", "costs.json"], None),
    "an unknown option": (lambda p: ["--heads", "x"], ["heads"], None),
    "an unknown option in a YAML": (
        lambda p: [(p / "c.yaml").write_text("threshold: 0.5\n"), "--config", p / "c.yaml"][1:],
        ["threshold"],
        None,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_refuses(tune, place, name):
    make, named, costs = WRONG[name]
    words = make(place)
    before = files_in(place)
    done = tune(
        *words,
        costs=("--costs", "costs.json") if costs is None else costs,
        rules=None if "--rules" in words else QUICK,
    )
    assert done.code == 2
    assert len(done.err.splitlines()) == 1 and done.err.startswith("accept-head: error: ")
    assert all(word in done.err for word in named), done.err
    assert done.out == ""
    assert files_in(place) == before, "something was written"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 7}, "was trained on the prompts of"),
        ({"prompts_fingerprint": "other", "draft_fingerprint": "other"}, "was trained with the draft"),
        (
            {"prompts_fingerprint": "other", "sampling": {"temperature": 0}},
            "greedy decoding, but the traces",
        ),
    ],
)
def test_a_head_of_other_traces_that_suit_it_badly_is_tuned_with_a_warning(tune, place, caplog, change, says):
    config = json.loads((place / "traces" / "trace_config.json").read_text())
    (place / "before" / "trace_config.json").write_text(json.dumps({**config, **change}))
    done = tune("--head", place / "before", *SMALL, rules=["entropy"])
    assert done.code == 0 and [line for line in (*caplog.messages, *done.err.splitlines()) if says in line]


def test_a_draft_that_does_not_exist_is_refused_with_the_option(tune, place):
    before = files_in(place)
    done = tune(draft=place / "nowhere")
    assert done.code == 2 and "--draft" in done.err and len(done.err.splitlines()) == 1
    assert files_in(place) == before


def test_the_unspoiled_command_is_accepted(tune):
    """So that no case above is refused for a reason of its own."""
    assert tune(*SMALL).code == 0


def test_the_console_command_does_it_and_says_nothing_on_stderr(made, place, run_warm):
    arguments = ["--traces", place / "traces", "--draft", made.folder / "draft", "--costs", place / "costs.json"]
    done = run_warm("tune", *arguments, "--head", place / "drawn", *SMALL, "--out", place / "tuned.json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads((place / "tuned.json").read_text())["policies"]
    assert all(one["throughput"] > 0 for one in rows)
    assert (place / "drawn" / "decoding.json").is_file()
