"""Rewards: the checked boundary to reward functions, the built-in ones, and reward models."""

from quintain.rewards.base import RewardPipeline
from quintain.rewards.model import RewardModel
from quintain.rewards.registry import REWARDS, resolve_rewards
from quintain.rewards.signature import per_sample
from quintain.rewards.text import completion_text

__all__ = ["REWARDS", "RewardModel", "RewardPipeline", "completion_text", "per_sample", "resolve_rewards"]
