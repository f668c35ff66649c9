"""The first update of every rollout is on-policy, or the run stops: a broken ratio trains on the wrong numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quintain.errors import RolloutError
from quintain.types import PolicyOutputs, Rollouts

RATIO_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
"""Largest |ratio - 1| that rounding explains: the same weights and tokens, in micro-batches cut another way."""
SAMPLER_TOLERANCE = {"float32": 1e-2, "bfloat16": 2.0}
"""Largest log-probability difference, in nats, between sampler and trainer on the same token and weights."""


class FirstUpdateCheck:
    """Compares the policies on the micro-batches of a rollout's first mini-batch, before any weight has moved.

    Args:
        engine: whatever sampled; its name goes into the message.
        dtype: "float32" or "bfloat16", the coarsest precision in use: it decides how far rounding may go.
        untrained: the reference and the target are copies of the online policy that has taken no step yet.
    """

    def __init__(self, engine: object, dtype: str, *, untrained: bool = True) -> None:
        self.engine_name = getattr(engine, "name", type(engine).__name__)
        self.dtype = dtype
        self.sampler_dtype = "bfloat16" if getattr(engine, "dtype", None) == torch.bfloat16 else dtype
        self.armed, self.untrained = False, untrained

    def arm(self, *, on_policy: bool = True) -> None:
        """A new rollout: the policy has not moved since it sampled, unless another policy sampled it."""
        self.armed = on_policy

    def disarm(self) -> None:
        """An optimizer step was taken."""
        self.armed = self.untrained = False

    def observe(self, outputs: PolicyOutputs, rollouts: Rollouts) -> dict[str, tuple[Tensor, Tensor]]:
        """Check one micro-batch.

        Returns:
            `sampling_logprob_difference` for the step's statistics, where the engine reported log-probabilities: the
            mean absolute difference a token, in nats, as (sum, count).
        Raises:
            RolloutError: the online policy's log-probabilities are not those recorded for the policy that sampled, or
                not those the engine reported.
        """
        if not self.armed or rollouts.old_logprobs is None:
            return {}
        mask, logprobs = rollouts.completion_mask, outputs.logprobs.detach()
        ratio_gap = torch.where(mask, (logprobs - rollouts.old_logprobs).exp() - 1, 0.0).abs()
        self._require(ratio_gap, RATIO_TOLERANCE[self.dtype], rollouts, "old_logprobs", "|ratio - 1|")
        for slot, recorded in (("ref", rollouts.ref_logprobs), ("target", rollouts.target_logprobs)):
            if self.untrained and recorded is not None:
                gap = torch.where(mask, (logprobs - recorded).exp() - 1, 0.0).abs()
                self._require(gap, RATIO_TOLERANCE[self.dtype], rollouts, f"{slot}_logprobs", "|ratio - 1|")
        reported = rollouts.sampling_logprobs
        known = mask & ~reported.isnan()
        difference = torch.where(known, logprobs - reported, 0.0).abs()
        limit = SAMPLER_TOLERANCE[self.sampler_dtype]
        self._require(difference, limit, rollouts, "sampling_logprobs", "|log-prob difference|")
        return {"sampling_logprob_difference": (difference.sum(), known.sum())} if bool(known.any()) else {}

    def _require(self, gaps: Tensor, limit: float, rollouts: Rollouts, name: str, what: str) -> None:
        worst = float(gaps.max())
        if worst <= limit:
            return
        row, token = divmod(int(gaps.argmax()), gaps.shape[1])
        source = f"the {self.engine_name!r} engine" if name == "sampling_logprobs" else "the annotation pass"
        raise RolloutError(
            f"the first update of a rollout must be on-policy, but {what} is {worst:.3g} (at most {limit:g} in "
            f"{self.dtype}) at row {row}, completion token {token}: the trainer's forward pass and {name} from "
            f"{source} disagree about the same tokens under the same weights. No weight was changed. Usual causes: "
            f"dropout left on, another temperature, a wrong mask or position, or an engine with stale weights."
        )


def coarsest_precision(dtype: str, model: nn.Module) -> str:
    """The name "float32" if both the forward pass (config's `dtype`) and the weights are in it, else "bfloat16"."""
    half = any(value.dtype in (torch.bfloat16, torch.float16) for value in model.parameters())
    return "float32" if dtype == "float32" and not half else "bfloat16"
