"""Question: what does a head gain on a published pair, and how much text does it take?

Qwen2.5-Coder-Instruct, 0.5B drafting for 1.5B, at T = 1 without top-k and greedily. Train and dev prompts are of MBPP,
GSM8K, Dolly and tool calls. There are two sets of test prompts, on which nothing is chosen: `test` is of HumanEval and
Spec-Bench, `alike` is of the train prompts' kind; `both` is all of them. Everything is priced by replay, for every
c = t_draft / t_target. A rule has the setting that is best on dev, a head has the threshold that `accept-head tune`
finds there by cost. `by the grid`: a head with the best of a grid on dev, like a rule.

python benchmarks/real_pair.py collect     # what is missing of the traces in benchmarks/traces
python benchmarks/real_pair.py ladder      # heads on the train traces that are there; the result
python benchmarks/real_pair.py domains     # what a residual is worth where it was not trained
python benchmarks/real_pair.py heads       # the heads in checkpoints/qwen2.5-coder

The weights are read from runs/models/qwen: benchmarks/traces/README.md says which they are. Collecting takes 5 hours on
2 cores with instructions for bfloat16 (avx512_bf16), in which everything is computed; on others it takes days. It goes
on where it was.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from ladder import K_MAX, Known, head_settings, judged, known_of, part_of, rule_settings
from record import REPOSITORY, RESULTS, write_result
from torch import Tensor

from accept_head import AcceptanceHead
from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.command.libraries import quiet_libraries
from accept_head.cost import ForwardCosts
from accept_head.files import read_json
from accept_head.hub.card import NO_BASE_MODEL, CardFacts, model_card
from accept_head.hub.folder import HEAD_CONFIG_NAME, TRAINING_NAME, WEIGHTS_NAME
from accept_head.hub.stored import read_stored
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.replay.cost_aware import cost_aware
from accept_head.inference.replay.coupled import CoupledTraces, load_coupled
from accept_head.inference.replay.scores import score_tokens
from accept_head.inference.replay.thresholds import Setting, replay_thresholds
from accept_head.inference.replay.truth import informed_tables
from accept_head.inference.replay.walk import Replayed
from accept_head.inference.tune.heads import load_heads
from accept_head.inference.verbs.tune import tune
from accept_head.pair import load_model
from accept_head.quality import binary_kl, quality
from accept_head.trace.config import CONFIG_NAME, TraceConfig
from accept_head.trace.shards import missing_shards
from accept_head.training.collect.verb import collect
from accept_head.training.learn import run
from accept_head.training.learn.splits import Splits, read_splits
from accept_head.training.learn.verb import train

HOME = REPOSITORY / "runs" / "real"  # heads
SHIPPED = REPOSITORY / "checkpoints" / "qwen2.5-coder"
TRACES = REPOSITORY / "benchmarks" / "traces" / "qwen2.5-coder"  # and prompts; they take long to make
MODELS = REPOSITORY / "runs" / "models" / "qwen"
DATA = REPOSITORY.parent / "shared" / "data"
TARGET, DRAFT = str(MODELS / "target"), str(MODELS / "draft")
HUB = {"target": "Qwen/Qwen2.5-Coder-1.5B-Instruct", "draft": "Qwen/Qwen2.5-Coder-0.5B-Instruct"}
WEIGHTS = """- its weights were made with the official GGUF files (Q4_K_M) of these models, dequantised to bfloat16;
  sha256 of the 1.5B's `cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046`, of the 0.5B's
  `1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32`; with the unquantised weights the library says once
  that they are others, and text stays exact"""
LONGEST = 700  # characters of a prompt: on a CPU prefill would take most of the time else
TRAIN, DEV = {"code": 400, "maths": 400, "chat": 500, "tools": 100}, 25  # of each domain
TEST = {"humaneval": 75, "specbench": 75}
TEXT: dict[str, Any] = {"top_k": 0, "max_new_tokens": 96, "batch_size": 25, "dtype": "bfloat16"}
PART = 100  # train prompts in a folder of traces: what can be trained on before all is collected
ALIKE = "alike"  # test prompts of the train prompts' kind: the last of these, which are not trained on
TRAIN_PARTS = tuple(f"train{place:02}" for place in range(sum(TRAIN.values()) // PART - 1))
SPLITS = ("dev", "test", *TRAIN_PARTS, ALIKE)
COSTS = (0.02, 0.05, 0.1, 0.2, 0.43)  # the last one as measured on 2 CPU cores
T_DRAFT = 0.1  # seconds, there
RULE_NAMES = ("cumulative-confidence", "max-prob", "confidence", "entropy", "online-logistic", "online-signals")
DECAYS = (0, 8, 32)
NAMES = {1.0: "sampled", 0.0: "greedy"}  # of the heads in SHIPPED
REFERENCES = ("base", "cumulative-confidence", "max-prob", "online-logistic")

Record = dict[str, Any]


def main() -> None:
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("collect", "ladder", "domains", "heads"))
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS), help="what to collect")
    parser.add_argument("--temperatures", nargs="+", type=float, choices=(1.0, 0.0), default=[1.0, 0.0])
    parser.add_argument("--informed", action="store_true", help="the informed bound, too: a target forward over test")
    options = parser.parse_args()
    if options.part == "collect":
        write_prompts()
        for temperature in options.temperatures:
            for split in options.splits:
                collected(split, temperature)
        return
    if options.part == "heads":
        for temperature in options.temperatures:
            print(f"wrote {shipped(temperature)}")
        return
    path = RESULTS / "real_pair.json"
    for temperature in options.temperatures:
        if options.part == "ladder":
            found = ladder_of(temperature, informed=options.informed)
        else:
            found = {"domains": domains_of(temperature)}
        result = read_json(path) if path.is_file() else {}
        result = {name: result.get(name, []) for name in ("text", "quality", "ladder", "domains")}
        for name, rows in found.items():
            others = [row for row in result[name] if row["temperature"] != temperature]
            result[name] = others + [{"temperature": temperature, **row} for row in rows]
        write_result("real_pair", {"costs": COSTS, **result}, command="python benchmarks/real_pair.py ladder domains")
    print(f"wrote {path}")


# --- prompts ---------------------------------------------------------------------------------------------------------


def write_prompts() -> None:
    """TRACES/prompts/SPLIT.jsonl, chat messages with a domain; drawn by seed, always the same."""
    if all(prompts_file(split).is_file() for split in SPLITS):
        return
    splits: dict[str, list[Record]] = {"train": [], "dev": []}
    for domain, texts in texts_by_domain().items():
        chosen = drawn(texts, TRAIN[domain] + DEV)
        splits["dev"] += [message(domain, each) for each in chosen[:DEV]]
        splits["train"] += [message(domain, each) for each in chosen[DEV:]]
    completions = [
        f"Complete this function:\n```python\n{r['prompt']}```" for r in read("eval_humaneval/HumanEval.jsonl.gz")
    ]
    turns = [(record["category"], record["turns"][0]) for record in read("eval_specbench/question.jsonl")]
    category = {text: name for name, text in turns}
    splits["test"] = [message("humaneval", each) for each in drawn(completions, TEST["humaneval"])]
    splits["test"] += [
        message(f"specbench/{category[each]}", each) for each in drawn([text for _, text in turns], TEST["specbench"])
    ]
    prompts_file("dev").parent.mkdir(parents=True, exist_ok=True)
    train = splits.pop("train")
    random.Random(0).shuffle(train)  # so that each part is of all domains
    splits |= {name: train[PART * place : PART * (place + 1)] for place, name in enumerate((*TRAIN_PARTS, ALIKE))}
    for split, records in splits.items():
        records.sort(key=lambda record: len(record["prompt"][0]["content"]))  # those of a batch are padded alike
        prompts_file(split).write_text("".join(json.dumps(record) + "\n" for record in records))


def texts_by_domain() -> dict[str, list[str]]:
    """All texts of the train prompts' kind."""
    sources: dict[str, tuple[str, Callable[[Record], str]]] = {
        "code": ("code_mbpp/mbpp.jsonl", lambda r: f"{r['text']}\nIt must pass: {r['test_list'][0]}"),
        "maths": ("math_gsm8k/train.jsonl.gz", lambda r: r["question"]),
        "chat": ("instr_dolly/dolly_3k.jsonl.gz", lambda r: f"{r['instruction']}\n{r['input']}".strip()),
        "tools": ("instr_toolcall/glaive_toolcall_en_demo.jsonl", _tool_call),
    }
    return {domain: [text(record) for record in no_tests(file)] for domain, (file, text) in sources.items()}


def drawn(texts: Sequence[str], count: int) -> list[str]:
    fitting = [text for text in dict.fromkeys(texts) if len(text) <= LONGEST]
    return random.Random(0).sample(fitting, min(count, len(fitting)))


def message(domain: str, text: str) -> Record:
    return {"prompt": [{"role": "user", "content": text}], "domain": domain}


def _tool_call(record: Record) -> str:
    return f"You can call these tools, with JSON:\n{record['tools']}\n\n{record['conversations'][0]['value']}"


def prompts_file(split: str) -> Path:
    return TRACES / "prompts" / f"{split}.jsonl"


def no_tests(file: str) -> list[Record]:
    """Its records, without those that share text with prompts that models are tested on."""
    overlap = {(each["file"], each["line"]) for each in read("OVERLAP.jsonl")}
    return [record for line, record in enumerate(read(file)) if (file, line) not in overlap]


def read(name: str) -> Iterable[Record]:
    path = DATA / name
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [json.loads(line) for line in lines]


# --- traces ----------------------------------------------------------------------------------------------------------


def collected(split: str, temperature: float) -> Path:
    """A folder of traces of this split, complete."""
    folder = TRACES / f"t{temperature:g}" / split
    if not is_collected(folder):
        collect(
            TARGET,
            DRAFT,
            prompts=str(prompts_file(split)),
            out=str(folder),
            temperature=temperature,
            seed=SPLITS.index(split),
            shard_size=TEXT["batch_size"],
            **TEXT,
        )
    return folder


def is_collected(folder: Path) -> bool:
    return (folder / CONFIG_NAME).is_file() and not missing_shards(folder, TraceConfig.load(folder))


# --- the ladder ------------------------------------------------------------------------------------------------------


def ladder_of(temperature: float, *, informed: bool) -> dict[str, list[dict[str, Any]]]:
    """text: what there is. quality: of each head and signal on test tokens. ladder: gains, as in ladder.json."""
    traces_of = TRACES / f"t{temperature:g}"
    parts = train_parts(temperature)
    prompts = sum(TraceConfig.load(part).num_prompts for part in parts)
    heads = {name: loaded(made(name, parts, temperature)) for name in rungs(prompts, temperature)}
    dev = coupled_of(traces_of / "dev")
    by_cost = {name: settings_by_cost(dev, head) for name, head in heads.items()}
    choices = dict.fromkeys(heads, range(len(COSTS)))
    on_grid = settings_of(dev, heads)
    judge = partial(judged, on_grid, temperature=temperature, references=REFERENCES, ratios=COSTS, choices=choices)
    found: dict[str, list[dict[str, Any]]] = {"text": [], "quality": [], "ladder": []}
    settings, known = [], []
    for split in (split for split in ("test", ALIKE) if is_collected(traces_of / split)):
        traces, tables = coupled_of(traces_of / split), None
        if informed and split == "test":
            tables = informed_tables(traces, draft_model(), lambda: load_model(TARGET, "--target", dtype=TEXT["dtype"]))
        at_cost = {name: replay_thresholds(traces, HeadPolicy(heads[name], 0.5), by_cost[name], name) for name in heads}
        settings.append(settings_of(traces, heads) | at_cost)
        known.append(known_of(traces, tables))
        tokens = {"train_prompts": prompts, "dev_tokens": dev.positions, "test_tokens": traces.positions}
        found["text"].append({"tested_on": split, **tokens})
        qualities = qualities_of(traces, heads).items()
        found["quality"] += [{"tested_on": split, "of": name, **quality} for name, quality in qualities]
        found["ladder"] += [{"tested_on": split, **row} for row in judge(settings[-1], known=known[-1])]
    if len(known) > 1:
        together = {name: joined(*(one[name] for one in settings)) for name in settings[0]}
        of_both = Known(joined(*(one.lengths for one in known)), joined(*([one.oracle] for one in known))[0])
        found["ladder"] += [{"tested_on": "both", **row} for row in judge(together, known=of_both)]
    return found


def joined(*replayed: Sequence[Replayed]) -> list[Replayed]:
    """The same policies on the responses of several traces."""
    return [
        replace(
            parts[0],
            counts=np.concatenate([part.counts for part in parts]),
            **{name: sum(getattr(part, name) for part in parts) for name in ("draft_lengths", "at_risk", "accepted")},
        )
        for parts in zip(*replayed, strict=True)
    ]


def settings_by_cost(dev: CoupledTraces, head: AcceptanceHead) -> list[Setting]:
    """For each of COSTS, as `accept-head tune` does."""
    settings = []
    for c in COSTS:
        threshold, _ = cost_aware(dev, HeadPolicy(head, 0.5), ForwardCosts(t_draft=c, t_target=1.0), k_max=K_MAX)
        settings.append(Setting(threshold=threshold, k_max=K_MAX))
    return settings


def settings_of(traces: CoupledTraces, heads: Mapping[str, AcceptanceHead]) -> dict[str, list[Replayed]]:
    """All settings of the rules, and of the heads that are also chosen by a grid."""
    rules = {name: rule_settings(traces, name) for name in RULE_NAMES}
    return rules | {f"{name}, by the grid": head_settings(traces, heads[name]) for name in ("base", "default")}


def train_parts(temperature: float) -> list[Path]:
    """Those that are there."""
    folders = [TRACES / f"t{temperature:g}" / part for part in TRAIN_PARTS]
    return [folder for folder in folders if is_collected(folder)]


def rungs(prompts: int, temperature: float) -> list[str]:
    """Heads by recipe and text. The paper's, whose token mixing runs the draft in each epoch, of 100 prompts, and for
    time at T = 1 only."""
    counts = [count for count in (10, 30, 100, 300) if count < prompts]
    bases, defaults = ([f"{name}, {count} prompts" for count in counts] for name in ("base", "default"))
    paper = ["specdecpp, 100 prompts"] if temperature else []
    return [*bases, "base", *defaults[2:], "default", *paper]


def made(name: str, parts: Sequence[Path], temperature: float) -> Path:
    """The folder of a head, trained unless it was before on the same text."""
    prompts = sum(TraceConfig.load(part).num_prompts for part in parts)
    out = HOME / f"t{temperature:g}" / f"{name.replace(', ', '_').replace(' ', '')}_of_{prompts}"
    if not (out / "model.safetensors").is_file():
        gc.collect()  # a run leaves its draft in cycles
        of, _, part = name.partition(", ")
        recipe: Any = {"base": "signals"}.get(of, of)
        options: dict[str, Any] = {"cache": True} if recipe == "default" else {}
        folders = parts_with(parts, int(part.split()[0])) if part.endswith("prompts") else parts
        train(
            traces=[str(folder) for folder in folders],
            draft=DRAFT,
            dev_traces=str(parts[0].parent / "dev"),
            out=str(out),
            recipe=recipe,
            **options,
        )
    return out


def parts_with(parts: Sequence[Path], count: int) -> list[Path]:
    """The first so many train prompts; those of a part are sorted by length, so every so manyth of it."""
    whole, rest = divmod(count, PART)
    chosen = list(parts[:whole])
    if rest:
        step = PART // rest
        name = f"{parts[whole].parent.name}_{rest}"
        chosen.append(part_of(parts[whole], name, lambda index, _: index % step == 0 and index < rest * step))
    return chosen


# --- heads to ship ---------------------------------------------------------------------------------------------------


def shipped(temperature: float) -> Path:
    """The default head in SHIPPED, tuned on dev prompts for the last of COSTS, with the models' names on the Hub."""
    head, out = made("default", train_parts(temperature), temperature), SHIPPED / NAMES[temperature]
    dev = TRACES / f"t{temperature:g}" / "dev"
    ship(head, out, HUB, dev, DRAFT, t_draft=T_DRAFT, c=COSTS[-1], note=WEIGHTS, more=gains_table(temperature))
    return out


def ship(
    head: Path,
    out: Path,
    names: dict[str, str],
    dev: Path,
    draft: str,
    *,
    t_draft: float,
    c: float,
    note: str,
    more: str = "",
) -> None:
    """Copy a trained head, tuned on these traces for these costs, with a card. names: of target and draft. note: in
    place of the card's line on the base model. more: at its end."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(head / WEIGHTS_NAME, out)
    for name in (HEAD_CONFIG_NAME, "metrics.json", TRAINING_NAME):
        (out / name).write_text((head / name).read_text().replace(f"{REPOSITORY}/", ""))
    replace(TraceConfig.load(head), **names).save(out)
    tuned = head.parent / f"{head.name}_tuned.json"
    tune(str(dev), draft, str(tuned), [str(out)], t_draft=t_draft, t_target=t_draft / c, dtype=TEXT["dtype"])
    facts = CardFacts(
        config=read_stored(out)[0],
        traces=TraceConfig.load(out),
        metrics=read_json(out / "metrics.json"),
        decoding=read_json(out / "decoding.json"),
        license="apache-2.0",
    )
    card = model_card(facts)
    card.data.base_model = [name for name in names.values() if not (REPOSITORY / name).is_dir()]
    (out / "README.md").write_text(str(card).replace(NO_BASE_MODEL, note) + more)


def gains_table(temperature: float) -> str:
    """What real_pair.json says of unseen prompts."""
    found = read_json(RESULTS / "real_pair.json")["ladder"]
    of = {
        (row["rung"].partition(":")[0], row["c"]): row["gain_over_best_fixed"]
        for row in found
        if row["temperature"] == temperature and row["tested_on"] == "both"
    }
    names = {
        "default": "this head",
        "cumulative-confidence": "`cumulative-confidence`, which needs no training",
        "online-logistic": "vLLM's online estimator",
        "oracle": "an oracle that knows every rejection",
    }
    rows = [f"| {shown} | {' | '.join(f'{of[rung, c]:.1%}' for c in COSTS)} |" for rung, shown in names.items()]
    return f"""
Gain in tokens/s over the best fixed draft length, by replay of 250 other prompts on which nothing was chosen; c is the
time of a draft forward over that of a target forward, and every rule is tuned for each c:

| | {" | ".join(f"c = {c:g}" for c in COSTS)} |
|---|{"--:|" * len(COSTS)}
""" + "".join(f"{row}\n" for row in rows)


# --- domains ---------------------------------------------------------------------------------------------------------


def domains_of(temperature: float) -> list[dict[str, Any]]:
    """What a residual saves of its base's binary KL on dev prompts, by how strongly its weights decay: in % on domains
    that it was trained on, and on one that neither it nor its base was. Stopped at its last epoch."""
    parts, folder = train_parts(temperature), TRACES / f"t{temperature:g}" / "dev"
    dev = coupled_of(folder)
    at = np.repeat(dev.domains, dev.lengths)
    rows = []
    for decay, left_out in product(DECAYS, (None, *TRAIN)):
        out = HOME / f"t{temperature:g}" / f"decay{decay}_without_{left_out}"
        gc.collect()  # a run leaves its draft in cycles
        with patch.object(run, "read_splits", partial(splits_without, left_out)):
            train(
                traces=[str(part) for part in parts],
                draft=DRAFT,
                dev_traces=str(folder),
                out=str(out),
                cache=True,
                decay=decay,
                keep="last",
            )
        head = loaded(out)
        losses = [divergences(dev, chance) for chance in (base_chances(dev, head), chances(dev, head))]
        for domain in TRAIN:
            of_base, of_head = (float(each[at == domain].mean()) for each in losses)
            rows.append(
                {"decay": decay, "left_out": left_out, "domain": domain, "base_kl": of_base, "head_kl": of_head}
            )
            print(rows[-1], flush=True)
    return rows


def splits_without(domain: str | None, *given: Any, **options: Any) -> Splits:
    """As read_splits, without the train prompts of a domain."""
    splits = read_splits(*given, **options)
    rows = [row for row, each in enumerate(splits.train["domain"]) if each != domain]
    return replace(splits, train=splits.train.select(rows))


def base_chances(traces: CoupledTraces, head: AcceptanceHead) -> Tensor:
    """(P,) what the head's base alone would say of each position."""
    count = traces.positions
    signals = torch.stack([each[:count] for each in (traces.logprob, traces.entropy, traces.max_prob)], -1)
    return head.base_logits(signals)[:, 0].sigmoid().detach()


def divergences(traces: CoupledTraces, chance: Tensor) -> np.ndarray:
    """(P,) binary KL of each position's acceptance probability from what was predicted, nats."""
    return binary_kl(acceptance_of(traces), torch.logit(chance.double().clamp(1e-6, 1 - 1e-6))).numpy()


# --- predictions -----------------------------------------------------------------------------------------------------


def qualities_of(traces: CoupledTraces, heads: Mapping[str, AcceptanceHead]) -> dict[str, dict[str, float]]:
    """Binary KL and such of what is predicted of each test token, against its acceptance probability."""
    count = traces.positions
    predicted = {"q(Y)": traces.logprob[:count].exp(), "max q": traces.max_prob[:count]}
    predicted |= {name: chances(traces, head) for name, head in heads.items()}
    return {
        name: quality(torch.logit(chance.double().clamp(1e-6, 1 - 1e-6)), acceptance_of(traces)).to_dict()
        for name, chance in predicted.items()
    }


def chances(traces: CoupledTraces, head: AcceptanceHead) -> Tensor:
    """(P,) what the head says of each position."""
    policy = HeadPolicy(head, 0.5, lag=0 if head.config.reads == "drawn" else None)
    return score_tokens(traces, policy)[: traces.positions]


def acceptance_of(traces: CoupledTraces) -> Tensor:
    """(P,)"""
    return torch.tensor(np.concatenate(traces.traces.with_format("numpy")["acceptance"][:]))


def coupled_of(folder: Path) -> CoupledTraces:
    return load_coupled(folder, draft_model(), checkpoint_fingerprint(DRAFT), k_max=K_MAX)


def loaded(folder: Path) -> AcceptanceHead:
    (head,) = load_heads([str(folder)], draft_model()).values()
    return head


@cache
def draft_model() -> Any:
    return load_model(DRAFT, "--draft", dtype=TEXT["dtype"])


if __name__ == "__main__":
    main()
