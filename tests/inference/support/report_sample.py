"""A report like one of `accept-head report`: policies replayed on made-up traces over real text."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np

from accept_head.cost import DecodeCounts, ForwardCosts, oracle_gap_closed, speedup, throughput
from accept_head.inference.report.data import (
    CalibrationCurve,
    DomainResult,
    PolicyResult,
    ReportData,
    ViewedResponse,
    ViewedRound,
    ViewedToken,
)

COSTS = ForwardCosts(t_draft=0.00133, t_target=0.00922, t_autoregressive=0.0072)
TEXTS = {
    "code": "def fib(n: int) -> int:\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n\n\n"
    'for i in range(10):\n\tprint(f"{i}: {fib(i)}")  # <ok> & "quoted"\n',
    "prose": "The afternoon was still, and the river lay between its banks like a sheet of lead. Somewhere beyond the "
    "orchard a gate closed, then a voice, thin with distance, called twice for a dog that didn't come.\n\nNobody "
    "answered. Martha put down the letter and listened.",
    "chat": "Sure! Here are three quick ideas:\n1. Roast the carrots with cumin – 25 minutes at 200 °C.\n2. Add lemon "
    "zest & a spoon of yoghurt.\n3. Serve with flat bread 🫓 and olives.",
}
PROMPTS = {"code": "Write a recursive Fibonacci in Python.\nPrint ten.", "prose": "Go on: It was", "chat": "Dinner?"}
EASE = {"code": 2.2, "prose": 0.5, "chat": 1.1}
DECOYS = [" the", " a", "\n", " of", " it", "  ", ",", " not", " return", "é"]
EDGES = np.linspace(0, 1, 11)


def _trace(domain: str, random: np.random.Generator) -> dict:
    """Of one response: tokens, the draft's proposals and how each would fare, and what a head makes of them."""
    tokens = re.findall(r" ?\w+|\n|\t|[ ]+(?=\S)|[^\w\s]", TEXTS[domain])
    logit = random.normal(EASE[domain], 1.6, len(tokens))
    acceptance = 1 / (1 + np.exp(-logit))
    accepted = random.random(len(tokens)) < acceptance
    proposals = [token if ok else str(random.choice(DECOYS)) for token, ok in zip(tokens, accepted, strict=True)]
    signals = {
        "head": 1 / (1 + np.exp(-(logit + random.normal(0.1, 0.9, len(tokens))))),
        "confidence": 1 / (1 + np.exp(-(logit * 0.7 + random.normal(0, 1.4, len(tokens))))),
        "entropy": np.clip(2.2 - 0.6 * logit + random.normal(0, 0.7, len(tokens)), 0.01, None),
    }
    return {"tokens": tokens, "proposals": proposals, "acceptance": acceptance, "accepted": accepted, **signals}


def _replay(
    trace: dict, family: str, parameter: float, random: np.random.Generator
) -> tuple[list[ViewedRound], Counter]:
    """Rounds of one response, and its counts: generated, discarded, target and draft forwards, per-depth ones."""
    rounds, counts, start, size = [], Counter(), 0, len(trace["tokens"])
    while start < size:
        drafted, survival, alive, depth = [], 1.0, True, 0
        while family != "none" and start + depth < size - 1:
            at = start + depth
            if family == "oracle" and not trace["accepted"][at]:
                break
            predicted = float(trace["head"][at] if alive else random.random() * 0.7) if family == "head" else None
            survival *= predicted or 1.0
            ok = bool(alive and trace["accepted"][at])
            drafted.append(
                ViewedToken(
                    text=trace["proposals"][at] if alive else str(random.choice(DECOYS)),
                    predicted=predicted,
                    survival=survival if family == "head" else None,
                    acceptance=float(trace["acceptance"][at]),
                    draft_probability=float(trace["confidence"][at]),
                    entropy=float(trace["entropy"][at]),
                    status="accepted" if ok else "rejected" if alive else "discarded",
                )
            )
            depth += 1
            counts[f"risk{depth}"] += alive
            counts[f"accepted{depth}"] += ok
            alive = ok
            stop = {"fixed": depth >= parameter, "head": 1 - survival > parameter or depth >= 12}
            stop |= {"confidence": trace["confidence"][at] < parameter, "entropy": trace["entropy"][at] > parameter}
            if stop.get(family, False) or (depth >= 12 and family != "oracle"):
                break
        kept = sum(token.status == "accepted" for token in drafted)
        kind = "bonus" if kept == len(drafted) else "redrawn"
        rounds.append(ViewedRound(drafted=drafted, emitted=trace["tokens"][start + kept], kind=kind))
        counts.update(generated=kept + 1, discarded=depth - kept, target=1, draft=depth)
        counts[f"length{depth}"] += 1
        start += kept + 1
    return rounds, counts


def _counts(counts: Counter) -> DecodeCounts:
    return DecodeCounts(
        generated=counts["generated"],
        discarded=counts["discarded"],
        target_forwards=counts["target"],
        draft_forwards=counts["draft"],
    )


def _rates(counts: Counter) -> dict[str, float]:
    total = _counts(counts)
    rates = {"discard_rate": total.discard_rate, "verification_rate": total.verification_rate}
    if not total.draft_forwards:
        return {**rates, "throughput": 1 / COSTS.t_autoregressive, "speedup": 1.0}
    return {**rates, "throughput": throughput(COSTS, **rates), "speedup": speedup(COSTS, **rates)}


SETTINGS = [
    ("none", None),
    *(("fixed", float(k)) for k in (1, 2, 3, 4, 6, 8, 10)),
    *(("head", h) for h in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)),
    *(("confidence", h) for h in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)),
    *(("entropy", h) for h in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)),
    ("oracle", None),
]


def _name(family: str, parameter: float | None) -> str:
    return family if parameter is None else f"{family}:{parameter:g}"


def sample_report(responses_per_domain: int = 8) -> ReportData:
    random = np.random.default_rng(5)
    traces = [(domain, _trace(domain, random)) for domain in TEXTS for _ in range(responses_per_domain)]
    counts: dict[str, dict[str, Counter]] = {}
    viewed = []
    for family, parameter in SETTINGS:
        name = _name(family, parameter)
        by_domain = counts[name] = {domain: Counter() for domain in TEXTS}
        for index, (domain, trace) in enumerate(traces):
            rounds, found = _replay(trace, family, parameter or 0.0, random)
            by_domain[domain].update(found)
            if index % responses_per_domain == 0 and name in ("fixed:3", "head:0.8", "confidence:0.5", "oracle"):
                viewed.append(ViewedResponse(prompt=PROMPTS[domain], domain=domain, policy=name, rounds=rounds))
    totals = {name: sum(by_domain.values(), Counter()) for name, by_domain in counts.items()}
    viewed.sort(key=lambda response: (list(PROMPTS.values()).index(response.prompt), response.policy != "head:0.8"))
    return ReportData(
        title="Draft lengths for tiny-target with tiny-draft",
        pair=("tiny-target", "tiny-draft"),
        sampling={"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0},
        prompts=len(traces),
        tokens=totals["none"]["generated"],
        costs=COSTS,
        policies=_mark([_policy(*setting, counts, totals) for setting in SETTINGS]),
        calibration=_calibration([trace for _, trace in traces], random),
        responses=viewed,
        provenance={
            "command": "accept-head report --traces runs/demo/traces/test --head runs/demo/head --out report.html",
            "versions": "accept-head 0.1.0, torch 2.13.0, transformers 5.19.0, Python 3.11.2",
            "hardware": "2 CPU cores (x86-64)",
            "date": "2026-11-21",
            "traces": "sha256 5a1f0c9e7b32d4",
        },
    )


def _policy(family: str, parameter: float | None, counts: dict, totals: dict) -> PolicyResult:
    name = _name(family, parameter)
    fixed = [other for other in counts if other.startswith("fixed")]
    best = max(_rates(totals[other])["throughput"] for other in fixed)
    rates, total = _rates(totals[name]), totals[name]
    gain, gap = (
        rates["throughput"] / best - 1,
        oracle_gap_closed(rates["throughput"], best, _rates(totals["oracle"])["throughput"]),
    )
    domains = {}
    for domain, found in counts[name].items():
        here = _rates(found)
        best_here = max(_rates(counts[other][domain])["throughput"] for other in fixed)

        domains[domain] = DomainResult(**here, gain_over_best_fixed=here["throughput"] / best_here - 1, prompts=8)
    deepest = max((int(key[4:]) for key in total if key.startswith("risk")), default=0)
    return PolicyResult(
        name=name,
        family=family,
        parameter=parameter,
        **rates,
        block_efficiency=_counts(total).block_efficiency,
        gain_over_best_fixed=gain,
        oracle_gap_closed=gap,
        ci95={"gain_over_best_fixed": [gain - 0.021, gain + 0.019], "oracle_gap_closed": [gap - 0.05, gap + 0.045]},
        draft_lengths=[total[f"length{n}"] for n in range(deepest + 1)],
        at_risk=[total[f"risk{n}"] for n in range(1, deepest + 1)],
        accepted=[total[f"accepted{n}"] for n in range(1, deepest + 1)],
        domains=domains,
        main=family in ("none", "oracle", "fixed"),
    )


def _mark(policies: list[PolicyResult]) -> list[PolicyResult]:
    """The best setting of each rule stands in the main table; the head's is the recommended one."""
    best = {
        max((p for p in policies if p.family == family), key=lambda p: p.throughput).name
        for family in ("head", "confidence", "entropy")
    }
    return [replace(p, main=True, chosen=p.family == "head") if p.name in best else p for p in policies]


def _calibration(traces: list[dict], random: np.random.Generator) -> list[CalibrationCurve]:
    curves = []
    for label, shift in (("1", 0.0), ("2", 0.1), ("3", 0.2), ("4-6", 0.35), ("7+", 0.6)):
        predicted = np.concatenate([trace["head"] for trace in traces])
        true = np.concatenate([trace["acceptance"] for trace in traces])
        keep = random.random(len(predicted)) < math.exp(-3 * shift)
        predicted, true = predicted[keep], np.clip(true[keep] * (1 - 0.2 * shift), 0, 1)
        place = np.clip(np.digitize(predicted, EDGES) - 1, 0, 9)
        bins = [place == i for i in range(10) if (place == i).any()]
        means = [float(predicted[b].mean()) for b in bins]
        observed, sizes = [float(true[b].mean()) for b in bins], [int(b.sum()) for b in bins]
        gaps = np.abs(np.array(means) - observed)
        curves.append(
            CalibrationCurve(
                head="head",
                depth=label,
                count=len(predicted),
                predicted=means,
                observed=observed,
                counts=sizes,
                ece=float((gaps * sizes).sum() / len(predicted)),
            )
        )
    return curves
