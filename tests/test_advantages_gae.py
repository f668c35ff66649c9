"""Generalised advantage estimation: known answers (T04), a plain loop, and padding that is never read (S47)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintain.advantages.gae import gae
from quintain.errors import ConfigError
from quintain.masking import masked_mean, masked_variance, masked_whiten


def one_row(rewards, values, valid=None):
    """Rewards, values and mask of a single completion."""
    width = len(values)
    mask = torch.arange(width)[None] < (width if valid is None else valid)
    return torch.tensor([rewards]), torch.tensor([values]), mask


@pytest.mark.parametrize("padding", [0.0, 9.0, 1e6, math.nan])
def test_padding_takes_no_part_in_the_recursion(padding):
    """T04: 0.857375 or 0.81225 in front would mean that a pad slot took part, or that the score sat one slot late."""
    rewards, values, mask = one_row([0.0, 0.0, 1.0, padding, padding], [0.5, 0.5, 0.5, padding, padding], valid=3)
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    torch.testing.assert_close(advantages, torch.tensor([[0.45125, 0.475, 0.5, 0.0, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.95125, 0.975, 1.0, 0.0, 0.0]]))


def test_a_full_length_completion():
    """T04."""
    rewards, values, mask = one_row([0.0, 0.0, 0.0, 0.0, 1.0], [0.5] * 5)
    advantages, _ = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    expected = torch.tensor([[0.407253, 0.428687, 0.45125, 0.475, 0.5]])
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=0)


def test_rewards_on_every_token():
    """T04."""
    rewards, values, mask = one_row([0.1, -0.2, 1.0], [0.2, 0.4, 0.6])
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    torch.testing.assert_close(advantages, torch.tensor([[0.661, 0.38, 0.4]]))
    torch.testing.assert_close(returns, torch.tensor([[0.861, 0.78, 1.0]]))


def test_without_smoothing_advantages_are_one_step_errors():
    rewards, values, mask = one_row([0.1, -0.2, 1.0], [0.2, 0.4, 0.6])
    advantages, _ = gae(rewards, values, mask, gamma=0.5, lam=0.0)
    torch.testing.assert_close(advantages, torch.tensor([[0.1, -0.3, 0.4]]))


def test_with_full_smoothing_returns_are_discounted_sums_of_rewards():
    rewards, values, mask = one_row([1.0, 2.0, 4.0], [0.3, -0.7, 5.0])
    _, returns = gae(rewards, values, mask, gamma=0.5, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[3.0, 4.0, 4.0]]))


def test_whitened_advantages_have_mean_0_and_variance_1_whatever_the_padding():
    """T04."""
    rewards, values, mask = one_row([0.1, -0.2, 1.0], [0.2, 0.4, 0.6])
    advantages, _ = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    whitened = masked_whiten(advantages, mask)
    assert masked_mean(whitened, mask).item() == pytest.approx(0, abs=1e-6)
    assert masked_variance(whitened, mask).item() == pytest.approx(1, abs=1e-6)

    padding = torch.full((1, 20), math.nan)
    wide_mask = torch.cat([mask, torch.zeros(1, 20, dtype=torch.bool)], dim=1)
    wide, _ = gae(torch.cat([rewards, padding], 1), torch.cat([values, padding], 1), wide_mask, gamma=1.0, lam=0.95)
    torch.testing.assert_close(masked_whiten(wide, wide_mask)[:, :3], whitened)


def loop(rewards, values, gamma, lam):
    """The definition, a row of valid tokens at a time: sums of discounted one-step errors."""
    steps = len(values)
    errors = [rewards[t] + gamma * (values[t + 1] if t + 1 < steps else 0.0) - values[t] for t in range(steps)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, steps)) for t in range(steps)]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), gamma=st.floats(0, 1), lam=st.floats(0, 1), holes=st.booleans())
def test_random_ragged_batches_agree_with_the_definition(data, gamma, lam, holes):
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    rewards, values = torch.randn(2, rows, width, generator=generator, dtype=torch.float64)
    if holes:
        mask = torch.rand(rows, width, generator=generator) < 0.6
    else:
        mask = torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=generator)
    nan = torch.where(mask, 0.0, math.nan)
    advantages, returns = gae(rewards + nan, values + nan, mask, gamma=gamma, lam=lam)
    for row in range(rows):
        valid = mask[row]
        expected = loop(rewards[row][valid].tolist(), values[row][valid].tolist(), gamma, lam)
        assert advantages[row][valid].tolist() == pytest.approx(expected, abs=1e-9)
        assert returns[row][valid].tolist() == pytest.approx(
            (torch.tensor(expected) + values[row][valid]).tolist(), abs=1e-6
        )
    assert advantages[~mask].eq(0).all() and returns[~mask].eq(0).all()


def test_no_gradient_reaches_the_values():
    rewards, values, mask = one_row([0.0, 1.0], [0.5, 0.5])
    advantages, returns = gae(rewards, values.requires_grad_(), mask, gamma=1.0, lam=0.95)
    assert not advantages.requires_grad and not returns.requires_grad


@pytest.mark.parametrize("name, value", [("gamma", -0.1), ("gamma", 1.1), ("lam", -0.1), ("lam", 1.1)])
def test_a_coefficient_outside_0_to_1_is_refused_by_name_and_value(name, value):
    rewards, values, mask = one_row([1.0], [0.5])
    with pytest.raises(ConfigError, match=rf"{name} must be in \[0, 1\]: got {value}"):
        gae(rewards, values, mask, **{"gamma": 1.0, "lam": 1.0, name: value})
