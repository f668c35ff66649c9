"""From the `rewards:` of a recipe to reward functions and weights."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable
from typing import Any

from quintain.configs.load import import_by_path
from quintain.errors import ConfigError, nearest
from quintain.rewards.functions import Scorer, exact_match, length, numeric_match, regex, repetition
from quintain.rewards.library import json_schema, math_verify, reasoning_gym, sentiment
from quintain.rewards.model import RewardModel

REWARDS: dict[str, Callable[..., Scorer]] = {
    "exact_match": exact_match,
    "json_schema": json_schema,
    "length": length,
    "math_verify": math_verify,
    "numeric_match": numeric_match,
    "reasoning_gym": reasoning_gym,
    "regex": regex,
    "repetition": repetition,
    "sentiment": sentiment,
}
"""The built-in rewards: name to factory."""

SPEC_KEYS = ("name", "weight", "kwargs")


def resolve_rewards(spec: Any) -> tuple[list[Callable[..., Any]], list[float]]:
    """The reward functions and weights that a recipe's `rewards:` stands for.

    Args:
        spec: one reward or a list of them. Each is a name, `{name, weight, kwargs}` (weight 1 if not given), or a
            callable. A name is a built-in reward's; a dotted path, `package.module:function` or
            `package.module.function`; or a reward model's, a Hub id with its slash or a folder.
    Raises:
        ConfigError: an unknown name, key or setting, with the known ones.
    """
    items = list(spec) if isinstance(spec, (list, tuple)) else [spec]
    if not items or spec is None:
        raise ConfigError(f"rewards is empty: name at least one, such as {', '.join(list(REWARDS)[:3])}.")
    parsed = [_parse(item) for item in items]
    return [resolve_reward(name, **kwargs) for name, _, kwargs in parsed], [weight for _, weight, _ in parsed]


def _parse(item: Any) -> tuple[Any, float, dict[str, Any]]:
    """Name, weight and settings of one entry."""
    if not isinstance(item, dict):
        return item, 1.0, {}
    for key in item:
        if key not in SPEC_KEYS:
            raise ConfigError(
                f"a reward takes {', '.join(SPEC_KEYS)}: got {key!r}.{nearest(str(key), SPEC_KEYS)} Settings of the "
                "reward itself go under kwargs."
            )
    if "name" not in item:
        raise ConfigError(f"a reward needs a name: got {item}.")
    weight = item.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
        raise ConfigError(f"the weight of reward {item['name']!r} must be a finite number: got {weight!r}.")
    kwargs = item.get("kwargs") or {}
    if not isinstance(kwargs, dict):
        raise ConfigError(f"the kwargs of reward {item['name']!r} must be a mapping: got {kwargs!r}.")
    return item["name"], float(weight), kwargs


def resolve_reward(reward: Any, tokenizer: Any = None, **kwargs: Any) -> Callable[..., Any]:
    """One reward by name, with its settings; anything but a name is taken for the reward itself.

    A built-in, or a class at a dotted path, is made with the settings; a function has them bound to it.
    """
    if not isinstance(reward, (str, os.PathLike)):
        return _bind(reward, str(reward), kwargs)
    name = os.fspath(reward)
    if name in REWARDS:
        return _make(REWARDS[name], name, kwargs)
    if os.path.isdir(name) or "/" in name:
        return _make(RewardModel, name, {"model": name, "tokenizer": tokenizer, **kwargs})
    if ":" in name or "." in name:
        target = import_by_path(name)
        return _make(target, name, kwargs) if inspect.isclass(target) else _bind(target, name, kwargs)
    raise ConfigError(
        f"unknown reward {name!r}.{nearest(name, REWARDS)} Built in: {', '.join(REWARDS)}. Your own: "
        "package.module:function. A reward model: owner/name, or the path of a folder."
    )


def _bind(target: Any, name: str, kwargs: dict[str, Any]) -> Any:
    if not kwargs:
        return target
    _check_settings(target, name, kwargs)
    return functools.partial(target, **kwargs)


def _make(factory: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> Any:
    _check_settings(factory, name, kwargs)
    for item in inspect.signature(factory).parameters.values():
        variadic = item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD)
        if item.default is item.empty and not variadic and item.name not in kwargs:
            raise ConfigError(f"reward {name!r} needs the setting {item.name!r}; give it under kwargs.")
    return factory(**kwargs)


def _check_settings(target: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> None:
    """Raise ConfigError for a setting that the target does not take."""
    parameters = inspect.signature(target).parameters.values()
    known = [item.name for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
    if not any(item.kind is item.VAR_KEYWORD for item in parameters):
        for key in kwargs:
            if key not in known:
                raise ConfigError(
                    f"reward {name!r} has no setting {key!r}.{nearest(key, known)} Its settings: "
                    f"{', '.join(known) or 'none'}."
                )
