"""Which charts a report shows, and from which metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quintain.report.plots import Line, line_chart, stacked_chart
from quintain.report.record import RunRecord


@dataclass(frozen=True)
class Panel:
    """A chart of the metrics whose whole name matches `pattern`."""

    title: str
    pattern: str
    caption: str
    wide: bool = False
    band: tuple[float, float] | None = None
    needs_reuse: bool = False
    """Shown only where a rollout serves several updates; otherwise the numbers are constant by definition."""


@dataclass(frozen=True)
class Chart:
    """A drawn panel: its SVG, and a label for each colour."""

    title: str
    caption: str
    svg: str
    legend: list[tuple[int, str]]
    wide: bool = False


PANELS = (
    Panel(
        "Reward", "reward|eval/reward|eval_reward", "What training raises: mean over the step's completions.", wide=True
    ),
    Panel("Reward by function", "rewards/.+/mean", "Each function on its own, before weights."),
    Panel("KL", "kl|ref_kl|target_kl_gap", "Nats per token, to the policy that sampled, the reference and the target."),
    Panel("Entropy", "entropy", "Nats per token. Falls as the policy commits itself; near 0 it no longer explores."),
    Panel(
        "Clip fraction",
        "clip_fraction",
        "Share of tokens whose update was clipped; the classic band of 10-30% is shaded.",
        band=(0.1, 0.3),
        needs_reuse=True,
    ),
    Panel("Largest ratio", "ratio_max", "Of a token's probability to what it was when sampled.", needs_reuse=True),
    Panel("Completion length", "completions/mean_length", "Tokens, the stop token included."),
    Panel(
        "Shares",
        "completions/clipped_ratio|completions/duplicate_fraction|frac_reward_zero_std|unscored_fraction",
        "Completions cut off, repeated or not scored; groups whose rewards are all equal.",
    ),
    Panel("Value loss", "loss/value", "Should fall, then level off."),
    Panel(
        "Explained variance", "explained_variance", "Of the returns, by the value model: 1 is perfect, 0 a constant."
    ),
    Panel("Gradient norm", "grad_norm", "Before clipping."),
    Panel(
        "Effective group size", "group/effective_size", "How many completions of a group share the old policy's weight."
    ),
    Panel("Target entropy", "group/target_entropy", "Of the target over a group, in nats."),
    Panel("Learning rate", "learning_rate|value_learning_rate", ""),
)
STAGES = ("rollout", "reward", "annotate", "fit")
TIME_PANEL = Panel("Time", "|".join(f"time/{stage}" for stage in STAGES), "Seconds a step.")


def charts_of_run(run: RunRecord) -> list[Chart]:
    """The charts of a single run: one colour a metric."""
    charts = []
    for panel in PANELS:
        keys = [] if panel.needs_reuse and not run.reuses_rollouts else _matching(panel, [run])
        lines = [_line(run, key, label=key, colour=index) for index, key in enumerate(keys)]
        charts += [_chart(panel, lines, run.findings if panel.wide else ())] if lines else []
    return charts + _time_chart(run)


def charts_of_runs(runs: Sequence[RunRecord]) -> list[Chart]:
    """The charts of several runs over each other: one chart a metric, one colour a run."""
    charts = []
    for panel in (*PANELS, TIME_PANEL):
        shown = [run for run in runs if run.reuses_rollouts] if panel.needs_reuse else list(runs)
        keys = _matching(panel, shown)
        for key in keys:
            title = panel.title if len(keys) == 1 else f"{panel.title}: {key}"
            lines = [_line(run, key, run.name, runs.index(run)) for run in shown if run.has(key)]
            charts.append(_chart(replace(panel, title=title), lines, ()))
    return charts


def _chart(panel: Panel, lines: list[Line], findings: Iterable[Mapping[str, Any]]) -> Chart:
    marks: dict[str, list[float]] = {"warn": [], "error": []}
    for finding in findings:
        if finding.get("severity") in marks and isinstance(finding.get("step"), int):
            marks[finding["severity"]].append(finding["step"])
    svg = line_chart(lines, wide=panel.wide, band=panel.band, warnings=marks["warn"], errors=marks["error"])
    legend = [(line.colour, line.label) for line in lines]
    return Chart(panel.title, panel.caption, svg, legend, panel.wide)


def _matching(panel: Panel, runs: Sequence[RunRecord]) -> list[str]:
    """The runs' metrics that belong to the panel, in the order in which it names them."""
    found = {key for run in runs for key in run.keys if re.fullmatch(panel.pattern, key)}
    named = panel.pattern.split("|")
    return sorted(found, key=lambda key: (named.index(key) if key in named else len(named), key))


def _line(run: RunRecord, key: str, label: str, colour: int) -> Line:
    steps, values = run.series(key)
    return Line(label, steps, values, colour, markers=key.startswith("eval"))


def _time_chart(run: RunRecord) -> list[Chart]:
    """Seconds a step, by stage, so that a slow stage can be told."""
    steps = [row["step"] for row in run.rows]
    parts = []
    for index, stage in enumerate(STAGES):
        seconds = [run.number(row, f"time/{stage}") for row in run.rows]
        if any(math.isfinite(value) for value in seconds):
            filled = [value if math.isfinite(value) else 0.0 for value in seconds]
            parts.append(Line(stage, steps, filled, index))
    if not parts:
        return []
    legend = [(part.colour, part.label) for part in parts]
    return [Chart("Time by stage", TIME_PANEL.caption, stacked_chart(steps, parts), legend)]
