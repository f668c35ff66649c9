"""Any trainer can switch the EMA target on; KL to a reference starts at exactly 0 (S5-S12, S27-S29, S35)."""

from __future__ import annotations

import pytest
import torch

from quintain import DGTrainer, GRPOTrainer, PPOTrainer, ReinforceTrainer, RLOOTrainer, TPOConfig, TPOTrainer

ALL = [PPOTrainer, GRPOTrainer, RLOOTrainer, ReinforceTrainer, DGTrainer, TPOTrainer]


def rows(trainer):
    trainer.train()
    return trainer.run.state.log_history


@pytest.mark.parametrize("trainer_class", ALL)
def test_every_trainer_keeps_and_measures_a_target_when_asked_to(trainer_class, make_trainer):
    """S9, S10, S35."""
    history = rows(make_trainer(trainer_class, use_target_policy=True, beta=0.04, ema_decay=0.9, max_steps=4))
    gaps = [row["target_kl_gap"] for row in history]
    assert gaps[0] == 0.0
    assert gaps[-1] > 0.0


def test_the_target_moves_after_a_step_in_which_the_policy_moved_and_lags_behind_it(make_trainer):
    """S27, S29, W3: by hand, target = 0.9 * start + 0.1 * online after one optimizer step."""
    trainer = make_trainer(GRPOTrainer, use_target_policy=True, beta=0.04, ema_decay=0.9, max_steps=1, num_epochs=1)
    start = {name: value.detach().clone() for name, value in trainer.policies.parameters.items()}
    trainer.train()
    online, target = trainer.policies.parameters, trainer.policies.slots["target"].tensors
    assert any(not torch.equal(start[name], online[name]) for name in start)
    for name in start:
        torch.testing.assert_close(target[name], 0.9 * start[name] + 0.1 * online[name].detach(), atol=1e-7, rtol=1e-5)


def test_the_target_is_updated_once_after_every_optimizer_step(make_trainer):
    """S8: 2 training steps of 2 epochs with 2 mini-batches are 8 optimizer steps."""
    trainer = make_trainer(TPOTrainer, num_epochs=2, num_mini_batches=2, max_steps=2)
    trainer.train()
    assert trainer.policies.target_update.steps == 8


def test_target_logprobs_are_computed_with_the_target_weights(make_trainer):
    """S11: with the online weights disturbed, the target still says what the start said."""
    trainer = make_trainer(GRPOTrainer, use_target_policy=True, beta=0.04)
    rollouts = trainer.generate_rollouts()
    before = trainer.policies.annotate(rollouts, old=True)
    with torch.no_grad():
        for parameter in trainer.policies.parameters.values():
            parameter.add_(0.1)
    after = trainer.policies.annotate(rollouts, old=True)
    assert torch.equal(before.target_logprobs, after.target_logprobs)
    assert not torch.allclose(before.old_logprobs, after.old_logprobs)


def test_slots_take_no_gradient_and_are_not_optimised(make_trainer):
    trainer = make_trainer(TPOTrainer)
    optimised = {
        id(p) for optimizer in trainer.optimizer.optimizers for g in optimizer.param_groups for p in g["params"]
    }
    for tensor in trainer.policies.slots["target"].tensors.values():
        assert not tensor.requires_grad
        assert id(tensor) not in optimised


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "exact"])
@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer, PPOTrainer, TPOTrainer])
def test_kl_to_the_reference_is_exactly_zero_before_the_first_update(trainer_class, estimator, make_trainer):
    settings = {"use_target_policy": False, "kl_estimator": estimator, "beta": 0.1, "num_epochs": 1, "max_steps": 1}
    row = rows(make_trainer(trainer_class, **settings))[0]
    assert row["ref_kl"] == 0.0


@pytest.mark.parametrize("trained", [False, True], ids=["fresh adapter", "trained adapter"])
def test_kl_to_the_reference_starts_at_zero_under_lora_and_slots_are_adapter_sized(trained, make_trainer):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = make_trainer(GRPOTrainer, trainer={"peft_config": lora}, beta=0.1, use_target_policy=False)
    if trained:
        with torch.no_grad():
            for name, parameter in trainer.policies.parameters.items():
                if "lora_B" in name:
                    parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
        trainer = make_trainer(
            GRPOTrainer, model=trainer.model, trainer={"processing_class": trainer.processing_class}, beta=0.1
        )
    history = rows(trainer)
    assert history[0]["ref_kl"] == 0.0
    assert history[-1]["ref_kl"] > 0.0
    held = sum(tensor.numel() for tensor in trainer.policies.slots["ref"].tensors.values())
    whole = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert 0 < held < 0.1 * whole


def test_exact_kl_in_the_loss_pulls_the_policy_back(make_trainer):
    """With no reward to gain, a policy moved off its reference returns to it."""
    gaps = {}
    for beta in (0.0, 10.0):
        trainer = make_trainer(
            GRPOTrainer,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            beta=max(beta, 1e-12),
            kl_estimator="exact",
            max_steps=15,
            learning_rate=3e-3,
            num_epochs=2,
        )
        trainer.first_update.untrained = False  # the check that would rightly stop a run whose reference was moved
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            for parameter in trainer.policies.parameters.values():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        history = rows(trainer)
        gaps[beta] = history[-1]["ref_kl"] / history[0]["ref_kl"]
    assert gaps[10.0] < 0.5 < gaps[0.0]


@pytest.mark.parametrize("end", [0.0, 1.0])
def test_an_ema_decay_at_either_end_is_refused_with_what_it_would_mean(end):
    """S22, S23."""
    with pytest.raises(ValueError, match="ema_decay") as caught:
        TPOConfig(ema_decay=end)
    message = str(caught.value)
    assert str(end) in message
    assert "(0, 1)" in message
    assert "never update" in message
    assert "online policy" in message


def test_the_target_can_supply_the_anchor_and_the_values(make_trainer):
    """S16."""
    rows(make_trainer(TPOTrainer, anchor="target"))
    trainer = make_trainer(PPOTrainer, use_target_policy=True, target_values=True, beta=0.04)
    rollouts = trainer.generate_rollouts()
    with torch.no_grad():
        trainer.policies.module.value_model.score.weight.fill_(1.0)
    assert bool((trainer.policies.annotate(rollouts, old=True).values == 0).all())
