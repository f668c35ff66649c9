"""Your own trust region in PPO: clipping plus a KL penalty, by overriding `actor_loss`.

    python examples/ppo_custom_constraint.py

`actor_loss` receives the valid tokens only, so a plain mean is right. Under a minute on a CPU, no download.
"""

from itertools import pairwise

import torch
from ppo_custom_reward import Monitor

from quintain import PPOConfig, PPOTrainer


class ClipAndKLTrainer(PPOTrainer):
    def actor_loss(self, ratio, advantages):
        clipped = torch.clamp(ratio, 1 - self.cliprange, 1 + self.cliprange)
        policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
        kl = (ratio - 1 - ratio.log()).mean()  # to the policy that sampled
        return policy_loss + self.kl_coef * kl


def rising(completions, **_):
    """Share of neighbouring digits that rise."""
    return [sum(a < b for a, b in pairwise(text)) / 3 for text in completions]


if __name__ == "__main__":
    ClipAndKLTrainer(
        model="scratch:tiny",
        reward_funcs=rising,
        args=PPOConfig(
            output_dir="runs/ppo-custom-constraint",
            model_init_kwargs={"characters": "0123456789>"},
            prompts_per_step=8,
            num_generations=8,
            min_completion_length=4,
            max_completion_length=4,
            learning_rate=1e-3,
            num_epochs=4,
            kl_coef=0.01,
            max_steps=60,
            save_steps=None,
            logging_steps=60,
        ),
        train_dataset=[{"prompt": f"{digit}>"} for digit in "01234567"],
        callbacks=[Monitor()],
    ).train()
