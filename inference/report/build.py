"""Makes a report's data: replays every policy on the traces, compares them, and collects single rounds."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from accept_head.cost import ForwardCosts
from accept_head.head.network import AcceptanceHead
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.profile.device import device_name, versions
from accept_head.inference.replay.comparison import compare
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.informed import replay_informed
from accept_head.inference.replay.scores import score_tokens
from accept_head.inference.replay.thresholds import threshold_lengths
from accept_head.inference.replay.truth import InformedTables
from accept_head.inference.replay.walk import Replayed, replay_fixed, replay_oracle
from accept_head.inference.report.calibration import calibrate_depths
from accept_head.inference.report.data import DomainResult, PolicyResult, ReportData, ViewedResponse
from accept_head.inference.report.rounds import view_responses
from accept_head.inference.report.rules import Choice, Rule, rules_of, short_name

TITLE = "What each draft-length policy costs"
SHARES = ("gain_over_best_fixed", "oracle_gap_closed", "informed_gap_closed")
NEIGHBOURS = 2  # fixed lengths that the main table shows on either side of the best


def build_report(
    traces: CoupledTraces,
    heads: Mapping[str, AcceptanceHead],
    costs: ForwardCosts,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chosen: Mapping[str, Choice],
    responses: int = 8,
    seed: int = 0,
    command: str = "",
    verdict: Mapping[str, Any] | None = None,
    truth: InformedTables | None = None,
) -> ReportData:
    """Replay everything that the page shows.

    chosen: settings that were chosen on other traces; the rest is chosen on these traces. truth: for the informed
    bound. verdict: of `accept-head fit`, as its summary.json has it.
    """
    rules = rules_of(traces, heads, costs, chosen)
    _, *fixed = replay_fixed(traces, range(traces.k_max + 1))
    none = replay_fixed(traces, [0])[0]
    bounds = [*([replay_informed(traces, truth, costs)] if truth else []), replay_oracle(traces)]
    curves = {name: rule.curve(traces) for name, rule in rules.items()}
    everything = [none, *fixed, *(replayed for curve in curves.values() for replayed in curve), *bounds]
    rows = compare(everything, costs, seed=seed)
    domains = _domains(traces, everything, costs)
    speeds = {row["name"]: row["throughput"] for row in rows}
    best = max(fixed, key=lambda policy: speeds[policy.name])
    # Settings that were chosen on these traces are shown, but not recommended.
    elsewhere = [curve[-1].name for name, curve in curves.items() if not rules[name].chosen_here]
    recommended = max(elsewhere, key=lambda name: speeds[name], default=None)
    if verdict:
        recommended = verdict["names"][verdict["use"]].partition(",")[0]
    rule_families = [name for name, curve in curves.items() for _ in curve]
    families = ["none", *["fixed"] * len(fixed), *rule_families, *(bound.name for bound in bounds)]
    main = {"none", *(bound.name for bound in bounds), *(curve[-1].name for curve in curves.values())}
    main |= {f"fixed:{best.params['k'] + step}" for step in range(-NEIGHBOURS, NEIGHBOURS + 1)}
    policies = [
        _result(row, replayed, family, results, main=replayed.name in main, chosen=replayed.name == recommended)
        for row, replayed, family, results in zip(rows, everything, families, domains, strict=True)
    ]
    trained = {name: rule for name, rule in rules.items() if isinstance(rule.policy, HeadPolicy)}
    scores = {name: score_tokens(traces, rule.policy) for name, rule in trained.items()}
    config = traces.config
    here = [name for name, rule in rules.items() if rule.chosen_here]
    return ReportData(
        title=TITLE + ("" if elsewhere else " (settings chosen on these traces)"),
        pair=(short_name(config.target), short_name(config.draft)),
        sampling=config.sampling.to_dict(),
        prompts=len(traces.lengths),
        tokens=traces.positions,
        costs=costs,
        policies=policies,
        calibration=[
            curve
            for name, rule in trained.items()
            for curve in calibrate_depths(traces, name, rule.accepting(scores[name]))
        ],
        responses=_viewed(traces, trained, scores, int(best.params["k"]), tokenizer, responses),
        provenance={
            "command": command,
            "settings chosen on these very traces": ", ".join(here) or "none",
            "traces": config.fingerprint()[:16],
            "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
            "hardware": f"{device_name(torch.device('cpu'))}, {os.cpu_count()} cores (replay)",
            "date": datetime.date.today().isoformat(),
        },
        verdict=verdict["text"] if verdict else (),
    )


def _domains(traces: CoupledTraces, policies: Sequence[Replayed], costs: ForwardCosts) -> list[dict[str, DomainResult]]:
    """For each policy, its figures in each domain."""
    results: list[dict[str, DomainResult]] = [{} for _ in policies]
    names = traces.domains
    for domain in sorted(set(names)):
        mine = [index for index, name in enumerate(names) if name == domain]
        rows = compare([replace(policy, counts=policy.counts[mine]) for policy in policies], costs, resamples=1)
        for found, row in zip(results, rows, strict=True):
            kept = ("throughput", "speedup", "gain_over_best_fixed", "discard_rate", "verification_rate")
            found[domain] = DomainResult(**{name: row[name] for name in kept}, prompts=len(mine))
    return results


def _result(
    row: Mapping[str, Any],
    replayed: Replayed,
    family: str,
    domains: Mapping[str, DomainResult],
    *,
    main: bool,
    chosen: bool,
) -> PolicyResult:
    return PolicyResult(
        **{name: value for name, value in row.items() if name not in ("ci95", "name", "params")},
        name=replayed.name,
        family=family,
        parameter=replayed.params.get("k", replayed.params.get("threshold")),
        params=replayed.params,
        ci95={name: tuple(row["ci95"][name]) for name in SHARES if name in row},
        draft_lengths=replayed.draft_lengths.tolist(),
        at_risk=replayed.at_risk.tolist(),
        accepted=replayed.accepted.tolist(),
        domains=domains,
        main=main,
        chosen=chosen,
    )


def _viewed(
    traces: CoupledTraces,
    rules: Mapping[str, Rule],
    scores: Mapping[str, torch.Tensor],
    best_fixed: int,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
) -> list[ViewedResponse]:
    """The same responses under each head and under the best fixed length."""
    chosen = _in_turn(traces.domains, count)
    viewed = []
    for name, rule in rules.items():
        lengths = threshold_lengths(traces, rule.policy, [rule.setting], scores[name])[:, 0]
        policy = f"{name}:{rule.setting.threshold:g}"
        viewed += view_responses(traces, chosen, policy, lengths, tokenizer, rule.accepting(scores[name]))
    lengths = traces.drafts.clamp(max=best_fixed)
    return viewed + view_responses(traces, chosen, f"fixed:{best_fixed}", lengths, tokenizer)


def _in_turn(domains: Sequence[str], count: int) -> list[int]:
    """Indices of `count` responses, taken from the domains in turn, in ascending order."""
    seen: dict[str, int] = {}
    ranks = []
    for index, domain in enumerate(domains):
        ranks.append((seen.get(domain, 0), index))
        seen[domain] = seen.get(domain, 0) + 1
    return sorted(index for _, index in sorted(ranks)[:count])
