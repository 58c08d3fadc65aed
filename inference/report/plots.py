"""The report's figures: rates against each other, throughput against threshold, calibration, draft lengths, depths."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from accept_head.inference.replay.comparison import BOUNDS
from accept_head.inference.report.data import NOT_RULES, CalibrationCurve, PolicyResult, ReportData, printable
from accept_head.inference.report.svg import (
    LIGHT,
    Plot,
    figure_style,
    finish,
    legend_above,
    line_label,
    log_counts,
    new_figure,
)

MARKERS = ("o", "s", "^", "D", "v", "P")
STYLES = ("-", "--", "-.", (0, (1, 1.2)), (0, (6, 2, 1, 2, 1, 2)), "-")
LEVELS = {"oracle": "oracle", "informed": "informed bound", "none": "target alone"}
LEAST_AT_RISK = 10  # an acceptance rate over fewer rounds is not shown


def draw_plots(data: ReportData) -> list[Plot]:
    """Every figure that the data has numbers for, in the page's order."""
    with figure_style():
        found = [_pareto(data), _throughput(data), *_calibrations(data.calibration), _lengths(data), _depths(data)]
    return [plot for plot in found if plot]


class _Look:
    """One colour, marker and dash for each family, the same in every figure."""

    def __init__(self, data: ReportData):
        chosen = data.chosen.family if data.chosen else None
        rules = sorted((f for f in data.families() if f not in NOT_RULES), key=lambda f: f != chosen)
        self.place = {family: index for index, family in enumerate(["fixed", *rules])}

    def __call__(self, family: str) -> dict[str, Any]:
        index = self.place.get(family)
        if index is None:
            return {"color": LIGHT["ink"], "marker": {"oracle": "*", "informed": "P"}.get(family, "X")}
        colour = LIGHT["fixed"] if index == 0 else LIGHT[f"rule{(index - 1) % 5}"]
        return {"color": colour, "marker": MARKERS[index % 6], "linestyle": STYLES[index % 6]}


def _short(name: str, longest: int = 24) -> str:
    """The name, short enough for a plot. A path keeps its end."""
    text = printable(name)
    return text if len(text) <= longest else "…" + text[1 - longest :]


def _label(name: str) -> str:
    """A label for a legend. Matplotlib leaves out labels that begin with an underscore."""
    text = _short(name)
    return f" {text}" if text.startswith("_") else text


def _pareto(data: ReportData) -> Plot:
    figure = new_figure(4.3)
    axes, look = figure.add_subplot(), _Look(data)
    for family, policies in data.families().items():
        x, y = [p.discard_rate for p in policies], [p.verification_rate for p in policies]
        if family in LEVELS:
            name = LEVELS[family]
            axes.plot(x, y, **{**look(family), "linestyle": ""}, markersize=11 if family == "oracle" else 8, label=name)
        else:
            axes.plot(x, y, **look(family), label="fixed K" if family == "fixed" else _label(family))
        if family == "fixed":
            for policy in policies:
                _beside(axes, policy, f"{policy.parameter:g}" if policy.parameter is not None else "", LIGHT["fixed"])
    shown = [p.discard_rate for p in data.highlights()]
    right = max(1.0, 2.5 * max(shown, default=0.0))  # K = 20 may discard ten times as much as others
    beyond = any(p.discard_rate > right for p in data.policies)
    right = right if beyond else axes.get_xlim()[1]
    axes.set_xlim(-0.04 * right, right)
    _iso_throughput(axes, data)
    if data.chosen:
        _ring(axes, data.chosen, data.chosen.discard_rate, data.chosen.verification_rate, below=True)
    axes.set(
        xlabel="discard rate (drafted, not accepted, a token)", ylabel="verification rate (target forwards a token)"
    )
    if data.policies:
        axes.legend(loc="upper right")
    return finish(
        figure,
        name="pareto",
        title="Discarded drafts against verifications",
        caption="Each curve is one family of policies through its settings; small numbers are K. Nearer the lower left "
        "corner is better on any hardware. "
        + (
            "Along the dashed line throughput equals that of the best fixed K, with this report's forward times. "
            * bool(data.best_fixed)
        )
        + ("The ring is the recommended policy. " if data.chosen else "")
        + (f"Policies that discard more than {right:.1f} lie outside." if beyond else ""),
        alt=_pareto_words(data),
    )


def _pareto_words(data: ReportData) -> str:
    words = [
        f"{printable(p.name)} discards {p.discard_rate:.3f} and verifies {p.verification_rate:.3f}"
        for p in data.highlights()
    ]
    return "Discard rate against verification rate of every policy: " + "; ".join(words) + "."


def _beside(axes: Axes, policy: PolicyResult, text: str, colour: str) -> None:
    place = (policy.discard_rate, policy.verification_rate)
    axes.annotate(text, place, xytext=(4, 4), textcoords="offset points", fontsize=9.5, color=colour)


def _ring(axes: Axes, policy: PolicyResult, x: float, y: float, *, below: bool) -> None:
    look: dict[str, Any] = {"markersize": 14, "fillstyle": "none", "linestyle": "", "color": LIGHT["ink"]}
    axes.plot([x], [y], marker="o", **look)
    words: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9.5, "ha": "right" if below else "left"}
    axes.annotate(_short(policy.name), (x, y), xytext=(-6, -15) if below else (7, 7), **words)


def _iso_throughput(axes: Axes, data: ReportData) -> None:
    """Draw lines of equal throughput. They are straight, because equation 5.1 is linear in the two rates."""
    if not (best := data.best_fixed):
        return
    low, high = axes.get_ylim()
    t_draft, rest = data.costs.t_draft, data.costs.t_target - data.costs.t_draft
    x = np.array(axes.get_xlim())
    y = best.verification_rate - t_draft / rest * (x - best.discard_rate) if rest > 0 else x * np.nan
    axes.plot(x, y, color=LIGHT["muted"], linewidth=1.1, linestyle=(0, (5, 3)), label="as fast as best K", zorder=1)
    axes.set(xlim=tuple(x), ylim=(low, high))


def _throughput(data: ReportData) -> Plot | None:
    rules = {
        family: points
        for family, policies in data.families().items()
        if family not in NOT_RULES and len(points := [p for p in policies if p.parameter is not None]) > 1
    }
    if not rules:
        return None
    # Thresholds that are probabilities share an axis. Those in another unit (entropy, nats) have their own.
    shared = [family for family, points in rules.items() if all(0 <= (p.parameter or 0) <= 1 for p in points)]
    panels = [panel for panel in [shared, *([family] for family in rules if family not in shared)] if panel]
    figure, look = new_figure(0.3 + 3.0 * len(panels)), _Look(data)
    every = figure.subplots(len(panels), 1, sharey=True, squeeze=False)[:, 0]
    for axes, families in zip(every, panels, strict=True):
        for family in families:
            points = rules[family]
            axes.plot(
                [p.parameter or 0.0 for p in points],
                [p.throughput for p in points],
                **look(family),
                label=_label(family),
            )
        if data.chosen and data.chosen.family in families and data.chosen.parameter is not None:
            _ring(axes, data.chosen, data.chosen.parameter, data.chosen.throughput, below=False)
        for policy, text in _levels(data):
            line_label(axes, policy.throughput, text)
        axes.set(ylabel="tokens/s")
        axes.set_xlabel("threshold" if families is shared else f"threshold of {_short(families[0])}")
        legend_above(axes, columns=3)
    best = [max(points, key=lambda p: p.throughput) for points in rules.values()]
    words = "; ".join(f"{printable(p.name)} is fastest of its rule at {p.throughput:.0f} tokens/s" for p in best)
    lines = "; ".join(f"{text} {policy.throughput:.0f} tokens/s" for policy, text in _levels(data))
    return finish(
        figure,
        name="throughput",
        title="Throughput against threshold",
        caption="Tokens a second by equation 3.1 with this report's forward times. Dashed: "
        + ", ".join(text for _, text in _levels(data))
        + "."
        + (" The ring is the recommended policy." if data.chosen and data.chosen.family in rules else ""),
        alt=f"Throughput against threshold: {words}. Levels: {lines}.",
    )


def _levels(data: ReportData) -> list[tuple[PolicyResult, str]]:
    levels = [(policy, LEVELS[policy.family]) for policy in data.policies if policy.family in LEVELS]
    best = data.best_fixed
    return levels + ([(best, f"best fixed K ({_short(best.name)})")] if best else [])


def _calibrations(curves: Sequence[CalibrationCurve]) -> list[Plot]:
    heads = list(dict.fromkeys(curve.head for curve in curves))
    return [
        _calibration(head, [curve for curve in curves if curve.head == head], _file_name(head, index, len(heads)))
        for index, head in enumerate(heads)
    ]


def _file_name(head: str, index: int, heads: int) -> str:
    """A file name for a head's plot. Heads are numbered, because folder names may be equal or no valid file names."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", head).strip("-")[-40:]
    return "calibration" if heads == 1 else f"calibration-{index + 1}-{slug}".rstrip("-")


def _calibration(head: str, curves: Sequence[CalibrationCurve], name: str) -> Plot:
    figure = new_figure(5.2)
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    axes.plot([0, 1], [0, 1], color=LIGHT["muted"], linewidth=1.1, linestyle=(0, (5, 3)), label="calibrated")
    for index, curve in enumerate(curves):
        look = {"color": LIGHT[f"depth{index % 5}"], "marker": MARKERS[index % 6], "linestyle": STYLES[index % 6]}
        axes.plot(curve.predicted, curve.observed, **look, label=f"depth {_short(curve.depth)}")
        below.plot(curve.predicted, curve.counts, **{**look, "markersize": 3.5, "linewidth": 1.1})
    axes.set(ylabel="observed acceptance", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    if any(count > 0 for curve in curves for count in curve.counts):
        log_counts(below)
    below.set(ylabel="tokens", xlabel="predicted acceptance")
    axes.legend(loc="upper left", title=None)
    errors = ", ".join(f"depth {printable(c.depth)}: {c.ece:.3f} over {c.count:,} tokens" for c in curves)
    return finish(
        figure,
        name=name,
        title=f"Calibration of {_short(head, 60)}",
        caption="Predicted against observed acceptance in bins, by depth in the round; on the diagonal a prediction "
        "means what it says. Below: tokens in each bin.",
        alt=f"Calibration of {printable(head)}; expected calibration error by depth: {errors}.",
    )


def _lengths(data: ReportData) -> Plot | None:
    policies = [p for p in data.highlights() if sum(p.draft_lengths)]
    if not policies:
        return None
    figure, look = new_figure(0.9 + 0.62 * len(policies)), _Look(data)
    axes, means = figure.add_subplot(), []
    longest = min(20, max(len(p.draft_lengths) for p in policies) - 1)
    for row, policy in enumerate(policies):
        counts = np.array(policy.draft_lengths, dtype=float)
        means.append(float((counts * np.arange(len(counts))).sum() / counts.sum()))
        shown = np.append(counts[:longest], counts[longest:].sum()) if len(counts) > longest else counts
        base, heights = len(policies) - 1 - row, shown / shown.max() * 0.78
        axes.bar(np.arange(len(shown)), heights, 0.8, bottom=base, color=look(policy.family)["color"])
        axes.axhline(base, color=LIGHT["muted"], linewidth=0.8)
        axes.text(longest + 0.5, base + 0.45, f"mean {means[-1]:.2f}", ha="right", fontsize=9.5, color=LIGHT["muted"])
    axes.set(xlabel="tokens drafted in a round", xlim=(-0.6, longest + 0.6), ylim=(0, len(policies)))
    axes.set_yticks([len(policies) - 0.62 - row for row in range(len(policies))], [_short(p.name) for p in policies])
    axes.tick_params(axis="y", length=0, labelcolor=LIGHT["ink"])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False, axis="y")
    words = "; ".join(f"{printable(p.name)} drafts {m:.2f}" for p, m in zip(policies, means, strict=True))
    return finish(
        figure,
        name="lengths",
        title="Draft lengths",
        caption="How often a round drafts that many tokens; each row is scaled to its own highest bar."
        + (
            f" The last column is {longest} or more."
            if any(len(p.draft_lengths) - 1 > longest for p in policies)
            else ""
        ),
        alt=f"Draft lengths. In the mean, {words} tokens a round.",
    )


def _depths(data: ReportData) -> Plot | None:
    policies = [p for p in data.highlights() if p.family not in BOUNDS and any(n >= LEAST_AT_RISK for n in p.at_risk)]
    if not policies:
        return None
    figure, look = new_figure(4.6), _Look(data)
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for policy in policies:
        at_risk = np.array(policy.at_risk, dtype=float)
        depth = np.arange(1, len(at_risk) + 1)
        enough = at_risk >= LEAST_AT_RISK
        rate = np.array(policy.accepted, dtype=float)[enough] / at_risk[enough]
        style = look(policy.family)
        interval = _wilson(rate, at_risk[enough])
        axes.errorbar(depth[enough], rate, interval, **style, elinewidth=0.8, label=_label(policy.name))
        below.plot(depth[at_risk > 0], at_risk[at_risk > 0], **{**style, "markersize": 3.5, "linewidth": 1.1})
    axes.set(ylabel="accepted, if reached", ylim=(0, 1.03))
    legend_above(axes, columns=2)
    log_counts(below)
    below.set(ylabel="at risk", xlabel="depth in the round")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    words = "; ".join(f"{printable(p.name)} {p.accepted[0] / p.at_risk[0]:.2f}" for p in policies if p.at_risk[0])
    return finish(
        figure,
        name="depths",
        title="Acceptance by depth",
        caption="Share of drafted tokens accepted among rounds in which every token before was (95 % interval; depths "
        f"that fewer than {LEAST_AT_RISK} rounds reach are left out). Below: those rounds, the number at risk.",
        alt=f"Conditional acceptance by depth. At depth 1: {words}.",
    )


def _wilson(rate: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Wilson's 95 % interval of a share, as distances (below, above) from it. It stays between 0 and 1."""
    z = 1.96
    middle = (rate + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(rate * (1 - rate) / count + (z / (2 * count)) ** 2)
    return np.maximum(np.stack([rate - middle + half, middle + half - rate]), 0)
