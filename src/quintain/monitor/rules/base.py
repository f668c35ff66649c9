"""What a rule of the doctor is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from quintain.monitor.history import History

Severity = Literal["note", "warn", "error"]
Action = Literal["note", "warn", "checkpoint", "stop"]
Stage = Literal["rollout", "reward", "optimisation"]


@dataclass(frozen=True)
class Sighting:
    """A rule's condition, met on the latest row."""

    message: str
    evidence: dict[str, float]
    size: float
    """How bad, above 0 and larger for worse: at twice the reported size it is reported again."""
    harmless: bool = False
    """The same numbers have an innocent reason here; the finding is only a note."""


@dataclass(frozen=True)
class Rule:
    """One thing that goes wrong in runs: when it is seen, what it usually means, and what to do about it."""

    name: str
    stage: Stage
    severity: Severity
    action: Action
    sees: str
    """When the rule fires, in words, with the names of `limits` in braces."""
    limits: Mapping[str, float]
    meaning: str
    advice: str
    check: Callable[..., Sighting | None]
    """Called with the history and `limits` by keyword."""

    @property
    def threshold(self) -> str:
        """`sees` with the numbers filled in."""
        return self.sees.format(**self.limits)

    def examine(self, history: History) -> Sighting | None:
        return self.check(history, **self.limits)
