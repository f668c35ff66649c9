"""Plain policy gradient and the delight gate."""

from __future__ import annotations

import math

import pytest
import torch

from quintain.errors import ConfigError
from quintain.objectives.score_function import delight_gate, delight_loss, score_function_loss


def test_the_gradient_of_the_score_function_loss_is_minus_the_advantage():
    logprobs = torch.tensor([[-1.0, -0.2]], requires_grad=True)
    loss = score_function_loss(logprobs, torch.tensor([[2.0, -3.0]]))
    torch.testing.assert_close(loss.detach(), torch.tensor([[2.0, -0.6]]))
    loss.sum().backward()
    assert logprobs.grad.tolist() == [[-2.0, 3.0]]


def test_gates_by_hand():
    """sigmoid(A * surprisal / eta): surprising successes pass, surprising failures do not, sure tokens are halved."""
    logprobs = torch.tensor([-4.0, -4.0, 0.0, -4.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, 0.0])
    gate = delight_gate(logprobs, advantages, delight_temperature=2.0)
    torch.testing.assert_close(gate, torch.tensor([0.880797, 0.119203, 0.5, 0.5]))


def test_the_gate_takes_no_part_in_the_gradient():
    logprobs = torch.tensor([-4.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0])
    gate = delight_gate(logprobs, advantages, delight_temperature=1.0)
    assert not gate.requires_grad
    delight_loss(logprobs, advantages, delight_temperature=1.0).sum().backward()
    torch.testing.assert_close(logprobs.grad, -gate * advantages)


def test_a_high_delight_temperature_is_half_the_plain_policy_gradient():
    logprobs, advantages = torch.tensor([-4.0, -0.5]), torch.tensor([1.0, -2.0])
    loss = delight_loss(logprobs, advantages, delight_temperature=1e9)
    torch.testing.assert_close(loss, score_function_loss(logprobs, advantages) / 2)


def test_extreme_inputs_give_finite_gates():
    gate = delight_gate(torch.tensor([-1e4, -1e4]), torch.tensor([1e4, -1e4]), delight_temperature=1e-3)
    assert gate.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("eta", [0.0, -1.0, math.nan])
def test_a_delight_temperature_that_is_not_above_0_is_refused(eta):
    with pytest.raises(ConfigError, match="must be above 0: got"):
        delight_gate(torch.zeros(1), torch.zeros(1), delight_temperature=eta)
