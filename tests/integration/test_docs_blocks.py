"""The documentation's code blocks: every block is listed here, its names exist, and it runs or has a reason not to.

The quick tests check each block against the code (tests/doc_blocks.py). The slow ones run a page's blocks in order. In
their folder, TARGET, DRAFT, T and D are the embedded pair, DRAFTER is its EAGLE-3 drafter, prompts.jsonl has a few of
its prompts, and the Hub is tests/hub_server.py. The commands are those of the page. A wrapper before the real program
adds small sizes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.doc_blocks import (
    OPTIONS,
    PYTHON,
    REPOSITORY,
    SHELL,
    TEXT,
    Block,
    anchors,
    blocks,
    commands,
    links,
    problems,
    span_problems,
    spans,
)
from tests.hub_server import HubServer

PAGES = [
    *(
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "benchmarks/README.md",
        "benchmarks/gpu/README.md",
    ),
    *(f"docs/{path.name}" for path in sorted((REPOSITORY / "docs").glob("*.md"))),
]


@dataclass(frozen=True)
class Run:
    """before: Python that makes what a piece of Python takes for given. apart: in a folder that the page's other blocks
    do not see. replace: in the text."""

    before: str = ""
    apart: bool = False
    replace: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class NotRun:
    why: str


MODELS = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = target = AutoModelForCausalLM.from_pretrained("TARGET")
draft_model = draft = AutoModelForCausalLM.from_pretrained("DRAFT")
inputs = AutoTokenizer.from_pretrained("TARGET")("Once upon a time", return_tensors="pt")
"""
MY_POLICY = "from accept_head.inference.policies.confidence import ConfidencePolicy as MyPolicy\n"
ENVIRONMENT = NotRun("the tests run in that environment")
FOLDERS = NotRun("a list of folders")
VLLM = NotRun(
    "vLLM has an environment of its own: tests/integration/vllm run the adapter, test_user_path.py docs/vllm.md"
)

# page → how each of its blocks begins → whether it is run
BLOCKS: dict[str, dict[str, Run | NotRun]] = {
    "README.md": {
        "make demo ": NotRun("test_fit.py runs the demo, and `make test` runs this test"),
        "pip install .": NotRun("the tests run in that environment, and test_fit.py runs the second line"),
        "accept-head collect": Run(),
        "accept-head generate": Run(),
        "from accept_head import Sampling, load_pair": Run(),
        "from accept_head.inference.adapters.transformers": Run(before=MODELS),
        "accept-head vllm-config": Run(),
        "accept-head publish head user/name": Run(),
        "accept_head/ ": FOLDERS,
    },
    "CONTRIBUTING.md": {"make test": NotRun("it runs this test"), "accept_head/ ": FOLDERS},
    "CHANGELOG.md": {},
    "SECURITY.md": {},
    "benchmarks/README.md": {},
    "benchmarks/gpu/README.md": {"pip install .": NotRun("needs a GPU: test_gpu_benchmarks.py runs the parts without")},
    "docs/README.md": {},
    "docs/quickstart.md": {
        "make .venv/ready": ENVIRONMENT,
        "export OMP_NUM_THREADS=1": ENVIRONMENT,
        "accept-head fit": Run(),
        "accept-head collect": Run(),
        "accept-head train": Run(),
        "accept-head profile": Run(),
        "accept-head generate": Run(),
        "from accept_head import": Run(),
        "accept-head report": Run(),
    },
    "docs/own_pair.md": {
        "accept-head fit ": NotRun("test_fit.py runs it"),
        "accept-head collect --target TARGET --draft DRAFT --prompts prompts.jsonl --out traces --dry_run true": Run(),
        "import json": Run(),
        "accept-head collect --target TARGET --draft DRAFT --top_k 0 --prompts prompts.jsonl --out traces\n": Run(),
        "accept-head collect --target TARGET --draft DRAFT --top_k 0 --prompts prompts.jsonl --out traces --b": NotRun(
            "needs vLLM, a server and several devices: test_respond.py, test_respond_openai.py and test_device_map.py "
            "in tests/training run these options"
        ),
        "accept-head collect --target TARGET --draft DRAFT --prompts prompts.jsonl --temperature 0 --out greedy": Run(),
        "accept-head train --traces traces --dev_traces dev_traces --draft DRAFT --out head --cache true": Run(),
        "accept-head train --traces traces --dev_traces dev_traces --draft DRAFT --out instant": Run(),
        "accept-head train --traces traces --dev_traces dev_traces --draft DRAFT --out heads": Run(),
        "accelerate launch --num_processes 2": Run(),
        "accept-head profile": Run(),
        "accept-head generate": Run(),
    },
    "docs/serving.md": {
        "accept-head generate": Run(),
        "from transformers import": Run(),
        "accept-head vllm-config": Run(),
        "accept-head bench": Run(),
    },
    "docs/formats.md": {
        "accept-head import-specdecpp --checkpoint": NotRun("takes their files: test_import_specdecpp.py makes such"),
        "accept-head import-specdecpp --data": NotRun("takes their files: test_import_specdecpp.py makes such"),
    },
    "docs/hub.md": {
        "hf auth login": Run(),
        "accept-head generate --target T": Run(),
        "AcceptanceHead.from_pretrained": Run(before=MODELS + "from accept_head import AcceptanceHead\n"),
    },
    "docs/lossless.md": {
        "from accept_head.inference.replay.lossless": Run(before=MY_POLICY, replace=(("pairs=200", "pairs=2"),)),
    },
    "docs/policies.md": {
        "import torch": Run(),
    },
    "docs/batch.md": {
        "--policy head:head:1,costs=auto": NotRun("options, and what they mean; their parser reads them"),
    },
    "docs/online.md": {
        "--policy head:head:0.65,online=true": NotRun("an option and a formula; its parser reads it"),
    },
    "docs/benchmarks.md": {
        "Verdict": NotRun("what the demo prints"),
    },
    "docs/scale.md": {
        "accept-head collect --config configs/llama2_collect.yaml": NotRun(
            "the models are on the Hub, the prompts too: tests/training/test_dry_run.py dry-runs all recipes"
        ),
        "accept-head collect --config configs/qwen3_collect.yaml": NotRun(
            "needs GPUs with vLLM, and a server: tests/training/test_respond_openai.py has one of its own"
        ),
        "accelerate launch --config_file configs/accelerate/multi_gpu.yaml": NotRun(
            "needs GPUs and hosts: test_accelerate_configs.py runs the CPU's config and reads the others"
        ),
    },
    "docs/theory.md": {"": NotRun("formulas")},
    "docs/log.md": {},
    "docs/replay.md": {},
    "docs/vllm.md": {'pip install ".[vllm]"': VLLM, "accept-head vllm-config": VLLM},
    "docs/eagle3.md": {"accept-head collect": Run(), "accept-head vllm-config": Run()},
}

# Programs that no block runs here; the quick tests hold their words against the repository.
NEVER_RUN = {
    "pip": "it would change the environment of the tests",
    "hf": "logs in; the Hub on loopback takes HF_TOKEN",
    "vllm": VLLM.why,
}

VERBATIM = "docs/quickstart.md"  # its sizes are small as they are
SMALL = {
    "collect": "--max_new_tokens 16 --batch_size 8 --shard_size 8",
    "train": "--epochs 1",
    "profile": "--max_new_tokens 12",
    "tune": "--rules max-prob",
    "report": "--responses 2",
    "generate": "--max_new_tokens 12 --max_prompts 4",
    "bench": "--max_prompts 4 --batch_size 2 --temperature 0 --fixed 1 2 --max_new_tokens 12 --repeats 1",
}
GIVEN = {"docs/serving.md": ("head", "costs.json"), "docs/hub.md": ("head",)}  # from pages that were read before
PROMPTS = {"prompts.jsonl": ("train", 16), "dev_prompts.jsonl": ("dev", 8), "test_prompts.jsonl": ("test", 8)}
FILLED = "accept-head generate --target TARGET --draft DRAFT --prompts prompts.jsonl --out filled.jsonl"


def blocks_of(page: str) -> list[Block]:
    return blocks(page, (REPOSITORY / page).read_text(encoding="utf-8"))


def entry_of(block: Block) -> Run | NotRun:
    """The longest beginning that fits."""
    fitting = [begin for begin in BLOCKS.get(block.page, {}) if block.text.startswith(begin)]
    assert fitting, f"{block}: new; say in {Path(__file__).name} whether it is run"
    return BLOCKS[block.page][max(fitting, key=len)]


# --- without running -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_an_entry_and_every_entry_a_block(page):
    found = [block.text for block in blocks_of(page) if entry_of(block)]
    for begin in BLOCKS[page]:
        assert any(text.startswith(begin) for text in found), f"{page} has no block {begin!r} any more"


@pytest.mark.parametrize("page", PAGES)
def test_what_a_block_names_exists(page, monkeypatch):
    monkeypatch.chdir(REPOSITORY)  # for the configs
    assert [problem for block in blocks_of(page) for problem in problems(block)] == []


@pytest.mark.parametrize("page", PAGES)
def test_what_a_sentence_names_exists(page):
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    assert [f"{span}: {problem}" for span in spans(text) for problem in span_problems(span)] == []


@pytest.mark.parametrize(
    "span",
    [
        "accept-head tun",
        "accept-head tune --magic",
        "tune --magic 7",
        "python benchmarks/no_such.py",
        "make no-such",
        "inference/no_such.py",
    ],
)
def test_a_broken_span_would_be_caught(span):
    assert [problem for found in spans(f"Say `{span}` here.") for problem in span_problems(found)]


@pytest.mark.parametrize("page", PAGES)
def test_a_block_that_is_run_has_something_to_run(page):
    for block in blocks_of(page):
        if isinstance(entry_of(block), Run):
            programs = {words[0] for words in commands(block.text)} if block.kind == SHELL else {"python"}
            assert programs - set(NEVER_RUN), block


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for address in links((REPOSITORY / page).read_text(encoding="utf-8")):
        name, _, anchor = address.partition("#")
        if "://" in name:
            continue
        file = (REPOSITORY / page).parent / name if name else REPOSITORY / page
        assert file.exists(), f"{page}: {address}"
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), f"{page}: {address}"


def test_the_index_names_every_page():
    named = set(links((REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8")))
    assert {path.name for path in (REPOSITORY / "docs").glob("*.md")} - {"README.md"} <= named


COLLECT = "accept-head collect --target T --draft D --prompts P --out O"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{COLLECT} --magic 7", "magic"),
        (f"{COLLECT} --top_k many", "top_k"),
        (f"{COLLECT} --backend vlm", "backend"),
        (f"{COLLECT} --dry_run perhaps", "dry_run"),
        (f"{COLLECT} \\\n    --magic 7", "magic"),
        (f"{COLLECT}\n{COLLECT} --magic 7", "magic"),
        ("accept-head collect --target T --draft D --prompts P", "out"),
        ("accept-head collect --config configs/no_such.yaml", "no_such.yaml"),
        ("accept-head colect --target T", "colect"),
        ("accept-head generate ... --magic 7", "magic"),
        ("accept-head generate ... --policy heat:head", "heat:head"),
        ("accept-head generate ... --policy head:head,onlin=true", "onlin"),
        ("accept-head generate ... --policy head:head,online=7", "online"),
        ("accept-head bench ... --policy fixed:4 svp", "svp"),
        ("accept-head publish head user/name more", "more"),
        (f"accelerate launch -m {COLLECT.replace('accept-head', 'accept_head')} --magic 7", "magic"),
        ("accelerate launch --magic 7 -m accept_head train", "accelerate|accept_head"),
        ("--policy head:head,magic=1     explained", "magic"),
        ('vllm serve T --additional-config \'{"accept_head": {"policy": "fixd:4"}}\'', "fixd"),
        ('vllm serve T --additional-config \'{"accept_head": {"polcy": "fixed:4"}}\'', "polcy"),
        ("vllm serve T --additional-config '{accept_head}'", "additional-config"),
        ("accept-head generate --stop 'end", "quote|matching|never ends"),
        ("make no-such-target", "no-such-target"),
        ("make demo\nno_such_program --option", "no_such_program"),
        ("pip install .[magic]", "magic"),
        ("python benchmarks/no_such.py", "no_such.py"),
        ("from accept_head import load_pear", "load_pear"),
        ("import accept_head\naccept_head.load_pear()", "load_pear"),
        ("from accept_head.inference import generate\ngenerate(a, b, c, polici='fixed:4')", "polici"),
    ],
)
def test_a_broken_block_would_be_caught(text, problem, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    (block,) = blocks("made up", "".join(f"    {line}\n" for line in text.splitlines()))
    assert block.kind in (SHELL, PYTHON, OPTIONS)
    found = " ".join(problems(block))
    assert any(part in found for part in problem.split("|")), found


def test_blocks_are_found_wherever_markdown_has_them():
    text = (
        "- list\n\n      make demo\n\n> quoted\n>\n> ```python\n> x = 1\n> ```\n\ntext\n\n    a  b\n\n~~~\nλ = 1\n~~~\n"
    )
    assert [(block.kind, block.line) for block in blocks("page", text)] == [
        (SHELL, 3), (PYTHON, 7), (TEXT, 13), (PYTHON, 15)
    ]  # fmt: skip


def test_a_block_without_an_entry_would_be_caught():
    (block,) = blocks("docs/replay.md", "    accept-head demo\n")
    with pytest.raises(AssertionError, match="new"):
        entry_of(block)


# --- really run ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture
def programs(tmp_path):
    """A folder for PATH with programs that stand in front of the real ones."""
    folder = tmp_path / "programs"
    folder.mkdir()
    venv = Path(sys.executable).parent
    cases = " ".join(f"{verb}) more='{options}';;" for verb, options in SMALL.items())
    choose = f'more=; for word in "$@"; do case $word in {cases} esac; [ "$more" ] && break; done'
    choose += '; case "$*" in *"--recipe signals"*) more=;; esac'  # it takes seconds, and has no epochs
    scripts = {
        "accept-head": f'[ "$VERBATIM" ] || {{ {choose}; }}; exec {venv}/accept-head "$@" $more',
        "accelerate": f'{choose}; shift; exec {venv}/accelerate launch --cpu --num_processes 2 "$@" $more',
        **{name: "exit 0" for name in NEVER_RUN},
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


def prepare(folder: Path, page: str, pair: Path) -> Path:
    """What the blocks of a page find there."""
    folder.mkdir()
    models = {"TARGET": "target", "T": "target", "DRAFT": "draft", "D": "draft", "DRAFTER": "eagle3"}
    for name, role in models.items():
        (folder / name).symlink_to(pair / role)
    for name in ("checkpoints", "configs"):
        (folder / name).symlink_to(REPOSITORY / name)
    for name, (split, count) in PROMPTS.items():
        lines = (pair / "prompts" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    if "head" in GIVEN.get(page, ()):
        shutil.copytree(pair / "heads" / "sampled", folder / "head")
    if "costs.json" in GIVEN.get(page, ()):
        (folder / "costs.json").write_text(json.dumps({"t_draft": 0.0013, "t_target": 0.0103}))
    return folder


def run_block(block: Block, entry: Run, folder: Path, environment: dict[str, str]) -> None:
    text = block.text.replace("accept-head generate ...", FILLED)
    for old, new in entry.replace:
        assert old in text, block
        text = text.replace(old, new)
    command = ["bash", "-euo", "pipefail", "-c", text]
    if block.kind == PYTHON:
        command = [sys.executable, "-c", entry.before + text]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    for words in commands(text) if block.kind == SHELL else ():
        if words[0] not in NEVER_RUN and "--out" in words and "--dry_run" not in words:
            assert (folder / words[words.index("--out") + 1]).exists(), words
    (folder / "filled.jsonl").unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", [page for page in PAGES if any(isinstance(e, Run) for e in BLOCKS[page].values())])
def test_the_page_runs(page, tmp_path, embedded_pair_folder, cli_environment, programs, hub):
    environment = {
        **cli_environment,
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VERBATIM": "1" if page == VERBATIM else "",
        "HF_ENDPOINT": hub.endpoint,  # nothing reaches further than that
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_TOKEN": "hf_writer",
    }
    folder = prepare(tmp_path / "page", page, embedded_pair_folder)
    for number, block in enumerate(blocks_of(page)):
        entry = entry_of(block)
        if isinstance(entry, Run):
            apart = prepare(tmp_path / f"apart{number}", page, embedded_pair_folder) if entry.apart else folder
            run_block(block, entry, apart, environment)
            for repository in hub.repositories.values():  # a second name for what was published
                repository.branches.setdefault("v2", repository.branches["main"])


@pytest.mark.slow
def test_a_block_that_fails_would_be_caught(tmp_path, embedded_pair_folder, cli_environment, programs):
    environment = {**cli_environment, "PATH": f"{programs}:{os.environ['PATH']}", "VERBATIM": ""}
    folder = prepare(tmp_path / "page", "README.md", embedded_pair_folder)
    for text in ("accept-head generate ... --policy head:no/such/head", "assert False", "accept-head demo --pair none"):
        (block,) = blocks("page", f"    {text}\n")
        with pytest.raises(AssertionError):
            run_block(block, Run(), folder, environment)
