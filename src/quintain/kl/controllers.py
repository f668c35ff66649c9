"""Coefficients of the KL term: a constant, or one that steers the observed KL to a target."""

from __future__ import annotations

import math

from quintain.errors import ConfigError

ERROR_BOUND = 0.2
"""Largest relative error that one update reacts to, as in the source."""


class FixedKLController:
    """A constant coefficient."""

    def __init__(self, value: float) -> None:
        """
        Raises:
            ConfigError: value is negative or not finite.
        """
        if not 0 <= value < math.inf:
            raise ConfigError(f"The KL coefficient must be finite and not negative: got {value}. Use 0 for no KL term.")
        self.value = value

    def update(self, observed_kl: float, n_samples: int) -> None:
        """Nothing to do: the coefficient does not depend on what is observed."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class AdaptiveKLController:
    """A coefficient that grows while the observed KL is above a target and shrinks while it is below.

        error = clamp(observed_kl / target - 1, -0.2, 0.2)
        value = value * (1 + error * min(n_samples / horizon, 1))

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2. The minimum is ours: a step of more than five horizons
    would otherwise make the coefficient negative, and the KL term a reward.
    """

    def __init__(self, init: float, target: float, horizon: int) -> None:
        """
        Args:
            init: coefficient at the start, above 0 (0 could never change).
            target: KL to steer to, in nats, in the same form as `observed_kl`.
            horizon: number of samples over which a full reaction is spread.
        Raises:
            ConfigError: one of them is not above 0.
        """
        for name, setting in (("kl_coef", init), ("target_kl", target), ("kl_horizon", horizon)):
            if not 0 < setting < math.inf:
                raise ConfigError(
                    f"kl_control='adaptive' needs {name} above 0: got {name}={setting}. "
                    "Set it, or use kl_control='fixed'."
                )
        self.value = init
        self.target = target
        self.horizon = horizon

    def update(self, observed_kl: float, n_samples: int) -> None:
        """React to the mean KL of `n_samples` samples.

        Raises:
            ValueError: observed_kl is not finite, which would be carried into every later loss.
        """
        if not math.isfinite(observed_kl):
            raise ValueError(
                f"observed_kl must be finite: got {observed_kl}. Look for the step's first non-finite number."
            )
        error = min(max(observed_kl / self.target - 1, -ERROR_BOUND), ERROR_BOUND)
        self.value *= 1 + error * min(n_samples / self.horizon, 1)

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]
