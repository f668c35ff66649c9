"""What a run consists of, and how a part of it is written without pickle: tensors to safetensors, the rest to JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class Stateful(Protocol):
    """A part of the run that decides its future and is therefore saved and restored."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Generators:
    """Named random generators: every draw of a run comes from one of these.

    Args:
        seed: each generator's own seed is derived from this and its name, so that drawing more from one changes
            nothing in another.
    """

    def __init__(self, seed: int, names: tuple[str, ...]) -> None:
        self._generators = {name: torch.Generator().manual_seed(derive_seed(seed, name)) for name in names}

    def __getitem__(self, name: str) -> torch.Generator:
        return self._generators[name]

    def fork(self, name: str, number: int) -> torch.Generator:
        """A fresh generator for process `number`: each draws numbers of its own, and all leave `name` in one state."""
        seed = int(torch.randint(2**62, (1,), generator=self._generators[name]))
        return torch.Generator().manual_seed(derive_seed(seed, str(number)))

    def state_dict(self) -> dict[str, Tensor]:
        return {name: generator.get_state() for name, generator in self._generators.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, generator in self._generators.items():
            generator.set_state(state[name])


def derive_seed(seed: int, name: str) -> int:
    """A seed that differs for every name, the same in every process."""
    import hashlib

    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:6], "big")


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """A JSON-able image of nested dicts, lists, tuples, numbers and tensors; tensors are moved into `tensors`.

    Raises:
        TypeError: the value holds something that neither JSON nor safetensors can carry.
    """
    if isinstance(value, Tensor):
        name = path or "value"
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"__tensor__": name}
    if isinstance(value, Mapping):
        items = [(key, pack(item, tensors, f"{path}/{key}" if path else str(key))) for key, item in value.items()]
        if all(isinstance(key, str) for key, _ in items):
            return dict(items)
        return {"__items__": [[key, item] for key, item in items]}
    if isinstance(value, list | tuple):
        packed = [pack(item, tensors, f"{path}/{index}") for index, item in enumerate(value)]
        return {"__tuple__": packed} if isinstance(value, tuple) else packed
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"cannot save {path!r}: a {type(value).__name__} is neither a tensor nor plain data")


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `pack`."""
    if isinstance(value, dict):
        if "__tensor__" in value:
            return tensors[value["__tensor__"]]
        if "__tuple__" in value:
            return tuple(unpack(item, tensors) for item in value["__tuple__"])
        if "__items__" in value:
            return {key: unpack(item, tensors) for key, item in value["__items__"]}
        return {key: unpack(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    return value
