"""A few dummy tokens on which a model is tried out before it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Int
from torch import Tensor, nn

from quintain.types import Rollouts


def two_completions(prompt: Int[Tensor, " prompt"], completions: Int[Tensor, "2 completion"]) -> Rollouts:
    """Two completions of one prompt, all tokens of them valid."""
    ones = torch.ones_like(completions, dtype=torch.bool)
    prompts = prompt.expand(2, -1)
    return Rollouts(
        prompt_ids=prompts,
        prompt_mask=torch.ones_like(prompts, dtype=torch.bool),
        completion_ids=completions,
        completion_mask=ones,
        stopped=ones[:, 0],
        sampling_logprobs=torch.zeros_like(completions, dtype=torch.float32),
        group_ids=torch.zeros_like(completions[:, 0]),
        prompts=["", ""],
        completions=["", ""],
    )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every part's own flag as it was afterwards."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
