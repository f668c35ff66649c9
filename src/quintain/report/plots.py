"""Curves as inline SVG. Colours are left to the page's style sheet, so that one drawing suits light and dark."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

SERIES_COLOURS = 8
MAX_POINTS = 600
"""More points than a chart has pixels only make the page heavy."""

# Matplotlib must be given real colours; each of these stands for a variable of the page's style sheet.
_INK, _GRID, _WARN, _ERROR = "#a0b0d1", "#a0b0d2", "#a0b0d3", "#a0b0d4"
_SERIES = tuple(f"#a0b0c{index}" for index in range(SERIES_COLOURS))
_VARIABLES = {_INK: "--ink-soft", _GRID: "--grid", _WARN: "--warn", _ERROR: "--error"} | {
    colour: f"--series-{index}" for index, colour in enumerate(_SERIES)
}


@dataclass(frozen=True)
class Line:
    """One curve. NaN makes a gap."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    colour: int
    markers: bool = False
    """Draw the points themselves, for a series too sparse to smooth."""


def line_chart(
    lines: Sequence[Line],
    *,
    wide: bool = False,
    band: tuple[float, float] | None = None,
    warnings: Sequence[float] = (),
    errors: Sequence[float] = (),
) -> str:
    """Each line faintly as it is and boldly as a moving average, over an optional shaded band.

    Args:
        warnings: steps marked by a dotted vertical line in the colour of warnings; `errors` likewise.
    """
    figure, axes = _figure(wide)
    if band is not None:
        axes.axhspan(*band, color=_GRID, alpha=0.6, linewidth=0)
    for steps, colour in ((warnings, _WARN), (errors, _ERROR)):
        for step in steps:
            axes.axvline(step, color=colour, linewidth=1, linestyle=(0, (2, 2)))
    for line in lines:
        _draw(axes, line)
    return _svg(figure)


def stacked_chart(steps: Sequence[float], parts: Sequence[Line]) -> str:
    """The parts piled up on each other; they must share `steps`."""
    figure, axes = _figure(wide=False)
    thin_steps = thin(steps)
    colours = [_SERIES[part.colour % SERIES_COLOURS] for part in parts]
    axes.stackplot(thin_steps, [thin(part.values) for part in parts], colors=colours, alpha=0.85, linewidth=0)
    axes.set_ylim(bottom=0)
    return _svg(figure)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred moving average over `window` values, fewer at the ends; NaN takes no part and stays a gap."""
    half, averages = window // 2, []
    for index, value in enumerate(values):
        near = [v for v in values[max(0, index - half) : index + half + 1] if math.isfinite(v)]
        averages.append(sum(near) / len(near) if math.isfinite(value) else math.nan)
    return averages


def thin(values: Sequence[float], most: int = MAX_POINTS) -> list[float]:
    """At most `most` values, each the mean of as many neighbours."""
    size = math.ceil(len(values) / most) or 1
    parts = [[v for v in values[i : i + size] if math.isfinite(v)] for i in range(0, len(values), size)]
    return [sum(part) / len(part) if part else math.nan for part in parts]


def _draw(axes: Any, line: Line) -> None:
    colour = _SERIES[line.colour % SERIES_COLOURS]
    steps, values = thin(line.steps), thin(line.values)
    if line.markers:
        axes.plot(steps, values, color=colour, linewidth=1.2, marker="o", markersize=4)
    elif len(values) < 10:
        axes.plot(steps, values, color=colour, linewidth=1.8, marker="o", markersize=3)
    else:
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
        axes.plot(steps, smooth(values, max(5, len(values) // 20)), color=colour, linewidth=2)


def _figure(wide: bool) -> tuple[Figure, Any]:
    figure = Figure(figsize=(10, 2.9) if wide else (5.2, 2.4), layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.tick_params(colors=_INK, labelsize=9, length=0)
    axes.set_xlabel("step", color=_INK, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
    axes.margins(x=0.01)
    return figure, axes


def _svg(figure: Figure) -> str:
    """The figure as an <svg> element that scales with the page, without prolog, metadata or colours of its own."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "quintain", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text
