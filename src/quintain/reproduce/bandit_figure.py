"""The bandits' figure: what each method reached, as JSON, a plot and a table beside what the paper finds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from quintain.report.markdown import table_header, table_row
from quintain.reproduce.bandit import ROUNDING, BanditCurves, many_contexts, single_context

ONE_CONTEXT = "one context"
MANY_CONTEXTS = "many contexts"
FINDINGS = {
    ONE_CONTEXT: "The paper's figure 2: TPO and DG converge fastest, GRPO and PG plateau at a higher error, and TPO "
    "stays closest to the exact policy gradient.",
    MANY_CONTEXTS: "The paper's figure 3: of TPO, DG and GRPO, TPO ends with the lowest error, and its direction is "
    "the nearest to that of cross-entropy (CE), which knows the right arms.",
}


def run_bandits(folder: Path, *, seeds: int = 100) -> str:
    """Run both bandits, write bandit.json and bandit.png into `folder`, and return a table in Markdown.

    bandit.json is a list with one object for each experiment and method:

        experiment, method, seeds    which curves these are
        final_error                  at the last step, mean over seeds
        mean_misalignment            over all steps, mean over seeds
        ..._sem                      standard errors of these two; null with one seed
        late_misalignment            over the second half of the steps, mean over seeds
        errors, misalignment         at each step, means over seeds

    Args:
        folder: made if it is missing; files of these names are overwritten.
        seeds: at least 1. The paper: 100.
    Raises:
        ConfigError: seeds is below 1.
    """
    experiments = {ONE_CONTEXT: single_context(seeds=seeds), MANY_CONTEXTS: many_contexts(seeds=seeds)}
    results = [row for name, curves in experiments.items() for row in _summarise(name, curves)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bandit.json").write_text(json.dumps(results) + "\n", encoding="utf-8")
    _plot(experiments).savefig(folder / "bandit.png", dpi=150)
    return "\n\n".join(_table(name, [row for row in results if row["experiment"] == name]) for name in experiments)


def _summarise(experiment: str, curves: BanditCurves) -> list[dict[str, Any]]:
    return [
        {
            "experiment": experiment,
            "method": method,
            "seeds": len(errors),
            "final_error": errors[:, -1].mean().item(),
            "final_error_sem": _standard_error(errors[:, -1]),
            "mean_misalignment": misalignment.mean().item(),
            "mean_misalignment_sem": _standard_error(misalignment.mean(dim=1)),
            "late_misalignment": misalignment[:, misalignment.shape[1] // 2 :].mean().item(),
            "errors": errors.mean(dim=0).tolist(),
            "misalignment": misalignment.mean(dim=0).tolist(),
        }
        for method, errors, misalignment in zip(curves.errors, curves.errors.values(), curves.misalignment.values())
    ]


def _standard_error(values: Float[Tensor, " seeds"]) -> float | None:
    """Of the mean over seeds, from their sample standard deviation; one seed alone has none."""
    return (values.std() / math.sqrt(len(values))).item() if len(values) > 1 else None


def _table(experiment: str, results: list[dict[str, Any]]) -> str:
    """What each method reached, what the paper finds, and at how many steps TPO bears that out."""
    lines = [
        f"Bandit, {experiment} ({results[0]['seeds']} seeds, {len(results[0]['errors'])} steps):",
        "",
        *table_header(
            "method", "final error, %", "± standard error", "misalignment", "± standard error", "in the second half"
        ),
    ]
    for row in results:
        cells = [
            row["method"].upper(),
            *(_cell(row[key], scale=100) for key in ("final_error", "final_error_sem")),
            *(_cell(row[key]) for key in ("mean_misalignment", "mean_misalignment_sem", "late_misalignment")),
        ]
        lines.append(table_row(*cells))
    curves = {row["method"]: row["misalignment"] for row in results if row["method"] != "ce"}
    nearest = sum(own <= min(others) + ROUNDING for own, *others in zip(curves.pop("tpo"), *curves.values()))
    steps = len(results[0]["errors"])
    return "\n".join([*lines, "", f"{FINDINGS[experiment]} Here TPO is the nearest at {nearest} of {steps} steps."])


def _cell(value: float | None, *, scale: float = 1) -> str:
    if value is None:
        return "-"
    return "0" if abs(value) < ROUNDING else f"{scale * value:.3g}"


def _plot(experiments: Mapping[str, BanditCurves]) -> Figure:
    """A row of panels for each experiment: error on the left, misalignment on the right; bands are standard errors."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = figure.subplots(len(experiments), 2, squeeze=False)
    for (left, right), (experiment, curves) in zip(panels, experiments.items()):
        _draw(left, curves.errors)
        _draw(right, curves.misalignment)
        right.set_ylim(bottom=ROUNDING)
        left.set(title=experiment, ylabel="error")
        right.set(title=experiment, ylabel="misalignment")
    return figure


def _draw(axes: Any, curves: Mapping[str, Float[Tensor, "seeds steps"]]) -> None:
    for method, values in curves.items():
        steps, mean = range(1, values.shape[1] + 1), values.mean(dim=0)
        (line,) = axes.plot(steps, mean, label=method.upper())
        if len(values) > 1:
            sem = values.std(dim=0) / math.sqrt(len(values))
            low = (mean - sem).clamp(min=ROUNDING)  # a log scale has no place for 0
            axes.fill_between(steps, low, mean + sem, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="step", yscale="log")
    axes.legend()
