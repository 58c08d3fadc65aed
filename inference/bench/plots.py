"""The plots of a bench: speed against batch size, attainment of the limit, and a trace's latency and draft lengths."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator

from accept_head.inference.bench.figures import TWIN
from accept_head.inference.bench.tables import short
from accept_head.inference.report.plots import MARKERS, STYLES
from accept_head.inference.report.svg import LIGHT, Plot, figure_style, finish, line_label, new_figure

MOST_LOSS = -50  # largest loss that is shown, per cent
Row = Mapping[str, Any]


def draw_plots(result: Mapping[str, Any]) -> list[Plot]:
    """Every figure that a result file of `accept-head bench` has numbers for."""
    plots = []
    with figure_style():
        for temperature in dict.fromkeys(cell["temperature"] for cell in result.get("cells", [])):
            cells = [cell for cell in result["cells"] if cell["temperature"] == temperature]
            cells.sort(key=lambda cell: cell["batch_size"])
            plots.append(_throughput(cells) if len(cells) > 1 else _gains(cells[0]))
            plots += [_attainment_by_batch(cells)] if cells[0]["slo_limits"] else []
        for cell in result.get("traces", []):
            plots += [_latency(cell), _attainment_by_scale(cell), _speculation(cell)]
    return plots


class _Look:
    """One colour, marker and dash for each policy, the same in every figure."""

    def __init__(self, cell: Row):
        rules = [row["name"] for row in cell["policies"] if not _is_reference(row["name"])]
        self.place = {name: index for index, name in enumerate(rules)}

    def __call__(self, name: str) -> dict[str, Any]:
        if name == "none":
            return {"color": LIGHT["ink"], "marker": "X", "linestyle": "-"}
        if (index := self.place.get(name)) is None:
            return {"color": LIGHT["fixed"], "linewidth": 0.9, "alpha": 0.75, "marker": ""}
        return {"color": LIGHT[f"rule{index % 5}"], "marker": MARKERS[index % 6], "linestyle": STYLES[(index // 5) % 6]}


def _is_reference(name: str) -> bool:
    return name == "none" or name.startswith("fixed:")


def _shown(cell: Row) -> list[str]:
    """All arms except the one for the noise floor."""
    return [row["name"] for row in cell["policies"] if not row["name"].endswith(TWIN)]


def _values(cells: Sequence[Row], figure: str, names: Sequence[str]) -> list[Any]:
    """One figure of each policy in each cell, cell after cell."""
    found = [{row["name"]: row[figure] for row in cell["policies"]} for cell in cells]
    return [values[name] for values in found for name in names]


def _throughput(cells: Sequence[Row]) -> Plot:
    names, look = _shown(cells[0]), _Look(cells[0])
    figure = new_figure(6.4 + _legend_height(names))
    above, below = figure.subplots(2, 1, sharex=True)
    batches = [cell["batch_size"] for cell in cells]
    for name in names:
        gains = [100 * gain for gain in _values(cells, "gain_over_best_fixed", [name])]
        _line(above, look, name, batches, _values(cells, "throughput", [name]))
        _line(below, look, name, batches, gains)
    floors = [100 * cell["noise"]["floor"] for cell in cells]
    below.fill_between(
        batches, [-floor for floor in floors], floors, color=LIGHT["grid"], zorder=0, label="noise floor"
    )
    above.set_yscale("log")
    above.yaxis.set_major_formatter("{x:,.0f}")
    above.yaxis.set_minor_formatter("{x:,.0f}")
    above.set(ylabel="tokens/s")
    below.set(ylabel="over the best fixed K, %", xlabel="batch size")
    below.set_ylim(bottom=max(MOST_LOSS, below.get_ylim()[0]))
    _batch_axis(below, batches)
    _legend(above, names)
    best = "; ".join(_best_words(cell) for cell in cells)
    temperature = cells[0]["temperature"]
    return finish(
        figure,
        name=f"throughput-T{temperature:g}",
        title=f"Speed against batch size, temperature {temperature:g}",
        caption="Thin blue lines are fixed draft lengths, with their K. Below: gain over the fixed K that is fastest "
        f"at that batch size, down to {MOST_LOSS} %; what lies in the grey band cannot be told from noise.",
        alt=f"Throughput against batch size at temperature {temperature:g}: {best}.",
    )


def _best_words(cell: Row) -> str:
    row = max((row for row in cell["policies"] if not row["name"].endswith(TWIN)), key=lambda row: row["throughput"])
    return f"at batch {cell['batch_size']} {short(row['name'])} is fastest, {row['throughput']:.0f} tokens/s"


def _attainment_by_batch(cells: Sequence[Row]) -> Plot:
    names, look = _shown(cells[0]), _Look(cells[0])
    figure = new_figure(3.4 + _legend_height(names))
    axes, batches = figure.add_subplot(), [cell["batch_size"] for cell in cells]
    for name in names:
        shares = [100 * share["1"] for share in _values(cells, "slo_attainment", [name])]
        _line(axes, look, name, batches, shares)
    axes.set(ylabel="responses within the limit, %", xlabel="batch size", ylim=(-3, 103))
    _batch_axis(axes, batches)
    _legend(axes, names)
    temperature = cells[0]["temperature"]
    return finish(
        figure,
        name=f"slo-T{temperature:g}",
        title=f"Attainment against batch size, temperature {temperature:g}",
        caption="Share of responses whose time per output token is within the 90th percentile of the target alone.",
        alt=f"SLO attainment against batch size at temperature {temperature:g}.",
    )


def _attainment_by_scale(cell: Row) -> Plot:
    names, look = _shown(cell), _Look(cell)
    figure = new_figure(3.4 + _legend_height(names))
    axes, scales = figure.add_subplot(), list(cell["slo_limits"])
    for name in names:
        (shares,) = _values([cell], "slo_attainment", [name])
        _line(axes, look, name, [float(scale) for scale in scales], [100 * shares[scale] for scale in scales])
    axes.set(ylabel="responses within the limit, %", xlabel="limit, times P90 of the target alone", ylim=(-3, 103))
    _legend(axes, names)
    return finish(
        figure,
        name=f"slo-{_file_name(cell)}",
        title=f"Attainment: {cell['cell']}",
        caption="Share of responses whose time per output token is within the limit (AdaSpec, figure 11).",
        alt=f"SLO attainment against the limit's scale, {cell['cell']}.",
    )


def _gains(cell: Row) -> Plot:
    names, look = _shown(cell), _Look(cell)
    values = [100 * value for value in _values([cell], "gain_over_best_fixed", names)]
    ends = [[100 * end for end in interval["gain_over_best_fixed"]] for interval in _values([cell], "ci95", names)]
    figure = new_figure(1.0 + 0.26 * len(names))
    axes = figure.add_subplot()
    floor = 100 * cell["noise"]["floor"]
    axes.axvspan(-floor, floor, color=LIGHT["grid"], zorder=0)
    _bars(axes, names, values, look)
    places = range(len(names))[::-1]
    axes.hlines(places, [low for low, _ in ends], [high for _, high in ends], color=LIGHT["ink"], linewidth=1.0)
    axes.set(xlabel="gain over the best fixed K, %")
    words = "; ".join(f"{short(name)} {value:+.1f} %" for name, value in zip(names, values, strict=True))
    return finish(
        figure,
        name=f"throughput-T{cell['temperature']:g}",
        title=f"Gain over the best fixed K: {cell['cell']}",
        caption="Lines are 95 % intervals over chunks; what lies in the grey band cannot be told from noise.",
        alt=f"Gain in tokens/s over the best fixed K, {cell['cell']}: {words}.",
    )


def _latency(cell: Row) -> Plot:
    names, look = _shown(cell), _Look(cell)
    values = _values([cell], "latency_speedup", names)
    figure = new_figure(1.0 + 0.26 * len(names))
    axes = figure.add_subplot()
    _bars(axes, names, values, look)
    for place, value in zip(range(len(names))[::-1], values, strict=True):
        axes.text(value, place, f" {value:.2f}", va="center", fontsize=9)
    axes.axvline(1, color=LIGHT["muted"], linewidth=1.1, linestyle=(0, (5, 3)))
    axes.set(xlabel="mean latency of the target alone / of the policy")
    words = "; ".join(f"{short(name)} {value:.2f}" for name, value in zip(names, values, strict=True))
    return finish(
        figure,
        name=f"latency-{_file_name(cell)}",
        title=f"Latency: {cell['cell']}",
        caption="Speed-up of the mean time from a request's arrival to its last token (AdaSpec, figure 10).",
        alt=f"Latency speed-up over the target alone, {cell['cell']}: {words}.",
    )


def _bars(axes: Axes, names: Sequence[str], values: Sequence[float], look: _Look) -> None:
    """Draw one bar per policy, the first on top."""
    places = range(len(names))[::-1]
    axes.barh(places, values, 0.7, color=[look(name)["color"] for name in names])
    axes.set_yticks(places, [short(name, 30) for name in names])
    axes.grid(visible=False, axis="y")


def _speculation(cell: Row) -> Plot:
    fixed = [row for row in cell["policies"] if row["name"].startswith("fixed:") and not row["name"].endswith(TWIN)]
    best = min(fixed, key=lambda row: row["latency"]["mean"])["name"]
    names = [best, *(name for name in _shown(cell) if not _is_reference(name))]
    figure, look = new_figure(5.0 + _legend_height(names)), _Look(cell)
    above, below = figure.subplots(2, 1, sharex=True)
    for name in names:
        (line,) = (row["timeline"] for row in cell["policies"] if row["name"] == name)
        for axes, values in ((above, line["mean_drafted"]), (below, line["live_rows"])):
            shown = [float("nan") if value is None else value for value in values]
            axes.plot(line["seconds"], shown, **{**look(name), "markersize": 3.5}, label=short(name, 30))
    above.set(ylabel="tokens drafted\nby a row in a round")
    below.set(ylabel="rows decoded", xlabel="seconds")
    below.yaxis.set_major_locator(MaxNLocator(integer=True))
    line_label(below, cell["batch_size"], "batch size")
    _legend(above, names)
    return finish(
        figure,
        name=f"speculation-{_file_name(cell)}",
        title=f"Speculation length: {cell['cell']}",
        caption="How long drafts are, and how many rows are decoded, as requests come and go (AdaSpec, figure 13).",
        alt=f"Draft length and live rows over time, {cell['cell']}.",
    )


def _line(axes: Axes, look: _Look, name: str, x: Sequence[float], y: Sequence[float]) -> None:
    """Draw the line of one policy. The line of a fixed draft length has its number at the end."""
    axes.plot(x, y, **look(name), label=short(name, 30))
    if name.startswith("fixed:"):
        place: dict[str, Any] = {"xytext": (3, -3), "textcoords": "offset points"}
        axes.annotate(name[6:], (x[-1], y[-1]), **place, fontsize=8, color=LIGHT["fixed"])


def _batch_axis(axes: Axes, batches: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.xaxis.set_minor_locator(NullLocator())


def _legend(axes: Axes, names: Sequence[str]) -> None:
    """Draw a legend above the axes. Of the fixed K only the first has an entry; their lines have numbers."""
    handles, labels = axes.get_legend_handles_labels()
    seen: list[int] = []
    for index, name in enumerate(names):
        if not name.startswith("fixed:"):
            seen.append(index)
        elif not any(names[other].startswith("fixed:") for other in seen):
            labels[index] = "fixed K" if sum(name.startswith("fixed:") for name in names) > 1 else labels[index]
            seen.append(index)
    axes.legend(
        [handles[index] for index in seen],
        [labels[index] for index in seen],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=2,
        borderpad=0,
        columnspacing=1.2,
        fontsize=9,
    )


def _legend_height(names: Sequence[str]) -> float:
    """Height of the legend in inches."""
    shown = 1 + sum(not name.startswith("fixed:") for name in names)
    return 0.2 * -(-shown // 2)


def _file_name(cell: Row) -> str:
    """File name of a trace's cell, without its ending."""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", Path(cell["trace"]).name.partition(".")[0]).strip("-")
    return f"{stem}-b{cell['batch_size']}-T{cell['temperature']:g}"
