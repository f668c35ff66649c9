"""Each algorithm learns: `quintain selftest` is the proof, and it can fail."""

from __future__ import annotations

import math

import pytest

from quintain.cli.main import main
from quintain.cli.selftest import OWN, Outcome, rise, run_algorithm


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", OWN)
def test_the_algorithm_learns_to_reverse_tokens_from_a_terminal_reward(algorithm):
    assert run_algorithm(algorithm).learned


@pytest.mark.slow
def test_selftest_fails_an_algorithm_that_cannot_learn(monkeypatch, capsys):
    monkeypatch.setitem(OWN, "grpo", {"learning_rate": 1e-12, "max_steps": 10})
    assert main(["selftest", "grpo"]) == 1
    assert "grpo did not learn" in capsys.readouterr().out


def test_the_rise_is_measured_in_standard_errors_of_the_difference():
    """Means 2 and 4, variances 1 and 1, three values each: 2 / sqrt(2/3)."""
    assert rise([1.0, 2.0, 3.0], [3.0, 4.0, 5.0]) == pytest.approx(2 / math.sqrt(2 / 3))
    assert rise([1.0, 1.0], [1.0, 1.0]) == 0.0


def test_a_rise_that_is_too_small_or_ends_too_low_is_not_learning():
    assert not Outcome("grpo", 0.0, 0.9, 2.0, 1.0).learned
    assert not Outcome("grpo", 0.0, 0.1, 9.0, 1.0).learned
