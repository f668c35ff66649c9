"""YAML as people mean it: PyYAML reads YAML 1.1, in which 1e-5 is text and `no` is false."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from quintain.errors import ConfigError


def read_yaml(text: str, source: str) -> Any:
    """Plain data from YAML. Raises ConfigError naming `source` and the place of the fault."""
    try:
        return yaml.load(text, Loader=_RecipeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error


def write_yaml(data: Any) -> str:
    """Plain data as YAML that `read_yaml`, and a reader of YAML 1.1, take back as it was."""
    text: str = yaml.dump(data, Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=120)
    return text


class _RecipeDumper(yaml.SafeDumper):
    """Safe YAML that quotes text which either version of YAML would take for something else, such as "no" or "1e-5"."""


class _RecipeLoader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2: 1e-5 is a number, `no` and `on` are text, 1:30 is not a number."""

    yaml_implicit_resolvers: ClassVar = {  # type: ignore[misc]
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":int", ":float"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore[no-untyped-call]
        for position, key in enumerate(keys):
            if key in keys[:position]:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Text with line separators or control characters in double quotes, where they are written as escapes."""
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_RecipeDumper.add_representer(str, _write_text)

_NUMBER_OR_TRUTH = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
)
for _reader_or_writer in (_RecipeLoader, _RecipeDumper):
    for _tag, _pattern, _first in _NUMBER_OR_TRUTH:
        _reader_or_writer.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), list(_first)
        )
