"""A run, or several beside each other, as one HTML page that needs nothing from elsewhere."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from quintain.report.charts import charts_of_run, charts_of_runs
from quintain.report.record import RunRecord, name_runs, read_run

LONGEST_TEXT = 1500
SEVERITIES = ("error", "warn", "note")


def write_report(runs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page and return its path.

    Args:
        runs: folders of runs. One gives a page about that run; several give their curves over each other.
        output: where to write; by default RUN/report.html, or comparison.html beside the first of several runs.
    Raises:
        DataError: no folder is given, one is given twice, or one is not a run's folder.
    """
    folders = [Path(run) for run in runs]
    records = [read_run(folder, name) for folder, name in zip(folders, name_runs(folders))]
    if output is None:
        output = folders[0] / "report.html" if len(folders) == 1 else folders[0].parent / "comparison.html"
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial")
    partial.write_text(render_page(records), encoding="utf-8", errors="replace")
    os.replace(partial, output)
    return output


def render_page(runs: Sequence[RunRecord]) -> str:
    """The page's HTML. Everything that comes from a run is escaped."""
    environment = Environment(loader=PackageLoader("quintain.report", "."), autoescape=True, trim_blocks=True)
    environment.filters.update(
        number=format_number, duration=format_duration, code=format_code, clip=clip_text, plain=format_setting
    )
    return environment.get_template("template.html").render(
        title=" and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs",
        runs=runs,
        charts=charts_of_run(runs[0]) if len(runs) == 1 else charts_of_runs(runs),
        headlines=[headline(run) for run in runs],
        by_severity=by_severity,
    )


def headline(run: RunRecord) -> dict[str, Any]:
    """The numbers at the top of the page; None where the run does not hold them."""
    edges = run.reward_edges
    speed = sorted(run.finite("tokens_per_second"))
    memory = run.finite("memory_peak_gb")
    change = edges[1] - edges[0] if edges else None
    return {
        "first": edges[0] if edges else None,
        "last": edges[1] if edges else None,
        "change": change,
        "errors_apart": change / edges[2] if edges and change is not None and edges[2] > 0 else None,
        "steps": run.rows[-1]["step"] if run.rows else 0,
        "planned": run.config.get("max_steps"),
        "tokens_per_second": speed[len(speed) // 2] if speed else None,
        "seconds": run.seconds or None,
        "memory": max(memory) if memory else None,
        "counts": {
            severity: sum(finding.get("severity") == severity for finding in run.findings) for severity in SEVERITIES
        },
    }


def by_severity(findings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Errors first, then warnings, then notes; within each as they came."""
    return [finding for severity in SEVERITIES for finding in findings if finding.get("severity") == severity]


def format_number(value: Any) -> str:
    """Four significant digits; a dash for what is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def format_duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, the two largest that are not 0."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


def format_code(text: str) -> Markup:
    """The text escaped, with `names in backticks` set as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def clip_text(text: Any) -> str:
    """The text, cut where it is too long to read in a table, saying how much is left out."""
    text = str(text)
    left = len(text) - LONGEST_TEXT
    return text if left <= 0 else f"{text[:LONGEST_TEXT]} … ({left} more characters)"


def format_setting(value: Any) -> str:
    """A setting's value as in YAML."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
