"""The page's figures as inline SVG, drawn by matplotlib in colours that read on light and dark."""

import io
from collections.abc import Sequence
from typing import Any

INK = "#7a8594"
COLOURS = ("#2f7ed8", "#e07b39", "#3a9d5d", "#a05cc5", "#c2453f", "#1f9aa0")
Series = dict[str, tuple[Sequence[float], Sequence[float]]]


def lines(title: str, x_label: str, y_label: str, series: Series, log_y: bool = False) -> str:
    """Return an SVG of one or more curves; ``series`` maps a label to its x and y values."""
    figure, axes = _axes(title, x_label, y_label)
    for colour, (label, (x, y)) in zip(COLOURS, series.items(), strict=False):
        axes.plot(x, y, color=colour, label=label, linewidth=1.6, marker="o", markersize=2.5)
    if log_y:
        axes.set_yscale("log")
    if len(series) > 1:
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    return _svg(figure, title)


def bars(title: str, y_label: str, labels: list[str], groups: dict[str, list[tuple[float, float, float]]]) -> str:
    """Return an SVG of grouped bars with intervals; each value is ``(value, low, high)``."""
    figure, axes = _axes(title, "", y_label)
    width = 0.8 / max(len(groups), 1)
    for index, (label, values) in enumerate(groups.items()):
        places = [place + (index - (len(groups) - 1) / 2) * width for place in range(len(values))]
        heights = [value for value, _, _ in values]
        below = [max(value - low, 0.0) for value, low, _ in values]
        above = [max(high - value, 0.0) for value, _, high in values]
        colour = COLOURS[index % len(COLOURS)]
        axes.bar(places, heights, width * 0.9, yerr=[below, above], color=colour, ecolor=INK, label=label)
    axes.set_xticks(range(len(labels)), labels)
    if len(groups) > 1:
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    return _svg(figure, title)


def _axes(title: str, x_label: str, y_label: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5.4, 3.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, color=INK, fontsize=10)
    axes.set_xlabel(x_label, color=INK, fontsize=9)
    axes.set_ylabel(y_label, color=INK, fontsize=9)
    axes.tick_params(colors=INK, labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.patch.set_alpha(0)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(INK)
    axes.grid(axis="y", color=INK, alpha=0.2)
    return figure, axes


def _svg(figure: Any, title: str) -> str:
    import matplotlib

    target = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "qdflash", "svg.fonttype": "none"}):
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Title": title})
    text = target.getvalue()
    return text[text.index("<svg") :]
