"""Question: what does a head gain on the drafter that is served most, an EAGLE-3 layer, and how good is ours?

SmolLM2-135M-Instruct with the drafter of `checkpoints/recipe/make_eagle3.py`, at T = 1 without top-k and greedily. The
drafter learns the target's own answers to `drafter` prompts. Heads learn from other prompts, on which it is as good as
on those of users. These, the dev prompts and the two sets of test prompts are those of real_pair.py.

If a verified token costs v target forwards, n drafted tokens cost n·(c + v): the ladder's cost of a draft is the sum.

python benchmarks/eagle3.py prompts     # then the drafter, in hours: the command is printed
python benchmarks/eagle3.py drafter     # how many tokens a target call
python benchmarks/eagle3.py collect     # traces with depths
python benchmarks/eagle3.py ladder
python benchmarks/eagle3.py heads       # what is shipped, in checkpoints/smollm2
python benchmarks/eagle3.py equal --host loop      # is greedy text that of the target alone?
.venv-vllm/bin/python benchmarks/eagle3.py equal --host vllm

By the clock, it is `load.py --pair smollm2`.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import random
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ladder import head_settings, judged, known_of, rule_settings
from real_decoded import FIXED, HEAD, InLoop, InVllm, chosen, margins, requests_of
from real_pair import (
    ALIKE,
    DATA,
    LONGEST,
    NAMES,
    SPLITS,
    TRAIN_PARTS,
    is_collected,
    message,
    no_tests,
    prompts_file,
    read,
    ship,
    texts_by_domain,
    write_prompts,
)
from record import REPOSITORY, RESULTS, circumstances, write_result

from accept_head import AcceptanceHead, Sampling
from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.command.libraries import quiet_libraries
from accept_head.files import read_json
from accept_head.inference.replay.coupled import CoupledTraces, load_coupled
from accept_head.inference.replay.truth import InformedTables, informed_tables
from accept_head.inference.tune.heads import load_heads
from accept_head.inference.verbs.generate import generate_file
from accept_head.pair import load_draft, load_model
from accept_head.training.collect.verb import collect
from accept_head.training.learn.verb import train

HOME = REPOSITORY / "runs" / "eagle3"
TARGET = str(REPOSITORY / "runs" / "models" / "smollm2" / "target")
DRAFTER = str(REPOSITORY / "checkpoints" / "smollm2" / "eagle3")
RECIPE = f"""python checkpoints/recipe/make_eagle3.py --target {TARGET} --out {DRAFTER} --work {HOME / "work"} \\
    --prompts {HOME / "prompts" / "drafter.jsonl"} --own_prompts 7000 --held_out {prompts_file("dev")} \\
    --dtype bfloat16 --draft_vocab 8192 --layers 2 15 27 --temperatures 1 0 --new_tokens 160 --engine vllm \\
    --steps 4 --epochs 3 --batch_tokens 2048 --lr 8e-3 --threads 2"""
DEPTHS = 8
TEXT: dict[str, Any] = {"top_k": 0, "max_new_tokens": 96, "batch_size": 25, "shard_size": 25, "dtype": "bfloat16"}
TRAIN = TRAIN_PARTS[:6]
DRAFTED, VERIFIED = (0.03, 0.05, 0.1), (0.0, 0.02, 0.05, 0.1)  # c and v
COSTS = sorted({round(c + v, 2) for c in DRAFTED for v in VERIFIED})
MOST = {"translation": 600, "stories": 600, "passages": 1000}  # prompts of a kind that the drafter learns from
ABOUT = (
    "Summarize this in one sentence:",
    "Who is this passage about, and what happens?",
    "Say this in simpler words:",
    "List the main points of this text:",
)
EQUAL_PROMPTS, BATCHES = 100, (1, 4, 16)
C, T_DRAFT = 0.15, 0.0055  # of the head that is served on a CPU, and seconds there
NAMED = {"target": "HuggingFaceTB/SmolLM2-135M-Instruct", "draft": "checkpoints/smollm2/eagle3"}
WEIGHTS = """- its target's weights were made with a GGUF file of this model (Q4_1, sha256
  `b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53`), dequantised to bfloat16; with the unquantised
  weights the library says once that they are others, and text stays exact"""
RULES = ("cumulative-confidence", "max-prob", "online-logistic", "online-signals")
HEADS = {"base": {"recipe": "signals"}, "default": {}}


def main() -> None:
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("prompts", "drafter", "collect", "ladder", "heads", "equal"))
    parser.add_argument("--temperatures", nargs="+", type=float, choices=(1.0, 0.0), default=[1.0, 0.0])
    parser.add_argument("--host", choices=("loop", "vllm"), default="loop")
    options = parser.parse_args()
    if options.part == "prompts":
        print(f"{write_drafter_prompts():,} prompts; now run\n{RECIPE}")
    elif options.part == "drafter":
        for split in ("test", ALIKE):
            keep("drafter", tokens_a_call(split), "tested_on")
    elif options.part == "equal":
        for row in equality(options.host):
            keep("equal", row, "host", "batch")
    for temperature in options.temperatures:
        if options.part == "collect":
            for split in ("dev", "test", ALIKE, *TRAIN):
                collected(split, temperature)
        elif options.part == "ladder":
            keep("ladder", {"temperature": temperature, "rows": ladder_of(temperature)}, "temperature")
        elif options.part == "heads":
            head, dev = made("default", temperature), collected("dev", temperature)
            ship(head, shipped(temperature), NAMED, dev, DRAFTER, t_draft=T_DRAFT, c=C, note=WEIGHTS)


def keep(part: str, found: dict[str, Any], *key: str) -> None:
    """Write a row of a part of the result, in place of an earlier one with the same key. Parts are measured apart."""
    path = RESULTS / "eagle3.json"
    there = read_json(path) if path.is_file() else {}
    result = {name: there.get(name, []) for name in ("drafter", "ladder", "equal")}
    others = [row for row in result[part] if any(row[name] != found[name] for name in key)]
    result[part] = [*others, {**found, "measured": circumstances()}]
    write_result("eagle3", {"costs": COSTS, **result}, command="python benchmarks/eagle3.py PART")


def write_drafter_prompts() -> int:
    """Texts of the train prompts' kinds and of some more that are not prompts of real_pair.py, at most MOST of a kind,
    in a random order; their number."""
    write_prompts()
    taken = {
        json.loads(line)["prompt"][0]["content"]
        for split in SPLITS
        for line in prompts_file(split).read_text().splitlines()
    }
    records = [
        message(domain, text)
        for domain, texts in (texts_by_domain() | further_texts()).items()
        for text in dict.fromkeys(texts)
        if text not in taken and len(text) <= LONGEST
    ]
    random.Random(0).shuffle(records)
    by_domain: Counter[str] = Counter()
    kept = []
    for record in records:
        by_domain[record["domain"]] += 1
        if by_domain[record["domain"]] <= MOST.get(record["domain"], 1500):
            kept.append(record)
    path = HOME / "prompts" / "drafter.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in kept))
    return len(kept)


def further_texts() -> dict[str, list[str]]:
    """What users ask for besides: the bodies of functions, translations, texts about a passage, stories."""
    code = [
        text
        for record in no_tests("code_thealgorithms/python_files.jsonl.gz")
        for text in heads_of_functions(record["text"])
    ]
    with gzip.open(DATA / "translation_deu_eng" / "eng_deu.tsv.gz", "rt") as lines:
        pairs = [line.rstrip("\n").split("\t") for line in lines]
    passages = [
        passage
        for book in read("prose_gutenberg/books.jsonl.gz")
        for passage in book["text"].split("\n\n")
        if 300 <= len(passage) <= 650
    ]
    stories = [record["text"] for record in read("stories_tinystories/tinystories.jsonl.gz")]
    return {
        "functions": [f"Write the body of this Python function:\n```python\n{each}```" for each in code],
        "translation": [f"What is this in English? {german}" for english, german in pairs if len(german) >= 30],
        "passages": [
            f"{asked}\n{each}" for place, each in enumerate(passages) for asked in [ABOUT[place % len(ABOUT)]]
        ],
        "stories": [f"Go on with this story:\n{each[:250].rsplit(' ', 1)[0]}" for each in stories],
    }


def heads_of_functions(source: str) -> Iterator[str]:
    """The functions of a Python file without their bodies: name, parameters and documentation."""
    lines = source.splitlines(keepends=True)
    try:
        tree = ast.parse(source)
    except SyntaxError:  # of a newer Python
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            head = lines[node.lineno - 1 : node.body[0].end_lineno]
            yield textwrap.dedent("".join(head))


def tokens_a_call(split: str) -> dict[str, Any]:
    """Greedily: tokens a target call, of all prompts and of those of each domain. in_its_vocabulary: the share of the
    answers' tokens that the drafter can propose."""
    out, policy = HOME / f"drafter_{split}.jsonl", "fixed:4"
    generate_file(
        TARGET, DRAFTER, str(prompts_file(split)), str(out), policy=policy, batch_size=16, max_new_tokens=64,
        dtype=TEXT["dtype"], stream=False,
    )  # fmt: skip
    with out.open() as lines:
        answers = [json.loads(line) for line in lines]
    found: dict[str, float] = {}
    for domain in ("all", *sorted({answer["domain"] for answer in answers})):
        mine = [answer for answer in answers if domain in ("all", answer["domain"])]
        found[domain] = total(mine, "generated") / total(mine, "rounds")
    tokens = [token for answer in answers for token in answer["token_ids"]]
    return {
        "tested_on": split,
        "policy": policy,
        "prompts": len(answers),
        "tokens": total(answers, "generated"),
        "target_calls": total(answers, "rounds"),
        "tokens_a_target_call": found,
        "in_its_vocabulary": drafter().t2d[tokens].double().mean().item(),
    }


def total(answers: list[dict[str, Any]], field: str) -> int:
    return sum(answer[field] for answer in answers)


def collected(split: str, temperature: float) -> Path:
    """A folder of traces of this split, complete."""
    folder = HOME / f"t{temperature:g}" / split
    if not is_collected(folder):
        prompts, seed = str(prompts_file(split)), SPLITS.index(split)
        collect(TARGET, DRAFTER, str(folder), prompts, temperature=temperature, seed=seed, depths=DEPTHS, **TEXT)
    return folder


def ladder_of(temperature: float) -> list[dict[str, Any]]:
    """Each setting is chosen on dev prompts."""
    heads = {name: trained(name, temperature) for name in HEADS}
    dev = settings_of(coupled("dev", temperature), heads)
    found = []
    for split in ("test", ALIKE):
        traces = coupled(split, temperature)
        rows = judged(
            dev, settings_of(traces, heads), temperature, (*RULES[:3], "base"), known=known_of(traces, asked(traces)),
            ratios=COSTS,
        )  # fmt: skip
        found += [{"tested_on": split, "test_tokens": traces.positions, **row} for row in rows]
    return found


def settings_of(traces: CoupledTraces, heads: dict[str, AcceptanceHead]) -> dict[str, Any]:
    rules = {name: rule_settings(traces, name) for name in RULES}
    return rules | {name: head_settings(traces, head) for name, head in heads.items()}


def asked(traces: CoupledTraces) -> InformedTables | None:
    return informed_tables(traces, drafter(), lambda: load_model(TARGET, "--target", dtype=TEXT["dtype"]))


def trained(name: str, temperature: float) -> AcceptanceHead:
    (head,) = load_heads([str(made(name, temperature))], drafter()).values()
    return head


def made(name: str, temperature: float) -> Path:
    out = HOME / f"t{temperature:g}" / "heads" / name
    if not (out / "model.safetensors").is_file():
        folders = [str(collected(part, temperature)) for part in TRAIN]
        train(folders, DRAFTER, str(out), dev_traces=str(collected("dev", temperature)), **HEADS[name])
    return out


def equality(host: str) -> Iterator[dict[str, Any]]:
    """Greedily and in float32: the answers that leave that of the target alone. There should be none."""
    where = host_of(host, max(BATCHES), "float32")
    requests = requests_of(where, chosen(EQUAL_PROMPTS))
    arms = {"none": "none", FIXED: "fixed:4", **chosen_head(0.0)}
    for batch in BATCHES:
        run = where.runner(arms, batch, Sampling(temperature=0.0))
        finished = {arm: run(arm, requests)[3] for arm in arms}
        others = margins(finished, requests, TARGET, "float32")
        tokens = sum(done.stats.generated for done in finished["none"])
        found = {"host": host, "batch": batch, "prompts": len(requests), "tokens": tokens}
        yield {**found, "arms": arms, "others": others}


def host_of(host: str, rows: int, dtype: str) -> InLoop | InVllm:
    if host == "loop":
        return InLoop(TARGET, DRAFTER, rows, dtype)
    return InVllm(TARGET, DRAFTER, rows, dtype, k_max=DEPTHS, method="eagle3")


def chosen_head(temperature: float) -> dict[str, str]:
    head = shipped(temperature).relative_to(REPOSITORY)
    for ladder in read_json(RESULTS / "eagle3.json")["ladder"]:
        for row in ladder["rows"]:
            if (ladder["temperature"], row["rung"], row["c"], row["tested_on"]) == (temperature, "default", C, "test"):
                return {HEAD: "head:{}:{threshold},k_min={k_min},k_max={k_max}".format(head, **row["params"])}
    return {}


def shipped(temperature: float) -> Path:
    return Path(DRAFTER).parent / NAMES[temperature]


@cache
def drafter() -> Any:
    return load_draft(DRAFTER, "--draft", dtype=TEXT["dtype"])


def coupled(split: str, temperature: float) -> CoupledTraces:
    return load_coupled(collected(split, temperature), drafter(), checkpoint_fingerprint(DRAFTER), k_max=DEPTHS)


if __name__ == "__main__":
    main()
