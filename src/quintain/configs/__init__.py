"""Settings: one dataclass an algorithm. Imports the standard library only, so that `--help` is instant."""

from quintain.configs.algorithms import DGConfig, GRPOConfig, PPOConfig, ReinforceConfig, RLOOConfig, TPOConfig
from quintain.configs.shared import OnlineRLConfig

__all__ = [
    "DGConfig",
    "GRPOConfig",
    "OnlineRLConfig",
    "PPOConfig",
    "RLOOConfig",
    "ReinforceConfig",
    "TPOConfig",
]
