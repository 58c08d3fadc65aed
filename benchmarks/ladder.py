"""Question: which rung of the ladder pays: the paper's head, a base alone, a residual to it, a look ahead?

On the embedded pair, without top-k. Heads are trained on the train prompts (missing traces and heads are made first,
under runs/), each rule's threshold and bounds are chosen by replay on the dev prompts, and judged on the test prompts,
for every c = t_draft / t_target, at T = 1 and greedily. The best fixed K that gains are over is the best one *on the
test prompts*. 95 % intervals are bootstraps over test prompts; `over` says how much faster a rung is than others, on
the same prompts.

ladder: one row a rung.   curve: the recommended head on a quarter to four seeds of the train prompts.
domains: the same head trained on one domain, tested on each.

python benchmarks/ladder.py [--only ladder curve domains] [--temperatures 1 0]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from record import REPOSITORY, RESULTS, TINY, write_result

from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.command.libraries import quiet_libraries
from accept_head.cost import ForwardCosts
from accept_head.files import read_json
from accept_head.head.network import AcceptanceHead
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.replay.bootstrap import draws, interval
from accept_head.inference.replay.comparison import compare, throughputs
from accept_head.inference.replay.coupled import CoupledTraces, load_coupled
from accept_head.inference.replay.informed import replay_informed
from accept_head.inference.replay.thresholds import Setting, replay_thresholds
from accept_head.inference.replay.truth import InformedTables, informed_tables
from accept_head.inference.replay.walk import Replayed, replay_fixed, replay_oracle
from accept_head.inference.tune.heads import load_heads
from accept_head.inference.tune.rules import LEARNERS, RULES, ask
from accept_head.pair import load_model
from accept_head.trace.config import CONFIG_NAME, TraceConfig
from accept_head.trace.shards import read_traces, write_shard
from accept_head.training.collect.verb import collect
from accept_head.training.learn.verb import train

DRAFT, TARGET = str(TINY / "draft"), str(TINY / "target")
COSTS = (0.05, 0.1, 0.21)
K_MAX = 20
SEEDS = 4  # of sampled train text
HEAD_GRID = (*(round(0.02 * step, 2) for step in range(1, 50)), 0.99)
BOUNDS = [(low, high) for low in (1, 2) for high in (4, 8, 20)]
RULE_NAMES = ("max-prob", "confidence", "entropy", "online-logistic")

# How each head is trained, on all the text there is: of T = 1, then of greedy decoding. None: the shipped head, of the
# default recipe.
SMALL_STEPS = {"batch_size": 4, "micro_batch_size": 4}
PAPER = {"recipe": "specdecpp", "w_rej": 1.0}
RECOMMENDED = "base + residual"
HEADS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "specdecpp": (PAPER, PAPER),
    "specdecpp, small steps": ({**PAPER, **SMALL_STEPS, "epochs": 6}, {**PAPER, **SMALL_STEPS, "epochs": 8}),
    "base": ({"recipe": "signals"}, {"recipe": "signals"}),
    RECOMMENDED: (None, None),
    "base + residual, both": ({"predicts": "both", "cache": True}, {"predicts": "both", "cache": True, "epochs": 8}),
}
REFERENCES = ("specdecpp", "specdecpp, small steps", "online-logistic", "base")


def main() -> None:
    quiet_libraries()
    parts: dict[str, Callable[[float], list[dict[str, Any]]]] = {"ladder": ladder, "curve": curve, "domains": domains}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--temperatures", nargs="+", type=float, choices=(1.0, 0.0), default=[1.0, 0.0])
    options = parser.parse_args()
    path = RESULTS / "ladder.json"
    kept = read_json(path) if path.is_file() else {}  # parts that are not run again stay
    result = {name: kept.get(name, []) for name in parts}
    for name in options.only:
        for temperature in options.temperatures:
            others = [row for row in result[name] if row["temperature"] != temperature]
            result[name] = others + [{"temperature": temperature, **row} for row in parts[name](temperature)]
            write_result("ladder", {"costs": COSTS, "text": TEXT, **result}, command="python benchmarks/ladder.py")
    print(f"wrote {path}")


# --- the parts -------------------------------------------------------------------------------------------------------


def ladder(temperature: float) -> list[dict[str, Any]]:
    rules = {"dev": {}, "test": {}}
    for split, families in rules.items():
        traces = coupled(split, temperature)
        families |= {name: rule_settings(traces, name) for name in RULE_NAMES}
        for name in HEADS:
            head = loaded(trained(name, temperature), temperature)
            families[name] = head_settings(traces, head)
            if head.config.looks_ahead:
                families[f"{name}, by the product alone"] = head_settings(traces, head, rule="product")
    return judged(rules["dev"], rules["test"], temperature, REFERENCES)


def curve(temperature: float) -> list[dict[str, Any]]:
    """The recommended head, on parts of the text."""
    rows = []
    for seeds in (0.25, 0.5, 1, 2, 4):
        name = f"{seeds:g} seeds"
        folders = train_folders(temperature, seeds)
        whole = seeds == SEEDS
        out = trained(RECOMMENDED, temperature) if whole else fitted(f"curve {name}", folders, temperature)
        head = loaded(out, temperature)
        families = [{name: head_settings(coupled(split, temperature), head)} for split in ("dev", "test")]
        positions = sum(int(np.sum([len(ids) for ids in read_traces(folder)[1]["draft_ids"]])) for folder in folders)
        rows += [
            {"seeds": seeds, "positions": positions, **row}
            for row in judged(*families, temperature)
            if row["rung"] == name
        ]
    return rows


def domains(temperature: float) -> list[dict[str, Any]]:
    """Trained on one domain or all of them, its threshold chosen on dev prompts of that; tested on each."""
    names = sorted(set(coupled("dev", temperature).domains))
    rows = []
    for learnt in (*names, "all"):
        folders = train_folders(temperature, SEEDS)
        if learnt == "all":
            out = trained(RECOMMENDED, temperature)
        else:
            folders = [part_of(folder, learnt, lambda i, d, n=learnt: d == n) for folder in folders]
            out = fitted(f"domain {learnt}", folders, temperature)
        dev, test = (
            {learnt: head_settings(coupled(split, temperature), loaded(out, temperature))} for split in ("dev", "test")
        )
        for tested in names:
            chosen_on = within(coupled("dev", temperature), None if learnt == "all" else learnt)
            rows += [
                {"trained_on": learnt, "tested_on": tested, **row}
                for row in judged(dev, test, temperature, (), chosen_on, within(coupled("test", temperature), tested))
                if row["rung"] == learnt
            ]
    return rows


def within(traces: CoupledTraces, domain: str | None) -> np.ndarray:
    """(n,) bool, the responses of a domain; None: all."""
    return np.array([domain in (None, name) for name in traces.domains])


# --- replay ----------------------------------------------------------------------------------------------------------


def head_settings(traces: CoupledTraces, head: AcceptanceHead, **options: Any) -> list[Replayed]:
    """As the authors read it, one token late, where it needs the state at the drawn token."""
    settings = [Setting(threshold=t, k_min=low, k_max=high) for low, high in bounds(traces) for t in HEAD_GRID]
    return replay_thresholds(traces, HeadPolicy(head, 0.5, **options), settings, "head")


def rule_settings(traces: CoupledTraces, name: str) -> list[Replayed]:
    if name in LEARNERS:  # none of these looks at the costs
        costs = ForwardCosts(t_draft=0.1, t_target=1.0)
        longest = sorted({8, min(K_MAX, traces.k_max)})
        return [ask(traces, name, value, costs, most) for value in LEARNERS[name].values for most in longest]
    rule = RULES[name]
    settings = [Setting(threshold=t, k_min=low, k_max=high) for low, high in bounds(traces) for t in rule.grid]
    return replay_thresholds(traces, rule(), settings, name)


def bounds(traces: CoupledTraces) -> list[tuple[int, int]]:
    return [(low, high) for low, high in BOUNDS if high <= traces.k_max]


class Known(NamedTuple):
    """What every family is compared with. lengths: no drafts, then each K. informed: None where it is not asked."""

    lengths: Sequence[Replayed]
    oracle: Replayed
    informed: Callable[[ForwardCosts], Replayed] | None = None


def known_of(traces: CoupledTraces, tables: InformedTables | None) -> Known:
    informed = None if tables is None else partial(replay_informed, traces, tables)
    return Known(replay_fixed(traces, range(min(K_MAX, traces.k_max) + 1)), replay_oracle(traces), informed)


def judged(
    dev: Mapping[str, Sequence[Replayed]],
    test: Mapping[str, Sequence[Replayed]],
    temperature: float,
    references: Sequence[str] = (),
    chosen_on: np.ndarray | None = None,
    tested_on: np.ndarray | None = None,
    *,
    known: Known | None = None,
    ratios: Sequence[float] = COSTS,
    choices: Mapping[str, Sequence[int]] | None = None,
) -> list[dict[str, Any]]:
    """Of each family the setting that is fastest on dev, as it fares on test; for every c of `ratios`. chosen_on,
    tested_on: (n,) bool, the responses that count; all when left out. known: of the test traces; of the embedded pair's
    when left out. choices: of some families, which setting is chosen for each of `ratios`."""
    if known is None:
        known = known_of(coupled("test", temperature), truth(temperature))
    none, *fixed = known.lengths
    rows = []
    for place, c in enumerate(ratios):
        costs = ForwardCosts(t_draft=c, t_target=1.0)
        chosen = {name: test[name][best(settings, costs, chosen_on)] for name, settings in dev.items()}
        chosen |= {name: test[name][indices[place]] for name, indices in (choices or {}).items()}
        policies = {"none": none} | {f"fixed:{k}": one for k, one in enumerate(fixed, 1)} | chosen
        policies["oracle"] = known.oracle
        if known.informed is not None:
            policies["informed"] = known.informed(costs)
        keep = slice(None) if tested_on is None else np.flatnonzero(tested_on)
        compared = compare([replace(one, counts=one.counts[keep]) for one in policies.values()], costs)
        shown = [*chosen, *({"informed", "oracle"} & set(policies))]
        shown.append(max((name for name in policies if name.startswith("fixed")), key=lambda n: speed(policies[n], c)))
        for name, row in zip(policies, compared, strict=True):
            if name in shown:
                rows.append({"rung": name, "c": c, **row, **over(chosen, name, references, costs)})
                show(temperature, rows[-1])
    return rows


def best(settings: Sequence[Replayed], costs: ForwardCosts, counted: np.ndarray | None) -> int:
    totals = np.array([one.counts[slice(None) if counted is None else counted].sum(0) for one in settings])
    return int(throughputs(totals, costs).argmax())


def speed(policy: Replayed, c: float) -> float:
    return float(throughputs(policy.counts.sum(0), ForwardCosts(t_draft=c, t_target=1.0)))


def over(
    chosen: Mapping[str, Replayed], name: str, references: Sequence[str], costs: ForwardCosts
) -> dict[str, dict[str, list[float]]]:
    """How much faster than each reference: [value, low, high], the same prompts drawn for both."""
    if name not in chosen or not references:
        return {}
    found = {}
    for other in references:
        pair = np.stack([chosen[name].counts, chosen[other].counts])
        mine, others = throughputs(np.einsum("rn,pnc->prc", draws(pair.shape[1]), pair), costs)
        whole = throughputs(pair.sum(1), costs)
        found[other] = [float(whole[0] / whole[1] - 1), *interval(mine / others - 1)]
    return {"over": found}


def show(temperature: float, row: Mapping[str, Any]) -> None:
    low, high = row["ci95"]["oracle_gap_closed"]
    print(
        f"T={temperature:g} c={row['c']:.2f} {row['rung']:45} {row['params']!s:44} "
        f"gain {100 * row['gain_over_best_fixed']:+5.2f} %  gap {100 * row['oracle_gap_closed']:+5.1f} % "
        f"({100 * low:.1f} to {100 * high:.1f})",
        flush=True,
    )


# --- heads -----------------------------------------------------------------------------------------------------------


def trained(name: str, temperature: float) -> Path:
    """A rung's head, on all the text there is."""
    options = HEADS[name][temperature == 0]
    if options is None:
        return TINY / "heads" / ("sampled" if temperature else "greedy")
    return fitted(name, train_folders(temperature, SEEDS), temperature, **options)


def fitted(name: str, folders: Sequence[Path], temperature: float, **options: Any) -> Path:
    """Trained unless that was done before."""
    words = "".join(letter if letter.isalnum() or letter == "." else " " for letter in name).split()
    out = REPOSITORY / "runs" / "ladder" / f"t{temperature:g}" / "_".join(words)
    if not (out / "model.safetensors").is_file():
        dev = str(collected("dev", temperature))
        train(
            traces=[str(folder) for folder in folders],
            draft=DRAFT,
            dev_traces=dev,
            out=str(out),
            **options,
        )
    return out


def loaded(folder: Path, temperature: float) -> AcceptanceHead:
    (head,) = load_heads([str(folder)], draft_model()).values()
    return head


@cache
def draft_model() -> Any:
    torch.set_num_threads(1)
    return load_model(DRAFT, "--draft")


# --- traces ----------------------------------------------------------------------------------------------------------

TEXT = {"top_k": 0, "max_new_tokens": 96}


@cache
def coupled(split: str, temperature: float, seed: int = 0) -> CoupledTraces:
    return load_coupled(collected(split, temperature, seed), draft_model(), checkpoint_fingerprint(DRAFT), k_max=K_MAX)


@cache
def truth(temperature: float) -> Any:
    return informed_tables(coupled("test", temperature), draft_model(), lambda: load_model(TARGET, "--target"))


def train_folders(temperature: float, seeds: float) -> list[Path]:
    """So many seeds of the train prompts; a part of one: the first prompts. Greedy text, and sampled text scored."""
    whole = range(max(1, int(seeds)))
    folders = [collected("train", 1.0, seed) for seed in whole] if temperature else [collected("train", 0.0)]
    folders += [] if temperature else [scored(seed) for seed in whole]
    if seeds >= 1:
        return folders
    most = seeds * TraceConfig.load(folders[0]).num_prompts
    return [part_of(folder, f"{seeds:g}", lambda i, _: i < most) for folder in folders]


def collected(split: str, temperature: float, seed: int = 0) -> Path:
    folder = text_folder(temperature) / (f"{split}_s{seed}" if seed else split)
    if not (folder / CONFIG_NAME).is_file():
        prompts = str(TINY / "prompts" / f"{split}.jsonl")
        sizes = {"batch_size": 40, "shard_size": 80}
        collect(TARGET, DRAFT, prompts=prompts, out=str(folder), temperature=temperature, seed=seed, **TEXT, **sizes)
    return folder


def scored(seed: int) -> Path:
    """Sampled text with its greedy labels."""
    folder = text_folder(0.0) / (f"on_train_s{seed}" if seed else "on_train")
    if not (folder / CONFIG_NAME).is_file():
        responses, sizes = str(collected("train", 1.0, seed)), {"batch_size": 40, "shard_size": 80}
        collect(TARGET, DRAFT, responses=responses, out=str(folder), temperature=0.0, **TEXT, **sizes)
    return folder


def text_folder(temperature: float) -> Path:
    return REPOSITORY / "runs" / "vllm" / f"t{temperature:g}" / "traces"


def part_of(folder: Path, name: str, wanted: Callable[[int, str], bool]) -> Path:
    """A folder of those traces for which wanted(index, domain); numbered anew, as a folder's are."""
    out = REPOSITORY / "runs" / "ladder" / "parts" / f"{folder.parents[1].name}_{folder.name}_{name}"
    if (out / CONFIG_NAME).is_file():
        return out
    config, traces = read_traces(folder)
    records = [
        {**record, "index": index}
        for index, record in enumerate(record for record in traces if wanted(record["index"], record["domain"]))
    ]
    out.mkdir(parents=True, exist_ok=True)
    part = TraceConfig(**{**vars(config), "num_prompts": len(records)})
    for shard, first in enumerate(range(0, len(records), config.shard_size)):
        write_shard(out, shard, records[first : first + config.shard_size])
    part.save(out)
    return out


if __name__ == "__main__":
    main()
