"""What a dataset can be named by, and where the name leads.

A reference is one of

    openai/gsm8k?name=main              a dataset of the Hub; options: name, revision, data_dir, data_files, streaming
    prompts.jsonl                       a local JSONL, JSON, CSV or Parquet file, or a folder of data
    builtin:reversal?length=4           prompts that come with the package; see `builtin.py` for names and options
    reasoning_gym:basic_arithmetic      a task of the reasoning-gym package, with its options
    my_package.tasks:make?size=100      a function that returns a dataset or a list of dicts

or a dataset, or a list of dicts, that is loaded already.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, IterableDataset

from quintain.data.builtin import load_builtin
from quintain.data.files import read_file, rows_to_dataset
from quintain.data.options import call_with_options, read_value, split_options
from quintain.errors import ConfigError, DataError, nearest

FORMS = "a Hub id, a .jsonl, .csv or .parquet file, builtin:NAME, reasoning_gym:NAME or package.module:function"
HUB_OPTIONS = ("name", "revision", "data_dir", "data_files", "streaming")


def load_dataset_reference(
    reference: Any,
    *,
    split: str | None = None,
    columns: Mapping[str, str] | None = None,
    default_split: str = "train",
) -> Dataset | IterableDataset:
    """The dataset a reference stands for.

    Args:
        reference: see the top of this module.
        split: a split's name, or a slice of it such as "train[:90%]" or "test[100:]". A source without splits, such
            as a file, is one split called "train". None takes `default_split` where there is one, else the only split.
        columns: columns to rename, from the dataset's name to ours: `{"question": "prompt"}`.
        default_split: see `split`.
    Raises:
        ConfigError: the reference, the split or a column leads nowhere.
        DataError: the data cannot be read, or there is none.
    """
    loaded = _load_text(os.fspath(reference), split) if isinstance(reference, (str, os.PathLike)) else reference
    label = repr(os.fspath(reference)) if isinstance(reference, (str, os.PathLike)) else "The dataset"
    if isinstance(loaded, (list, tuple)):
        loaded = rows_to_dataset(loaded, label)
    if isinstance(loaded, (Dataset, IterableDataset)):
        loaded = {"train": loaded}
    if (
        not isinstance(loaded, Mapping)
        or not loaded
        or not all(isinstance(d, (Dataset, IterableDataset)) for d in loaded.values())
    ):
        raise ConfigError(
            f"{label} must be a datasets.Dataset, IterableDataset or a list of dicts: got {type(loaded).__name__}."
        )
    dataset = _choose_split(loaded, split, default_split, label)
    if isinstance(dataset, Dataset) and not len(dataset):
        raise DataError(f"{label} is empty (split {split or default_split!r}). Give at least one row with a prompt.")
    return _rename(dataset, columns or {}, label)


def _load_text(reference: str, split: str | None) -> Any:
    """What a textual reference leads to: a dataset, several by split, or a list of dicts."""
    path = Path(reference).expanduser()
    if reference and path.is_file():
        return read_file(path)
    if reference and path.is_dir():
        return _load_folder(path)
    name, options = split_options(reference)
    scheme, colon, rest = name.partition(":")
    if scheme == "builtin" and colon:
        return load_builtin(rest, options, reference)
    if scheme == "reasoning_gym" and colon:
        return _load_reasoning_gym(rest, options, reference)
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        return call_with_options(_import_function(scheme, rest, reference), options, reference)
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) and path.suffix not in (
        ".jsonl",
        ".json",
        ".csv",
        ".parquet",
    ):
        return _load_hub(name, options, reference, split)
    raise ConfigError(f"There is no dataset at {reference!r}: no such file, nor can it be a Hub id. Give {FORMS}.")


def _load_folder(path: Path) -> Any:
    """A folder written by `save_to_disk`, or one with data files that `datasets` recognises."""
    if any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        return datasets.load_from_disk(str(path))
    try:
        return datasets.load_dataset(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"The folder {str(path)!r} could not be read as a dataset: {error}") from error


def _load_hub(name: str, options: dict[str, str], reference: str, split: str | None) -> Any:
    unknown = [option for option in options if option not in HUB_OPTIONS]
    if unknown:
        raise ConfigError(
            f"{reference!r} has an unknown option {unknown[0]!r}.{nearest(unknown[0], HUB_OPTIONS)} "
            f"Known: {', '.join(HUB_OPTIONS)}."
        )
    arguments: dict[str, Any] = dict(options)
    if "streaming" in options:
        arguments["streaming"] = read_value(options["streaming"]) is True
    try:
        loaded = datasets.load_dataset(name, split=split, **arguments)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The dataset {reference!r} could not be loaded from the Hub: {error}") from error
    return loaded if split is None else {split: loaded}


def _load_reasoning_gym(task: str, options: dict[str, str], reference: str) -> list[dict[str, Any]]:
    """Chat prompts of a reasoning-gym task, with `answer` and, as JSON text, the `metadata` its scorer wants."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"{reference!r} needs the reasoning-gym package ({error}). "
            f"Install it: pip install 'quintain[reasoning-gym]'"
        ) from error
    if task not in DATASETS:
        raise ConfigError(
            f"reasoning-gym has no task {task!r}.{nearest(task, DATASETS)} Known: {', '.join(sorted(DATASETS))}."
        )
    settings = {"size": 500, "seed": 0} | {name: read_value(text) for name, text in options.items()}
    try:
        entries = reasoning_gym.create_dataset(task, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym does not take the options of {reference!r}: {error}") from error
    return [
        {
            "prompt": [{"role": "user", "content": entry["question"]}],
            "question": entry["question"],
            "answer": entry["answer"],
            "metadata": json.dumps(entry["metadata"], default=str),
        }
        for entry in entries
    ]


def _import_function(module: str, name: str, reference: str) -> Any:
    """The function of `package.module:function`, looked for in the working directory too."""
    if os.getcwd() not in sys.path:  # a command's path starts at the command, not where it was called
        sys.path.append(os.getcwd())
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"There is no module {module!r} (in {reference!r}).{nearest(module, ('builtin', 'reasoning_gym'))} "
            f"Install it, or run from the folder that holds it."
        ) from error
    function = getattr(imported, name, None)
    if not callable(function):
        names = [key for key, value in vars(imported).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"{module!r} has no function {name!r} (in {reference!r}).{nearest(name, names)} "
            f"It has: {', '.join(names) or 'none'}."
        )
    return function


def _choose_split(splits: Mapping[str, Any], split: str | None, default: str, label: str) -> Dataset | IterableDataset:
    if split is None and default not in splits and len(splits) == 1:
        return next(iter(splits.values()))
    split = split or default
    if split in splits:
        return splits[split]
    streamed = any(isinstance(part, IterableDataset) for part in splits.values())
    try:
        if streamed:
            raise ValueError("a stream has no slices")
        lengths = {name: len(part) for name, part in splits.items()}
        pieces = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"{label} has no split {split!r} ({error}).{nearest(split, splits)} Splits: {', '.join(splits)}; "
            f'a part of one is written like "{next(iter(splits))}[:90%]".'
        ) from error
    parts = []
    for piece in pieces:
        rows = range(lengths[piece.splitname])[piece.from_ : piece.to]
        parts.append(splits[piece.splitname].select(rows or []))  # `select` refuses an empty range past the end
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def _rename(dataset: Dataset | IterableDataset, columns: Mapping[str, str], label: str) -> Dataset | IterableDataset:
    names = dataset.column_names
    if names is not None:
        for old, new in columns.items():
            if old not in names:
                turned = f" Did you mean {{{new}: {old}}}?" if new in names else nearest(old, names)
                raise ConfigError(
                    f"dataset_columns renames from the dataset's name to ours, and {label} has no column {old!r}."
                    f"{turned} Columns: {', '.join(names)}."
                )
            if new in names and new not in columns:
                raise ConfigError(
                    f"dataset_columns renames {old!r} to {new!r}, which {label} has already. "
                    f"Rename that one too, for example {{{new}: original_{new}, {old}: {new}}}."
                )
    return dataset.rename_columns(dict(columns)) if columns else dataset
