"""Fixed and adaptive KL coefficients (S45, S46)."""

from __future__ import annotations

import math

import pytest

from quintain.errors import ConfigError
from quintain.kl.controllers import AdaptiveKLController, FixedKLController


def test_a_fixed_coefficient_does_not_move():
    controller = FixedKLController(0.05)
    controller.update(observed_kl=99.0, n_samples=64)
    assert controller.value == 0.05


@pytest.mark.parametrize(
    "observed, expected",
    [
        (6.0, 0.1),  # on target
        (6.6, 0.101),  # 10% above, times 10 / 100 samples
        (5.4, 0.099),
        (600.0, 0.102),  # the error is bounded to +-20%
        (-3.0, 0.098),  # an estimate may be negative
    ],
)
def test_an_adaptive_coefficient_follows_the_observed_kl(observed, expected):
    controller = AdaptiveKLController(init=0.1, target=6.0, horizon=100)
    controller.update(observed, n_samples=10)
    assert controller.value == pytest.approx(expected)


def test_an_adaptive_coefficient_stays_positive_when_a_step_exceeds_many_horizons():
    controller = AdaptiveKLController(init=0.1, target=6.0, horizon=10)
    controller.update(0.0, n_samples=1000)
    assert controller.value == pytest.approx(0.08)


@pytest.mark.parametrize("observed", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_is_refused_and_changes_nothing(observed):
    controller = AdaptiveKLController(init=0.1, target=6.0, horizon=100)
    with pytest.raises(ValueError, match=f"must be finite: got {observed}"):
        controller.update(observed, n_samples=10)
    assert controller.value == 0.1


@pytest.mark.parametrize("make", [lambda: FixedKLController(0.3), lambda: AdaptiveKLController(0.3, 6.0, 100)])
def test_a_restored_controller_goes_on_as_if_nothing_had_happened(make):
    straight, restored = make(), make()
    straight.update(9.0, 10)
    restored.load_state_dict(straight.state_dict())
    for controller in (straight, restored):
        controller.update(2.0, 10)
    assert restored.value == straight.value


@pytest.mark.parametrize(
    "settings, field", [((0.0, 6.0, 100), "kl_coef"), ((0.1, 0.0, 100), "target_kl"), ((0.1, 6.0, 0), "kl_horizon")]
)
def test_an_adaptive_setting_that_is_not_above_0_is_refused_by_name(settings, field):
    with pytest.raises(ConfigError, match=f"{field}=0"):
        AdaptiveKLController(*settings)


def test_a_negative_fixed_coefficient_is_refused():
    with pytest.raises(ConfigError, match=r"got -0\.1"):
        FixedKLController(-0.1)
