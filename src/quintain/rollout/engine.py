"""What an engine is, and which one to use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from quintain.errors import ConfigError, nearest
from quintain.rollout.checks import validate_sampling
from quintain.rollout.hf import TransformersEngine
from quintain.rollout.native import NativeEngine, unsupported_by_native
from quintain.rollout.records import build_rollouts, rollouts_from_tokens
from quintain.rollout.stopping import completion_mask, resolve_stop_token_ids
from quintain.types import Samples, SamplingParams

__all__ = [
    "ENGINES",
    "RolloutEngine",
    "build_rollouts",
    "completion_mask",
    "make_engine",
    "resolve_stop_token_ids",
    "rollouts_from_tokens",
    "validate_sampling",
]

ENGINES = ("auto", "native", "transformers", "vllm")

_log = logging.getLogger(__name__)


class RolloutEngine(Protocol):
    """Samples completions with the weights that its model has at the time of the call."""

    name: str

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, generator: torch.Generator
    ) -> Samples:
        """Sample `num_generations` completions of each prompt.

        Args:
            prompts: token ids, of any lengths, unpadded.
            generator: the only source of randomness; the global generators are neither read nor moved.
        Returns:
            Row `i * num_generations + j` is completion j of prompt i.
        Raises:
            ConfigError, DataError: the settings or the prompts cannot be used.
            RolloutError: sampling failed.
        """
        ...


def make_engine(
    name: str, model: nn.Module, tokenizer: Any = None, *, dtype: torch.dtype | None = None
) -> RolloutEngine:
    """The engine called `name`; "auto" is native where it can run the model, else transformers.

    Args:
        dtype: of the native engine's matrix products; None is that of the weights.

    Which one "auto" chose, and why, is logged; the choice itself is the engine's `name`.

    Raises:
        ConfigError: the name is unknown, or that engine cannot run this model.
    """
    if name == "vllm":
        raise ConfigError(
            "rollout_engine='vllm' is not available in this version. Use 'auto', 'native' or 'transformers'."
        )
    if name not in ENGINES:
        raise ConfigError(f"rollout_engine must be one of {', '.join(ENGINES)}: got {name!r}.{nearest(name, ENGINES)}")
    if name == "auto":
        reason = unsupported_by_native(model)
        name = "transformers" if reason else "native"
        _log.info("rollout engine: %s%s", name, f" (not native: {reason})" if reason else "")
    return NativeEngine(model, tokenizer, dtype=dtype) if name == "native" else TransformersEngine(model, tokenizer)
