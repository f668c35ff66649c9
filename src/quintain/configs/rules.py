"""Rules for one field's value: a range, a set of choices, a list. Each returns the plain value or raises."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol

from quintain.errors import ConfigError, nearest


class Rule(Protocol):
    """What a field's value must satisfy."""

    def check(self, name: str, value: Any) -> Any:
        """The value as its field stores it. Raises ConfigError naming `name`, the value and what is allowed."""
        ...


@dataclass(frozen=True)
class Number:
    """A finite number inside an interval written as in mathematics, such as "(0, 1]"."""

    interval: str
    whole: bool = False
    """Only whole numbers; 100.0 is taken as 100."""
    optional: bool = False
    """None is allowed."""
    word: str = ""
    """A word that is allowed in a number's place, such as "auto"; empty: none."""
    hint: str = ""
    """A sentence that says what to do, or what the ends of the interval would mean."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[(\[][^,]+,[^,]+[)\]]", self.interval):
            raise ConfigError(f"an interval is written like '[0, inf)' or '(0, 1]': got {self.interval!r}.")

    def check(self, name: str, value: Any) -> Any:
        if value is None and self.optional:
            return None
        if self.word and value == self.word:
            return value
        kind = "a whole number" if self.whole else "a number"
        others = (f" or {self.word!r}" if self.word else "") + (" or unset" if self.optional else "")
        expected = f"{name} must be {kind} in {self.interval}{others}"
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ConfigError(f"{expected}: got {value!r}. {self.hint}".rstrip())
        number = float(value)
        if not self._contains(number) or (self.whole and not number.is_integer()):
            raise ConfigError(f"{expected}: got {value}. {self.hint}".rstrip())
        return int(number) if self.whole or isinstance(value, Integral) else number

    def _contains(self, number: float) -> bool:
        low, high = (float(end) for end in self.interval[1:-1].split(","))
        above = number > low if self.interval[0] == "(" else number >= low
        below = number < high if self.interval[-1] == ")" else number <= high
        return above and below


@dataclass(frozen=True)
class OneOf:
    """One of a few names. A string enumeration's member is taken as its value."""

    choices: tuple[str, ...]
    optional: bool = False

    def check(self, name: str, value: Any) -> Any:
        if value is None and self.optional:
            return None
        text = getattr(value, "value", value)
        if text not in self.choices:
            known = ", ".join(repr(choice) for choice in self.choices)
            raise ConfigError(f"{name} must be one of {known}: got {text!r}.{nearest(str(text), self.choices)}")
        return text


@dataclass(frozen=True)
class ListOf:
    """A list whose every item satisfies a rule; a single string counts as a list of one. Stored as a tuple."""

    item: Rule
    optional: bool = False
    length: int | None = None

    def check(self, name: str, value: Any) -> Any:
        if value is None:
            if self.optional:
                return None
            value = ()
        if isinstance(value, str):
            value = (value,)
        if isinstance(value, Mapping) or not hasattr(value, "__iter__"):
            raise ConfigError(f"{name} must be a list: got {value!r}. Write it as [a, b].")
        items = tuple(self.item.check(f"{name}[{position}]", item) for position, item in enumerate(value))
        if self.length is not None and len(items) != self.length:
            raise ConfigError(f"{name} must have {self.length} items: got {list(items)}.")
        return items


@dataclass(frozen=True)
class OfType:
    """A value of one Python type, for fields with no further restriction."""

    kind: type
    optional: bool = False

    def check(self, name: str, value: Any) -> Any:
        if value is None and self.optional:
            return None
        if not isinstance(value, self.kind):
            names = {bool: "true or false", str: "text", dict: "a mapping"}
            raise ConfigError(f"{name} must be {names.get(self.kind, self.kind.__name__)}: got {value!r}.")
        return value


def rule_for(annotation: Any) -> Rule | None:
    """The rule that a field's plain type implies, or None for a type that says nothing simple."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    base, _, rest = text.partition(" | ")
    if rest not in ("", "None"):
        return None
    optional = rest == "None"
    if base in ("int", "float"):
        return Number("(-inf, inf)", whole=base == "int", optional=optional)
    kinds: dict[str, type] = {"bool": bool, "str": str, "dict": dict, "dict[str, Any]": dict}
    return OfType(kinds[base], optional) if base in kinds else None
