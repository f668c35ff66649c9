"""The EMA-target form of TPO (S13, S14, S28, W1)."""

from __future__ import annotations

import math

import pytest
import torch

from quintain.kl.estimators import ESTIMATORS, k1, k2
from quintain.objectives.target_kl import ema_kl_loss, policy_gradient_target_kl

LOGPROBS = torch.tensor([[-1.0, -2.0, 0.0], [-0.5, 0.0, 0.0]])
TARGET = torch.tensor([[-1.5, -1.0, 0.0], [-0.7, 0.0, 0.0]])
ADVANTAGES = torch.tensor([[1.0, 1.0, 0.0], [-2.0, 0.0, 0.0]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_the_loss_as_it_was_first_written():
    """S13, W1: (1 + 2 - 1) from -(A * logp), 0.1 * (0.5 - 1 + 0.2) from the log-ratios, over three valid tokens."""
    logprobs = LOGPROBS.clone().requires_grad_()
    loss = ema_kl_loss(logprobs, TARGET, ADVANTAGES, MASK, kl_coef=0.1, estimator=k1)
    assert loss.item() == pytest.approx((2 - 0.03) / 3)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.9, -0.9, 0.0], [2.1, 0.0, 0.0]]) / 3)


def test_the_default_kind_of_estimator_pulls_towards_the_target():
    logprobs = LOGPROBS.clone().requires_grad_()
    ema_kl_loss(logprobs, TARGET, torch.zeros_like(ADVANTAGES), MASK, kl_coef=0.3, estimator=k2).backward()
    torch.testing.assert_close(logprobs.grad, 0.3 * (LOGPROBS - TARGET) * MASK / 3)


def test_it_is_the_mean_of_the_per_token_form():
    kl = k2(LOGPROBS - TARGET)
    per_token = policy_gradient_target_kl(LOGPROBS, ADVANTAGES, kl, kl_coef=0.04)
    loss = ema_kl_loss(LOGPROBS, TARGET, ADVANTAGES, MASK, kl_coef=0.04, estimator=k2)
    torch.testing.assert_close(loss, per_token[MASK].mean())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_empty_mask_gives_a_finite_zero_that_can_be_back_propagated(name):
    """S14."""
    logprobs = torch.full((2, 3), math.nan, requires_grad=True)
    nothing = torch.zeros_like(MASK)
    loss = ema_kl_loss(logprobs, TARGET, ADVANTAGES, nothing, kl_coef=0.04, estimator=ESTIMATORS[name])
    loss.backward()
    assert loss.item() == 0 and logprobs.grad.eq(0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e5])
def test_the_loss_is_finite_on_arbitrary_inputs(name, scale):
    """S28."""
    generator = torch.Generator().manual_seed(0)
    logprobs, target, advantages = scale * torch.randn(3, 8, 5, generator=generator)
    mask = torch.rand(8, 5, generator=generator) < 0.7
    padding = torch.where(mask, 0.0, math.nan)
    logprobs.requires_grad_()
    loss = ema_kl_loss(logprobs, target + padding, advantages + padding, mask, kl_coef=0.04, estimator=ESTIMATORS[name])
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all() and logprobs.grad[~mask].eq(0).all()


def test_the_target_receives_no_gradient():
    """S6."""
    target = TARGET.clone().requires_grad_()
    ema_kl_loss(LOGPROBS.clone().requires_grad_(), target, ADVANTAGES, MASK, kl_coef=1.0, estimator=k2).backward()
    assert target.grad is None
