"""Question: which policies are lossless, under which verifier?

Exact enumeration (inference/replay/lossless.py): a round of the first of several rows, on random pairs of tables, for
every policy, with settings that make it stop at different lengths, and for rules that are known to be biased, which the
same code has to find. The table goes to docs/lossless.md, between its markers.

python benchmarks/lossless.py [--pairs 200]
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from record import REPOSITORY, write_result
from torch import Tensor

from accept_head import AcceptanceHead, HeadConfig
from accept_head.cost import BatchForwardCost, PairCosts
from accept_head.inference.policies.adaedl import AdaEdlPolicy
from accept_head.inference.policies.adaspec import AdaSpecPolicy
from accept_head.inference.policies.bandit import BanditPolicy
from accept_head.inference.policies.batch_map import BatchMapPolicy
from accept_head.inference.policies.batch_stop import BatchStopPolicy
from accept_head.inference.policies.budget import BudgetPolicy
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.cumulative_confidence import CumulativeConfidencePolicy
from accept_head.inference.policies.drafting import Drafting
from accept_head.inference.policies.dsde import DsdePolicy
from accept_head.inference.policies.entropy import EntropyPolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.goodput import GoodputPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.hf_confidence import HfConfidencePolicy
from accept_head.inference.policies.hf_heuristic import HfHeuristicPolicy
from accept_head.inference.policies.leviathan import LeviathanPolicy
from accept_head.inference.policies.max_prob import MaxProbPolicy, MeanMaxProbPolicy
from accept_head.inference.policies.online.logistic import OnlineLogisticPolicy
from accept_head.inference.policies.online.recalibrated import RecalibratedHeadPolicy
from accept_head.inference.policies.online.signals import OnlineSignalsPolicy, prior_base
from accept_head.inference.policies.svip import SvipPolicy
from accept_head.inference.policy import DraftPolicy, DraftStep, RowPolicy, Signal
from accept_head.inference.replay.lossless import HIDDEN, PROVED, Enumerated, Shape, enumerate_rounds
from accept_head.signals import SIGNALS

SHAPES = (Shape(vocab=3, depth=3, rows=3), Shape(vocab=4, depth=2, rows=2))
# docs/theory.md §9: 300 pairs of unrelated uniform tables, one row; the mean and the largest TV. The costs behind its
# two argmax rules are not known, so ours need not be the same.
REFERENCE = Shape(vocab=3, depth=2, rows=1, history=0, concentration=1.0, agreement=0.0)
REFERENCE_VALUES = {
    "drop by q(drawn)": (0.106, 0.264),
    "argmax over survival of drawn tokens": (0.060, 0.250),
    "retrospective argmax, prefix-only": (0.018, 0.216),
}
BIASED = 1e-3  # mean total variation that a biased rule exceeds
DOCUMENT = REPOSITORY / "docs" / "lossless.md"
BEGIN, END = "<!-- benchmarks/lossless.py -->", "<!-- end -->"


def _forward(beta: float, gamma: float) -> BatchForwardCost:
    return BatchForwardCost(alpha=0.0, beta=beta, gamma=gamma, r_squared=1.0)


COSTS = PairCosts(draft=_forward(0.002, 0.01), target=_forward(0.05, 0.4))
GRAPH = PairCosts(draft=_forward(0.0, 0.01), target=_forward(1.0, 4.0))
DEAR = PairCosts(draft=_forward(0.0, 0.002), target=_forward(0.1, 0.4))  # dear verification: tokens are dropped


def built(reads: Any = "drawn") -> AcceptanceHead:
    """A head whose scores are all over [0, 1]."""
    torch.manual_seed(7)
    statistics: Any = {"signals": SIGNALS, "signal_mean": (-1.0, 1.0, 0.5), "signal_std": (1.0, 0.5, 0.2)}
    head = AcceptanceHead(HeadConfig(hidden_size=HIDDEN, depth=1, reads=reads, **statistics))
    torch.nn.init.normal_(head.output.weight, std=1.0)
    return head


def head(reads: Any = "drawn", **options: Any) -> HeadPolicy:
    return HeadPolicy(built(reads), 0.6, **options)


def learning(train: bool) -> RecalibratedHeadPolicy:
    """It learns within the few rounds that are played."""
    policy = RecalibratedHeadPolicy(built("before"), 0.6, online=True, train=train, prior=0.1)
    if policy.training is not None:
        policy.training.INTERVAL, policy.training.FEWEST = 2, 1
    return policy


POLICIES: dict[str, Callable[[], DraftPolicy]] = {
    "fixed": lambda: FixedPolicy(2),
    "leviathan": lambda: LeviathanPolicy(0.4),
    "hf-heuristic": lambda: HfHeuristicPolicy(2, k_max=4),
    "hf-confidence": lambda: HfConfidencePolicy(0.4),
    "confidence": lambda: ConfidencePolicy(0.4),
    "cumulative-confidence": lambda: CumulativeConfidencePolicy(0.3),
    "max-prob": lambda: MaxProbPolicy(0.6),
    "max-prob-mean": lambda: MeanMaxProbPolicy(0.6),
    "entropy": lambda: EntropyPolicy(0.8),
    "svip": lambda: SvipPolicy(0.35),
    "adaedl": lambda: AdaEdlPolicy(0.6),
    "online-logistic": lambda: OnlineLogisticPolicy(0.5),
    "online-signals": lambda: OnlineSignalsPolicy(0.6, prior=0.1),
    "dsde": lambda: DsdePolicy(2, k_min=1, k_max=4, calibration=2),
    "bandit": lambda: BanditPolicy(2),
    "batch-map": lambda: BatchMapPolicy([(1, 1, 3), (2, 2, 2), (3, 8, 1)]),
    "goodput": lambda: GoodputPolicy(COSTS, k_max=3, prior=2.0),
    "adaspec": lambda: AdaSpecPolicy(DEAR, k_max=3),
    "budget": lambda: BudgetPolicy(COSTS, k_max=3),
    "head, lag 0": lambda: head(lag=0),
    "head, lag 1": lambda: head(lag=1),
    "head that reads before": lambda: head(reads="before"),
    "head that is a base alone": lambda: HeadPolicy(prior_base(), 0.6),
    "head, `online=true`": lambda: learning(train=False),
    "head, `online=true,train=true`": lambda: learning(train=True),
    "head, `costs=`": lambda: BatchStopPolicy(head(reads="before"), COSTS),
    "max-prob, `costs=`": lambda: BatchStopPolicy(MaxProbPolicy(0.6), COSTS),
}


class Dropping(RowPolicy):
    """Drafts 3 tokens; `kept` says from their scores, (batch, depths), which to verify: a row's first that are kept."""

    trims = True
    max_draft_tokens = 3
    lossless = frozenset({"match"})

    def __init__(self, signal: Signal, kept: Callable[[Tensor], Tensor]):
        self.needs, self.kept = frozenset({signal}), kept

    def start_round(self, live: Tensor) -> Tensor:
        self.scores: list[Tensor] = []
        return super().start_round(live)

    def keep_drafting(self, step: DraftStep) -> Tensor:
        score = step.max_prob if step.logprob is None else step.logprob.exp()
        assert score is not None
        self.scores.append(score)
        return step.active

    def trim(self, drafted: Tensor) -> Tensor:
        return self.kept(torch.stack(self.scores, dim=1)).long().cumprod(-1).sum(-1)


def best_of_batch(scores: Tensor) -> Tensor:
    """TETRIS, DSpark: the m tokens with the largest survival, m by argmax over what this round drew; the forward takes
    as long as the next of the sizes that a serving engine captured. (batch, depths) → bool."""
    survivals = scores.cumprod(-1)
    ranked, order = torch.sort(survivals.T.flatten(), descending=True, stable=True)
    tokens = len(scores) + torch.arange(len(ranked) + 1)
    padded = 2.0 ** tokens.float().log2().ceil()
    best = ((len(scores) + torch.nn.functional.pad(ranked.cumsum(0), (1, 0))) / (4 + padded)).argmax()
    kept = torch.zeros(len(ranked), dtype=torch.bool)
    kept[order[:best]] = True
    return kept.view(scores.T.shape).T


def best_in_twos(scores: Tensor) -> Tensor:
    """The same with forwards that are as long for one candidate as for two: with one row and rounds of two, the sizes
    1, 2, 4 never make the first candidate depend on the second."""
    survivals = scores.cumprod(-1)
    gains = torch.nn.functional.pad(survivals[0].cumsum(0), (1, 0))
    best = ((1 + gains) / (2 + 2 * (torch.arange(len(gains)) / 2).ceil())).argmax()
    return (torch.arange(scores.shape[1]) < best)[None]


def drafted_probability(scores: Tensor) -> Tensor:
    return scores >= 0.5


def lossy_adaspec() -> DraftPolicy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AdaSpecPolicy(COSTS, k_max=3, lossy=True)


LOSSY: dict[str, Callable[[], DraftPolicy]] = {
    "drop by q(drawn)": lambda: Dropping(Signal.LOGPROB, drafted_probability),
    "argmax over survival of drawn tokens": lambda: Dropping(Signal.LOGPROB, best_of_batch),
    "retrospective argmax, prefix-only": lambda: Dropping(Signal.MAX_PROB, best_of_batch),
    "adaspec, lossy": lossy_adaspec,
    "budget, retrospective, graph": lambda: BudgetPolicy(GRAPH, k_max=3, retrospective=True, graph=True, cap=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    options = parser.parse_args()
    rows = []
    for name, make in (POLICIES | LOSSY).items():
        found = [enumerate_rounds(make, pairs=options.pairs, shape=shape) for shape in SHAPES]
        rows.append(row_of(name, make(), found))
        print(rows[-1], flush=True)
    reference = [compared(name, values) for name, values in REFERENCE_VALUES.items()]
    shapes = [f"vocabulary {s.vocab}, depth {s.depth}, {s.rows} rows, {s.history} rounds before" for s in SHAPES]
    result = {"pairs": options.pairs, "shapes": shapes, "policies": rows, "reference": reference}
    print(f"wrote {write_result('lossless', result)}")
    write_table(rows)


def compared(name: str, values: tuple[float, float]) -> dict[str, Any]:
    signal = Signal.MAX_PROB if "prefix-only" in name else Signal.LOGPROB
    rule = drafted_probability if name.startswith("drop") else best_in_twos
    found = enumerate_rounds(lambda: Dropping(signal, rule), pairs=300, shape=REFERENCE).ratio
    row = {"rule": name, "mean": float(found.mean()), "max": float(found.max()), "field_md": values}
    print(row, flush=True)
    return row


def row_of(name: str, policy: DraftPolicy, found: list[Enumerated]) -> dict[str, Any]:
    """Of all pairs of all shapes together."""
    asked = Drafting(policy)
    row: dict[str, Any] = {"policy": name, "says": sorted(asked.lossless), "trims": asked.trims}
    for verifier in ("ratio", "match"):
        values = [value for one in found for value in getattr(one, verifier)]
        row[verifier] = {"mean": sum(values) / len(values), "max": max(values)}
    row |= {
        "proved": sorted(verifier for verifier in ("ratio", "match") if row[verifier]["max"] < PROVED),
        "drafted": [one.drafted.tolist() for one in found],
        "submitted": [one.submitted.tolist() for one in found],
    }
    return row


def write_table(rows: list[dict[str, Any]]) -> None:
    lines = [
        "| policy | drops drawn tokens | lossless, it says | ratio test: mean, largest TV | sampler match |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        ratio, match = (
            "0 (proved)" if row[name]["max"] < PROVED else f"**{row[name]['mean']:.3f}, {row[name]['max']:.3f}**"
            for name in ("ratio", "match")
        )
        says = "both" if len(row["says"]) == 2 else ", ".join(row["says"])
        lines.append(f"| {row['policy']} | {'yes' if row['trims'] else 'no'} | {says} | {ratio} | {match} |")
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text("\n".join([before + BEGIN, *lines, END + after]), encoding="utf-8")


if __name__ == "__main__":
    main()
