"""What came out, beside what the paper reports: JSON, tables and a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from quintain.report.intervals import t_interval
from quintain.report.markdown import table_header, table_row
from quintain.report.plots import smooth
from quintain.reproduce.jobs import Job, Result
from quintain.reproduce.paper import NO_LEARNING, Errors, reported

SOLVED = 0.05
"""A seed has solved the task if its final error is below this."""
SMOOTHED_STEPS = 10
"""Steps averaged before asking when an error was first reached."""
LOWEST_ERROR = 1e-4
"""Where the plot's logarithmic axis ends: 0 has no place on it."""


@dataclass(frozen=True)
class Axis:
    """What distinguishes the groups of runs that are compared: a number of the job."""

    title: str
    value: Callable[[Job], int]


AXES = {
    "length": Axis("H", lambda job: job.length),
    "epochs": Axis("epochs", lambda job: job.num_epochs),
    "groups": Axis("K", lambda job: job.group_size),
}


def write_results(results: Sequence[Result], folder: Path, *, axis: Axis, paper: Errors, command: str) -> str:
    """Fill `folder` with results.json, table.md and errors.png, and return the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    text = tables(results, axis, paper)
    objects = ",\n".join(json.dumps(result.to_dict()) for result in results)
    (folder / "results.json").write_text(f"[\n{objects}\n]\n", encoding="utf-8")
    (folder / "table.md").write_text(f"    {command}\n\n{text}\n", encoding="utf-8")
    plot(results, axis, paper).savefig(folder / "errors.png", dpi=150)
    return text


def tables(results: Sequence[Result], axis: Axis, paper: Errors) -> str:
    """Final errors with intervals and what the paper reports, then the mean error along the way, in Markdown."""
    groups = grouped(results, axis)
    lines = table_header(
        "algorithm",
        axis.title,
        "seeds",
        "final error % [95% interval]",
        "each seed %",
        "paper %",
        f"solved (< {100 * SOLVED:g}%)",
        "steps to 50%, median of those",
        "steps to 1%, median of those",
        "worst after that %",
    )
    for (algorithm, value), runs in groups.items():
        lines.append(
            table_row(
                algorithm,
                value,
                len(runs),
                percent_interval([run.final_error for run in runs]),
                ", ".join(f"{100 * run.final_error:.1f}" for run in runs),
                paper_number(paper, algorithm, value),
                f"{sum(run.final_error < SOLVED for run in runs)}/{len(runs)}",
                median_steps(runs, 0.5),
                median_steps(runs, 0.01),
                ", ".join("-" if (worst := worst_after(run, 0.01)) is None else f"{100 * worst:.1f}" for run in runs),
            )
        )
    steps = curve_steps(results)
    lines += ["", "Mean error % over the seeds, at these steps:", ""]
    lines += table_header("algorithm", axis.title, *map(str, steps))
    for (algorithm, value), runs in groups.items():
        cells = [percent_interval([error_around(run, step) for run in runs]) for step in steps]
        lines.append(table_row(algorithm, value, *cells))
    return "\n".join(lines)


def grouped(results: Iterable[Result], axis: Axis) -> dict[tuple[str, int], list[Result]]:
    """The runs of each algorithm at each value of the axis, that is, the seeds."""
    groups: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        groups.setdefault((result.job.algorithm, axis.value(result.job)), []).append(result)
    return dict(sorted(groups.items(), key=lambda item: item[0][1]))


def steps_to(result: Result, error: float) -> int | None:
    """The first step whose error, averaged with that of the steps before it, is at most `error`."""
    errors = result.errors
    for step in range(SMOOTHED_STEPS, len(errors) + 1):
        if statistics.fmean(errors[step - SMOOTHED_STEPS : step]) <= error:
            return step
    return None


def worst_after(result: Result, error: float) -> float | None:
    """The largest error, averaged as in `steps_to`, once `error` had been reached: how far a solved run fell back."""
    reached = steps_to(result, error)
    if reached is None:
        return None
    return max(error_around(result, step) for step in range(reached, len(result.errors) + 1))


def median_steps(runs: Sequence[Result], error: float) -> str:
    """The median over the seeds that got there, and how many did."""
    reached = [step for run in runs if (step := steps_to(run, error)) is not None]
    return f"{statistics.median(reached):g} ({len(reached)}/{len(runs)})" if reached else f"- (0/{len(runs)})"


def curve_steps(results: Sequence[Result]) -> list[int]:
    """Steps at which the table shows the curve: more of them early, where most happens."""
    last = max(len(result.errors) for result in results)
    shares = (0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
    return sorted({max(1, round(share * last)) for share in shares})


def error_around(result: Result, step: int) -> float:
    """Mean error of the steps up to and including `step`, over a window of `SMOOTHED_STEPS`."""
    return statistics.fmean(result.errors[max(0, step - SMOOTHED_STEPS) : step])


def percent_interval(values: Sequence[float]) -> str:
    """Mean and interval in percent, such as "6.9 [4.8, 9.0]". The interval ends at 0 and 100, as errors do."""
    found = t_interval(values)
    if found.half_width is None:
        return f"{100 * found.mean:.1f}"
    low, high = max(0.0, found.mean - found.half_width), min(1.0, found.mean + found.half_width)
    return f"{100 * found.mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def paper_number(paper: Errors, algorithm: str, value: int) -> str:
    """What the paper has for this cell, or "-"."""
    number = reported(paper, algorithm, value)
    if number is None:
        return "-"
    return f"> {number:g}" if number >= NO_LEARNING else f"{number:g}"


def plot(results: Sequence[Result], axis: Axis, paper: Errors) -> Figure:
    """One panel a value of the axis: each seed thin, their mean bold, the paper's final error as a dashed line."""
    values = sorted({axis.value(result.job) for result in results})
    algorithms = list(dict.fromkeys(result.job.algorithm for result in results))
    figure = Figure(figsize=(5.5 * len(values), 4.2), layout="constrained")
    panels = figure.subplots(1, len(values), squeeze=False, sharey=True)[0]
    groups = grouped(results, axis)
    for axes, value in zip(panels, values):
        axes.set(title=f"{axis.title} = {value}", xlabel="step", yscale="log", ylim=(LOWEST_ERROR, 1.2))
        for number, algorithm in enumerate(algorithms):
            runs, colour = groups.get((algorithm, value), []), f"C{number}"
            curves = [smooth(run.errors, SMOOTHED_STEPS) for run in runs]
            for curve in curves:
                axes.plot([max(error, LOWEST_ERROR) for error in curve], color=colour, linewidth=0.6, alpha=0.4)
            if curves:
                mean = [max(statistics.fmean(errors), LOWEST_ERROR) for errors in zip(*curves)]
                axes.plot(
                    mean, color=colour, linewidth=1.8, label=f"{algorithm} ({len(runs)} seed{'s' * (len(runs) > 1)})"
                )
            theirs = reported(paper, algorithm, value)
            if runs and theirs is not None and theirs < NO_LEARNING:
                axes.axhline(theirs / 100, color=colour, linestyle="--", linewidth=1)
        axes.legend(fontsize=8)
    panels[0].set_ylabel("share of completions with an error")
    return figure
