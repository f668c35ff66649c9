"""The order in which prompts are drawn: endless, seeded, and resumable at any step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from datasets import Dataset, IterableDataset

from quintain.data.prompts import EncodedPrompt, PromptFormat, collect_prompts, missing_prompt_column
from quintain.errors import CheckpointError, ConfigError, DataError
from quintain.types import Prompts

SHUFFLE_BUFFER_ROWS = 1000
"""Rows among which a stream is shuffled."""


@dataclass(frozen=True)
class Survey:
    """What a look at every prompt found: the rows to use, each prompt's tokens before any cut, and what became of them."""

    kept: list[int]
    lengths: list[int]
    num_dropped: int
    num_cut: int


def survey(dataset: Dataset, prompt_format: PromptFormat) -> Survey:
    """Check and measure every prompt, so that a fault shows before training and not in the middle of it.

    Raises:
        DataError: a prompt is unusable, or none is left.
    """
    if "prompt" not in dataset.column_names:
        raise DataError(missing_prompt_column(dataset.column_names))
    kept: list[int] = []
    lengths: list[int] = []
    num_cut = 0
    prompts = dataset.select_columns("prompt")
    for start in range(0, len(prompts), 1000):
        indices = range(start, min(start + 1000, len(prompts)))
        for index, item in zip(indices, prompt_format.encode(list(prompts.select(indices)), indices)):
            lengths.append(item.length)
            num_cut += item.outcome == "cut"
            if item.outcome != "dropped":
                kept.append(index)
    if not kept:
        raise DataError(
            f"No prompt is left: all {len(lengths)} have more than max_prompt_length={prompt_format.max_prompt_length} "
            f"tokens (the shortest has {min(lengths, default=0)}). Raise max_prompt_length."
        )
    return Survey(kept, lengths, len(lengths) - len(kept), num_cut)


class PromptSampler:
    """Endless steps of prompts.

    In one pass over the dataset (an epoch) every prompt is used exactly once; where the sizes do not divide, a step
    takes the last prompts of one epoch and the first of the next, and no prompt twice. Only a dataset smaller than a
    step must repeat prompts within it; `num_repeated` counts them.

    A stream is read in order, or shuffled through a buffer of `SHUFFLE_BUFFER_ROWS` rows, and resumed by reading up to
    where it stood. Its prompts are checked as they come, and a step at the end of an epoch may repeat one.

    Args:
        dataset: rows with a "prompt".
        prompt_format: how a row becomes a prompt.
        prompts_per_step: prompts of a step, over all processes.
        shuffle: a new random order every epoch; off keeps the dataset's order, for a curriculum (S66).
        seed: of the order.
        rank: this process, in [0, world_size).
        world_size: processes; each gets its share of every step.
    Raises:
        ConfigError: there are fewer prompts in a step than processes.
        DataError: a prompt is unusable, or there is none.
    """

    def __init__(
        self,
        dataset: Dataset | IterableDataset,
        prompt_format: PromptFormat,
        *,
        prompts_per_step: int,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if prompts_per_step < world_size:
            raise ConfigError(
                f"prompts_per_step={prompts_per_step} leaves some of the {world_size} processes without a prompt. "
                f"Use prompts_per_step={world_size} or more."
            )
        self.dataset, self.prompt_format, self.prompts_per_step = dataset, prompt_format, prompts_per_step
        self.rank, self.world_size = rank, world_size
        self.num_dropped = self.num_cut = self.num_repeated = 0
        self.survey: Survey | None = None
        self._order: _Order
        if isinstance(dataset, IterableDataset):
            self._order = _StreamOrder(dataset, shuffle, seed)
            for row in itertools.islice(dataset, 1):
                prompt_format.encode([row], [0])
        else:
            self.survey = survey(dataset, prompt_format)
            self.num_dropped, self.num_cut = self.survey.num_dropped, self.survey.num_cut
            self._order = _ShuffledOrder(dataset, self.survey.kept, shuffle, seed)

    @property
    def num_prompts(self) -> int | None:
        """Prompts of one epoch; None for a stream, whose length is not known."""
        return None if self.survey is None else len(self.survey.kept)

    @property
    def epoch(self) -> int:
        """The epoch of the last prompt drawn, from 0."""
        return self._order.epoch

    def next_batch(self) -> Prompts:
        """This process's share of the next step's prompts.

        Raises:
            DataError: in a stream: a prompt is unusable, or a whole epoch had none to use.
        """
        step: list[EncodedPrompt] = []
        start = self._order.epoch
        while len(step) < self.prompts_per_step:
            if not step and self._order.epoch > start + 1:
                raise DataError(
                    f"A whole pass over the stream gave no prompt within "
                    f"max_prompt_length={self.prompt_format.max_prompt_length}. Raise max_prompt_length."
                )
            step += self._usable(self._order.take(self.prompts_per_step - len(step)))
        return self._share(step)

    def one_pass(self, limit: int | None = None) -> Iterator[Prompts]:
        """The prompts once, in the dataset's order, `prompts_per_step` at a time: for evaluation.

        Leaves the endless order where it stands. With several processes each gets its share of every part.

        Args:
            limit: most prompts, over all processes; None takes all.
        """
        rows: Iterator[tuple[int, Mapping[str, Any]]]
        if self.survey is None:
            rows = enumerate(self.dataset)
        else:
            rows = ((index, self.dataset[index]) for index in self.survey.kept)
        usable = (item for row in rows for item in self._encode([row]) if item.outcome != "dropped")
        usable = itertools.islice(usable, limit)
        while part := list(itertools.islice(usable, self.prompts_per_step)):
            share = self._share(part)
            if len(share):
                yield share

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands, as plain numbers and lists."""
        return {
            "num_prompts": self.num_prompts,
            "num_dropped": self.num_dropped,
            "num_cut": self.num_cut,
            "num_repeated": self.num_repeated,
            "order": self._order.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state` was taken. The seed is the saved one; the step's size and processes may differ.

        Raises:
            CheckpointError: the state lacks a part, or belongs to another dataset.
        """
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise CheckpointError(f"The saved prompt order lacks {', '.join(missing)}. Use an undamaged checkpoint.")
        if state["num_prompts"] != self.num_prompts:
            raise CheckpointError(
                f"The dataset has changed since the checkpoint: it had {state['num_prompts']} usable prompts and has "
                f"{self.num_prompts}. Resume with the dataset and max_prompt_length of the saved run."
            )
        self._order.load_state_dict(state["order"])
        self.num_dropped, self.num_cut = state["num_dropped"], state["num_cut"]
        self.num_repeated = state["num_repeated"]

    def _encode(self, rows: list[tuple[int, Mapping[str, Any]]]) -> list[EncodedPrompt]:
        return self.prompt_format.encode([row for _, row in rows], [index for index, _ in rows])

    def _usable(self, rows: list[tuple[int, Mapping[str, Any]]]) -> list[EncodedPrompt]:
        """The rows as prompts, without dropped ones. A stream's are counted here, others were in the survey."""
        encoded = self._encode(rows)
        self.num_repeated += len(rows) - len({index for index, _ in rows})
        if self.survey is None:
            self.num_dropped += sum(item.outcome == "dropped" for item in encoded)
            self.num_cut += sum(item.outcome == "cut" for item in encoded)
        return [item for item in encoded if item.outcome != "dropped"]

    def _share(self, step: list[EncodedPrompt]) -> Prompts:
        """The rank's contiguous part; parts differ by one prompt at most."""
        bounds = [len(step) * part // self.world_size for part in (self.rank, self.rank + 1)]
        return collect_prompts(step[bounds[0] : bounds[1]])


class _Order(Protocol):
    epoch: int

    def take(self, count: int) -> list[tuple[int, Mapping[str, Any]]]:
        """The next rows with their numbers, into the next epoch if need be."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class _ShuffledOrder:
    """Rows of a dataset by number. An epoch's order follows from the seed, the epoch, and what the step it began in held."""

    def __init__(self, dataset: Dataset, kept: list[int], shuffle: bool, seed: int) -> None:
        self.dataset, self.kept, self.shuffle, self.seed = dataset, kept, shuffle, seed
        self._start_epoch(0, (), 0)

    def take(self, count: int) -> list[tuple[int, Mapping[str, Any]]]:
        taken: list[int] = []
        while len(taken) < count:
            if self.position == len(self._permutation):
                self._start_epoch(self.epoch + 1, taken, count - len(taken))
            part = self._permutation[self.position : self.position + count - len(taken)]
            self.position += len(part)
            taken += part
        return [(index, self.dataset[index]) for index in taken]

    def _start_epoch(self, epoch: int, taken: Collection[int], wanted: int) -> None:
        """Begin an epoch, keeping rows already `taken` by the running step out of the next `wanted` places.

        Impossible, and not tried, where the dataset is smaller than the step.
        """
        order = list(self.kept)
        if self.shuffle:
            random.Random(f"{self.seed} {epoch}").shuffle(order)
        avoided = set(taken)
        if len(order) - len(avoided) >= wanted:
            first = [index for index in order if index not in avoided][:wanted]
            order = first + [index for index in order if index not in set(first)]
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
        _require_parts(self.state_dict(), state)
        self.seed = state["seed"]
        self._start_epoch(state["epoch"], state["taken"], state["wanted"])
        self.position = state["position"]


class _StreamOrder:
    """Rows of a stream as they come, each epoch shuffled through a buffer in its own way if wanted."""

    def __init__(self, dataset: IterableDataset, shuffle: bool, seed: int) -> None:
        self.dataset, self.shuffle = dataset, shuffle
        self._start_epoch(0, 0, seed)

    def take(self, count: int) -> list[tuple[int, Mapping[str, Any]]]:
        taken: list[tuple[int, Mapping[str, Any]]] = []
        while len(taken) < count:
            row = next(self._rows, None)
            if row is not None:
                taken.append((self.position, row))
                self.position += 1
            elif self.position == 0:
                raise DataError("The stream is empty. Give at least one row with a prompt.")
            else:
                self._start_epoch(self.epoch + 1, 0, self.seed)
                if taken:
                    break  # the caller asks again
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
        _require_parts(self.state_dict(), state)
        self._start_epoch(state["epoch"], state["position"], state["seed"])


def _require_parts(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    missing = [name for name in own if name not in state]
    if missing:
        raise CheckpointError(f"The saved prompt order lacks {', '.join(missing)}. Use an undamaged checkpoint.")
