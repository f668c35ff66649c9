"""A GPT-2 style trainer and a scored rollout of two prompts of unlike length, to look at the first update of."""

from __future__ import annotations

import torch
from tiny_models import tiny_model, tiny_tokenizer

from quintain.types import Prompts

PROMPTS = Prompts([[5, 6, 7], [5, 6, 7, 8, 9, 10, 11, 12, 13]], ["short", "long"])


def trainer_on_gpt2(trainer_class, folder):
    """Absolute positions, dropout 0.1 in the model's config, two epochs of reuse at temperature 0.7."""
    config = trainer_class.config_class(
        output_dir=str(folder),
        num_generations=4,
        prompts_per_step=2,
        max_completion_length=4,
        min_completion_length=4,
        temperature=0.7,
        num_epochs=2,
        learning_rate=1e-2,
        max_steps=10,
    )
    return trainer_class(tiny_model("gpt2"), None, config, processing_class=tiny_tokenizer())


def scored_rollouts(trainer):
    rollouts = trainer.complete(PROMPTS, trainer.sampling, trainer.generators["rollout"])
    rewards = torch.arange(len(rollouts), dtype=torch.float32)
    return rollouts.replace(rewards=rewards, scored=torch.ones(len(rollouts), dtype=torch.bool))
