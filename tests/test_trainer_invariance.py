"""The same gradient for every split, padding and row order (T05)."""

from __future__ import annotations

import pytest
import torch

from quintain import (
    DGTrainer,
    GRPOTrainer,
    LossOutput,
    OnlineRLTrainer,
    PPOTrainer,
    ReinforceTrainer,
    RLOOTrainer,
    TPOTrainer,
)
from quintain.monitor.statistics import StepStatistics
from quintain.types import PolicyOutputs, Rollouts

ALL = [PPOTrainer, GRPOTrainer, RLOOTrainer, ReinforceTrainer, DGTrainer, TPOTrainer]
GRPO_FORMS = ["dapo", "grpo", "dr_grpo", "bnpo", "cispo"]


class Gradients:
    """Stands in for the optimizer step: keeps the gradients it is given and moves nothing."""

    def __init__(self, trainer):
        self.trainer, self.seen = trainer, None
        self.learning_rates, self.policy_stands_still = trainer.optimizer.learning_rates, False

    def step(self, leave_out):
        parameters = self.trainer.policies.parameters
        self.seen = {name: value.grad.clone() for name, value in parameters.items() if value.grad is not None}
        for parameter in parameters.values():
            parameter.grad = None
        return {"grad_norm": 1.0}


def gradients(trainer, rollouts, budget):
    trainer.policies.micro_batch_tokens = budget
    trainer.optimizer = Gradients(trainer)
    trainer.fit(rollouts)
    return trainer.optimizer.seen


def ragged_rollouts(trainer):
    """Two prompts of unequal length, eight completions of 1 to 3 valid tokens, untied rewards, one row unscored."""
    rollouts = trainer.generate_rollouts()
    lengths = torch.tensor([1, 2, 3, 1, 3, 2, 1, 3])
    mask = torch.arange(3) < lengths[:, None]
    scored = torch.ones(8, dtype=torch.bool)
    scored[2] = False
    return rollouts.replace(
        completion_mask=mask,
        sampling_logprobs=torch.full(mask.shape, torch.nan),
        rewards=torch.tensor([0.0, 1.0, 0.0, 3.0, -1.0, 0.5, 0.25, 2.0]),
        scored=scored,
    )


def assert_same(first, second):
    assert first.keys() == second.keys()
    assert any(value.abs().max() > 1e-6 for value in first.values())
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=1e-6, rtol=1e-4)


def forms():
    yield from ((trainer_class, {"beta": 0.1, "entropy_coef": 0.01}) for trainer_class in ALL)
    yield from ((GRPOTrainer, {"beta": 0.1, "loss_type": name}) for name in GRPO_FORMS)
    yield GRPOTrainer, {"importance_sampling_level": "sequence"}
    yield TPOTrainer, {"loss_type": "policy_gradient"}
    yield TPOTrainer, {"group_logits": "logprob"}
    yield TPOTrainer, {"group_logits": "tempered"}
    yield TPOTrainer, {"group_logits": "averaged"}


@pytest.mark.parametrize(("trainer_class", "settings"), forms())
def test_micro_batches_row_order_and_padding_change_no_gradient(trainer_class, settings, make_trainer):
    settings = {
        **settings,
        "num_epochs": 1,
        "max_completion_length": 3,
        "min_completion_length": 3,
        "num_generations": 4,
    }
    trainer = make_trainer(trainer_class, **settings)
    rollouts = ragged_rollouts(trainer)
    whole = gradients(trainer, rollouts, 10_000)
    assert_same(whole, gradients(trainer, rollouts, 1))
    assert_same(whole, gradients(trainer, rollouts, 20))
    order = torch.tensor([7, 0, 5, 2, 1, 6, 3, 4])
    assert_same(whole, gradients(trainer, rollouts.select(order), 20))
    garbage = torch.where(rollouts.completion_mask, rollouts.completion_ids, 4)
    assert_same(whole, gradients(trainer, rollouts.replace(completion_ids=garbage), 20))


class ConstantLosses(OnlineRLTrainer):
    """Per-token losses 1, 2, 3, 4 on rows with 1, 2, 3 and 10 valid tokens, scaled by one parameter."""

    config_class = GRPOTrainer.config_class
    aggregate = GRPOTrainer.aggregate

    def estimate(self, rollouts):
        return rollouts

    def loss(self, outputs, rollouts):
        per_token = outputs.logprobs * 0 + rollouts.signals["constant"][:, None] * self.scale
        return LossOutput({"policy": self.aggregate(per_token, rollouts)})


class StubPolicies:
    """Policies of one scalar parameter, so that the loss itself is all there is."""

    def online(self, rollouts):
        zeros = torch.zeros(rollouts.completion_ids.shape)
        return PolicyOutputs(logprobs=zeros, entropy=zeros)

    def micro_batches(self, rollouts, keep):
        return (rollouts.select(rows) for rows in rollouts.partition(self.micro_batch_tokens, keep))

    def after_step(self):
        pass


@pytest.mark.parametrize(("loss_type", "expected"), [("dapo", 3.375), ("grpo", 2.5), ("dr_grpo", 1.35)])
@pytest.mark.parametrize("rows_per_micro", [1, 2, 4])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_loss_of_a_step_is_the_stated_mean_for_every_split_and_order(
    loss_type, expected, rows_per_micro, reverse, make_trainer
):
    """T05's numbers: token mean 3.375, sequence mean 2.5, constant divisor 4 x 10 gives 1.35."""
    trainer = make_trainer(ConstantLosses, loss_type=loss_type, max_completion_length=10, micro_batch_tokens=11)
    trainer.policies = StubPolicies()
    trainer.scale = torch.ones((), requires_grad=True)
    seen = {}

    class Optimizer:
        def step(self, leave_out):
            seen["gradient"] = float(trainer.scale.grad)
            return {"grad_norm": 0.0}

    trainer.optimizer = Optimizer()
    lengths = torch.tensor([1, 2, 3, 10])
    rollouts = Rollouts(
        prompt_ids=torch.zeros(4, 1, dtype=torch.long),
        prompt_mask=torch.ones(4, 1, dtype=torch.bool),
        completion_ids=torch.zeros(4, 10, dtype=torch.long),
        completion_mask=torch.arange(10) < lengths[:, None],
        stopped=torch.ones(4, dtype=torch.bool),
        sampling_logprobs=torch.zeros(4, 10),
        group_ids=torch.zeros(4, dtype=torch.long),
        prompts=[""] * 4,
        completions=[""] * 4,
        scored=torch.ones(4, dtype=torch.bool),
        signals={"constant": torch.tensor([1.0, 2.0, 3.0, 4.0])},
    )
    if reverse:
        rollouts = rollouts.select([3, 2, 1, 0])
    trainer.policies.micro_batch_tokens = {1: 1, 2: 22, 4: 44}[rows_per_micro]
    statistics = StepStatistics()
    trainer.train_minibatch(rollouts, statistics)
    assert statistics.result()["loss/policy"] == pytest.approx(expected, abs=1e-6)
    assert seen["gradient"] == pytest.approx(expected, abs=1e-6)
