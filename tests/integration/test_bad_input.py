"""Every wrong input gives one sentence that names the error and exit code 2, and leaves no partial files."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import yaml

from accept_head import AcceptanceHead, HeadConfig, InputError
from accept_head.head.saved import load_head
from accept_head.inference import make_policy
from accept_head.pair import hidden_size


@pytest.fixture
def given(tmp_path, random_pair_folder, random_traces_folder, byte_tokenizer):
    """Good input, and makers of bad input, in a folder of this test's own."""

    def file(name, text):
        path = tmp_path / name
        path.write_text(text)
        return path

    def traces(change):
        """A copy of good traces that `change(folder)` has spoiled."""
        folder = tmp_path / "traces"
        shutil.copytree(random_traces_folder, folder)
        change(folder)
        return folder

    def renumbered_draft():
        """The draft with a tokenizer of the same size and tokens, but other ids."""
        folder = tmp_path / "renumbered"
        shutil.copytree(random_pair_folder / "draft", folder)
        byte_tokenizer(order=-1).save_pretrained(folder)
        return folder

    def folder(name, *files):
        (tmp_path / name).mkdir()
        for inside in files:
            (tmp_path / name / inside).write_text("not yours")
        return tmp_path / name

    return SimpleNamespace(
        target=random_pair_folder / "target",
        draft=random_pair_folder / "draft",
        prompts=random_pair_folder / "prompts" / "train.jsonl",
        traces=random_traces_folder,
        out=tmp_path / "out",
        nowhere=tmp_path / "nowhere",
        file=file,
        folder=folder,
        spoiled=traces,
        renumbered_draft=renumbered_draft,
    )


def collect(given, **changes):
    """Arguments of collect; an option that is None is left out."""
    options = {"target": given.target, "draft": given.draft, "prompts": given.prompts, "out": given.out}
    return ["collect", *flags({**options, "max_new_tokens": 4, "max_prompts": 2, **changes})]


def train(given, **changes):
    options = {"traces": given.traces, "draft": given.draft, "out": given.out, "batch_size": 8, "epochs": 1}
    return ["train", *flags({**options, **changes})]


def flags(options):
    return [word for name, value in options.items() if value is not None for word in (f"--{name}", value)]


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(data)


def edit_config(folder, **changes):
    path = folder / "trace_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# A case: the command line for `given`, and what its sentence must name. Strings are looked for as they are.
COLLECT_CASES = {
    "empty prompts file": lambda g: (collect(g, prompts=g.file("empty.jsonl", "")), ["empty.jsonl"]),
    "blank prompts file": lambda g: (collect(g, prompts=g.file("blank.jsonl", "\n\n")), ["blank.jsonl"]),
    "prompts that are not JSONL": lambda g: (
        collect(g, prompts=g.file("bad.jsonl", '{"prompt": "a"}\nprompt: b\n')),
        ["bad.jsonl", "line 2"],
    ),
    "prompts that are a JSON array": lambda g: (
        collect(g, prompts=g.file("array.jsonl", '[{"prompt": "a"}]\n')),
        ["array.jsonl", "line 1", "list"],
    ),
    "a record without the field": lambda g: (
        collect(g, prompts=g.file("fields.jsonl", '{"prompt": "a"}\n{"text": "b"}\n')),
        ["fields.jsonl", "line 2", "'prompt'"],
    ),
    "a field that no record has": lambda g: (collect(g, field="question"), ["train.jsonl", "line 1", "'question'"]),
    "a field of the wrong type": lambda g: (
        collect(g, prompts=g.file("types.jsonl", '{"prompt": 7}\n')),
        ["types.jsonl", "line 1", "'prompt'", "int"],
    ),
    "a prompt longer than the context": lambda g: (
        collect(g, prompts=g.file("long.jsonl", json.dumps({"prompt": "a" * 200}) + "\n")),
        ["long.jsonl", "line 1", "201", "124"],
    ),
    "a missing prompts file": lambda g: (collect(g, prompts=f"{g.nowhere}.jsonl"), ["nowhere.jsonl"]),
    "a missing data set": lambda g: (collect(g, prompts=g.nowhere), ["nowhere"]),
    "different vocabularies of one size": lambda g: (
        collect(g, draft=g.renumbered_draft()),
        ["--target", "--draft", "vocabular"],
    ),
    "a target that does not exist": lambda g: (collect(g, target=g.nowhere), ["--target", "nowhere"]),
    "a draft that does not exist": lambda g: (collect(g, draft=g.nowhere), ["--draft", "nowhere"]),
    "a target folder with nothing in it": lambda g: (collect(g, target=g.folder("bare")), ["--target", "bare"]),
    "an output below a file": lambda g: (
        collect(g, out=g.file("file", "a file") / "out"),
        ["--out", "file/out"],
    ),
    "an output that is a file": lambda g: (collect(g, out=g.file("file", "a file")), ["--out", "file"]),
    "an output with foreign shards": lambda g: (
        collect(g, out=g.folder("foreign", "shard-00000.parquet")),
        ["--out", "foreign"],
    ),
    "a negative temperature": lambda g: (collect(g, temperature=-1), ["temperature", "-1"]),
    "a temperature that is not a number": lambda g: (collect(g, temperature="nan"), ["temperature", "nan"]),
    "a negative number of alternatives": lambda g: (collect(g, alternatives=-1), ["alternatives", "-1"]),
    "alternatives to an argmax": lambda g: (collect(g, alternatives=2, temperature=0), ["alternatives", "temperature"]),
    "a negative top_k": lambda g: (collect(g, top_k=-1), ["top_k", "-1"]),
    "a top_p above 1": lambda g: (collect(g, top_p=1.5), ["top_p", "1.5"]),
    "a top_k that is not a number": lambda g: (collect(g, top_k="many"), ["top_k", "many"]),
    "no new tokens": lambda g: (collect(g, max_new_tokens=0), ["max_new_tokens", "0"]),
    "more new tokens than the context": lambda g: (collect(g, max_new_tokens=128), ["max_new_tokens", "128"]),
    "no prompts wanted": lambda g: (collect(g, max_prompts=0), ["max_prompts", "0"]),
    "an empty batch": lambda g: (collect(g, batch_size=0), ["batch_size", "0"]),
    "an unknown dtype": lambda g: (collect(g, dtype="float8"), ["dtype", "float8"]),
    "a missing option": lambda g: (collect(g, out=None), ["out"]),
    "an unknown flag": lambda g: ([*collect(g), "--temprature", 1], ["temprature"]),
    "a word that belongs to no flag": lambda g: ([*collect(g), "surplus"], ["surplus"]),
    "an unknown option in a YAML": lambda g: (
        [*collect(g), "--config", g.file("bad.yaml", "temprature: 1\n")],
        ["temprature"],
    ),
    "a wrong type in a YAML": lambda g: (
        [*collect(g), "--config", g.file("bad.yaml", "top_k: many\n")],
        ["top_k", "many"],
    ),
    "a YAML that is none": lambda g: ([*collect(g), "--config", g.file("bad.yaml", "a: [1\n")], ["bad.yaml"]),
    "a missing YAML": lambda g: ([*collect(g), "--config", f"{g.nowhere}.yaml"], ["nowhere.yaml"]),
}

TRAIN_CASES = {
    "traces of another pair": lambda g: (train(g, draft=g.target), ["another pair", "--draft"]),
    "a truncated shard": lambda g: (
        train(g, traces=g.spoiled(lambda folder: cut_in_half(folder / "shard-00002.parquet"))),
        ["shard-00002.parquet"],
    ),
    "a shard with one wrong byte": lambda g: (
        train(g, traces=g.spoiled(lambda folder: flip_a_byte(folder / "shard-00002.parquet"))),
        ["shard-00002.parquet"],
    ),
    "an empty shard": lambda g: (
        train(g, traces=g.spoiled(lambda folder: (folder / "shard-00004.parquet").write_bytes(b""))),
        ["shard-00004.parquet"],
    ),
    "a missing shard": lambda g: (
        train(g, traces=g.spoiled(lambda folder: (folder / "shard-00001.parquet").unlink())),
        ["shard-00001.parquet", "1 of 6"],
    ),
    "two shards swapped": lambda g: (
        train(
            g,
            traces=g.spoiled(
                lambda folder: shutil.copy(folder / "shard-00001.parquet", folder / "shard-00003.parquet")
            ),
        ),
        ["shard-00003.parquet", "index"],
    ),
    "a trace config that is not JSON": lambda g: (
        train(g, traces=g.spoiled(lambda folder: cut_in_half(folder / "trace_config.json"))),
        ["trace_config.json"],
    ),
    "a trace config of another version": lambda g: (
        train(g, traces=g.spoiled(lambda folder: edit_config(folder, version=99))),
        ["trace_config.json", "version", "99"],
    ),
    "a trace config with an unknown field": lambda g: (
        train(g, traces=g.spoiled(lambda folder: edit_config(folder, colour="red"))),
        ["trace_config.json", "colour"],
    ),
    "no trace folder": lambda g: (train(g, traces=g.nowhere), ["nowhere"]),
    "a folder without traces": lambda g: (train(g, traces=g.folder("bare", "notes.txt")), ["bare"]),
    "a trace folder that is a file": lambda g: (train(g, traces=g.file("file", "a file")), ["file"]),
    "dev traces of other sampling settings": lambda g: (
        train(
            g,
            dev_traces=g.spoiled(
                lambda folder: edit_config(folder, sampling={"temperature": 0.5, "top_k": 50, "top_p": 1.0})
            ),
        ),
        ["--dev_traces", "0.5"],
    ),
    "dev traces of another target": lambda g: (
        train(g, dev_traces=g.spoiled(lambda folder: edit_config(folder, target_fingerprint="another"))),
        ["--dev_traces", "another pair"],
    ),
    "a draft that does not exist": lambda g: (train(g, draft=g.nowhere), ["--draft", "nowhere"]),
    "an output that is another folder": lambda g: (
        train(g, out=g.folder("mine", "notes.txt")),
        ["--out", "mine"],
    ),
    "an output below a file": lambda g: (train(g, out=g.file("file", "a file") / "head"), ["--out", "file"]),
    "depth 7": lambda g: (train(g, depth=7), ["depth", "7"]),
    "a negative depth": lambda g: (train(g, depth=-1), ["depth", "-1"]),
    "an unknown recipe": lambda g: (train(g, recipe="best"), ["recipe", "best"]),
    "an unknown prediction": lambda g: (train(g, predicts="all"), ["predicts", "all"]),
    "alternatives that the traces lack": lambda g: (train(g, alternatives=9), ["alternatives is 9", "collect"]),
    "alternatives with exact packing": lambda g: (
        train(g, alternatives=1, packing="exact"),
        ["alternatives", "prefix"],
    ),
    "an unknown packing": lambda g: (train(g, packing="loose"), ["packing", "loose"]),
    "an unknown precision": lambda g: (train(g, precision="fp8"), ["precision", "fp8"]),
    "signals for a prediction of the next token": lambda g: (
        train(g, predicts="next", signals="true"),
        ["signals", "next"],
    ),
    "a share of target tokens where none are mixed": lambda g: (train(g, r=0.5), ["r is 0.5", "'mixing'"]),
    "a loss weight of 0": lambda g: (train(g, w_rej=0), ["w_rej", "0"]),
    "a share above 1": lambda g: (train(g, r=2), ["r is 2"]),
    "no epochs": lambda g: (train(g, epochs=0), ["epochs", "0"]),
    "an empty micro-batch": lambda g: (train(g, micro_batch_size=0), ["micro_batch_size"]),
    "a batch that cannot be divided": lambda g: (
        train(g, batch_size=8, micro_batch_size=3),
        ["batch_size", "8", "3"],
    ),
    "a batch larger than the traces": lambda g: (train(g, batch_size=64), ["batch_size", "64"]),
    "a learning rate that is no number": lambda g: (train(g, lr="fast"), ["lr", "fast"]),
    "an unknown flag": lambda g: ([*train(g), "--dropout", 0.1], ["dropout"]),
    "an unknown option in a YAML": lambda g: (
        [*train(g), "--config", g.file("bad.yaml", "dropout: 0.1\n")],
        ["dropout"],
    ),
}

OTHER_CASES = {
    "an unknown verb": lambda g: (["colect"], ["colect"]),
    "a demo of a pair that does not exist": lambda g: (
        ["demo", "--pair", g.nowhere, "--out", g.out],
        ["nowhere"],
    ),
    "a demo whose output is below a file": lambda g: (
        ["demo", "--pair", g.target.parent, "--out", g.file("file", "a file") / "out"],
        ["--out", "file"],
    ),
}


def files_in(folder):
    """{path: content} of every file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check(case, given, run, sandbox):
    arguments, named = case(given)
    before = files_in(sandbox)
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("accept-head: error: ")
    for words in named:
        assert words in done.stderr
    assert done.stdout == ""
    assert files_in(sandbox) == before, "something was written"


@pytest.mark.parametrize("name", COLLECT_CASES)
def test_collect_refuses(name, given, run_warm, tmp_path):
    check(COLLECT_CASES[name], given, run_warm, tmp_path)


@pytest.mark.parametrize("name", TRAIN_CASES)
def test_train_refuses(name, given, run_warm, tmp_path):
    check(TRAIN_CASES[name], given, run_warm, tmp_path)


@pytest.mark.parametrize("name", OTHER_CASES)
def test_command_refuses(name, given, run_warm, tmp_path):
    check(OTHER_CASES[name], given, run_warm, tmp_path)


def test_a_fresh_process_says_the_same_and_nothing_else(given, run_cli, run_warm):
    """The cases above run in forks of a process with the libraries imported; importing must not add to stderr."""
    arguments, _ = COLLECT_CASES["different vocabularies of one size"](given)
    fresh, warm = run_cli(*arguments), run_warm(*arguments)
    assert (fresh.returncode, fresh.stdout, fresh.stderr) == (2, "", warm.stderr)


def test_the_unspoiled_commands_are_accepted(given, run_warm):
    """So that no case above is refused for a reason of its own."""
    for arguments in (collect(given), train(given, out=given.out.with_name("head"))):
        done = run_warm(*arguments)
        assert done.returncode == 0, done.stderr
    assert (given.out / "shard-00000.parquet").is_file()
    assert (given.out.with_name("head") / "model.safetensors").is_file()


# --- heads ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved_head(tmp_path):
    def save(size):
        AcceptanceHead(HeadConfig(hidden_size=size, depth=1)).save_pretrained(tmp_path / f"head{size}")
        return tmp_path / f"head{size}"

    return save


def test_a_head_of_another_hidden_size_is_refused(saved_head, random_pair):
    size = hidden_size(random_pair.draft)
    assert load_head(saved_head(size), hidden_size=size).config.hidden_size == size
    wrong = saved_head(size + 8)
    for load in (
        lambda: load_head(wrong, hidden_size=size),
        lambda: make_policy(f"head:{wrong}:0.5", random_pair),
    ):
        with pytest.raises(InputError, match=rf"{wrong}.*{size + 8}.*{size}") as caught:
            load()
        assert "\n" not in str(caught.value)
    make_policy(f"head:{saved_head(size)}:0.5", random_pair)


@pytest.mark.parametrize(
    "spec", ["head", "head:", "head:0.5", "head:PATH:high", "head:PATH:1.5", "head:PATH:-1", "heads"]
)
def test_a_policy_that_is_not_spelled_right_is_refused(saved_head, random_pair, spec):
    path = saved_head(hidden_size(random_pair.draft))
    with pytest.raises(InputError):
        make_policy(spec.replace("PATH", str(path)), random_pair)


def test_a_head_that_does_not_exist_is_refused_by_name(tmp_path, random_pair):
    for name in (tmp_path / "nowhere", "no-such-head"):
        with pytest.raises(InputError, match=str(name)):
            make_policy(f"head:{name}:0.5", random_pair)


# --- options --------------------------------------------------------------------------------------------------------


def test_options_come_from_a_yaml_and_flags_win(given, run_warm, tmp_path):
    options = {"target": str(given.target), "draft": str(given.draft), "prompts": str(given.prompts)}
    config = given.file("collect.yaml", yaml.safe_dump({**options, "max_new_tokens": 4, "max_prompts": 3, "seed": 5}))
    done = run_warm("collect", "--config", config, "--out", given.out, "--max_prompts", 2)
    assert done.returncode == 0, done.stderr
    used = json.loads((given.out / "trace_config.json").read_text())
    assert (used["max_new_tokens"], used["num_prompts"], used["seed"]) == (4, 2, 5)


@pytest.mark.parametrize("verb", ["collect", "train"])
def test_print_config_prints_a_yaml_that_the_verb_reads(verb, given, run_warm):
    arguments = {"collect": collect, "train": train}[verb](given)
    done = run_warm(*arguments, "--print_config")
    assert done.returncode == 0, done.stderr
    printed = yaml.safe_load(done.stdout)
    assert printed["draft"] == str(given.draft)
    assert not given.out.exists()
    config = given.file("printed.yaml", done.stdout)
    again = run_warm(verb, "--config", config, "--print_config")
    assert yaml.safe_load(again.stdout) == printed


@pytest.mark.parametrize("verb", ["collect", "train", "demo", "generate", "profile", "tune"])
def test_every_verb_has_help_that_explains_each_option(verb, run_warm):
    done = run_warm(verb, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"usage: accept-head {verb}" in done.stdout
    words = " ".join(done.stdout.split())
    assert "--out OUT" in words and "--config" in words and "--print_config" in words


def test_help_and_version_need_no_verb(run_cli, run_warm):
    for done in (run_cli("--help"), run_warm("-h"), run_warm()):
        assert (done.returncode, done.stderr) == (0, "")
        assert all(f"\n  {verb} " in done.stdout for verb in ("collect", "train", "demo"))
    version = run_warm("--version")
    assert (version.returncode, version.stderr) == (0, "")
    assert version.stdout.strip().count(".") == 2
