"""Checkpoints on disk. A folder named step-NNNNNN is whole: it is written aside, fsynced, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from quintain.checkpoints.state import Stateful, pack, unpack
from quintain.errors import CheckpointError

MANIFEST = "manifest.json"


def save_checkpoint(
    folder: Path, step: int, parts: Mapping[str, Stateful], *, keep: int | None = None, protect: int | None = None
) -> Path:
    """Write every part of the run under `folder/step-NNNNNN` and return that path.

    Args:
        folder: the run's `checkpoints` folder; made if missing.
        parts: name to anything with `state_dict`.
        keep: how many checkpoints to leave in the folder, the newest first; None keeps all. Older ones are removed
            only after the new one is whole.
        protect: step of a checkpoint that stays whatever its age, such as the best one's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:06d}"
    aside = folder / f".step-{step:06d}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    digests: dict[str, str] = {}
    for name, part in parts.items():
        tensors: dict[str, Any] = {}
        tree = pack(part.state_dict(), tensors)
        save_file(tensors, aside / f"{name}.safetensors")
        (aside / f"{name}.json").write_text(json.dumps(tree), encoding="utf-8")
        for suffix in ("safetensors", "json"):
            digests[f"{name}.{suffix}"] = _digest(aside / f"{name}.{suffix}")
    manifest = {"step": step, "parts": list(parts), "sha256": digests}
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*aside.iterdir(), aside):
        _fsync(path)
    if final.exists():  # an interrupted run that resumed earlier passes this step again
        shutil.rmtree(final)
    aside.rename(final)
    _fsync(folder)
    if keep is not None:
        for old in list_checkpoints(folder)[: -max(keep, 1)]:
            if old.name != f"step-{protect or 0:06d}":
                shutil.rmtree(old)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(found, key=lambda path: int(path.name[5:]))


def latest_checkpoint(run: Path) -> Path:
    """The newest whole checkpoint of a run.

    Raises:
        CheckpointError: there is none.
    """
    found = list_checkpoints(run / "checkpoints")
    if not found:
        raise CheckpointError(
            f"no checkpoint to resume from in {run / 'checkpoints'}. Give a run folder that holds checkpoints/step-*, "
            f"or start a new run without --resume."
        )
    return found[-1]


def load_checkpoint(path: Path, parts: Mapping[str, Stateful]) -> int:
    """Restore every part from a checkpoint and return its step. Nothing is restored unless all parts are whole.

    Raises:
        CheckpointError: a part or file is missing or its content is not what was written; names it.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read ({error}). Use an older checkpoint.") from error
    states = {name: _load_part(path, name, manifest) for name in parts}
    for name, part in parts.items():
        try:
            part.load_state_dict(states[name])
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"part {name!r} of {path} does not fit this run ({error}). Was it written with other settings or by "
                f"another algorithm?"
            ) from error
    return int(manifest["step"])


def _load_part(path: Path, name: str, manifest: Mapping[str, Any]) -> Any:
    if name not in manifest["parts"]:
        raise CheckpointError(f"{path} lacks the part {name!r} (it has {', '.join(manifest['parts'])}).")
    for suffix in ("safetensors", "json"):
        file = path / f"{name}.{suffix}"
        if not file.exists():
            raise CheckpointError(f"{path} lacks the file {file.name!r} of the part {name!r}. Use an older checkpoint.")
        if _digest(file) != manifest["sha256"][file.name]:
            raise CheckpointError(f"{file} is damaged: its checksum is not the one recorded. Use an older checkpoint.")
    tensors = load_file(path / f"{name}.safetensors")
    return unpack(json.loads((path / f"{name}.json").read_text(encoding="utf-8")), tensors)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows has no handle to a folder, and needs none
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
