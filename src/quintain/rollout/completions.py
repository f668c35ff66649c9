"""The completions being written, and the state a model must be in meanwhile; shared by the engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from quintain.rollout.sampling import next_tokens, uniform_dtype
from quintain.rollout.stopping import StopTracker
from quintain.types import Samples, SamplingParams


class Completions:
    """Draws every next token, records it with its log-probability, and knows which rows have ended.

    All random numbers are drawn at the start, one a row and position, so that a row's tokens depend neither on how long
    other rows run nor on when they leave the batch, and so that both engines sample the same tokens.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        generator: torch.Generator,
        tokenizer: Any,
        device: torch.device,
    ) -> None:
        rows, width = len(prompts) * sampling.num_generations, sampling.max_completion_length
        uniforms = torch.rand(rows, width, generator=generator, device=generator.device, dtype=torch.float64)
        # One column more than there are tokens: what an ended row draws goes there.
        uniforms = nn.functional.pad(uniforms, (0, 1))
        self._uniforms = uniforms.to(uniform_dtype(device)).to(device)
        self._sampling = sampling
        self._prompts = prompts
        self._ids = torch.full((rows, width + 1), sampling.pad_token_id, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(rows, width + 1, dtype=torch.float32, device=device)
        self._values: Float[Tensor, "rows width"] | None = None
        self._tracker = StopTracker(rows, sampling, tokenizer, device)
        self._seen: Bool[Tensor, "batch vocab"] | None = None
        self._width = width

    @property
    def ended(self) -> Bool[Tensor, " batch"]:
        """Rows that have their last token."""
        return self._tracker.ended

    def append(
        self,
        logits: Float[Tensor, "rows vocab"],
        rows: Int[Tensor, " rows"],
        values: Float[Tensor, " rows"] | None = None,
    ) -> Int[Tensor, " rows"]:
        """Draw the next token of each of `rows` and record it; what an ended row draws is not part of it.

        Args:
            values: what a critic says of the rows as they are, to be recorded beside the token.
        """
        places = torch.where(self.ended[rows], self._width, self._tracker.lengths[rows])
        tokens, logprobs = next_tokens(
            logits,
            self._uniforms[rows, places],
            self._sampling,
            seen=self._seen_by(rows, logits.shape[1]),
            ban_stops=self._too_short(places),
        )
        self._ids[rows, places] = tokens
        self._logprobs[rows, places] = logprobs
        if values is not None:
            self._values = torch.zeros_like(self._logprobs) if self._values is None else self._values
            self._values[rows, places] = values
        if self._seen is not None:
            self._seen[rows, tokens] = True
        self._tracker.update(rows, tokens)
        return tokens

    def _too_short(self, places: Int[Tensor, " rows"]) -> Bool[Tensor, " rows"] | None:
        """Rows that may not stop yet, or None where all may."""
        least = self._sampling.min_completion_length
        return places + 1 < least if least > 1 else None

    def samples(self) -> Samples:
        """What was sampled, without the columns that no row needs."""
        lengths = self._tracker.lengths
        width = int(lengths.max())
        mask = torch.arange(width, device=lengths.device) < lengths[:, None]
        return Samples(
            completion_ids=torch.where(mask, self._ids[:, :width], self._sampling.pad_token_id),
            completion_mask=mask,
            stopped=self._tracker.stopped.clone(),
            logprobs=torch.where(mask, self._logprobs[:, :width], 0.0),
            values=None if self._values is None else torch.where(mask, self._values[:, :width], 0.0),
        )

    def _seen_by(self, rows: Int[Tensor, " rows"], vocabulary: int) -> Bool[Tensor, "rows vocab"] | None:
        """Tokens that the repetition penalty applies to, or None when it is off."""
        if self._sampling.repetition_penalty == 1:
            return None
        if self._seen is None:
            seen = torch.zeros(len(self._prompts), vocabulary, dtype=torch.bool, device=rows.device)
            for index, prompt in enumerate(self._prompts):
                seen[index, [token for token in prompt if token < vocabulary]] = True
            self._seen = seen.repeat_interleave(self._sampling.num_generations, dim=0)
        return self._seen[rows]


@contextmanager
def sampling_mode(model: nn.Module) -> Iterator[None]:
    """No gradients and no dropout inside; every module's own training flag as it was afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True
        # Where PyTorch's issue 158232 is not fixed, an enclosing autocast would serve the casts made in here, which
        # carry no gradient, to the training forward.
        torch.clear_autocast_cache()


def left_pad(
    sequences: Sequence[Sequence[int]], pad_token_id: int, device: torch.device | str = "cpu"
) -> tuple[Int[Tensor, "batch prompt"], Bool[Tensor, "batch prompt"]]:
    """Sequences of unequal length as one tensor, ends aligned, and where their tokens are.

    The mask comes from the lengths: a prompt may hold the pad token.
    """
    width = max((len(sequence) for sequence in sequences), default=0)
    ids = [[pad_token_id] * (width - len(sequence)) + list(sequence) for sequence in sequences]
    mask = [[False] * (width - len(sequence)) + [True] * len(sequence) for sequence in sequences]
    return torch.tensor(ids, dtype=torch.long, device=device), torch.tensor(mask, dtype=torch.bool, device=device)
