"""Where a run's numbers and completions go."""

from quintain.trackers.console import ConsoleTracker
from quintain.trackers.jsonl import JsonlTracker

__all__ = ["ConsoleTracker", "JsonlTracker"]
