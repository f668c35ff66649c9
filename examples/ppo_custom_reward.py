"""Your own reward in PPO: two weighted functions, and KL of each token subtracted by overriding `compute_rewards`.

    python examples/ppo_custom_reward.py

A tiny transformer learns to write digits in rising order ("fluency") without the digit 9 ("safety"). Under a minute on
a CPU, no download.
"""

from itertools import pairwise

import torch

from quintain import PPOConfig, PPOTrainer, log_training_stats


def fluency(completions, **_):
    """Share of neighbouring digits that rise."""
    return [sum(a < b for a, b in pairwise(text)) / 3 for text in completions]


def safety(completions, **_):
    """1 without a 9, else 0."""
    return [float("9" not in text) for text in completions]


class MixedRewardTrainer(PPOTrainer):
    def compute_rewards(self, scores, logprobs, ref_logprobs, masks=None):
        kl = logprobs - ref_logprobs
        rewards = torch.where(masks, -self.kl_coef * kl, 0.0)
        last = masks.sum(dim=1) - 1
        rewards[torch.arange(len(rewards)), last] += scores
        return rewards


class Monitor:
    def on_log(self, args, state, control, logs, **_):
        if state.global_step % 10 == 0:
            log_training_stats(logs)


if __name__ == "__main__":
    MixedRewardTrainer(
        model="scratch:tiny",
        reward_funcs=[fluency, safety],
        args=PPOConfig(
            output_dir="runs/ppo-custom-reward",
            model_init_kwargs={"characters": "0123456789>"},
            prompts_per_step=8,
            num_generations=8,
            min_completion_length=4,
            max_completion_length=4,
            learning_rate=1e-3,
            num_epochs=2,
            kl_coef=0.01,
            reward_weights=(0.5, 0.3),
            max_steps=60,
            save_steps=None,
            logging_steps=60,
        ),
        train_dataset=[{"prompt": f"{digit}>"} for digit in "01234567"],
        callbacks=[Monitor()],
    ).train()
