"""The report as one self-contained HTML file, and its plots as PNGs beside it.

All text from a model or a user is escaped by the template (in the headline by `words`), or passes through `script_json`
to the viewer's script, which only sets textContent.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import jinja2
from markupsafe import Markup

from accept_head.files import atomic_path
from accept_head.inference.replay.comparison import BOUNDS
from accept_head.inference.report.data import ReportData, printable
from accept_head.inference.report.formats import (
    interval,
    milliseconds,
    other_params,
    per_cent,
    rate,
    speed,
    times,
    words,
)
from accept_head.inference.report.plots import draw_plots
from accept_head.inference.report.svg import PALETTE, Plot
from accept_head.inference.report.viewer import script_json, viewer_data


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
    environment = jinja2.Environment(
        autoescape=True, finalize=_finalize, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {each.__name__: each for each in (rate, speed, times, per_cent, interval, other_params)}
    return environment.from_string(template).render(
        data=data,
        plots=plots,
        deep=[policy for policy in data.highlights() if policy.at_risk and policy.family not in BOUNDS],
        prompts_of={d: f"{found.prompts:,} prompts" for p in data.main for d, found in p.domains.items()},
        facts=_facts(data),
        headline=Markup(headline(data)),
        palette=Markup(_palette()),
        script_hash=f"sha256-{digest}",
        viewer=Markup(script_json(viewer_data(data.responses))),
    )


def _finalize(value: object) -> object:
    """What the template shows: text without characters that are none. The template escapes it."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


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
        f"at {milliseconds(costs.t_target)} a verification and {milliseconds(costs.t_draft)} a drafted token"
    )
    if policy is None or data.verdict:
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


def _facts(data: ReportData) -> dict[str, str]:
    """How the report was made."""
    costs = data.costs
    return {
        "target": data.pair[0],
        "draft": data.pair[1],
        "sampling": ", ".join(f"{name} {value}" for name, value in data.sampling.items()),
        "prompts": f"{data.prompts:,} ({data.tokens:,} tokens)",
        "forward times": f"{milliseconds(costs.t_draft)} draft, {milliseconds(costs.t_target)} a verification, "
        f"{milliseconds(costs.t_autoregressive)} target alone",
        **data.provenance,
    }
