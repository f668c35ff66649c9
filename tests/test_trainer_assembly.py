"""From a trainer's arguments to its parts: critics, precision, and what is refused before anything is trained."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification, MistralConfig, MistralForSequenceClassification

from quintain import ConfigError, GRPOConfig, GRPOTrainer, PPOTrainer
from quintain.policies.loading import load_model

PROMPTS = [{"prompt": "abcdefghijk"}, {"prompt": "abc"}]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "num_labels": 1,
    "pad_token_id": 0,
}


def count_a(completions, **_):
    return [float(text.count("a")) for text in completions]


def trainer_on_tiny_llama(trainer_class, tmp_path, *, model=None, trainer=None, **settings):
    settings = {
        "output_dir": str(tmp_path),
        "prompts_per_step": 2,
        "num_generations": 4,
        "max_completion_length": 10,
        "max_steps": 1,
        "save_steps": None,
        **settings,
    }
    return trainer_class(
        model=tiny_model("llama") if model is None else model,
        reward_funcs=count_a,
        args=trainer_class.config_class(**settings),
        train_dataset=PROMPTS,
        processing_class=tiny_tokenizer(),
        **(trainer or {}),
    )


def test_values_of_a_windowed_critic_are_those_of_each_sequence_alone(tmp_path):
    """The policy can share prompts inside a pack; this critic, with its window of 4 tokens, cannot."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        critic = MistralForSequenceClassification(MistralConfig(**SIZES, sliding_window=4))
    trainer = trainer_on_tiny_llama(PPOTrainer, tmp_path, trainer={"value_model": critic})
    rollouts = trainer.policies.annotate(trainer.generate_rollouts(), old=True)
    for row in range(len(rollouts)):
        alone = trainer.policies.annotate(rollouts.select([row]), old=True).values[0]
        assert torch.allclose(alone, rollouts.values[row, : len(alone)], atol=1e-4)


def test_a_critic_with_too_few_token_embeddings_is_refused(tmp_path):
    critic = LlamaForSequenceClassification(LlamaConfig(**{**SIZES, "vocab_size": 8}))
    with pytest.raises(ConfigError, match="8 token embeddings, and the policy has 64"):
        trainer_on_tiny_llama(PPOTrainer, tmp_path, trainer={"value_model": critic})


def test_a_separate_critic_starts_from_the_weights_of_the_model_that_was_passed_in(make_trainer):
    """Not from those of the place it was once loaded from, which may have other sizes even."""
    model = load_model("scratch:tiny", model_init_kwargs={"characters": "01=", "seed": 5})
    with torch.no_grad():
        model.model.norm.weight.mul_(3.0)
    trainer = make_trainer(PPOTrainer, model=model, value_model="separate")
    critic = trainer.policies.module.value_model.classifier
    for name, weight in model.model.state_dict().items():
        assert torch.equal(critic.model.state_dict()[name], weight), name
    assert not critic.score.weight.any()
    trainer.train()
    assert critic.score.weight.any()


def test_half_precision_weights_are_not_taken_for_a_broken_sampler(tmp_path):
    """T06: sampler and trainer round differently in bfloat16, whatever the config's `dtype` says."""
    model = tiny_model("llama").to(torch.bfloat16)
    trainer_on_tiny_llama(GRPOTrainer, tmp_path, model=model, num_epochs=2, max_completion_length=24).train()


def test_a_reference_model_that_nothing_reads_is_refused(make_trainer):
    """T08: KL weight 0 leaves the reference without a reader."""
    other = load_model("scratch:tiny", model_init_kwargs={"characters": "01=", "seed": 1})
    with pytest.raises(ConfigError, match=r"ref_model was given and nothing reads it: beta=0\.0"):
        make_trainer(GRPOTrainer, trainer={"ref_model": other})


def test_evaluation_data_without_a_reward_column_is_refused_at_construction(tiny_settings, reversal):
    """T07 j, for the second dataset too: not after an hour of training, at the first evaluation."""

    def needs_answer(completions, answer, **_):
        return [0.0] * len(completions)

    with pytest.raises(ConfigError, match=r"needs_answer.*'answer'"):
        GRPOTrainer(
            model="no/such-model",
            reward_funcs=needs_answer,
            args=GRPOConfig(**{**tiny_settings, "eval_steps": 1}),
            train_dataset=reversal,
            eval_dataset=[{"prompt": "01="}],
        )


def test_an_optimizer_without_the_critic_is_refused(make_trainer):
    model = load_model("scratch:tiny", model_init_kwargs={"characters": "01="})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(ConfigError, match="none of the value model's 1 parameters"):
        make_trainer(PPOTrainer, model=model, trainer={"optimizers": (optimizer, None)})
    make_trainer(GRPOTrainer, model=model, trainer={"optimizers": (optimizer, None)})


def test_virtual_prompt_tokens_are_refused(make_trainer):
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="virtual prompt tokens"):
        make_trainer(GRPOTrainer, trainer={"peft_config": config})
