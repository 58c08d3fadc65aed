"""The data of a report, as frozen data classes. build.py makes it by replaying policies, and page.py shows it.

Rates, gains and shares are fractions, not per cent. Times are in seconds, throughputs in tokens per second, entropies
in nats. A number without a value (a gap when the oracle is not faster than the best fixed K) is NaN or None.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from accept_head.cost import ForwardCosts
from accept_head.inference.replay.comparison import BOUNDS

TokenStatus = Literal["accepted", "rejected", "discarded"]
RoundEnd = Literal["redrawn", "bonus", "end"]
NOT_RULES = ("fixed", "none", *BOUNDS)  # families without a threshold


@dataclass(frozen=True, kw_only=True)
class DomainResult:
    """One policy on the prompts of one domain.

    gain_over_best_fixed: over the best fixed K in this domain. prompts: number of prompts in the domain.
    """

    throughput: float
    speedup: float
    gain_over_best_fixed: float
    discard_rate: float
    verification_rate: float
    prompts: int


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """One policy at one setting, over all prompts.

    name: unique in a report, for example "head:0.5".
    family: policies of one family share a curve: "fixed", "none", "informed", "oracle", or a stopping rule ("head",
        "confidence", "entropy", or a head's name when there are several).
    parameter: K or the threshold, the place on the family's curve; None when there is none.
    informed_gap_closed: the gain as a share of the informed bound's gain; None when this is not known.
    ci95: 95 % intervals [low, high] of "gain_over_best_fixed" and of both shares.
    draft_lengths: number of rounds that drafted 0, 1, 2, … tokens.
    at_risk: for depths 1, 2, …, rounds that drafted this depth with every token before it accepted.
    accepted: the rounds of at_risk whose token at this depth was accepted too.
    domains: by the prompts' domain, "" when they name none.
    main: whether the main table and plots show it. chosen: whether it is recommended, at most one in a report.
    """

    name: str
    family: str
    parameter: float | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    discard_rate: float
    verification_rate: float
    block_efficiency: float
    throughput: float
    speedup: float
    gain_over_best_fixed: float
    oracle_gap_closed: float
    informed_gap_closed: float | None = None
    ci95: Mapping[str, Sequence[float]] = field(default_factory=dict)
    draft_lengths: Sequence[int] = ()
    at_risk: Sequence[int] = ()
    accepted: Sequence[int] = ()
    domains: Mapping[str, DomainResult] = field(default_factory=dict)
    main: bool = True
    chosen: bool = False

    @property
    def worst_domain(self) -> str | None:
        """Where a policy gains least; None for a bound and for the target alone."""
        if self.family in ("none", *BOUNDS):
            return None
        return min(self.domains, key=lambda domain: self.domains[domain].gain_over_best_fixed)


@dataclass(frozen=True, kw_only=True)
class CalibrationCurve:
    """The calibration of one head's predictions at one range of depths.

    depth: its label, "1" or "4-6". count: drafted tokens. predicted, observed, counts: for each bin of predicted
    acceptance, the mean prediction, the mean true acceptance and the number of tokens. ece: expected calibration error.
    """

    head: str
    depth: str
    count: int
    predicted: Sequence[float]
    observed: Sequence[float]
    counts: Sequence[int]
    ece: float


@dataclass(frozen=True, kw_only=True)
class ViewedToken:
    """One drafted token as the round viewer shows it.

    predicted: the policy's P̂ that this token is accepted. survival: the product of P̂ in its round up to here. Both are
    None for a policy that predicts nothing. acceptance: the true a(Y) = min(1, p/q); None after a rejection, where the
    target has no distribution. draft_probability: q(Y). status: "discarded" for a token drafted after the rejected one.
    """

    text: str
    predicted: float | None = None
    survival: float | None = None
    acceptance: float | None
    draft_probability: float
    entropy: float
    status: TokenStatus


@dataclass(frozen=True, kw_only=True)
class ViewedRound:
    """One round: the drafted tokens, and the text of the token that the target added.

    kind: "redrawn" when it replaces a rejected token, "bonus" when all were accepted, "end" when a drafted end token
    ended the response (then `emitted` is "").
    """

    drafted: Sequence[ViewedToken]
    emitted: str
    kind: RoundEnd


@dataclass(frozen=True, kw_only=True)
class ViewedResponse:
    """One prompt under one policy. The same prompt under several policies has several of these, with equal `prompt`."""

    prompt: str
    domain: str = ""
    policy: str
    rounds: Sequence[ViewedRound]


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """A whole report.

    pair: names of (target, draft). sampling: temperature and so on. prompts, tokens: how many were replayed.
    policies: in any order within a family, including `none`, fixed:K and `oracle` if there are any.
    provenance: lines for the foot of the page: command, versions, hardware, date, fingerprint of the traces.
    verdict: what to use, in sentences, the first one as the page's heading; of `accept-head fit`.
    """

    title: str
    pair: tuple[str, str]
    sampling: Mapping[str, Any]
    prompts: int
    tokens: int
    costs: ForwardCosts
    policies: Sequence[PolicyResult]
    calibration: Sequence[CalibrationCurve] = ()
    responses: Sequence[ViewedResponse] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    verdict: Sequence[str] = ()

    @property
    def chosen(self) -> PolicyResult | None:
        return next((policy for policy in self.policies if policy.chosen), None)

    @property
    def best_fixed(self) -> PolicyResult | None:
        fixed = [policy for policy in self.policies if policy.family == "fixed"]
        return max(fixed, key=lambda policy: policy.throughput, default=None)

    @property
    def main(self) -> list[PolicyResult]:
        return [policy for policy in self.policies if policy.main]

    def families(self) -> dict[str, list[PolicyResult]]:
        """Policies by family. Families keep their order, and each is sorted by its parameter."""
        found: dict[str, list[PolicyResult]] = {}
        for policy in self.policies:
            found.setdefault(policy.family, []).append(policy)
        return {name: sorted(members, key=_place) for name, members in found.items()}

    def highlights(self) -> list[PolicyResult]:
        """The few policies for plots: the best fixed K, the best main setting of each rule, and the bounds."""
        best = self.best_fixed
        rules = [
            max(members, key=lambda policy: (policy.chosen, policy.throughput))
            for family, policies in self.families().items()
            if family not in NOT_RULES and (members := [policy for policy in policies if policy.main])
        ]
        bounds = [policy for policy in self.policies if policy.family in BOUNDS]
        return [*([best] if best else []), *sorted(rules, key=lambda policy: not policy.chosen), *bounds]


def _place(policy: PolicyResult) -> tuple[bool, float]:
    return (policy.parameter is None, policy.parameter or 0.0)


def printable(text: str) -> str:
    """The text as one line for any font and encoder: no lone surrogates, control or direction characters."""
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in ("Cc", "Cs", "Cf") else c for c in text)
