"""The doctor: watches a run's metrics, says what looks wrong, what it usually means and what to do.

It only reads numbers. What happens on an action ("checkpoint", "stop") is the trainer's decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintain.errors import DataError
from quintain.monitor.history import History
from quintain.monitor.rules import RULES, Action, Rule, Severity, Sighting, Stage
from quintain.monitor.runs import read_config, read_metrics

COOL_DOWN_STEPS = 100
WORSE = 2.0


@dataclass(frozen=True)
class Finding:
    """Something that looks wrong in a run, as written to findings.jsonl (`dataclasses.asdict`)."""

    severity: Severity
    rule: str
    step: int
    message: str
    evidence: dict[str, float]
    meaning: str
    advice: str
    action: Action
    stage: Stage


class Doctor:
    """Examines a run step by step.

    A finding is reported once, then again only when it has become twice as bad or still holds after 100 steps. A note
    is reported once, and again only when it has become serious.

    Args:
        config: the run's resolved settings by public field name, as in config.yaml.
        rules: what to look for.
    """

    def __init__(self, config: Mapping[str, Any], rules: Sequence[Rule] = RULES) -> None:
        self.rules = tuple(rules)
        self.history = History(config)
        self._reported: dict[str, dict[str, Any]] = {}

    def observe(self, metrics: Mapping[str, Any]) -> list[Finding]:
        """Take in one step's metrics (the keys of metrics.jsonl) and return what is new.

        Raises:
            DataError: the row has no step number.
        """
        self.history.add(metrics)
        findings = []
        for rule in self.rules:
            sighting = rule.examine(self.history)
            if sighting is not None and self._is_news(rule, sighting):
                findings.append(self._report(rule, sighting))
        return findings

    def _is_news(self, rule: Rule, sighting: Sighting) -> bool:
        last = self._reported.get(rule.name)
        if last is None:
            return True
        if _is_note(rule, sighting):
            return False
        lasting = self.history.step - last["step"] >= COOL_DOWN_STEPS
        return lasting or sighting.size >= WORSE * last["size"] or last["note"]

    def _report(self, rule: Rule, sighting: Sighting) -> Finding:
        note = _is_note(rule, sighting)
        self._reported[rule.name] = {"step": self.history.step, "size": sighting.size, "note": note}
        return Finding(
            severity="note" if note else rule.severity,
            rule=rule.name,
            step=self.history.step,
            message=sighting.message,
            evidence=sighting.evidence,
            meaning=rule.meaning,
            advice=rule.advice,
            action="note" if note else rule.action,
            stage=rule.stage,
        )

    def state_dict(self) -> dict[str, Any]:
        """All that decides later findings, in plain JSON types."""
        return {
            "history": self.history.state_dict(),
            "reported": {name: dict(last) for name, last in self._reported.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history.load_state_dict(state["history"])
        self._reported = {name: dict(last) for name, last in state["reported"].items()}


def _is_note(rule: Rule, sighting: Sighting) -> bool:
    return sighting.harmless or rule.severity == "note"


def examine_run(path: Path | str) -> list[Finding]:
    """Replay a run's metrics.jsonl under its config.yaml and return every finding, in order of step.

    Raises:
        DataError: a file is missing, or no step has been recorded.
    """
    run = Path(path)
    rows = read_metrics(run).rows
    if not rows:
        raise DataError(f"{run / 'metrics.jsonl'} records no step yet: there is nothing to examine.")
    doctor = Doctor(read_config(run))
    return [finding for row in rows for finding in doctor.observe(row)]
