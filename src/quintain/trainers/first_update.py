"""The first update of every rollout is on-policy, or the run stops: a broken ratio trains on the wrong numbers."""

from __future__ import annotations

import torch

from quintain.errors import RolloutError
from quintain.types import PolicyOutputs, Rollouts

RATIO_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}
"""Largest |ratio - 1| that rounding explains: the same weights and tokens, in micro-batches cut another way."""
SAMPLER_TOLERANCE = {"float32": 1e-2, "bfloat16": 2.0, "float16": 1.0}
"""Largest log-probability difference, in nats, between sampler and trainer on the same token and weights."""


class FirstUpdateCheck:
    """Compares the policies on the micro-batches of a rollout's first mini-batch, before any weight has moved.

    Args:
        engine: whatever sampled; its name goes into the message.
        dtype: compute precision, which decides how far rounding may go.
    """

    def __init__(self, engine: object, dtype: str) -> None:
        self.engine_name = getattr(engine, "name", type(engine).__name__)
        self.dtype = dtype if dtype in RATIO_TOLERANCE else "bfloat16"
        self.armed = False
        self.sampler_difference = 0.0

    def arm(self) -> None:
        """A new rollout: the policy has not moved since it sampled."""
        self.armed, self.sampler_difference = True, 0.0

    def disarm(self) -> None:
        """An optimizer step was taken."""
        self.armed = False

    def observe(self, outputs: PolicyOutputs, rollouts: Rollouts) -> None:
        """Check one micro-batch.

        Raises:
            RolloutError: the online policy's log-probabilities are not those recorded for the policy that sampled, or
                not those the engine reported.
        """
        if not self.armed or rollouts.old_logprobs is None:
            return
        mask, logprobs = rollouts.completion_mask, outputs.logprobs.detach()
        ratio_gap = torch.where(mask, (logprobs - rollouts.old_logprobs).exp() - 1, 0.0).abs()
        self._require(ratio_gap, RATIO_TOLERANCE[self.dtype], rollouts, "old_logprobs", "|ratio - 1|")
        reported = rollouts.sampling_logprobs
        difference = torch.where(mask & ~reported.isnan(), logprobs - reported, 0.0).abs()
        self.sampler_difference = max(self.sampler_difference, float(difference.max()))
        self._require(difference, SAMPLER_TOLERANCE[self.dtype], rollouts, "sampling_logprobs", "|log-prob difference|")

    def _require(self, gaps: torch.Tensor, limit: float, rollouts: Rollouts, name: str, what: str) -> None:
        worst = float(gaps.max())
        if worst <= limit:
            return
        row, token = divmod(int(gaps.argmax()), gaps.shape[1])
        source = f"the {self.engine_name!r} engine" if name == "sampling_logprobs" else "the annotation pass"
        raise RolloutError(
            f"the first update of a rollout must be on-policy, but {what} is {worst:.3g} (at most {limit:g} in "
            f"{self.dtype}) at row {row}, completion token {token}: the trainer's forward pass and {name} from {source} "
            f"disagree about the same tokens under the same weights. No weight was changed. Usual causes: dropout left "
            f"on, another temperature, a wrong mask or position, or an engine with stale weights."
        )
