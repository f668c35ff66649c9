"""Faults in the value model of PPO: it loses track of the returns, or misleads."""

from __future__ import annotations

from statistics import fmean, median

from quintain.monitor.history import History
from quintain.monitor.rules.base import Rule, Sighting


def value_loss_unsettled(history: History, *, factor: float, steps: int, minimum: int) -> Sighting | None:
    """The value loss is far above its lowest level, and not because rewards are spread wider now."""
    # A policy that stands still is easy to follow: its loss is no yardstick for the time when the policy moves.
    phase = history.policy_steps or history.count
    losses = [loss for (loss,) in history.table("loss/value", rows=phase)]
    if history.steps_since_value_warmup < minimum or len(losses) < minimum:
        return None
    # When rewards spread wider, the same critic has a larger loss: judge it per unit of reward variance as well.
    relative = [loss / max(spread**2, 1e-8) for loss, spread in _losses_and_spreads(history, phase)]
    growth = [
        median(series[-steps:]) / max(min(median(series[i : i + steps]) for i in range(len(series) - steps)), 1e-12)
        for series in (losses, relative)
        if len(series) >= minimum
    ]
    if min(growth) <= factor:
        return None
    now = median(losses[-steps:])
    return Sighting(
        f"the value loss is {now:.3g}, {growth[0]:.1f} times its lowest level",
        {"loss/value": now, "times_lowest": growth[0], "limit": factor},
        size=min(growth),
    )


def _losses_and_spreads(history: History, rows: int) -> list[tuple[float, float]]:
    """The value loss beside the standard deviation of the scores that it is about, as `scale_rewards` left them."""
    scaled = history.table("loss/value", "reward_std", "score_std", rows=rows)
    if scaled:
        return [(loss, spread / max(unit, 1e-8)) for loss, spread, unit in scaled]
    return [(loss, spread) for loss, spread in history.table("loss/value", "reward_std", rows=rows)]


def explained_variance_negative(
    history: History, *, limit: float, steps: int, minimum: int, share: float
) -> Sighting | None:
    """The critic predicts returns worse than a constant would."""
    explained = history.typical("explained_variance", steps)
    if history.steps_since_value_warmup < minimum or explained is None or explained >= limit:
        return None
    return Sighting(
        f"explained variance of the value model is {explained:.2f}",
        {"explained_variance": explained, "limit": limit},
        size=1 - explained,
        harmless=history.has_learnt and _spread_has_shrunk(history, share=share, steps=steps),
    )


def value_gradient_drowns_policy(history: History, *, share: float, excess: float, steps: int) -> Sighting | None:
    """Clipping shrinks the policy's update because the value model's gradient is nearly all of the whole."""
    limit = history.setting("max_grad_norm", 0.0)
    if not limit or history.setting("value_max_grad_norm", 0.0):
        return None
    norms = history.table("value_grad_norm", "grad_norm", rows=min(steps, history.policy_steps))
    if len(norms) < steps:
        return None
    part, whole = median(value / max(all_, 1e-12) for value, all_ in norms), median(all_ for _, all_ in norms)
    if part < share or whole < excess * limit:
        return None
    return Sighting(
        f"the value model's gradient is {part:.1%} of a gradient of {whole:.3g}, which is clipped to {limit:g}",
        {"value_grad_norm/grad_norm": part, "grad_norm": whole, "max_grad_norm": limit},
        size=whole / limit,
    )


def _spread_has_shrunk(history: History, *, share: float, steps: int) -> bool:
    """Whether rewards vary much less than at the start, so that any error is large beside the variance of returns."""
    first, now = history.first("reward_std"), history.typical("reward_std", steps)
    return bool(first) and now is not None and now < share * fmean(first)


CRITIC_RULES = (
    Rule(
        name="value_loss_unsettled",
        stage="optimisation",
        severity="warn",
        action="warn",
        sees=(
            "The {steps}-step median of `loss/value` is more than {factor} times its lowest in the last 200 steps, "
            "also when divided by the variance of the scores, from {minimum} steps after the value model's warm-up on. "
            "Losses from `value_warmup_steps` are not compared with later ones: a policy that moves is harder to "
            "follow."
        ),
        limits={"factor": 4, "steps": 10, "minimum": 40},
        meaning="The value model should improve, then level off; it is losing track of the returns instead.",
        advice=(
            "If it swings or diverges: lower `value_learning_rate`, set `value_max_grad_norm`, and bring scores to one "
            "scale with `scale_rewards: running`. If it falls behind: raise `value_learning_rate`, let it learn first "
            "(`value_warmup_steps`), or give it weights of its own with `value_model: separate`. No fixed ratio of "
            "the two learning rates is right. See the critic in tuning.md."
        ),
        check=value_loss_unsettled,
    ),
    Rule(
        name="explained_variance_negative",
        stage="optimisation",
        severity="warn",
        action="warn",
        sees=(
            "`explained_variance` has a median below {limit} over {steps} steps, from {minimum} steps after the value "
            "model's warm-up on, `value_warmup_steps` included. Only a note where the reward has risen and "
            "`reward_std` is below {share:.0%} of what it was in the first ten steps: returns that hardly vary leave "
            "nothing to explain."
        ),
        limits={"limit": -0.2, "steps": 20, "minimum": 40, "share": 0.5},
        meaning=(
            "The value model predicts returns worse than their mean would: it adds noise to the advantages. A fresh "
            "head starts at 0, so this is not lack of time."
        ),
        advice=(
            "If `loss/value` swings: lower `value_learning_rate`, set `value_max_grad_norm`, use `scale_rewards: "
            "running`. If it still falls: raise `value_learning_rate` (`vf_coef` where weights are shared) or let it "
            "learn first with `value_warmup_steps`. If policy and critic disturb each other in one backbone: "
            "`detach_value_head` protects the policy, `value_model: separate` frees both. A `lam` near 1 leans less on "
            "the critic; GRPO, RLOO and TPO need none. See the critic in tuning.md."
        ),
        check=explained_variance_negative,
    ),
    Rule(
        name="value_gradient_drowns_policy",
        stage="optimisation",
        severity="warn",
        action="warn",
        sees=(
            "Over {steps} steps in which the policy moves, `value_grad_norm` has a median of more than {share:.0%} of "
            "`grad_norm`, and that is more than {excess} times `max_grad_norm`, with `value_max_grad_norm` unset."
        ),
        limits={"share": 0.95, "excess": 5, "steps": 10},
        meaning=(
            "One limit holds for policy and critic together: the value model's errors are so large, mostly because "
            "scores are, that clipping leaves the policy next to nothing."
        ),
        advice=(
            "Bring scores to size 1 with `scale_rewards: running` (and choose `kl_coef` anew), or bound them with "
            "`reward_clip`. `value_max_grad_norm` clips the critic by itself."
        ),
        check=value_gradient_drowns_policy,
    ),
)
