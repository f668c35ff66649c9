"""Quintain: online reinforcement learning of language models.

Trainers are imported when they are first asked for, so that configs and the command's --help do not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quintain.configs.algorithms import DGConfig, GRPOConfig, PPOConfig, ReinforceConfig, RLOOConfig, TPOConfig
from quintain.configs.shared import OnlineRLConfig
from quintain.errors import CheckpointError, ConfigError, DataError, QuintainError, RewardError, RolloutError

if TYPE_CHECKING:
    from quintain.rewards import per_sample
    from quintain.trainers.base import OnlineRLTrainer, OnlineRLTrainerBase
    from quintain.trainers.dg import DGTrainer
    from quintain.trainers.grpo import GRPOTrainer
    from quintain.trainers.manual import log_training_stats
    from quintain.trainers.ppo import PPOTrainer
    from quintain.trainers.reinforce import ReinforceTrainer
    from quintain.trainers.rloo import RLOOTrainer
    from quintain.trainers.tpo import TPOTrainer
    from quintain.types import LossOutput, LossTerm, PolicyOutputs, Rollouts

__version__ = "0.1.0"

_HOMES = {
    "OnlineRLTrainer": "trainers.base",
    "OnlineRLTrainerBase": "trainers.base",
    "PPOTrainer": "trainers.ppo",
    "GRPOTrainer": "trainers.grpo",
    "RLOOTrainer": "trainers.rloo",
    "ReinforceTrainer": "trainers.reinforce",
    "DGTrainer": "trainers.dg",
    "TPOTrainer": "trainers.tpo",
    "log_training_stats": "trainers.manual",
    "per_sample": "rewards",
    "LossOutput": "types",
    "LossTerm": "types",
    "PolicyOutputs": "types",
    "Rollouts": "types",
}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DGConfig",
    "DGTrainer",
    "DataError",
    "GRPOConfig",
    "GRPOTrainer",
    "LossOutput",
    "LossTerm",
    "OnlineRLConfig",
    "OnlineRLTrainer",
    "OnlineRLTrainerBase",
    "PPOConfig",
    "PPOTrainer",
    "PolicyOutputs",
    "QuintainError",
    "RLOOConfig",
    "RLOOTrainer",
    "ReinforceConfig",
    "ReinforceTrainer",
    "RewardError",
    "RolloutError",
    "Rollouts",
    "TPOConfig",
    "TPOTrainer",
    "log_training_stats",
    "per_sample",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quintain' has no attribute {name!r}")
    return getattr(importlib.import_module(f"quintain.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
