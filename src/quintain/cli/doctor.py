"""`quintain doctor`: the findings of a run, printed."""

from __future__ import annotations

from pathlib import Path

from quintain.monitor.health import Finding, examine_run


def doctor(run: Path) -> int:
    """Print a run's findings; the exit status is 1 if any of them is an error."""
    findings = examine_run(run)
    for finding in findings:
        print(describe(finding))
    errors = sum(finding.severity == "error" for finding in findings)
    others = len(findings) - errors
    print(f"{run}: errors: {errors}, other findings: {others}." if findings else f"{run}: nothing looks wrong.")
    return 1 if errors else 0


def describe(finding: Finding) -> str:
    """A finding in a few lines: what was seen, its numbers, what it usually means, and what to do."""
    evidence = ", ".join(f"{name} {value:.4g}" for name, value in finding.evidence.items())
    return (
        f"{finding.severity} at step {finding.step}: {finding.message} [{finding.rule}]\n"
        f"  evidence: {evidence}\n  meaning:  {finding.meaning}\n  advice:   {finding.advice}"
    )
