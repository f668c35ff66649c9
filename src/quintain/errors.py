"""The errors Quintain raises on purpose. Each message says what was wrong, the value, and how to fix it."""

from __future__ import annotations


class QuintainError(Exception):
    """Base of every error raised on purpose, so that a caller can catch them all."""


class ConfigError(QuintainError, ValueError):
    """A setting is outside its range, contradicts another, or has an unknown name."""


class DataError(QuintainError, ValueError):
    """A dataset or a prompt cannot be used as it is."""


class RewardError(QuintainError, RuntimeError):
    """A reward function failed or broke its contract; the weights are as they were before the call."""


class RolloutError(QuintainError, RuntimeError):
    """Sampling failed, or the sampler and the trainer disagree about the same tokens."""


class CheckpointError(QuintainError, RuntimeError):
    """A checkpoint is missing, damaged, or lacks a part that the run needs."""


def nearest(name: str, choices: object) -> str:
    """A clause naming the closest of `choices`, or an empty string when none is close."""
    import difflib

    close = difflib.get_close_matches(name, [str(choice) for choice in choices], n=1, cutoff=0.6)  # type: ignore[attr-defined]
    return f" Did you mean {close[0]!r}?" if close else ""
