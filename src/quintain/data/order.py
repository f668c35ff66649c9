"""Where the next row comes from: a dataset in seeded order, or a stream. Both go on for ever and can be resumed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

from datasets import Dataset, IterableDataset

from quintain.errors import CheckpointError, DataError

SHUFFLE_BUFFER_ROWS = 1000
"""Rows among which a stream is shuffled."""

Row = tuple[int, Mapping[str, Any]]
"""A row with its number."""


class Order(Protocol):
    epoch: int

    def take(self, count: int) -> list[Row]:
        """The next rows with their numbers, into the next epoch if need be."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class SeededOrder:
    """Rows of a dataset by number.

    The order of an epoch follows from the seed, the epoch and the rows that its first step had taken already.
    """

    def __init__(self, dataset: Dataset, kept: list[int], shuffle: bool, seed: int) -> None:
        self.dataset, self.kept, self.shuffle, self.seed = dataset, kept, shuffle, seed
        self._start_epoch(0, (), 0)

    def take(self, count: int) -> list[Row]:
        taken: list[int] = []
        while len(taken) < count:
            if self.position == len(self._permutation):
                self._start_epoch(self.epoch + 1, taken, count - len(taken))
            part = self._permutation[self.position : self.position + count - len(taken)]
            self.position += len(part)
            taken += part
        return [(index, self.dataset[index]) for index in taken]

    def _start_epoch(self, epoch: int, taken: Collection[int], wanted: int) -> None:
        """Begin an epoch, with rows that the running step has not `taken` yet first in its next `wanted` places.

        So no row comes twice in a step that the dataset can fill.
        """
        order = list(self.kept)
        if self.shuffle:
            random.Random(f"{self.seed} {epoch}").shuffle(order)
        avoided = set(taken)
        first = [index for index in order if index not in avoided][:wanted]
        front = set(first)
        order = first + [index for index in order if index not in front]
        self.epoch, self.position, self._permutation = epoch, 0, order
        self._taken, self._wanted = list(taken), wanted

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "taken": list(self._taken),
            "wanted": self._wanted,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_parts(self.state_dict(), state)
        self.seed = state["seed"]
        self._start_epoch(state["epoch"], state["taken"], state["wanted"])
        self.position = state["position"]


class StreamOrder:
    """Rows of a stream as they come, each epoch shuffled through a buffer in its own way if wanted."""

    def __init__(self, dataset: IterableDataset, shuffle: bool, seed: int) -> None:
        self.dataset, self.shuffle = dataset, shuffle
        self._start_epoch(0, 0, seed)

    def take(self, count: int) -> list[Row]:
        taken: list[Row] = []
        while len(taken) < count:
            row = next(self._rows, None)
            if row is not None:
                taken.append((self.position, row))
                self.position += 1
            elif self.position == 0:
                raise DataError("The stream is empty. Give at least one row with a prompt.")
            else:
                self._start_epoch(self.epoch + 1, 0, self.seed)
        return taken

    def _start_epoch(self, epoch: int, position: int, seed: int) -> None:
        self.epoch, self.position, self.seed = epoch, position, seed
        rows = self.dataset
        if self.shuffle:
            rows = rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER_ROWS)
            rows.set_epoch(epoch)
        self._rows: Iterator[Mapping[str, Any]] = itertools.islice(iter(rows), position, None)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_parts(self.state_dict(), state)
        self._start_epoch(state["epoch"], state["position"], state["seed"])


def require_parts(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    missing = [name for name in own if name not in state]
    if missing:
        raise CheckpointError(f"The saved prompt order lacks {', '.join(missing)}. Use an undamaged checkpoint.")
