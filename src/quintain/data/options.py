"""The `?name=value&name=value` part of a dataset reference, and calling a function with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

import yaml

from quintain.errors import ConfigError, nearest


def split_options(reference: str) -> tuple[str, dict[str, str]]:
    """`name?a=1&b=2` as the name and its options. `%26` and the like stand for characters that would divide it.

    Raises:
        ConfigError: an option has no `=`, or comes twice.
    """
    name, mark, query = reference.partition("?")
    options: dict[str, str] = {}
    for item in query.split("&") if mark else ():
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise ConfigError(f"Options of a dataset read ?name=value&name=value: got {item!r} in {reference!r}.")
        if key in options:
            raise ConfigError(f"The option {key!r} comes twice in {reference!r}. Keep one.")
        options[key] = unquote(value)
    return name, options


def call_with_options(function: Callable[..., Any], options: Mapping[str, str], reference: str) -> Any:
    """Call a function with options given as text, each turned into the type of the parameter's default.

    A parameter without default gets the value as YAML reads it: `3` a number, `[1, 2]` a list, `abc` text.

    Raises:
        ConfigError: an option is unknown, missing, or of the wrong type.
    """
    parameters = inspect.signature(function).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    known = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    values = {}
    for name, text in options.items():
        if name not in known and not open_ended:
            raise ConfigError(
                f"{reference!r} has an unknown option {name!r}.{nearest(name, known)} "
                f"Known: {', '.join(known) or 'none'}."
            )
        default = parameters[name].default if name in known else inspect.Parameter.empty
        values[name] = _convert(name, text, default, reference)
    try:
        inspect.signature(function).bind(**values)
    except TypeError as error:
        raise ConfigError(f"{reference!r} does not give the function what it needs: {error}.") from error
    return function(**values)


def read_value(text: str) -> Any:
    """A value as YAML reads it, and text where that fails."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _convert(name: str, text: str, default: Any, reference: str) -> Any:
    if isinstance(default, str):
        return text
    value = read_value(text)
    if isinstance(default, float) and isinstance(value, int):
        value = float(value)
    if isinstance(default, (bool, int, float)) and type(value) is not type(default):
        raise ConfigError(
            f"The option {name!r} of {reference!r} must be a {type(default).__name__} such as {default}: got {text!r}."
        )
    return value
