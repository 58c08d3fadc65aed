"""`accept-head report`: one HTML page, and PNGs, of what every policy costs on traces, and of single rounds.

Thresholds come from where they were chosen: a head's decoding.json, `--tuned` for the others. What was chosen nowhere
is chosen on these traces, and the page says so.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from accept_head.cost import ForwardCosts
from accept_head.errors import InputError
from accept_head.files import read_json, writable_file
from accept_head.head.network import AcceptanceHead
from accept_head.inference.costs.files import read_costs
from accept_head.inference.policies import HeadPolicy
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.profile.device import device_name
from accept_head.inference.replay.comparison import compare
from accept_head.inference.replay.coupled import LONGEST, CoupledTraces, load_coupled
from accept_head.inference.replay.informed import replay_informed
from accept_head.inference.replay.scores import score_tokens
from accept_head.inference.replay.thresholds import Setting, replay_thresholds, threshold_lengths
from accept_head.inference.replay.truth import InformedTables, informed_tables, target_loader
from accept_head.inference.replay.walk import Replayed, replay_fixed, replay_oracle
from accept_head.inference.report.data import DomainResult, PolicyResult, ReportData, ViewedResponse
from accept_head.inference.report.page import write_report
from accept_head.inference.report.view import calibrate_depths, view_responses
from accept_head.inference.tune.files import DECODING_NAME
from accept_head.inference.tune.grid import Grid
from accept_head.inference.tune.heads import load_heads
from accept_head.inference.tune.rules import RULES
from accept_head.inference.tune.search import search_all
from accept_head.pair import checkpoint_fingerprint, load_model, load_tokenizer

SHOWN = tuple(name for name in RULES if name != "svip")  # which is `entropy` on another scale: the same curve
SHARES = ("gain_over_best_fixed", "oracle_gap_closed", "informed_gap_closed")
NEIGHBOURS = 2  # fixed lengths on either side of the best that the main table shows


def report(
    traces: str,
    draft: str,
    out: str = "report.html",
    head: list[str] | None = None,
    tuned: str | None = None,
    costs: str | None = None,
    t_draft: float | None = None,
    t_target: float | None = None,
    target_times: float = 1.0,
    responses: int = 8,
    target: str | None = None,
    max_prompts: int | None = None,
    title: str = "What each draft-length policy costs",
    seed: int = 0,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> None:
    """Replay every policy on traces and show it on one HTML page that needs no network, with its plots as PNGs.

    Args:
        traces: Folder made by `accept-head collect`, of prompts that nothing was trained or chosen on.
        draft: The draft that the traces were made with.
        out: HTML file to write; OUT.pareto.png and others go beside it.
        head: Heads to show; the setting of each comes from its decoding.json.
        tuned: File by `accept-head tune`: settings of the other policies, and costs if none are given here.
        costs: JSON file by `accept-head profile`.
        t_draft: Seconds of one draft forward, in place of `costs`.
        t_target: Seconds of one target forward.
        target_times: What if the target were so many times as slow?
        responses: Responses whose rounds are shown one by one, from all domains in turn.
        target: The target that the traces were made with, to show the informed bound, as for `tune`.
        max_prompts: Use the first so many traces.
        title: The page's title.
        seed: Seed of the bootstrap.
        dtype: float32, bfloat16, float16, or auto; of the models.
        trust_remote_code: Run model code that comes with the models.
    """
    path = writable_file(Path(out))
    choices = read_json(Path(tuned)) if tuned else {}
    if tuned and not isinstance(choices.get("policies"), list):
        raise InputError(f"--tuned {tuned}: field 'policies' is missing; accept-head tune writes such a file")
    if responses < 0:
        raise InputError(f"responses is {responses}, expected a number, 0 or more")
    given = costs is not None or t_draft is not None or t_target is not None
    priced = read_costs(costs if given else tuned, t_draft, t_target, target_times)
    model = load_model(draft, "--draft", dtype=dtype, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(draft, "--draft", trust_remote_code)
    fingerprint = checkpoint_fingerprint(draft)
    heads = load_heads(head or [], model, fingerprint)
    load_target = target_loader(Path(traces), target, dtype, trust_remote_code)
    settings = read_choices(list(heads), choices)
    longest = max([LONGEST, *(choice.get("k_max", 0) for choice in settings.values())])
    coupled = load_coupled(Path(traces), model, fingerprint, k_max=longest, max_prompts=max_prompts)
    truth = informed_tables(coupled, model, load_target)
    data = build_report(
        coupled, heads, priced, tokenizer, chosen=settings, title=title, truth=truth,
        responses=responses, seed=seed, command=" ".join(["accept-head", *sys.argv[1:]]),
    )  # fmt: skip
    for file in write_report(data, path):
        print(f"wrote {file}")


Choice = dict[str, Any]  # threshold, k_min, k_max and, for some heads, lag


def read_choices(heads: Sequence[str], tuned: Mapping[str, Any]) -> dict[str, Choice]:
    """The setting of each rule that was chosen somewhere: heads and other rules by name."""
    choices = {}
    for row in tuned.get("policies", []):
        name, _, _ = str(row.get("name")).rpartition(":")
        if "threshold" in row.get("params", {}):
            choices[name.removeprefix("head:")] = dict(row["params"])
    for name in heads:
        if (Path(name) / DECODING_NAME).is_file():
            values = read_json(Path(name) / DECODING_NAME)
            choices[name] = {key: values[key] for key in ("threshold", "k_min", "k_max", "lag") if key in values}
    return choices


def build_report(
    traces: CoupledTraces,
    heads: Mapping[str, AcceptanceHead],
    costs: ForwardCosts,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chosen: Mapping[str, Choice],
    title: str,
    responses: int = 8,
    seed: int = 0,
    command: str = "",
    truth: InformedTables | None = None,
) -> ReportData:
    """Replay everything that the page shows. chosen: settings from elsewhere; the rest is chosen on these traces.
    truth: for the informed bound."""
    rules = _rules(traces, heads, costs, chosen)
    _, *fixed = replay_fixed(traces, range(traces.k_max + 1))
    none = replay_fixed(traces, [0])[0]
    bounds = [*([replay_informed(traces, truth, costs)] if truth else []), replay_oracle(traces)]
    curves = {name: rule.curve(traces) for name, rule in rules.items()}
    everything = [none, *fixed, *(replayed for curve in curves.values() for replayed in curve), *bounds]
    rows = compare([policy.measured() for policy in everything], costs, seed=seed)
    domains = _domains(traces, everything, costs)
    speeds = {row["name"]: row["throughput"] for row in rows}
    best = max(fixed, key=lambda policy: speeds[policy.name])
    # What was chosen on these very traces is shown, not recommended.
    elsewhere = [curve[-1].name for name, curve in curves.items() if not rules[name].chosen_here]
    recommended = max(elsewhere, key=lambda name: speeds[name], default=None)
    rule_families = [name for name, curve in curves.items() for _ in curve]
    families = ["none", *["fixed"] * len(fixed), *rule_families, *(bound.name for bound in bounds)]
    main = {"none", *(bound.name for bound in bounds), *(curve[-1].name for curve in curves.values())}
    main |= {f"fixed:{best.params['k'] + step}" for step in range(-NEIGHBOURS, NEIGHBOURS + 1)}
    policies = [
        PolicyResult(
            **{name: value for name, value in row.items() if name not in ("ci95", "name", "params")},
            name=replayed.name,
            family=family,
            parameter=replayed.params.get("k", replayed.params.get("threshold")),
            params=replayed.params,
            ci95={name: tuple(row["ci95"][name]) for name in SHARES if name in row},
            draft_lengths=replayed.draft_lengths.tolist(),
            at_risk=replayed.at_risk.tolist(),
            accepted=replayed.accepted.tolist(),
            domains=results,
            main=replayed.name in main,
            chosen=replayed.name == recommended,
        )
        for row, replayed, family, results in zip(rows, everything, families, domains, strict=True)
    ]
    trained = {name: rule for name, rule in rules.items() if isinstance(rule.policy, HeadPolicy)}
    scores = {name: score_tokens(traces, rule.policy) for name, rule in trained.items()}
    config = traces.config
    here = [name for name, rule in rules.items() if rule.chosen_here]
    return ReportData(
        title=title if elsewhere else f"{title} (settings chosen on these traces)",
        pair=(_short(config.target), _short(config.draft)),
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
            "versions": ", ".join(f"{name} {version(name)}" for name in ("accept-head", "torch", "transformers")),
            "hardware": f"{device_name(torch.device('cpu'))}, {os.cpu_count()} cores (replay)",
            "date": datetime.date.today().isoformat(),
        },
    )


class _Rule:
    """One family of threshold rules, with the setting that was chosen for it."""

    def __init__(self, policy: ThresholdPolicy, name: str, thresholds: Sequence[float], choice: Choice, here: bool):
        self.policy, self.name, self.thresholds, self.chosen_here = policy, name, thresholds, here
        self.setting = Setting(threshold=choice["threshold"], k_min=choice["k_min"], k_max=choice["k_max"])

    def accepting(self, scores: torch.Tensor) -> torch.Tensor:
        """(M,) P̂ of each token, of its scores."""
        return scores[..., 0] if self.policy.predicts_next else scores

    def curve(self, traces: CoupledTraces) -> list[Replayed]:
        """Every threshold at the chosen bounds, the chosen one last."""
        others = [value for value in self.thresholds if value != self.setting.threshold]
        settings = [Setting(threshold=v, k_min=self.setting.k_min, k_max=self.setting.k_max) for v in others]
        return replay_thresholds(traces, self.policy, [*settings, self.setting], self.name)


def _rules(
    traces: CoupledTraces,
    heads: Mapping[str, AcceptanceHead],
    costs: ForwardCosts,
    chosen: Mapping[str, Choice],
) -> dict[str, _Rule]:
    """Every rule at the setting chosen elsewhere, or else at the best one here; keys are short names."""
    grid = Grid()
    missing = [name for name in (*heads, *SHOWN) if "threshold" not in chosen.get(name, {})]
    found = (
        search_all(traces, {name: heads[name] for name in heads if name in missing}, costs, grid) if missing else None
    )
    short = {name: _short(name) for name in heads}
    if len(set(short.values())) < len(short):
        short = {name: name for name in heads}
    rules = {}
    for name in (*heads, *SHOWN):
        choice = found.chosen[name].params if found and name in missing else chosen[name]
        choice = {"k_min": 1, "k_max": traces.k_max, **choice}
        if name in heads:
            policy: ThresholdPolicy = HeadPolicy(heads[name], 0.5, lag=choice.get("lag"))
        else:
            policy = RULES[name]()
        values = grid.of(name) if name in RULES else grid.thresholds
        label = short.get(name, name)
        rules[label] = _Rule(policy, label, values, choice, name in missing)
    return rules


def _domains(traces: CoupledTraces, policies: Sequence[Replayed], costs: ForwardCosts) -> list[dict[str, DomainResult]]:
    """Of each policy, its figures in each domain."""
    results: list[dict[str, DomainResult]] = [{} for _ in policies]
    names = traces.domains
    for domain in sorted(set(names)):
        mine = [index for index, name in enumerate(names) if name == domain]
        rows = compare([policy.measured(mine) for policy in policies], costs, resamples=1)
        for found, row in zip(results, rows, strict=True):
            kept = ("throughput", "speedup", "gain_over_best_fixed", "discard_rate", "verification_rate")
            found[domain] = DomainResult(**{name: row[name] for name in kept}, prompts=len(mine))
    return results


def _viewed(
    traces: CoupledTraces,
    rules: Mapping[str, _Rule],
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
    """The first responses of each domain in turn, `count` in all, in order."""
    seen: dict[str, int] = {}
    ranks = []
    for index, domain in enumerate(domains):
        ranks.append((seen.get(domain, 0), index))
        seen[domain] = seen.get(domain, 0) + 1
    return sorted(index for _, index in sorted(ranks)[:count])


def _short(name: str) -> str:
    return Path(name).name or name
