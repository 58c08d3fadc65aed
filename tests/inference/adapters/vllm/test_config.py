"""`accept-head vllm-config`: its file, its output and its errors.

It runs without vLLM. vLLM's own parser reads the same in tests/integration/vllm/test_vllm_config.py.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
import yaml

from accept_head import AcceptanceHead, HeadConfig
from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.cli import main
from accept_head.inference.costs.batch_table import FIELD

DECODING = {"threshold": 0.6, "k_min": 1, "k_max": 7, "lag": 1}
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
TABLE = {FIELD: [[1, 4, 5], [5, 16, 3], [17, 64, 0]]}


@pytest.fixture
def here(tmp_path, random_pair_folder, monkeypatch):
    """A folder with a `target` and a `draft` of which only config.json is there, a tuned `head` and one that judges
    before it draws; the current folder."""
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        shutil.copy(random_pair_folder / name / "config.json", tmp_path / name)
    make_head(tmp_path / "head")
    make_head(tmp_path / "before", reads="before", decoding={"threshold": 0.5, "k_max": 4})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_head(folder, decoding=DECODING, sampling=SAMPLING, fingerprint="unknown", **config):
    torch.manual_seed(0)
    AcceptanceHead(HeadConfig(**{"hidden_size": 16, **config})).save_pretrained(folder)
    if decoding is not None:
        (folder / "decoding.json").write_text(json.dumps(decoding))
    traces = {"sampling": sampling, "draft": "the one", "draft_fingerprint": fingerprint}
    (folder / "trace_config.json").write_text(json.dumps(traces))


@pytest.fixture
def run(here, capsys):
    """run(*arguments) → the options of the YAML, the words of the printed command, and the comments before it. Both say
    the same, always."""

    def call(*arguments):
        out = here / "vllm.yaml"
        words = [str(argument) for argument in arguments]
        given = [] if "--target" in words else ["--target", "target", "--draft", "draft"]
        code = main(["vllm-config", *given, *words, "--out", str(out)])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        *comments, line = printed.out.splitlines()
        assert all(comment.startswith("# ") for comment in comments)
        options, command = yaml.safe_load(out.read_text()), shlex.split(line)
        assert command == as_words(options)
        return options, command, comments

    return call


def as_words(options):
    """vLLM's rules for its YAML (utils/argparse_utils.py, load_config_file); `model` is the first word here."""
    words = ["vllm", "serve", options.pop("model")]
    for key, value in list(options.items()):
        assert value is True or isinstance(value, dict | int | str)  # of false, vLLM makes nothing
        words += (
            [f"--{key}"]
            if value is True
            else [f"--{key}", json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)]
        )
    options["model"] = words[2]
    return words


@pytest.fixture
def refused(here, capsys):
    """refused(*arguments) → the one line on stderr; nothing is written."""

    def call(*arguments):
        given = [] if "--target" in arguments else ["--target", "target", "--draft", "draft"]
        out = [] if "--out" in arguments else ["--out", "vllm.yaml"]
        before = sorted(here.iterdir())
        assert main(["vllm-config", *given, *map(str, arguments), *out]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        assert sorted(here.iterdir()) == before
        return printed.err

    return call


# --- what it writes --------------------------------------------------------------------------------------------------


def test_a_tuned_head(run, here):
    options, command, comments = run("--head", "head")
    assert options == {
        "model": str(here / "target"),
        "speculative-config": {
            "method": "draft_model",
            "model": str(here / "draft"),
            "num_speculative_tokens": 7,
            "draft_sample_method": "probabilistic",
        },
        "no-async-scheduling": True,
        "additional-config": {"accept_head": {"policy": f"head:{here / 'head'},costs=auto"}},
    }
    assert command[:3] == ["vllm", "serve", str(here / "target")]
    assert f"# vllm serve --config {here / 'vllm.yaml'}" in comments


def test_an_eagle3_drafter_has_a_method_of_its_own(run, embedded_pair_folder):
    target, drafter = embedded_pair_folder / "target", embedded_pair_folder / "eagle3"
    options, _, _ = run("--target", target, "--draft", drafter, "--policy", "max-prob:0.4,k_max=5")
    speculation = options["speculative-config"]
    assert (speculation["method"], speculation["model"]) == ("eagle3", str(drafter))


def test_a_head_that_reads_the_drafts_embeddings(run, here):
    """Of which there are none here, only their shape."""
    make_head(here / "embedding", reads="before", embedding_std=0.1, decoding={"threshold": 0.5, "k_max": 4})
    options, _, _ = run("--head", "embedding")
    assert options["additional-config"] == {"accept_head": {"policy": f"head:{here / 'embedding'},costs=auto"}}


def test_without_out_it_only_prints(here, capsys):
    assert main(["vllm-config", "--target", "target", "--draft", "draft", "--head", "head"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("vllm serve ")
    assert not list(here.glob("*.yaml"))


def test_another_threshold_does_not_change_what_vllm_compiles(run, here):
    """additional-config is part of the key of vLLM's compiled models; the head's decoding.json is not."""
    first, _, _ = run("--head", "head")
    (here / "head" / "decoding.json").write_text(json.dumps({**DECODING, "threshold": 0.1, "k_max": 3}))
    second, _, _ = run("--head", "head")
    assert first["additional-config"] == second["additional-config"]
    assert (
        first["speculative-config"]["num_speculative_tokens"],
        second["speculative-config"]["num_speculative_tokens"],
    ) == (7, 3)
    named, _, _ = run("--policy", "head:head:0.1")
    assert named["additional-config"] != first["additional-config"]


@pytest.mark.parametrize(
    ("given", "trained", "method"),
    [(None, 1.0, "probabilistic"), (None, 0.0, "greedy"), ("0", 1.0, "greedy"), ("0.7", 0.0, "probabilistic")],
)
def test_the_draft_samples_as_requests_do(run, here, given, trained, method):
    make_head(here / "head", sampling={**SAMPLING, "temperature": trained})
    options, _, comments = run("--head", "head", *(["--temperature", given] if given else []))
    assert options["speculative-config"]["draft_sample_method"] == method
    assert any("trained at temperature" in comment for comment in comments) == (given is not None)


def test_it_says_what_the_head_was_not_trained_for(run, here, random_pair_folder):
    models = ("--target", random_pair_folder / "target", "--draft", random_pair_folder / "draft")
    make_head(here / "head", sampling={**SAMPLING, "top_k": 50})
    _, _, comments = run(*models, "--head", "head")
    assert any("another draft (the one)" in comment for comment in comments)
    assert any("top-k" in comment for comment in comments)
    make_head(here / "head", fingerprint=checkpoint_fingerprint(random_pair_folder / "draft"))
    _, _, comments = run(*models, "--head", "head")
    assert not any("trained" in comment for comment in comments)


def test_a_policy_with_files_gets_their_absolute_paths(run, here):
    (here / "costs.json").write_text(json.dumps({"t_draft": 0.001, "t_target": 0.01}))
    policy = run("--policy", "head:head:0.25,k_max=9,costs=costs.json")[0]["additional-config"]["accept_head"]["policy"]
    assert policy == f"head:{here / 'head'}:0.25,k_max=9,costs={here / 'costs.json'}"
    policy = run("--policy", "goodput:costs.json,k_max=3")[0]["additional-config"]["accept_head"]["policy"]
    assert policy == f"goodput:{here / 'costs.json'},k_max=3"
    (here / "0.6").mkdir()  # a number stays a number, whatever lies around
    assert run("--policy", "max-prob:0.6")[0]["additional-config"]["accept_head"]["policy"] == "max-prob:0.6"


@pytest.mark.parametrize("policy", ["fixed:3", "batch-map:table.json"])
def test_what_vllm_does_by_itself_is_left_to_it(run, here, policy):
    (here / "table.json").write_text(json.dumps(TABLE))
    options, _, _ = run("--policy", policy)
    assert set(options) == {"model", "speculative-config"}
    speculation = options["speculative-config"]
    assert speculation["num_speculative_tokens"] == {"fixed:3": 3, "batch-map:table.json": 5}[policy]
    assert speculation.get(FIELD) == {"fixed:3": None, "batch-map:table.json": TABLE[FIELD]}[policy]


def test_a_table_alone_and_as_a_limit_for_a_head(run, here):
    (here / "table.json").write_text(json.dumps(TABLE))
    alone, _, _ = run("--batch_map", "table.json")
    assert alone == run("--policy", "batch-map:table.json")[0]
    both, _, _ = run("--batch_map", "table.json", "--head", "head")
    assert both["speculative-config"] == alone["speculative-config"]  # 5 of the table, not 7 of the head
    assert both["no-async-scheduling"]
    assert both["additional-config"]["accept_head"]["policy"] == f"head:{here / 'head'},costs=auto"
    shorter, _, _ = run("--batch_map", "table.json", "--head", "before")
    assert shorter["speculative-config"]["num_speculative_tokens"] == 4  # of the head; vLLM cuts the table's 5


def test_tensor_parallel_models_have_as_many_gpus_each(run):
    options, _, _ = run("--head", "head", "--tensor_parallel_size", 2, "--trust_remote_code", "true")
    assert options["tensor-parallel-size"] == options["speculative-config"]["draft_tensor_parallel_size"] == 2
    assert options["trust-remote-code"] is True


def test_fewer_tokens_than_the_policy_would_draft(run):
    options, _, _ = run("--head", "head", "--num_speculative_tokens", 4)
    assert options["speculative-config"]["num_speculative_tokens"] == 4


def test_a_name_on_the_hub_stays_one(run, monkeypatch):
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name, **options: read(name.rpartition("/")[2], **options))
    options, command, _ = run("--target", "someone/target", "--draft", "someone/draft", "--head", "head")
    assert options["model"] == command[2] == "someone/target"
    assert options["speculative-config"]["model"] == "someone/draft"


@pytest.mark.parametrize(
    "odd", ["with space", "it's", 'a "quoted" $HOME `x`', "größer: #1", "- [x] {y}", "true", "1e5"]
)
def test_paths_come_through_shell_and_yaml(run, here, odd):
    folder = here / odd
    folder.mkdir()
    for name in ("target", "draft", "head"):
        shutil.copytree(here / name, folder / name)
    names = [str(folder / name) for name in ("target", "draft", "head")]
    options, command, _ = run("--target", names[0], "--draft", names[1], "--head", names[2])
    assert command[2] == options["model"] == names[0]
    assert options["speculative-config"]["model"] == names[1]
    assert options["additional-config"]["accept_head"]["policy"] == f"head:{names[2]},costs=auto"


# --- --tuned ---------------------------------------------------------------------------------------------------------


def tuned(here, *rows):
    policies = [{"name": spec or "oracle", "spec": spec, "throughput": speed} for spec, speed in rows]
    (here / "tuned.json").write_text(json.dumps({"policies": policies}))
    return "--tuned", "tuned.json"


def test_the_fastest_that_vllm_can_run(run, here):
    rows = [("none", 100.0), ("fixed:3", 120.0), ("head:head:0.3,k_max=6", 150.0), ("dsde:4", 170.0), (None, 300.0)]
    options, _, _ = run(*tuned(here, *rows))
    assert options["additional-config"]["accept_head"]["policy"] == f"head:{here / 'head'}:0.3,k_max=6,costs=auto"
    options, _, _ = run(*tuned(here, *rows[:2]))
    assert "additional-config" not in options and options["speculative-config"]["num_speculative_tokens"] == 3


def test_a_head_as_it_was_tuned_there(run, here):
    rows = [("fixed:3", 160.0), ("head:before:0.2", 150.0), (f"head:{here}/head:0.3,k_max=6", 140.0), ("none", 145.0)]
    options, _, _ = run("--head", "head", *tuned(here, *rows))
    assert options["additional-config"]["accept_head"]["policy"] == f"head:{here / 'head'}:0.3,k_max=6,costs=auto"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([("none", 9.0), ("fixed:2", 5.0)], "faster there than the target alone"),
        ([("dsde:4", 9.0)], "none of its policies can run in vLLM"),
        ([("head:elsewhere:0.5", 9.0)], "elsewhere"),
        ([(None, 9.0)], "tuned.json: expected a file by accept-head tune"),
        ([("fixed:2", "quick"), ("none", 1.0)], "tuned.json: expected a file by accept-head tune"),
    ],
)
def test_files_of_tune_that_lead_nowhere(refused, here, rows, words):
    assert words in refused(*tuned(here, *rows))


def test_a_head_that_was_not_tuned_there(refused, here):
    assert "--head head is not among" in refused("--head", "head", *tuned(here, ("head:before:0.2", 9.0)))


# --- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "no policy is named"),
        ("--head nowhere", "nowhere: no such folder, nor a name on the Hub"),
        ("--head untuned", "untuned has no decoding.json"),
        ("--head narrow", "hidden_size is 8, but the draft's is 16"),
        ("--policy magic:3", "policy 'magic:3': unknown"),
        ("--policy dsde", "DsdePolicy needs DIVERGENCE, which vLLM does not give"),
        ("--policy none", "no tokens are ever drafted"),
        ("--policy fixed:0", "no tokens are ever drafted"),
        ("--policy fixed:500", "positions for 128 tokens only"),
        ("--policy fixed:3 --head head", "--policy fixed:3"),
        ("--head head --num_speculative_tokens 8", "num_speculative_tokens is 8, expected 1 to 7"),
        ("--head head --num_speculative_tokens 0", "num_speculative_tokens is 0"),
        ("--policy head:head:0.5,k_min=3 --num_speculative_tokens 2", "expected 3 to 20"),
        ("--head head --tensor_parallel_size 0", "tensor_parallel_size is 0"),
        ("--head head --temperature -1", "temperature is -1"),
        ("--head head --batch_map nowhere.json", "nowhere.json: no such file"),
        ("--policy batch-map:table.json --batch_map table.json", "say the same thing"),
        ("--batch_map zeros.json", "no tokens are ever drafted"),
        ("--head a,b", "a,b: the path has a comma in it"),
        ("--target nowhere --draft draft --head head", "--target nowhere: its config.json cannot be read"),
        ("--target broken --draft draft --head head", "--target broken: its config.json cannot be read"),
        ("--target large --draft draft --head head", "vocab_size is 999 in --target large and 261 in --draft draft"),
        ("--head head --out vllm.json", "--out vllm.json: expected a name that ends in .yaml"),
        ("--head head --tuned nowhere.json", "nowhere.json: no such file"),
    ],
)
def test_wrong_input_is_one_line(refused, here, arguments, words):
    make_head(here / "untuned", decoding=None)
    make_head(here / "narrow", hidden_size=8)
    make_head(here / "a,b")
    (here / "table.json").write_text(json.dumps(TABLE))
    (here / "zeros.json").write_text(json.dumps({FIELD: [[1, 9, 0]]}))
    for name, change in (("broken", None), ("large", {"vocab_size": 999})):
        shutil.copytree(here / "target", here / name)
        config = json.loads((here / "target" / "config.json").read_text())
        (here / name / "config.json").write_text(json.dumps(config | change) if change else "{")
    assert words in refused(*arguments.split())


def test_dropping_by_what_was_drawn_is_for_greedy_drafts_only(run, refused, here):
    (here / "costs.json").write_text(json.dumps({"t_draft": 0.001, "t_target": 0.01}))
    policy = ("--policy", "budget:costs.json,retrospective=true")
    assert "would not be the target's" in refused(*policy)
    options, _, _ = run(*policy, "--temperature", 0)
    assert options["speculative-config"]["draft_sample_method"] == "greedy"


def test_vllm_is_not_imported(here, tmp_path):
    """A vLLM that cannot be imported, as on a laptop that only prepares the configuration."""
    (tmp_path / "libraries" / "vllm").mkdir(parents=True)
    (tmp_path / "libraries" / "vllm" / "__init__.py").write_text("raise RuntimeError('vllm was imported')")
    command = [sys.executable, "-m", "accept_head", "vllm-config", "--target", "target", "--draft", "draft"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "libraries")}
    probe = [sys.executable, "-c", "import vllm"]
    assert b"vllm was imported" in subprocess.run(probe, env=environment, capture_output=True).stderr
    done = subprocess.run([*command, "--head", "head"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("vllm serve ")
