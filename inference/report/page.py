"""The report as one self-contained HTML file, and its plots as PNGs beside it.

All text from a model or a user passes through `words` into HTML, or through `script_json` to the viewer's script, which
only sets textContent.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from accept_head.files import atomic_path
from accept_head.inference.replay.comparison import BOUNDS
from accept_head.inference.report.data import PolicyResult, ReportData
from accept_head.inference.report.plots import draw_plots
from accept_head.inference.report.svg import PALETTE, Plot
from accept_head.inference.report.tables import (
    calibration_table,
    depth_table,
    domain_tables,
    interval,
    per_cent,
    policy_table,
    times,
    words,
)
from accept_head.inference.report.viewer import script_json, viewer, viewer_data


def write_report(data: ReportData, path: Path) -> list[Path]:
    """Write `path` and the plots beside it (OUT.pareto.png, …), each atomically. Returns the paths, the page first."""
    plots = draw_plots(data)
    pages = {path: render_page(data, plots).encode()}
    pages |= {path.with_name(f"{path.stem}.{plot.name}.png"): plot.png for plot in plots}
    for file, content in pages.items():
        with atomic_path(file) as temporary:
            temporary.write_bytes(content)
    return list(pages)


def render_page(data: ReportData, plots: Sequence[Plot]) -> str:
    template = (files("accept_head.inference.report") / "page.html").read_text(encoding="utf-8")
    script = re.findall(r"<script>(.*?)</script>", template, flags=re.S)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sections = _sections(data, {plot.name: plot for plot in plots})
    values = {
        "title": words(data.title),
        "script_hash": f"sha256-{digest}",
        "palette": _palette(),
        "headline": headline(data),
        "contents": "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title, _ in sections),
        "sections": "".join(
            f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>\n{body}</section>\n'
            for name, title, body in sections
        ),
        "data": script_json(viewer_data(data.responses)),
    }
    # In one pass, because an inserted value may itself contain {{braces}}.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _palette() -> str:
    light, dark = ("; ".join(f"--{name}: {pair[i]}" for name, pair in PALETTE.items()) for i in (0, 1))
    return f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


def headline(data: ReportData) -> str:
    """The report in one sentence, as HTML: about the recommended policy, or the fastest if there is none."""
    real = [policy for policy in data.policies if policy.family not in (*BOUNDS, "none")]
    policy = data.chosen or max(real, key=lambda p: p.throughput, default=None)
    costs = data.costs
    setting = (
        f"On {data.prompts:,} prompts ({data.tokens:,} tokens), {words(data.pair[0])} with draft {words(data.pair[1])} "
        f"at {_milliseconds(costs.t_target)} a verification and {_milliseconds(costs.t_draft)} a drafted token"
    )
    if policy is None:
        return f"{setting}."
    text = (
        f"{setting}: <strong>{words(policy.name)}</strong> decodes {times(policy.speedup)} as fast as the target alone"
    )
    if not (best := data.best_fixed) or policy is best:
        return text + "."
    gain = policy.gain_over_best_fixed
    than = f"{per_cent(abs(gain), sign=False)} {'faster' if gain >= 0 else 'slower'} than the best fixed draft length"
    text += f" and {than} ({words(best.name)})"
    if math.isfinite(policy.oracle_gap_closed) and any(p.family == "oracle" for p in data.policies):
        text += f", which closes {per_cent(policy.oracle_gap_closed, sign=False)} of the gap to the oracle"
        if span := interval(policy.ci95.get("oracle_gap_closed")):
            text += f" (95\N{NARROW NO-BREAK SPACE}% interval {span})"
    if policy.informed_gap_closed is not None:
        share = per_cent(policy.informed_gap_closed, sign=False)
        text += f", and has {share} of the gain of a policy that knows how likely each token is accepted"
    return text + "."


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g}\N{NARROW NO-BREAK SPACE}ms"


def _sections(data: ReportData, plots: dict[str, Plot]) -> list[tuple[str, str, str]]:
    """(id, title, HTML) of each section."""
    calibrations = [plot for name, plot in plots.items() if name.startswith("calibration")]
    deep = [policy for policy in data.highlights() if policy.at_risk and policy.family not in BOUNDS]
    found = [
        ("results", "Results", _results(data)),
        ("rates", "Rates and throughput", _figures(plots, "pareto", "throughput") + _all_settings(data)),
        ("calibration", "Calibration", _calibration(data, calibrations)),
        (
            "drafts",
            "Draft lengths and depth",
            _figures(plots, "lengths", "depths")
            + (_details("Acceptance by depth as a table", depth_table(deep)) if deep else ""),
        ),
        ("domains", "Domains", _domains(data)),
        ("rounds", "Rounds, one by one", viewer(data.responses)),
        ("provenance", "How this was made", _provenance(data)),
    ]
    return [(name, title, body) for name, title, body in found if body]


def _results(data: ReportData) -> str:
    notes = (
        "Discard rate: drafted tokens that were not accepted, per generated token. Verification rate: target forwards "
        "per generated token. Block efficiency: generated tokens per target forward. Tokens/s by equation 5.1 of "
        "SpecDec++ with the forward times below. "
        + (
            "Informed: a policy that knows how likely each token is accepted, but not whether it is; it drafts at "
            "least one. " * any(policy.family == "informed" for policy in data.policies)
        )
        + "Small print: 95\N{NARROW NO-BREAK SPACE}% intervals over prompts."
    )
    return policy_table("Main policies", data, data.main) + f'<p class="note">{notes}</p>\n'


def _all_settings(data: ReportData) -> str:
    if all(policy.main for policy in data.policies):
        return ""
    everything: list[PolicyResult] = [policy for members in data.families().values() for policy in members]
    return _details(f"All {len(everything)} settings as a table", policy_table("All settings", data, everything))


def _details(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>\n{body}</details>\n"


def _figure(plot: Plot) -> str:
    return (
        f"<figure><h3>{words(plot.title)}</h3>\n{plot.svg}\n<figcaption>{words(plot.caption)}</figcaption></figure>\n"
    )


def _figures(plots: dict[str, Plot], *names: str) -> str:
    found = "".join(_figure(plots[name]) for name in names if name in plots)
    return f'<div class="figures">{found}</div>\n' if found else ""


def _calibration(data: ReportData, plots: Sequence[Plot]) -> str:
    if not plots:
        return ""
    return f'<div class="figures">{"".join(map(_figure, plots))}</div>\n' + _details(
        "Calibration error by depth as a table", calibration_table(data.calibration)
    )


def _domains(data: ReportData) -> str:
    if not (tables := domain_tables(data)):
        return ""
    return tables + (
        '<p class="note">Speed-up over the target alone and, below it, the gain over the fixed K that is best in that '
        "domain. ▾ worst: where the policy gains least.</p>\n"
    )


def _provenance(data: ReportData) -> str:
    costs = data.costs
    facts = {
        "target": data.pair[0],
        "draft": data.pair[1],
        "sampling": ", ".join(f"{name} {value}" for name, value in data.sampling.items()),
        "prompts": f"{data.prompts:,} ({data.tokens:,} tokens)",
        "forward times": f"{_milliseconds(costs.t_draft)} draft, {_milliseconds(costs.t_target)} a verification, "
        f"{_milliseconds(costs.t_autoregressive)} target alone",
        **data.provenance,
    }
    rows = "".join(f"<dt>{words(name)}</dt><dd>{words(value)}</dd>\n" for name, value in facts.items())
    return f'<dl class="facts">{rows}</dl>\n'
