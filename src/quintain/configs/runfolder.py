"""A run's folder: what lies in it, and the config.yaml from which the run can be made again."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quintain.configs.yaml_text import write_yaml
from quintain.errors import ConfigError

CONFIG_FILE = "config.yaml"
RUN_ENTRIES = (
    CONFIG_FILE,
    "metrics.jsonl",
    "completions.jsonl",
    "findings.jsonl",
    "checkpoints",
    "model",
    "value_model",
    "adapter",
    "profile",
    "report.html",
)
"""Everything that a run writes into its folder."""

_DISTRIBUTIONS = ("quintain", "torch", "transformers", "accelerate", "peft", "datasets")
_SECRET = re.compile(r"^token$|(^|_)(api_key|password|secret|auth_token|access_token|hf_token)$")


def write_config(folder: str | Path, settings: Mapping[str, Any]) -> Path:
    """Write config.yaml: every setting, then the versions and git revision it ran under. Returns its path.

    Args:
        settings: flat plain data, as `Recipe.to_dict` or `OnlineRLConfig.to_dict` give it. Values under names such as
            "token" or "api_key" are left out, at any depth.
    """
    path = Path(folder) / CONFIG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {**_plain(settings), "environment": environment()}
    path.write_text(write_yaml(data), encoding="utf-8")
    return path


def environment() -> dict[str, str | None]:
    """Versions of Python and of the libraries that decide a run's numbers, and the git revision of the work."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {**versions, "git_revision": git_revision()}


def git_revision(folder: str | Path = ".") -> str | None:
    """The commit checked out in `folder`, with "-modified" if files differ from it; None outside a repository."""
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return None
    return f"{head}-modified" if _git(folder, "status", "--porcelain", "--untracked-files=no") else head


def holds_run(folder: str | Path) -> bool:
    """Whether the folder holds anything that a run wrote."""
    return any((Path(folder) / name).exists() for name in RUN_ENTRIES)


def set_aside_run(folder: str | Path) -> Path | None:
    """Move what an earlier run wrote into a folder inside this one, and return that; None if there is no run."""
    if not holds_run(folder):
        return None
    number = 1
    while (earlier := Path(folder) / f"earlier-{number}").exists():
        number += 1
    earlier.mkdir()
    for name in RUN_ENTRIES:
        if (Path(folder) / name).exists():
            (Path(folder) / name).rename(earlier / name)
    return earlier


def remove_run(folder: str | Path) -> None:
    """Delete what a run wrote into the folder, and nothing else that lies there."""
    for name in RUN_ENTRIES:
        entry = Path(folder) / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def config_of_run(run: str | Path) -> Path:
    """The config.yaml of a run's folder. Raises ConfigError if there is none."""
    path = Path(run) / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{run} is not a run's folder: it has no {CONFIG_FILE}. Give the output_dir of a run.")
    return path


def _plain(value: Any) -> Any:
    """The value as plain YAML can hold it, without secrets. What has no plain form is written as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if not _SECRET.search(str(key))}
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, type(None))) else str(value)


def _git(folder: str | Path, *arguments: str) -> str | None:
    """What git prints, or None where there is no git or no repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
