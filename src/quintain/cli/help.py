"""`quintain train --help`: every setting of an algorithm, from the docstrings under its config's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jsonargparse import ArgumentParser, set_parsing_settings

from quintain.configs.load import find_config_class, find_recipe, read_recipe
from quintain.configs.shared import OnlineRLConfig
from quintain.configs.trl_names import TRLNames

_USAGE = (
    "quintain train RECIPE [--field value ...] [--overwrite] [--profile]\n"
    "       quintain train --resume RUN [--field value ...] [--profile]"
)
_DESCRIPTION = """Train a model as a recipe says. RECIPE is a YAML file, or the name of a recipe that comes with
Quintain, such as quickstart or tiny. Its keys are algorithm, model, dataset and rewards, optionally peft,
dataset_split, dataset_columns, eval_dataset and eval_dataset_split, and the settings below. --field value replaces
any of them."""


def train_help(recipe: str | None, overrides: Mapping[str, Any]) -> str:
    """The help text, for the algorithm of the recipe or of `--algorithm`, or else the settings all algorithms share."""
    algorithm = overrides.get("algorithm")
    if algorithm is None and recipe is not None:
        algorithm = read_recipe(find_recipe(recipe)).get("algorithm")
    config_class = OnlineRLConfig if algorithm is None else find_config_class(str(algorithm))
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(prog="quintain train", usage=_USAGE, description=_DESCRIPTION, add_help=False)
    hidden = {item.name for item in fields(TRLNames)} | {*config_class.trl_renamed, *config_class.trl_valued}
    parser.add_class_arguments(config_class, as_group=True, skip=hidden)
    more = "For one algorithm's own settings: quintain train RECIPE --help, or --algorithm NAME --help.\n"
    flags = (
        "options:\n"
        "  --resume RUN          Continue an interrupted run in its own folder, from its last checkpoint.\n"
        "  --overwrite           Delete the run that is already in output_dir, then start afresh.\n"
        "  --profile             Trace the second step and write where its time goes to profile/ in the run's folder.\n"
        "  -h, --help            Show this help.\n"
    )
    return f"{parser.format_help()}\n{flags}\n{more}"
