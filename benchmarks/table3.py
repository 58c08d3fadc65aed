"""Question: which depth and which w_rej? The paper's table 3 and figure 3, by a sweep and by replay.

Trains 20 heads in one run (configs/table3.yaml: depth 0 to 4 x w_rej 1, 3, 6, 12), prices each at the paper's
thresholds and bounds (0.1 to 0.9, 2 to 20 tokens, read one token late) on test traces, and reports train and dev KL,
and the best throughput and its threshold, in all and by domain. Figure 3: discard against verification rate of all of
them and of fixed lengths; whether a head lies on the better side of every fixed length.

python benchmarks/table3.py                       # the embedded pair, the paper's recipe
python benchmarks/table3.py --recipe default      # our recipe
python benchmarks/table3.py --heads HEADS --traces TEST --draft D --costs costs.json   # a sweep of your own
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import embedded
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from record import REPOSITORY, RESULTS, TINY, write_result

from accept_head import load_pair
from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.command.libraries import quiet_libraries
from accept_head.cost import ForwardCosts
from accept_head.files import read_json
from accept_head.inference.costs.files import read_costs
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.profile.regression import regress_rounds
from accept_head.inference.replay.comparison import throughputs
from accept_head.inference.replay.coupled import CoupledTraces, load_coupled
from accept_head.inference.replay.thresholds import Setting, replay_thresholds
from accept_head.inference.replay.walk import Replayed, replay_fixed, replay_oracle
from accept_head.inference.tune.heads import load_heads
from accept_head.pair import load_model
from accept_head.prompts import load_prompts
from accept_head.training.learn.verb import train

DEPTHS, WEIGHTS, THRESHOLDS = (0, 1, 2, 3, 4), (1.0, 3.0, 6.0, 12.0), (0.1, 0.3, 0.5, 0.7, 0.9)
FIXED = (1, 2, 3, 4, 6, 8, 10, 12, 14)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="specdecpp")
    parser.add_argument("--heads")
    parser.add_argument("--traces")
    parser.add_argument("--draft", default=str(TINY / "draft"))
    parser.add_argument("--costs")
    options = parser.parse_args()
    quiet_libraries()
    folder = Path(options.heads) if options.heads else trained(options.recipe)
    draft, fingerprint = load_model(options.draft, "--draft"), checkpoint_fingerprint(options.draft)
    names = sorted(path.parent for path in folder.glob("*/model.safetensors"))
    heads = load_heads([str(name) for name in names], draft)
    traces = load_coupled(Path(options.traces or embedded.traces("test")), draft, fingerprint)
    costs = read_costs(options.costs, None, None) if options.costs else measured_costs()
    priced = {name: price(traces, HeadPolicy(head, 0.5)) for name, head in heads.items()}
    rows = [row(Path(name), replayed, traces, costs) for name, replayed in priced.items()]
    fixed, oracle = replay_fixed(traces, FIXED), replay_oracle(traces)
    name = "table3" if options.recipe == "specdecpp" else f"table3_{options.recipe}"
    result = {
        "recipe": options.recipe,
        "prompts": len(traces.lengths),
        "costs": asdict(costs),
        "rows": rows,
        "fixed": [point(policy, costs) for policy in fixed],
        "oracle": point(oracle, costs),
        "figure_3": {
            Path(name).name: [point(policy, costs) for policy in replayed] for name, replayed in priced.items()
        },
        "fixed_lengths_that_a_head_beats_in_both_rates": dominated(fixed, [r for rs in priced.values() for r in rs]),
    }
    for line in rows:
        print({key: value for key, value in line.items() if key != "domains"})
    print(
        f"fixed lengths that some head beats in both rates: {result['fixed_lengths_that_a_head_beats_in_both_rates']}"
    )
    print(f"wrote {write_result(name, result)} and {draw(fixed, oracle, priced, RESULTS / f'{name}.png')}")


def trained(recipe: str) -> Path:
    """The sweep on the embedded pair, unless it is there."""
    folder = REPOSITORY / "runs" / f"table3_{recipe}"
    if not folder.is_dir():
        train(
            traces=str(embedded.traces("train")),
            dev_traces=str(embedded.traces("dev")),
            draft=str(TINY / "draft"),
            out=str(folder),
            recipe=recipe,  # type: ignore[arg-type]
            depth=list(DEPTHS),
            w_rej=list(WEIGHTS),
        )
    return folder


def measured_costs() -> ForwardCosts:
    pair = load_pair(TINY / "target", TINY / "draft")
    prompts = load_prompts(str(TINY / "prompts" / "dev.jsonl"), pair.tokenizer, max_prompts=8)
    return regress_rounds(pair, [prompt.ids for prompt in prompts]).costs


def price(traces: CoupledTraces, policy: HeadPolicy) -> list[Replayed]:
    k_min = 1 if policy.head.config.reads == "before" else 2
    settings = [Setting(threshold=h, k_min=k_min, k_max=20) for h in THRESHOLDS]
    return replay_thresholds(traces, policy, settings, "head")


def row(name: Path, replayed: list[Replayed], traces: CoupledTraces, costs: ForwardCosts) -> dict[str, Any]:
    metrics, training = read_json(name / "metrics.json"), read_json(name / "training_config.json")
    domains = np.array(traces.domains)
    groups = {domain: domains == domain for domain in sorted(set(domains))}
    return {
        "depth": training["depth"],
        "w_rej": training["w_rej"],
        "train_kl": metrics["train"]["token"]["binary_kl"],
        "dev_kl": metrics["dev"]["token"]["binary_kl"],
        **best(replayed, np.ones(len(domains), dtype=bool), costs),
        "domains": {domain: best(replayed, group, costs) for domain, group in groups.items()},
    }


def best(replayed: list[Replayed], group: np.ndarray, costs: ForwardCosts) -> dict[str, float]:
    speeds = [float(throughputs(policy.counts[group].sum(0), costs)) for policy in replayed]
    return {"throughput": max(speeds), "threshold": replayed[int(np.argmax(speeds))].params["threshold"]}


def point(policy: Replayed, costs: ForwardCosts) -> dict[str, Any]:
    return {
        **policy.params,
        "discard_rate": policy.total.discard_rate,
        "verification_rate": policy.total.verification_rate,
        "throughput": float(throughputs(policy.counts.sum(0), costs)),
    }


def dominated(fixed: list[Replayed], heads: list[Replayed]) -> list[int]:
    """Fixed lengths with a head's setting that is at most as high in both rates and lower in one."""
    points = np.array([(head.total.discard_rate, head.total.verification_rate) for head in heads])
    lengths = []
    for policy in fixed:
        mine = np.array([policy.total.discard_rate, policy.total.verification_rate])
        if ((points <= mine).all(1) & (points < mine).any(1)).any():
            lengths.append(int(policy.params["k"]))
    return lengths


def draw(fixed: list[Replayed], oracle: Replayed, priced: dict[str, list[Replayed]], path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for number, (label, policies, style) in enumerate(
        [("fixed K", fixed, "o-"), *((Path(name).name, replayed, ".-") for name, replayed in priced.items())]
    ):
        x, y = ([getattr(p.total, rate) for p in policies] for rate in ("discard_rate", "verification_rate"))
        colour, width = ("black", 1.6) if number == 0 else (plt.cm.viridis(number / (len(priced) + 1)), 0.7)
        axes.plot(x, y, style, color=colour, linewidth=width, markersize=4, label=label if number == 0 else None)
    axes.plot(oracle.total.discard_rate, oracle.total.verification_rate, "k*", markersize=11, label="oracle")
    axes.plot([], [], ".-", color=plt.cm.viridis(0.5), label=f"{len(priced)} heads x {len(THRESHOLDS)} thresholds")
    axes.set(xlabel="discard rate", ylabel="verification rate", title="Figure 3: nearer to the corner is better")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    return path


if __name__ == "__main__":
    main()
