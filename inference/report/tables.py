"""The report's tables, and the format of its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from accept_head.inference.replay.comparison import BOUNDS
from accept_head.inference.report.data import CalibrationCurve, PolicyResult, ReportData, printable

DOMAINS_A_TABLE = 5  # as many as fit on paper; further domains get another table
NO_NUMBER = "–"
MINUS = "\N{MINUS SIGN}"


def words(text: object) -> str:
    """Any text as HTML."""
    return escape(printable(str(text)))


def rate(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else NO_NUMBER


def speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def times(value: float) -> str:
    return f"{value:.3f}\N{MULTIPLICATION SIGN}"


def per_cent(value: float, *, sign: bool = True) -> str:
    """A share like +2.9 %, with a true minus sign and a non-breaking space."""
    if not math.isfinite(value):
        return NO_NUMBER
    text = f"{abs(value) * 100:.1f}\N{NARROW NO-BREAK SPACE}%"
    if text.startswith("0.0"):
        return text
    return (MINUS if value < 0 else "+" if sign else "") + text


def interval(bounds: Sequence[float] | None) -> str:
    """An interval like '2.8 to 12.6 %', or ''."""
    if not bounds or not all(math.isfinite(bound) for bound in bounds):
        return ""
    low, high = ((MINUS if bound < 0 else "") + f"{abs(bound) * 100:.1f}" for bound in bounds)
    return f"{low} to {high}\N{NARROW NO-BREAK SPACE}%"


def table(caption: str, heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """An HTML table that scrolls in its own box. rows: (attributes of the row, cells), in HTML; cell 0 is a heading."""
    head = "".join(f'<th scope="col">{cell}</th>' for cell in heads)
    body = "".join(
        f'<tr{mark}><th scope="row">{cells[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in cells[1:]) + "</tr>\n"
        for mark, cells in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">'
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n"
    )


def _under(text: str) -> str:
    return f'<span class="under">{text}</span>' if text else ""


def policy_table(caption: str, data: ReportData, policies: Sequence[PolicyResult]) -> str:
    informed = any(policy.informed_gap_closed is not None for policy in policies)
    heads = [
        "policy",
        "discard rate",
        "verification rate",
        "block efficiency",
        "tokens/s",
        "speed\N{NON-BREAKING HYPHEN}up",
    ]
    return table(
        caption,
        [*heads, "gain over best fixed\N{NO-BREAK SPACE}K", "oracle gap closed", *["informed gap closed"] * informed],
        [
            (' class="chosen"' if policy.chosen else "", _policy_cells(data, policy)[: None if informed else -1])
            for policy in policies
        ],
    )


def _policy_cells(data: ReportData, policy: PolicyResult) -> list[str]:
    note = "recommended" if policy.chosen else "best fixed K" if policy is data.best_fixed else ""
    others = ", ".join(f"{key} {value}" for key, value in policy.params.items() if key not in ("k", "threshold"))
    return [
        words(policy.name) + _under(note) + _under(words(others)),
        rate(policy.discard_rate),
        rate(policy.verification_rate),
        f"{policy.block_efficiency:.2f}",
        speed(policy.throughput),
        times(policy.speedup),
        per_cent(policy.gain_over_best_fixed) + _under(interval(policy.ci95.get("gain_over_best_fixed"))),
        per_cent(policy.oracle_gap_closed) + _under(interval(policy.ci95.get("oracle_gap_closed"))),
        NO_NUMBER
        if policy.informed_gap_closed is None
        else per_cent(policy.informed_gap_closed) + _under(interval(policy.ci95.get("informed_gap_closed"))),
    ]


def domain_tables(data: ReportData) -> str:
    """Tables of main policies by domain, with each policy's worst domain marked. '' if the prompts name no domain."""
    policies = [policy for policy in data.main if policy.domains]
    domains = list(dict.fromkeys(domain for policy in policies for domain in policy.domains))
    if not any(domains):
        return ""
    blocks = [domains[i : i + DOMAINS_A_TABLE] for i in range(0, len(domains), DOMAINS_A_TABLE)]
    return "".join(_domain_table(policies, block, len(domains)) for block in blocks)


def _domain_table(policies: Sequence[PolicyResult], domains: Sequence[str], total: int) -> str:
    prompts = {d: next(p.domains[d].prompts for p in policies if d in p.domains) for d in domains}
    heads = [f"{words(d) or '(none named)'}{_under(f'{prompts[d]:,} prompts')}" for d in domains]
    rows = [
        (' class="chosen"' if policy.chosen else "", [words(policy.name), *_domain_cells(policy, domains, total)])
        for policy in policies
    ]
    return table("Speed-up and gain over the best fixed K in each domain", ["policy", *heads], rows)


def _domain_cells(policy: PolicyResult, domains: Sequence[str], total: int) -> list[str]:
    worst = min(policy.domains, key=lambda domain: policy.domains[domain].gain_over_best_fixed)
    mark = total > 1 and policy.family not in ("none", *BOUNDS)
    return [
        times(found.speedup)
        + _under(
            ("▾\N{NO-BREAK SPACE}worst " if mark and domain == worst else "") + per_cent(found.gain_over_best_fixed)
        )
        if (found := policy.domains.get(domain))
        else NO_NUMBER
        for domain in domains
    ]


def calibration_table(curves: Sequence[CalibrationCurve]) -> str:
    several = len({curve.head for curve in curves}) > 1
    rows = [
        ("", [f"{words(c.head) + ', ' if several else ''}depth {words(c.depth)}", f"{c.count:,}", f"{c.ece:.4f}"])
        for c in curves
    ]
    return table("Expected calibration error by depth", ["", "tokens", "calibration error"], rows)


def depth_table(policies: Sequence[PolicyResult], deepest: int = 8) -> str:
    depth = min(deepest, max(len(policy.at_risk) for policy in policies))
    rows = [
        (
            "",
            [
                words(policy.name),
                *(
                    f"{accepted / risk:.3f}{_under(f'{risk:,}')}" if risk else NO_NUMBER
                    for accepted, risk in zip(policy.accepted[:depth], policy.at_risk[:depth], strict=True)
                ),
                *[NO_NUMBER] * (depth - len(policy.at_risk)),
            ],
        )
        for policy in policies
    ]
    return table("Acceptance by depth, with the rounds at risk", ["policy", *map(str, range(1, depth + 1))], rows)
