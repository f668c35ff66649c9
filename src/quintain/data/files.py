"""Rows from local files, and rows to a dataset. What is wrong is reported with its line or row."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset
from datasets.table import InMemoryTable

from quintain.errors import ConfigError, DataError


def read_file(path: Path) -> Dataset:
    """A JSONL, JSON (a list of objects), CSV or Parquet file. Every value of a CSV file is text, as it stands there.

    Raises:
        ConfigError: another kind of file.
        DataError: a line that cannot be read, with its number; text that is not UTF-8; no rows.
    """
    readers: dict[str, Callable[[Path], Dataset]] = {
        ".jsonl": _read_json,
        ".json": _read_json,
        ".csv": _read_csv,
        ".parquet": _read_parquet,
    }
    if path.suffix.lower() not in readers:
        raise ConfigError(f"A dataset file must end in {', '.join(readers)}: got {str(path)!r}.")
    return readers[path.suffix.lower()](path)


def rows_to_dataset(rows: Sequence[Mapping[str, Any]], source: str) -> Dataset:
    """A list of dicts as a dataset; a column that a row lacks holds None there.

    Args:
        source: what to call the rows in an error.
    Raises:
        DataError: no rows, a row that is not a dict, or a column of several types.
    """
    if not rows:
        raise DataError(f"{source} is empty. Give at least one row with a prompt.")
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f'{source}, row {index}: expected a dict such as {{"prompt": "..."}}, got {row!r:.80}.')
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    try:
        return Dataset.from_dict(columns)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise DataError(f"{source}: {_explain_column(columns)} ({error})") from error


def _explain_column(columns: Mapping[str, list[Any]]) -> str:
    """Which column cannot be stored, and the first two rows whose types differ."""
    for name, values in columns.items():
        try:
            Dataset.from_dict({name: values})
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            first: dict[str, int] = {}
            for index, value in enumerate(values):
                if value is not None:
                    first.setdefault(type(value).__name__, index)
            if len(first) > 1:
                kinds = " and ".join(f"{kind} (row {index})" for kind, index in list(first.items())[:2])
                advice = (
                    "Prompts are either all text or all lists of messages." if name == "prompt" else "Use one type."
                )
                return f"the column {name!r} mixes {kinds}. {advice}"
            return f"the column {name!r} holds values that differ in their inner types. Make them alike."
    return "the columns cannot be stored together."


def _read_text(path: Path) -> str:
    """The file as UTF-8, with or without a byte order mark."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: the file is not UTF-8 (byte 0x{data[error.start]:02x}). Save it as UTF-8, for "
            f"example: iconv -f LATIN1 -t UTF-8 {path.name}"
        ) from error


def _read_json(path: Path) -> Dataset:
    text = _read_text(path)
    if text.lstrip().startswith("["):
        return rows_to_dataset(_parse_json(text, path, 1), str(path))
    rows = []
    # Not splitlines(): a JSON string may hold line separators of Unicode as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            row = _parse_json(line, path, number)
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: expected a JSON object, got {line.strip()[:60]!r}.")
            rows.append(row)
    return rows_to_dataset(rows, str(path))


def _parse_json(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at, shown = line + error.lineno - 1, text.split("\n")[error.lineno - 1][:60]
        raise DataError(f"{path}, line {at}: not valid JSON ({error.msg}, column {error.colno}): {shown!r}.") from error


def _read_csv(path: Path) -> Dataset:
    reader = csv.DictReader(io.StringIO(_read_text(path), newline=""), strict=True)
    rows = []
    try:
        names = reader.fieldnames or []
        if len(set(names)) < len(names):
            raise DataError(f"{path}: the header names a column twice: {', '.join(names)}.")
        for row in reader:
            if None in row or None in row.values():
                raise DataError(
                    f"{path}, line {reader.line_num}: the row does not have the {len(names)} fields of the header "
                    f"({', '.join(names)}). Quote fields that hold commas or newlines."
                )
            rows.append(row)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.reader.line_num}: not valid CSV ({error}).") from error
    return rows_to_dataset(rows, str(path))


def _read_parquet(path: Path) -> Dataset:
    try:
        table = pyarrow.parquet.read_table(path)
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file ({error}).") from error
    if not table.num_rows:
        raise DataError(f"{path} is empty. Give at least one row with a prompt.")
    return Dataset(InMemoryTable(table))
