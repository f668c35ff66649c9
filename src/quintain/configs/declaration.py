"""Faults in how a config class of one's own is written, found before its values are looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quintain.errors import ConfigError, nearest


def check_declaration(config_class: type, shared_rules: Mapping[str, Any]) -> None:
    """Refuse a config class whose declarations cannot mean what they say.

    Args:
        config_class: a subclass of `OnlineRLConfig`.
        shared_rules: the rules of the fields that every trainer has.
    Raises:
        ConfigError: an annotated field in a class that is no dataclass, a rule or a KL weight for a field that does not
            exist, or a shared field that was given another meaning.
    """
    name = config_class.__name__
    known = {item.name for item in fields(config_class)}
    for annotated, kind in vars(config_class).get("__annotations__", {}).items():
        if annotated not in known and "ClassVar" not in str(kind):
            raise ConfigError(f"{name}.{annotated} is not a setting because {name} is not a dataclass: add @dataclass.")
    for listing in ("rules", "kl_weights"):
        for entry in getattr(config_class, listing):
            if entry not in known:
                raise ConfigError(f"{name}.{listing} names {entry!r}, which is not a field.{nearest(entry, known)}")
    for field_name, rule in shared_rules.items():
        if config_class.rules[field_name] != rule:  # type: ignore[attr-defined]
            raise ConfigError(
                f"{name} gives {field_name!r} a rule of its own, and every trainer has a setting of that name already "
                f"({name} would change both). Rename your field."
            )
