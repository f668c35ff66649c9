"""What a reward function's signature says about how to call it, checked before training starts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quintain.errors import ConfigError, nearest

STANDARD_KEYWORDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What every reward function may ask for, besides the dataset's columns."""
SINGULAR = {"prompt": "prompts", "completion": "completions"}
"""Further names in a `per_sample` function, where each row-aligned keyword holds one completion's entry."""


def per_sample(function: Callable[..., Any] | None = None, *, max_concurrency: int = 16) -> Any:
    """Mark a reward function that scores one completion a call; the calls run in threads (or as coroutines).

    It is called by keyword with `prompt`, `completion`, `completion_ids`, one entry of every dataset column,
    `trainer_state`, `log_extra(name, value)` and `log_metric(name, number)`, and returns one number, None, or a list
    of intermediate rewards.

    Args:
        max_concurrency: calls in progress at any time, at least 1.
    """
    if max_concurrency < 1:
        raise ConfigError(f"per_sample's max_concurrency must be at least 1: got {max_concurrency}.")
    if function is None:
        return functools.partial(per_sample, max_concurrency=max_concurrency)
    function.per_sample_concurrency = max_concurrency  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class RewardFunction:
    """A reward function, and how it may be called."""

    name: str
    call: Callable[..., Any]
    keywords: frozenset[str]
    """Keywords it names."""
    takes_any: bool
    """It takes `**kwargs`: every keyword is passed."""
    required: tuple[str, ...]
    """Keywords without which the call fails."""
    bound: frozenset[str]
    """Keywords that a `functools.partial` has fixed; a dataset column of that name does not replace them."""
    is_async: bool
    concurrency: int
    """Calls at a time of a `per_sample` function; 0: one call scores the whole batch."""

    def wants(self, keyword: str) -> bool:
        """Whether `keyword` is passed to it."""
        if keyword in self.bound:
            return False
        plural = self.concurrency > 0 and keyword in SINGULAR.values()
        return keyword in self.keywords or (self.takes_any and not plural)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise ConfigError if a required keyword is neither standard nor a dataset column."""
        columns = sorted(columns)
        standard = (*STANDARD_KEYWORDS, *SINGULAR) if self.concurrency else STANDARD_KEYWORDS
        known = (*standard, *columns)
        for keyword in self.required:
            if keyword not in known:
                raise ConfigError(
                    f"reward function '{self.name}' asks for {keyword!r}, which is neither a dataset column nor a "
                    f"standard keyword. Available columns: {', '.join(columns) or 'none'}. Standard keywords: "
                    f"{', '.join(standard)}.{nearest(keyword, known)} Rename the column or the parameter, or give "
                    "the parameter a default."
                )


def inspect_function(function: Callable[..., Any], name: str) -> RewardFunction:
    """Read a reward function's signature.

    A function that reads columns whose names are settings (as built-in rewards do) lists them in an attribute
    `required_columns` and takes `**kwargs`.

    Raises:
        ConfigError: it is a class, cannot be called, or cannot be called by keyword.
    """
    if inspect.isclass(function):
        raise ConfigError(f"reward function '{name}' is a class; pass an instance, {function.__name__}(...), instead.")
    if not callable(function):
        raise ConfigError(
            f"a reward function must be a callable, a reward model, or the name of either: got {function!r} "
            f"of type {type(function).__name__}."
        )
    keywords, required, takes_any = _read_signature(function, name)
    inner = _inner(function)
    columns = tuple(getattr(inner, "required_columns", ()))
    return RewardFunction(
        name=name,
        call=function,
        keywords=frozenset((*keywords, *columns)),
        takes_any=takes_any,
        required=(*required, *columns),
        bound=frozenset(function.keywords) if isinstance(function, functools.partial) else frozenset(),
        is_async=inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__),
        concurrency=_concurrency(inner),
    )


def _read_signature(function: Callable[..., Any], name: str) -> tuple[list[str], list[str], bool]:
    """The keywords a function names, those of them without a default, and whether it takes any other."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [], [], True  # some compiled callables hide their signature: pass everything, as for **kwargs
    for item in parameters:
        if item.kind is item.POSITIONAL_ONLY and item.default is item.empty:
            raise ConfigError(
                f"reward function '{name}' has the positional-only parameter {item.name!r}, but reward functions are "
                "called by keyword. Remove the '/' from its signature, or wrap it."
            )
    named = [item for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
    required = [item.name for item in named if item.default is item.empty]
    return [item.name for item in named], required, any(item.kind is item.VAR_KEYWORD for item in parameters)


def _inner(function: Any) -> Any:
    """The callable inside a `functools.partial`."""
    return function.func if isinstance(function, functools.partial) else function


def _concurrency(function: Any) -> int:
    """The `per_sample` mark of a function or of an object's `__call__`; 0 without one."""
    mark = getattr(function, "per_sample_concurrency", 0)
    return int(mark or getattr(type(function).__call__, "per_sample_concurrency", 0))


def unique_names(functions: Sequence[Any]) -> list[str]:
    """One metric name a function: its own name or, for an object, its class's; repeats are numbered from `_2`."""
    names: list[str] = []
    for function in functions:
        inner = _inner(function)
        base = str(getattr(inner, "__name__", type(inner).__name__)).strip("<>")
        name, number = base, 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    return names
