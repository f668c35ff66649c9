"""The paper's tabular bandits: logits without a network, so that policies, gradients and errors are exact.

In every context one arm is right, arm `RIGHT`, with reward 1; the others earn 0. A method is a direction g over the
logits, and only the direction counts: each step adds step_size * g / |g|. `v` below is e_right - pi, the gradient of
log pi(right) over the logits, and p is pi(right).

Source: Kaddour 2026, arXiv:2604.06159, sections 3.1 and 3.2, figures 2 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from quintain.advantages.group import group_relative
from quintain.errors import ConfigError
from quintain.objectives.score_function import delight_gate
from quintain.objectives.target_matching import standardised_scores, target_distribution

RIGHT = 0
BASELINE = 0.5
"""What PG, DG and TPO take off the rewards of sampled arms."""
DELIGHT_TEMPERATURE = TARGET_TEMPERATURE = 1.0

ROUNDING = 1e-12
"""Rounding makes up to about 1e-15 of a misalignment of 0. Below this number, nothing is told apart."""


@dataclass(frozen=True)
class BanditCurves:
    """What each method reached, by its name, step by step."""

    errors: dict[str, Float[Tensor, "seeds steps"]]
    """1 - p, averaged over the contexts."""
    misalignment: dict[str, Float[Tensor, "seeds steps"]]
    """1 - cos(g, oracle), in [0, 2]; 1 where g is 0. Numbers below `ROUNDING` are as good as 0."""


def single_context(
    *,
    seeds: int = 100,
    arms: int = 100,
    samples: int = 100,
    steps: int = 150,
    step_size: float = 0.1,
    seed: int = 0,
) -> BanditCurves:
    """One context, arms sampled: how good is a direction that is estimated? Methods: tpo, dg, grpo, pg.

    Logits start at 0. The oracle is the exact policy gradient, p * v. Error and misalignment of a step are taken
    before its update. All methods draw from the same stream of random numbers.

    Args:
        seeds: independent runs, at least 1.
        arms: at least 2.
        samples: arms drawn a step, at least 1.
        steps: at least 1.
        step_size: length of a step over a run's logits, above 0.
        seed: of the random numbers.
    Raises:
        ConfigError: an argument is outside its range.
    Source: arXiv:2604.06159, section 3.1.
    """
    _require_at_least(1, seeds=seeds, samples=samples, steps=steps)
    _require_at_least(2, arms=arms)
    _require_length(step_size)
    errors, misalignment = {}, {}
    for method, direction in SAMPLED_DIRECTIONS.items():
        generator = torch.Generator().manual_seed(seed)
        logits = torch.zeros(seeds, arms, dtype=torch.float64)
        errors[method], misalignment[method] = torch.zeros(2, seeds, steps, dtype=torch.float64)
        for step in range(steps):
            logprobs = logits.log_softmax(dim=-1)
            actions = torch.multinomial(logprobs.exp(), samples, replacement=True, generator=generator)
            gradient = direction(logprobs, actions)
            errors[method][:, step] = 1 - logprobs[:, RIGHT].exp()
            misalignment[method][:, step] = _misalignment(gradient, exact_pg(logprobs))
            logits = logits + step_size * _unit(gradient)
    return BanditCurves(errors, misalignment)


def many_contexts(
    *,
    seeds: int = 100,
    contexts: int = 100,
    arms: int = 10,
    steps: int = 1000,
    step_size: float = 0.1,
    seed: int = 0,
) -> BanditCurves:
    """Many contexts, nothing sampled: how is one step shared out among them? Methods: tpo, dg, grpo, pg, ce.

    Logits start as standard normal draws. One normalised step goes over the logits of all contexts together. PG, DG and
    GRPO take the mean over all arms, weighted by the policy, of what one sampled arm would contribute; TPO scores every
    arm once. The oracle is the direction of cross-entropy, v. The error of a step is taken after its update.

    Args:
        seeds: independent runs, at least 1.
        contexts: at least 1.
        arms: of each context, at least 2.
        steps: at least 1.
        step_size: length of a step over all logits of a run, above 0.
        seed: of the first logits.
    Raises:
        ConfigError: an argument is outside its range.
    Source: arXiv:2604.06159, section 3.2.
    """
    _require_at_least(1, seeds=seeds, contexts=contexts, steps=steps)
    _require_at_least(2, arms=arms)
    _require_length(step_size)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(seeds, contexts, arms, generator=generator, dtype=torch.float64)
    errors, misalignment = {}, {}
    for method, direction in EXACT_DIRECTIONS.items():
        errors[method], misalignment[method] = torch.zeros(2, seeds, steps, dtype=torch.float64)
        logits = start
        logprobs = start.log_softmax(dim=-1)
        for step in range(steps):
            gradient = direction(logprobs).flatten(start_dim=1)
            misalignment[method][:, step] = _misalignment(gradient, exact_ce(logprobs).flatten(start_dim=1))
            logits = logits + step_size * _unit(gradient).view_as(logits)
            logprobs = logits.log_softmax(dim=-1)
            errors[method][:, step] = 1 - logprobs[..., RIGHT].exp().mean(dim=-1)
    return BanditCurves(errors, misalignment)


# ---- directions from sampled arms -----------------------------------------------------------------------------------


def sampled_pg(logprobs: Float[Tensor, "seeds arms"], actions: Int[Tensor, "seeds samples"]) -> Tensor:
    """REINFORCE with a constant baseline.

    g = mean over samples of (reward - 1/2) * (e_a - pi)
    """
    return _score_function(logprobs, actions, _rewards(actions) - BASELINE)


def sampled_dg(logprobs: Float[Tensor, "seeds arms"], actions: Int[Tensor, "seeds samples"]) -> Tensor:
    """The same through the delight gate.

    g = mean over samples of gate(a) * (reward - 1/2) * (e_a - pi)
    """
    advantages = _rewards(actions) - BASELINE
    gate = delight_gate(logprobs.gather(-1, actions), advantages, delight_temperature=DELIGHT_TEMPERATURE)
    return _score_function(logprobs, actions, gate * advantages)


def sampled_grpo(logprobs: Float[Tensor, "seeds arms"], actions: Int[Tensor, "seeds samples"]) -> Tensor:
    """Rewards standardised over the samples. It is the first update after sampling, where nothing is clipped.

    g = mean over samples of (reward - mean) / std * (e_a - pi);    0 where all samples earned the same
    """
    rewards = _rewards(actions)
    advantages = group_relative(rewards.flatten(), *_rows(rewards), correction=0).view_as(rewards)
    return _score_function(logprobs, actions, advantages)


def sampled_tpo(logprobs: Float[Tensor, "seeds arms"], actions: Int[Tensor, "seeds samples"]) -> Tensor:
    """Target matching with all arms as candidates.

    score_k = mean over samples of (reward - 1/2) * [a = k];    g = softmax(log pi + standardised(score)) - pi
    """
    scores = _mean_by_arm(_rewards(actions) - BASELINE, actions, arms=logprobs.shape[-1])
    standardised = standardised_scores(scores.flatten(), *_rows(scores)).view_as(scores)
    return _towards_target(logprobs, standardised)


# ---- directions from all arms ---------------------------------------------------------------------------------------


def exact_ce(logprobs: Float[Tensor, "seeds *contexts arms"]) -> Tensor:
    """Cross-entropy to the right arm, for one who knows it.

    g = d/dlogits log pi(right) = e_right - pi = v
    """
    return _right_arm(logprobs) - logprobs.exp()


def exact_pg(logprobs: Float[Tensor, "seeds *contexts arms"]) -> Tensor:
    """The policy gradient. Only the right arm is rewarded, and it is drawn with probability p.

    g = sum over arms of pi(a) * reward(a) * (e_a - pi) = p * v
    """
    return _right(logprobs).exp() * exact_ce(logprobs)


def exact_dg(logprobs: Float[Tensor, "seeds *contexts arms"]) -> Tensor:
    """The policy gradient through the delight gate. Arms without reward have advantage 0, whatever their gate.

    g = sum over arms of pi(a) * gate(a) * reward(a) * (e_a - pi) = p * sigmoid(-log p) * v
    """
    right = _right(logprobs)
    gate = delight_gate(right, torch.ones_like(right), delight_temperature=DELIGHT_TEMPERATURE)
    return right.exp() * gate * exact_ce(logprobs)


def exact_grpo(logprobs: Float[Tensor, "seeds *contexts arms"]) -> Tensor:
    """Rewards standardised over infinitely many samples.

    A reward is 1 with probability p, so its mean is p and its variance p * (1 - p). Because e_a - pi has mean 0, taking
    off the mean reward changes nothing, and what is left is the policy gradient over the standard deviation:

    g = p * v / sqrt(p * (1 - p)) = sqrt(p / (1 - p)) * v
    """
    wrong = logprobs.clone()
    wrong[..., RIGHT] = -torch.inf
    log_odds = _right(logprobs) - wrong.logsumexp(dim=-1, keepdim=True)
    return (log_odds / 2).exp() * exact_ce(logprobs)


def exact_tpo(logprobs: Float[Tensor, "seeds *contexts arms"]) -> Tensor:
    """Target matching with all arms as candidates, each scored once.

    g = softmax(log pi + standardised(reward)) - pi
    """
    rewards = _right_arm(logprobs)
    standardised = standardised_scores(rewards, *_rows(rewards))  # rewards are the same in every context
    return _towards_target(logprobs, standardised.expand_as(logprobs))


SAMPLED_DIRECTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tpo": sampled_tpo,
    "dg": sampled_dg,
    "grpo": sampled_grpo,
    "pg": sampled_pg,
}
EXACT_DIRECTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "tpo": exact_tpo,
    "dg": exact_dg,
    "grpo": exact_grpo,
    "pg": exact_pg,
    "ce": exact_ce,
}


def _towards_target(logprobs: Tensor, standardised: Tensor) -> Tensor:
    """q - pi, where each row of the last axis is one group."""
    target = target_distribution(
        standardised.flatten(), logprobs.flatten(), *_rows(logprobs), target_temperature=TARGET_TEMPERATURE
    )
    return target.view_as(logprobs) - logprobs.exp()


def _score_function(logprobs: Tensor, actions: Tensor, weights: Tensor) -> Tensor:
    """Mean over the samples of weight * (e_a - pi), in which every sample has the same pi."""
    return _mean_by_arm(weights, actions, arms=logprobs.shape[-1]) - weights.mean(dim=-1, keepdim=True) * logprobs.exp()


def _mean_by_arm(weights: Tensor, actions: Tensor, *, arms: int) -> Tensor:
    """Mean over the samples of weight * e_a."""
    return weights.new_zeros(len(weights), arms).scatter_add(-1, actions, weights) / weights.shape[-1]


def _rewards(actions: Tensor) -> Tensor:
    return (actions == RIGHT).double()


def _right_arm(logprobs: Tensor) -> Tensor:
    """e_right, which is also the reward of each arm: [arms]."""
    return one_hot(torch.tensor(RIGHT), logprobs.shape[-1]).to(logprobs.dtype)


def _right(logprobs: Tensor) -> Tensor:
    """log p, with an axis of length 1 for the arms."""
    return logprobs[..., RIGHT, None]


def _rows(values: Tensor) -> tuple[Int[Tensor, " batch"], Bool[Tensor, " batch"]]:
    """Group ids and mask for `values` laid flat: a group for each row of the last axis, everything scored."""
    groups = values.numel() // values.shape[-1]
    return torch.arange(groups).repeat_interleave(values.shape[-1]), torch.ones(values.numel(), dtype=torch.bool)


# ---- steps and their measure ----------------------------------------------------------------------------------------


def _unit(vectors: Float[Tensor, "seeds logits"]) -> Float[Tensor, "seeds logits"]:
    """Each row at length 1; a row of zeros stays as it is."""
    length = vectors.norm(dim=-1, keepdim=True)
    return vectors / torch.where(length > 0, length, 1.0)


def _misalignment(gradient: Float[Tensor, "seeds logits"], oracle: Float[Tensor, "seeds logits"]) -> Tensor:
    """1 - cos of the angle between each two rows. Rounding can take a cosine above 1, never this below 0."""
    return (1 - (_unit(gradient) * _unit(oracle)).sum(dim=-1)).clamp(min=0)


def _require_at_least(least: int, **counts: int) -> None:
    for name, value in counts.items():
        if value < least:
            raise ConfigError(
                f"{name} must be at least {least}: got {value}. Raise {name}, or leave it at its default."
            )


def _require_length(step_size: float) -> None:
    if not 0 < step_size < math.inf:
        raise ConfigError(f"step_size must be a finite number above 0: got {step_size}. The paper: 0.1.")
