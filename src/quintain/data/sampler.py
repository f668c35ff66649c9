"""The order in which prompts are drawn: endless, seeded, and resumable at any step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from datasets import Dataset, IterableDataset

from quintain.data.order import Order, Row, SeededOrder, StreamOrder, require_parts
from quintain.data.prompts import EncodedPrompt, PromptFormat, collect_prompts
from quintain.data.survey import Survey, survey
from quintain.errors import CheckpointError, ConfigError, DataError
from quintain.types import Prompts


class PromptSampler:
    """Endless steps of prompts.

    In one pass over the dataset (an epoch) every prompt is used exactly once; where the sizes do not divide, a step
    takes the last prompts of one epoch and the first of the next, and no prompt twice. Only a dataset smaller than a
    step repeats prompts within it, as few as it must; `num_repeated` counts them.

    A stream is read in order, or shuffled through a buffer of 1000 rows, and resumed by reading up to where it stood.
    Its prompts are checked as they come, and a step at the end of an epoch may repeat one.

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
        self._order: Order
        if isinstance(dataset, IterableDataset):
            self._order = StreamOrder(dataset, shuffle, seed)
            first = next(iter(dataset), None)
            if first is None:
                raise DataError("The stream is empty. Give at least one row with a prompt.")
            prompt_format.encode([first], [0])
        else:
            self.survey = survey(dataset, prompt_format)
            self.num_dropped, self.num_cut = self.survey.num_dropped, self.survey.num_cut
            self._order = SeededOrder(dataset, self.survey.kept, shuffle, seed)

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
        usable = (item for row in enumerate(self.dataset) for item in self._encode([row]) if item.outcome != "dropped")
        chosen = itertools.islice(usable, limit)
        while part := list(itertools.islice(chosen, self.prompts_per_step)):
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
        require_parts(self.state_dict(), state)
        if state["num_prompts"] != self.num_prompts:
            raise CheckpointError(
                f"The dataset has changed since the checkpoint: it had {state['num_prompts']} usable prompts and has "
                f"{self.num_prompts}. Resume with the dataset and max_prompt_length of the saved run."
            )
        self._order.load_state_dict(state["order"])
        self.num_dropped, self.num_cut = state["num_dropped"], state["num_cut"]
        self.num_repeated = state["num_repeated"]

    def _encode(self, rows: list[Row]) -> list[EncodedPrompt]:
        return self.prompt_format.encode([row for _, row in rows], [index for index, _ in rows])

    def _usable(self, rows: list[Row]) -> list[EncodedPrompt]:
        """The rows as prompts, without dropped ones. A stream's are counted here, others were in the survey."""
        encoded = self._encode(rows)
        if self.survey is not None:
            self.num_repeated += len(rows) - len({index for index, _ in rows})
        else:
            self.num_dropped += sum(item.outcome == "dropped" for item in encoded)
            self.num_cut += sum(item.outcome == "cut" for item in encoded)
        return [item for item in encoded if item.outcome != "dropped"]

    def _share(self, step: list[EncodedPrompt]) -> Prompts:
        """The rank's contiguous part; parts differ by one prompt at most."""
        bounds = [len(step) * part // self.world_size for part in (self.rank, self.rank + 1)]
        return collect_prompts(step[bounds[0] : bounds[1]])
