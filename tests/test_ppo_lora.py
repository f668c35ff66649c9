"""PPO with adapters: one frozen backbone serves policy, critic, reference and target (S36, S41, S50)."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from quintain import ConfigError, PPOTrainer
from quintain.policies.loading import load_model, load_tokenizer
from quintain.policies.value_head import AdapterValueModel

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
"""Starts at zero: the adapted model is the base model until it has learnt something."""


def lora_trainer(make_trainer, *, lora=LORA, trainer_class=PPOTrainer, **settings):
    settings = {"value_model": "separate", "num_generations": 2, **settings}
    return make_trainer(trainer_class, **settings, trainer={"peft_config": LoraConfig(**lora)})


def gradients(trainer, rollouts):
    """Of one update over the whole rollout, by parameter."""
    seen = {}

    def keep(leave_out):
        seen.update({name: value.grad.clone() for name, value in trainer.policies.parameters.items()})
        trainer.optimizer.zero()
        return {"grad_norm": 0.0}

    trainer.optimizer.step = keep
    trainer.fit(rollouts)
    return seen


def give_the_critic_an_opinion(trainer):
    """A head that starts at zero sends no gradient into its adapter, and one with B = 0 none into A."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in trainer.policies.parameters.items():
            if "lora_B" in name or "score" in name:
                value.copy_(torch.randn(value.shape, generator=generator) * 0.3)


def rollouts_of(trainer):
    rollouts = trainer.generate_rollouts()
    return rollouts.replace(
        rewards=torch.arange(len(rollouts), dtype=torch.float32), scored=torch.ones(len(rollouts), dtype=torch.bool)
    )


def test_values_come_from_the_critics_adapter_and_log_probabilities_from_the_policys(make_trainer):
    trainer = lora_trainer(make_trainer)
    give_the_critic_an_opinion(trainer)
    rollouts = trainer.generate_rollouts()
    before = trainer.policies.online(rollouts)
    with torch.no_grad():
        for name, value in trainer.policies.parameters.items():
            if name.startswith("value_model."):
                value.add_(0.5)
    after = trainer.policies.online(rollouts)
    assert torch.equal(before.logprobs, after.logprobs)
    assert not torch.allclose(before.values, after.values)
    with torch.no_grad():
        for name, value in trainer.policies.parameters.items():
            if name.startswith("language_model."):
                value.add_(0.5)
    last = trainer.policies.online(rollouts)
    assert torch.equal(after.values, last.values)
    assert not torch.allclose(after.logprobs, last.logprobs)


def test_every_weight_of_the_critics_adapter_stands_where_the_policys_did(make_trainer):
    """Twelve layers and every linear map in them: whatever order names are kept in, "10" sorts before "2"."""
    trainer = lora_trainer(
        make_trainer,
        lora={**LORA, "target_modules": "all-linear"},
        model_init_kwargs={"characters": "01=", "num_hidden_layers": 12},
    )
    give_the_critic_an_opinion(trainer)
    critic = trainer.policies.module.value_model
    backbone = trainer.model.get_base_model().base_model
    before = {name: value for name, value in backbone.named_parameters() if value.requires_grad}
    assert len(before) == len(critic.adapter) == 12 * 7 * 2
    with critic.in_place():
        for name, value in backbone.named_parameters():
            if name in before:
                assert value is critic.adapter[name.replace(".", "/")], name
    assert all(value is before[name] for name, value in backbone.named_parameters() if name in before)


def test_each_loss_reaches_its_own_adapter_only(make_trainer):
    class ValueLossOnly(PPOTrainer):
        def actor_loss(self, ratio, advantages):
            return 0.0 * ratio

    trainer = lora_trainer(make_trainer, trainer_class=ValueLossOnly, num_epochs=1, kl_coef=0.0)
    give_the_critic_an_opinion(trainer)
    for name, gradient in gradients(trainer, rollouts_of(trainer)).items():
        assert bool(gradient.any()) == name.startswith("value_model."), name


@pytest.mark.parametrize("value_model", ["separate", "shared"])
def test_gradient_checkpointing_changes_no_gradient(value_model, make_trainer):
    """Layers are computed again in the backward pass, and must be so with the adapter of the first time."""
    settings = {"value_model": value_model, "num_epochs": 1, "kl_coef": 0.0}
    plain = lora_trainer(make_trainer, **settings)
    thrifty = lora_trainer(make_trainer, **settings, gradient_checkpointing=True)
    give_the_critic_an_opinion(plain)
    give_the_critic_an_opinion(thrifty)
    rollouts = rollouts_of(plain)
    expected, seen = gradients(plain, rollouts), gradients(thrifty, rollouts)
    assert expected.keys() == seen.keys()
    for name in expected:
        assert bool(expected[name].any()), name
        torch.testing.assert_close(seen[name], expected[name], atol=1e-6, rtol=1e-5)


def test_an_interrupted_forward_pass_gives_the_backbone_back_to_the_policy(make_trainer):
    trainer = lora_trainer(make_trainer)
    give_the_critic_an_opinion(trainer)
    rollouts = trainer.generate_rollouts()
    expected = trainer.policies.online(rollouts).logprobs
    with pytest.raises(KeyboardInterrupt), trainer.policies.module.value_model.in_place():
        raise KeyboardInterrupt
    assert torch.equal(trainer.policies.online(rollouts).logprobs, expected)


def test_the_critics_second_pass_halves_the_micro_batch(make_trainer):
    """`micro_batch_tokens` bounds the activations held at once, of policy and critic together."""
    sizes = {
        name: lora_trainer(make_trainer, value_model=name, micro_batch_tokens=100).policies.micro_batch_tokens
        for name in ("shared", "separate")
    }
    assert sizes == {"shared": 100, "separate": 50}


def test_reference_and_target_are_adapter_sized_and_the_reference_is_the_model_without_adapter(make_trainer):
    trainer = lora_trainer(make_trainer, use_target_policy=True, kl_reference="ref", target_values=True)
    trained = dict(trainer.policies.parameters)
    policys = {name for name in trained if name.startswith("language_model.")}
    assert all("lora" in name for name in policys)
    assert trainer.policies.slots["ref"].tensors.keys() == policys
    assert trainer.policies.slots["target"].tensors.keys() == trained.keys()  # it supplies the values, too
    give_the_critic_an_opinion(trainer)
    annotated = trainer.policies.annotate(trainer.generate_rollouts(), old=True)
    with trainer.model.disable_adapter():
        without = trainer.policies.online(annotated).logprobs
    torch.testing.assert_close(annotated.ref_logprobs, without, atol=1e-6, rtol=0)
    assert not torch.allclose(annotated.old_logprobs, without)


def test_a_run_with_two_adapters_resumes_bit_for_bit(make_trainer, tmp_path):
    settings = {"max_steps": 4, "save_steps": 1, "num_epochs": 2, "scale_rewards": "running", "value_warmup_steps": 1}

    def trainer(folder):
        return lora_trainer(make_trainer, output_dir=str(tmp_path / folder), **settings)

    straight = trainer("straight")
    straight.train()
    broken = trainer("broken")
    broken.max_steps = 2
    broken.train()
    resumed = trainer("broken")
    resumed.train(resume_from=tmp_path / "broken")
    whole, again = straight.policies.state_dict(), resumed.policies.state_dict()
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert straight.score_moments.state_dict() == resumed.score_moments.state_dict()
    assert straight.score_moments.count == 16


def test_a_policy_that_is_wrapped_already_gets_a_value_adapter_too(make_trainer):
    wrapped = get_peft_model(load_model("scratch:tiny", model_init_kwargs={"characters": "01="}), LoraConfig(**LORA))
    tokenizer = load_tokenizer("scratch:tiny", model_init_kwargs={"characters": "01="})
    trainer = make_trainer(
        PPOTrainer, model=wrapped, value_model="separate", trainer={"processing_class": tokenizer}, num_generations=2
    )
    assert isinstance(trainer.policies.module.value_model, AdapterValueModel)
    trainer.train()


def test_an_adapter_outside_the_backbone_leaves_the_critic_nothing_and_is_refused(make_trainer):
    with pytest.raises(ConfigError, match="trains nothing there"):
        lora_trainer(make_trainer, lora={**LORA, "target_modules": ["lm_head"]})
