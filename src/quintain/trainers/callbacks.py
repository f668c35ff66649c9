"""Callbacks written for `transformers.TrainerCallback`: they are told what happens, and may ask to stop or save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerControl, TrainerState


class Callbacks:
    """Calls `on_train_begin`, `on_step_end`, `on_log`, `on_evaluate`, `on_save` and `on_train_end` where a callback has
    them.

    Args:
        callbacks: instances or classes.
        args: the run's config, passed on as `args`.
        max_steps: training steps of the run.
    """

    def __init__(self, callbacks: Sequence[Any], args: Any, max_steps: int) -> None:
        self.callbacks = [item() if isinstance(item, type) else item for item in callbacks]
        self.args = args
        self.state = TrainerState(max_steps=max_steps)
        self.control = TrainerControl()

    def begin(self, step: int) -> None:
        self.state.global_step = step
        self.control.should_training_stop = False
        self._call("on_train_begin")

    def step_end(self, step: int, row: dict[str, float]) -> None:
        """A training step is over and `row` holds its metrics."""
        self.control.should_save = False
        self.state.global_step = step
        self.state.log_history.append(row)
        self._call("on_step_end")
        self._call("on_log", logs=row)

    def evaluated(self, metrics: dict[str, float]) -> None:
        """The policy was scored on held-out prompts. `state.best_metric` is still that of earlier steps."""
        self._call("on_evaluate", metrics=metrics)

    def saved(self, step: int) -> None:
        self._call("on_save")

    def end(self, step: int) -> None:
        self._call("on_train_end")

    def _call(self, event: str, **arguments: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                answer = method(self.args, self.state, self.control, **arguments)
                if isinstance(answer, TrainerControl):
                    self.control = answer
