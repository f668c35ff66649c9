"""KL estimators: what each estimates, and whose gradient it has, by summing over a whole small vocabulary (S43, W1)."""

from __future__ import annotations

import math

import pytest
import torch

from quintain.kl.estimators import ESTIMATORS, exact_kl, k1, k2, k3

LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.0, -0.4], dtype=torch.float64)
REFERENCE = torch.tensor([0.0, -0.6, 0.1, 0.9, -0.5], dtype=torch.float64)


def kl(logits, other):
    """KL(first || second) by its definition."""
    return (logits.softmax(-1) * (logits.log_softmax(-1) - other.log_softmax(-1))).sum()


def expected_gradient(estimator):
    """Mean gradient of the estimate on the logits, over tokens drawn from the policy."""
    logits = LOGITS.clone().requires_grad_()
    estimates = estimator(logits.log_softmax(-1) - REFERENCE.log_softmax(-1))
    (estimates * LOGITS.softmax(-1)).sum().backward()
    return logits.grad


def gradient_of(divergence):
    logits = LOGITS.clone().requires_grad_()
    divergence(logits).backward()
    return logits.grad


def test_estimates_of_one_token_by_hand():
    log_ratio = torch.tensor([0.5, -0.5, 0.0])
    torch.testing.assert_close(k1(log_ratio), log_ratio)
    torch.testing.assert_close(k2(log_ratio), torch.tensor([0.125, 0.125, 0.0]))
    torch.testing.assert_close(k3(log_ratio), torch.tensor([0.106531, 0.148721, 0.0]))


@pytest.mark.parametrize("name, unbiased", [("k1", True), ("k2", False), ("k3", True)])
def test_which_values_are_unbiased(name, unbiased):
    log_ratio = LOGITS.log_softmax(-1) - REFERENCE.log_softmax(-1)
    mean = (LOGITS.softmax(-1) * ESTIMATORS[name](log_ratio)).sum()
    assert torch.isclose(mean, kl(LOGITS, REFERENCE), rtol=1e-9).item() is unbiased


def test_the_gradient_of_k1_is_zero_on_average():
    """W1."""
    torch.testing.assert_close(expected_gradient(k1), torch.zeros_like(LOGITS))


def test_the_gradient_of_k2_is_that_of_kl_to_the_reference():
    torch.testing.assert_close(expected_gradient(k2), gradient_of(lambda logits: kl(logits, REFERENCE)))


def test_the_gradient_of_k3_is_that_of_kl_from_the_reference():
    torch.testing.assert_close(expected_gradient(k3), gradient_of(lambda logits: kl(REFERENCE, logits)))


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_estimates_other_than_k1_are_never_negative(name):
    assert ESTIMATORS[name](torch.linspace(-90, 90, 1001)).ge(0).all()
    assert ESTIMATORS[name](torch.logspace(-8, 0, 1001)).ge(0).all()


def test_k3_keeps_its_precision_near_zero():
    """exp(-x) - 1 in float32 has an error of 6e-8, more than the whole estimate at x = 1e-4."""
    log_ratio = torch.tensor([1e-4, -1e-4])
    torch.testing.assert_close(k3(log_ratio), log_ratio.square() / 2, rtol=1e-2, atol=0)


def test_k3_is_finite_and_keeps_the_right_sign_however_far_the_policies_are_apart():
    """S28."""
    log_ratio = torch.tensor([-1e4, -100.0, -19.0, 100.0, 1e4], requires_grad=True)
    estimates = k3(log_ratio)
    estimates.sum().backward()
    assert estimates.isfinite().all() and log_ratio.grad.isfinite().all()
    assert log_ratio.grad.sign().tolist() == [0, 0, -1, 1, 1]


def test_exact_kl_is_the_definition_for_every_token():
    generator = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 3, 4, 11, generator=generator)
    p, r = logits.softmax(-1), reference.softmax(-1)
    torch.testing.assert_close(exact_kl(logits, reference), (p * (p / r).log()).sum(-1))
    assert exact_kl(logits, logits).eq(0).all() and exact_kl(logits, reference + 5.0).ge(0).all()


def test_the_gradient_of_exact_kl_is_that_of_kl_to_the_reference():
    expected = gradient_of(lambda logits: kl(logits, REFERENCE))
    torch.testing.assert_close(gradient_of(lambda logits: exact_kl(logits, REFERENCE)), expected)


def test_exact_kl_of_two_coins_by_hand():
    logits = torch.tensor([[math.log(3.0), 0.0]])
    assert exact_kl(logits, torch.zeros(1, 2)).item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
