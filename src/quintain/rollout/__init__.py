"""Sampling completions from a policy: engines, stop rules, and the record of what was sampled."""

from quintain.rollout.checks import validate_sampling
from quintain.rollout.engine import ENGINES, RolloutEngine, make_engine
from quintain.rollout.hf import TransformersEngine
from quintain.rollout.native import NativeEngine
from quintain.rollout.records import build_rollouts, rollouts_from_tokens
from quintain.rollout.stopping import completion_mask, resolve_stop_token_ids

__all__ = [
    "ENGINES",
    "NativeEngine",
    "RolloutEngine",
    "TransformersEngine",
    "build_rollouts",
    "completion_mask",
    "make_engine",
    "resolve_stop_token_ids",
    "rollouts_from_tokens",
    "validate_sampling",
]
