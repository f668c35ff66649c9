"""Score the policy on held-out prompts, without learning from them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from quintain.checkpoints.state import derive_seed

if TYPE_CHECKING:
    from quintain.trainers.base import OnlineRLTrainer


def evaluate(trainer: OnlineRLTrainer) -> dict[str, float]:
    """Mean reward over the evaluation prompts, sampled with the same seed every time so that steps can be compared.

    Returns:
        `eval_reward`, and `eval_rewards/{name}/mean` for each function.
    """
    prompts, config = trainer.eval_prompts, trainer.config
    assert prompts is not None and trainer.reward is not None
    generator = torch.Generator().manual_seed(derive_seed(config.seed, "eval"))
    sampling = replace(trainer.sampling, num_generations=config.num_generations_eval)
    totals: dict[str, list[torch.Tensor]] = {}
    for batch in prompts.one_pass(limit=config.eval_num_prompts):
        rollouts = trainer.complete(batch, sampling, generator)
        output = trainer.reward.score(rollouts.to("cpu"), trainer.run.state)
        totals.setdefault("eval_reward", []).append(output.rewards[output.scored])
        for name, values in output.components.items():
            totals.setdefault(f"eval_rewards/{name}/mean", []).append(values[~values.isnan()])
    joined = {name: torch.cat(parts) for name, parts in totals.items()}
    return {name: float(values.double().mean()) for name, values in joined.items() if len(values)}
