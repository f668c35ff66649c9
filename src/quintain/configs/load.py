"""Recipes: a flat YAML file and command-line overrides, turned into a checked config.

This module needs PyYAML; the rest of `configs` does without, so it is imported by its full name.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from quintain.configs.algorithms import DGConfig, GRPOConfig, PPOConfig, ReinforceConfig, RLOOConfig, TPOConfig
from quintain.configs.shared import OnlineRLConfig
from quintain.configs.yaml_text import read_yaml
from quintain.errors import ConfigError, nearest

CONFIG_CLASSES: dict[str, type[OnlineRLConfig]] = {
    "tpo": TPOConfig,
    "grpo": GRPOConfig,
    "rloo": RLOOConfig,
    "ppo": PPOConfig,
    "dg": DGConfig,
    "reinforce": ReinforceConfig,
}


@dataclass(frozen=True)
class Recipe:
    """Everything a run is made from. The fields are a recipe's keys; `config` holds those of the algorithm."""

    algorithm: str
    """A known name, or "module:Class" of a trainer of your own."""
    model: str
    """A model reference: Hub id, folder, .gguf file, pkg: reference or scratch:tiny."""
    dataset: str
    """A dataset reference: Hub id, file, builtin:NAME, or dotted path to a function."""
    rewards: Any
    """A reward's name, a mapping {name, weight, kwargs}, or a list of these."""
    config: OnlineRLConfig
    peft: dict[str, Any] | None = None
    """Arguments of peft.LoraConfig; unset trains every weight."""
    dataset_split: str | None = None
    """Which split of the dataset to train on; unset is "train"."""
    dataset_columns: dict[str, str] | None = None
    """Columns to rename, from the dataset's name to ours, such as {question: prompt}."""
    eval_dataset: str | None = None
    """A dataset reference for evaluation."""
    eval_dataset_split: str | None = None
    """Which split of the evaluation dataset to use; unset is "test"."""
    notes: list[str] = field(default_factory=list)
    """What the reader of the recipe should know, such as fields that were not carried over."""

    def to_dict(self) -> dict[str, Any]:
        """The recipe as flat plain data, with every setting resolved. `recipe_from_dict` takes it back."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("config", "notes")}
        return {**own, **self.config.to_dict()}


RECIPE_KEYS = tuple(item.name for item in fields(Recipe) if item.name not in ("config", "notes"))
_REQUIRED_KEYS = ("algorithm", "model", "dataset", "rewards")
# Written by a run into its config.yaml, for the reader.
_PROVENANCE_KEY = "environment"


def load_recipe(name: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe by path or by name and apply overrides.

    Args:
        name: path of a YAML file, or the name of a recipe that comes with Quintain.
        overrides: values that replace or add to the file's.
    Raises:
        ConfigError: there is no such recipe, it is not a flat mapping, a key is unknown or missing, or a value is
            outside its range.
    """
    path = find_recipe(name)
    return recipe_from_dict(read_recipe(path), overrides or {}, source=str(path))


def read_recipe(path: Path) -> dict[str, Any]:
    """The keys of a recipe file, unchecked. Raises ConfigError if it cannot be read, is empty or is not a mapping."""
    try:
        data = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The recipe {path} cannot be read: {error}.") from error
    if data is None:
        raise ConfigError(f"The recipe {path} is empty. It needs at least the keys {', '.join(_REQUIRED_KEYS)}.")
    if not isinstance(data, dict):
        raise ConfigError(f"The recipe {path} must be a mapping of `key: value` lines: got {type(data).__name__}.")
    return data


def recipe_from_dict(data: Mapping[str, Any], overrides: Mapping[str, Any], source: str = "the recipe") -> Recipe:
    """A recipe from its keys and overrides. Raises ConfigError as `load_recipe` does."""
    settings = {key: value for key, value in data.items() if key != _PROVENANCE_KEY}
    algorithm = overrides.get("algorithm", settings.get("algorithm"))
    if not isinstance(algorithm, str):
        known = ", ".join(CONFIG_CLASSES)
        raise ConfigError(f"{source} must name its algorithm, one of {known} or module:Class: got {algorithm!r}.")
    config_class = find_config_class(algorithm)
    notes: list[str] = []
    if algorithm != settings.get("algorithm"):
        notes = _drop_fields_of_other_algorithms(settings, config_class, algorithm)
    _refuse_unknown_keys(settings, config_class, algorithm, source)
    _refuse_unknown_keys(overrides, config_class, algorithm, "the command line")
    settings.update(overrides)
    missing = [key for key in _REQUIRED_KEYS if settings.get(key) is None]
    if missing:
        raise ConfigError(f"{source} lacks {' and '.join(missing)}. Add the line `{missing[0]}: ...`.")
    own = {key: settings.pop(key) for key in RECIPE_KEYS if key in settings}
    _check_types(own, source)
    return Recipe(**own, config=config_class(**settings), notes=notes)


def find_config_class(algorithm: str) -> type[OnlineRLConfig]:
    """The config dataclass of a known algorithm, or of a trainer class given as "module:Class" or "module.Class"."""
    if algorithm in CONFIG_CLASSES:
        return CONFIG_CLASSES[algorithm]
    if not re.search(r"[.:]", algorithm):
        raise ConfigError(
            f"algorithm={algorithm!r} is not known.{nearest(algorithm, CONFIG_CLASSES)} Known are "
            f"{', '.join(CONFIG_CLASSES)}; a trainer of your own is given as module:Class."
        )
    config_class = getattr(import_by_path(algorithm), "config_class", None)
    if not (isinstance(config_class, type) and issubclass(config_class, OnlineRLConfig)):
        raise ConfigError(
            f"{algorithm} must have a class attribute config_class, a dataclass derived from OnlineRLConfig: got "
            f"{config_class!r}. Derive it from OnlineRLTrainer and set config_class."
        )
    return config_class


def import_by_path(path: str) -> Any:
    """The object at "module:name" or "module.name", with the current directory searched first.

    Raises:
        ConfigError: there is no such module or name. An error inside the module passes through as it is.
    """
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    # A console script, unlike `python -m`, does not search the current directory.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{path}: there is no module {error.name!r} in {Path.cwd()} or among the installed packages. "
            "Run the command from the folder that holds it."
        ) from error
    if not hasattr(module, name):
        raise ConfigError(f"{path}: module {module_name!r} has no {name!r}.{nearest(name, vars(module))}")
    return getattr(module, name)


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe given by path, or by the name of one that comes with Quintain."""
    path = Path(name)
    if path.is_file():
        return path
    known = {file.stem: file for folder in _recipe_folders() for file in sorted(folder.glob("*.yaml"))}
    if str(name) in known:
        return known[str(name)]
    raise ConfigError(
        f"There is no recipe {str(name)!r}: no such file, and not the name of one that comes with Quintain "
        f"({', '.join(known)}).{nearest(str(name), known)}"
    )


def _recipe_folders() -> list[Path]:
    """Where recipes that come with Quintain lie: inside an installed package, or at the root of a checkout."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parents[1]
    folders = [package / "recipes"]
    if (checkout / "pyproject.toml").is_file():
        folders.append(checkout / "recipes")
    return [folder for folder in folders if folder.is_dir()]


def parse_arguments(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split a command line into plain words, and `--field value` or `--field=value` with the values read as YAML.

    Raises:
        ConfigError: a field lacks its value, or is given twice.
    """
    words: list[str] = []
    overrides: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        option = rest.pop(0)
        if not option.startswith("--"):
            words.append(option)
            continue
        name, equals, text = option[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{name} lacks its value: settings are given as --{name} value.")
            text = rest.pop(0)
        name = name.replace("-", "_")
        if name in overrides:
            raise ConfigError(f"--{name} is given twice. Give it once.")
        overrides[name] = read_yaml(text, f"--{name}")
    return words, overrides


def _own_fields(config_class: type[OnlineRLConfig]) -> set[str]:
    """Fields that a config has beyond the shared ones."""
    shared = {item.name for item in fields(OnlineRLConfig)}
    return {item.name for item in fields(config_class)} - shared


def _drop_fields_of_other_algorithms(
    settings: dict[str, Any], config_class: type[OnlineRLConfig], algorithm: str
) -> list[str]:
    """Remove settings that a recipe made for the algorithm it names, now that another was asked for.

    A field of the file's algorithm goes even if the new one has a field of that name: loss_type, beta and eta mean
    different things in each.
    """
    written_for = settings.get("algorithm")
    theirs = _own_fields(find_config_class(written_for)) if isinstance(written_for, str) else set()
    elsewhere = set().union(*(_own_fields(other) for other in CONFIG_CLASSES.values()))
    dropped = [key for key in settings if key in theirs or key in elsewhere - _own_fields(config_class)]
    for key in dropped:
        del settings[key]
    if not dropped:
        return []
    return [f"The recipe is written for {written_for}: {', '.join(dropped)} not used with algorithm {algorithm}."]


def _refuse_unknown_keys(keys: Iterable[Any], config_class: type[OnlineRLConfig], algorithm: str, source: str) -> None:
    known = [*RECIPE_KEYS, *(item.name for item in fields(config_class) if item.init)]
    for key in keys:
        if key in known:
            continue
        owners = [name for name, other in CONFIG_CLASSES.items() if key in _own_fields(other)]
        if owners:
            raise ConfigError(f"{source}: {key!r} is a setting of {' and '.join(owners)}, not of {algorithm}.")
        raise ConfigError(
            f"{source}: {key!r} is not a key of a recipe or a setting of {algorithm}.{nearest(str(key), known)}"
        )


def _check_types(own: Mapping[str, Any], source: str) -> None:
    """The recipe's own keys hold text, except rewards (checked where they are resolved) and two mappings."""
    for key, value in own.items():
        kind = dict if key in ("peft", "dataset_columns") else str
        if key != "rewards" and value is not None and not isinstance(value, kind):
            wanted = "a mapping such as {r: 16}" if kind is dict else "text"
            raise ConfigError(f"{source}: {key} must be {wanted}: got {value!r}.")
