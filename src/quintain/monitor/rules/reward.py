"""Faults in what was scored: no signal, a broken one, or one that is being gamed."""

from __future__ import annotations

import math
from statistics import fmean, median

from quintain.monitor.history import History, step_noise
from quintain.monitor.rules.base import Rule, Sighting

GROUP_FIELDS = {"epsilon", "group_logits"}
"""Settings that only algorithms have which compare the completions of one prompt. To others a tied group still teaches
something."""


def reward_flat(history: History, *, errors: float, minimum: float, unplanned: float) -> Sighting | None:
    """The reward of the last 20 steps is no better than that of the first ten, half-way through the run."""
    planned = history.setting("max_steps", 0) - history.setting("value_warmup_steps", 0)
    judged_from = max(minimum, planned / 2 if planned > 0 else unplanned)
    rise, error = history.reward_rise()
    if history.steps_since_warmup < judged_from or len(history.recent("reward")) < minimum or rise > errors * error:
        return None
    return Sighting(
        f"after {history.count} steps the reward has moved by {rise:+.3g}, within its noise of {error:.2g}",
        {"rise": rise, "standard_error": error, "steps": history.count},
        size=1.0,
    )


def reward_crashed(history: History, *, noises: float, share: float, minimum: int) -> Sighting | None:
    """The reward has lost most of what it had gained, far beyond its step-to-step noise."""
    now, first = history.typical("reward", 5), history.first("reward")
    if now is None or history.best_reward is None or history.count < minimum:
        return None
    drop = history.best_reward - now
    noise = step_noise(history.recent("reward"))
    spread = median(history.recent("reward_std") or [0.0])
    if drop <= max(noises * noise, share * (history.best_reward - fmean(first)), share * spread):
        return None
    return Sighting(
        f"the reward fell to {now:.3g} from its best of {history.best_reward:.3g}",
        {"reward": now, "best_reward": history.best_reward, "step_noise": noise},
        size=drop,
    )


def heldout_fell(history: History, *, noises: float) -> Sighting | None:
    """Held-out reward is well below its best while training reward is above what it was then."""
    heldout = [pair[0] for pair in history.evaluations]
    trained = [pair[1] for pair in history.evaluations]
    if len(heldout) < 6:
        return None
    triples = [fmean(heldout[i : i + 3]) for i in range(len(heldout) - 2)]
    best = max(range(len(triples) - 3), key=lambda i: triples[i])
    drop, gain = triples[best] - triples[-1], fmean(trained[-3:]) - fmean(trained[best : best + 3])
    # A gain must clear the noise of two means of three readings, each of which already averages ten steps.
    needed = 2 * step_noise(history.recent("reward")) * math.sqrt(2 / 30)
    if drop <= noises * step_noise(heldout) or gain <= needed:
        return None
    return Sighting(
        f"held-out reward fell by {drop:.3g} from its best while training reward rose by {gain:.3g}",
        {"eval/reward": triples[-1], "best_eval/reward": triples[best], "training_gain": gain},
        size=drop,
    )


def groups_tied(history: History, *, fraction: float, steps: int) -> Sighting | None:
    """Most groups give every completion the same reward, and so no gradient."""
    if not GROUP_FIELDS & history.settings.keys() or history.setting("num_generations", 2) < 2:
        return None
    tied = history.typical("frac_reward_zero_std", steps)
    if tied is None or tied <= fraction:
        return None
    return Sighting(
        f"{tied:.0%} of groups have one reward for all their completions",
        {"frac_reward_zero_std": tied, "reward": history.typical("reward", 5) or 0.0, "limit": fraction},
        size=tied,
        harmless=history.has_learnt,
    )


def reward_outlier(history: History, *, factor: float, minimum: int) -> Sighting | None:
    """One step's rewards are spread far wider than those of any recent step."""
    spreads = history.recent("reward_std")
    if len(spreads) <= minimum:
        return None
    widest = max(spreads[:-1])
    if widest <= 0 or spreads[-1] <= factor * widest:
        return None
    return Sighting(
        f"rewards spread over {spreads[-1]:.3g} (standard deviation), at most {widest:.3g} before",
        {"reward_std": spreads[-1], "widest_before": widest, "limit": factor * widest},
        size=spreads[-1] / widest,
    )


def many_unscored(history: History, *, fraction: float, steps: int) -> Sighting | None:
    """Many completions got no score at all."""
    unscored = history.typical("unscored_fraction", steps)
    if unscored is None or unscored <= fraction:
        return None
    return Sighting(
        f"{unscored:.0%} of completions were not scored by any reward function",
        {"unscored_fraction": unscored, "limit": fraction},
        size=unscored,
    )


REWARD_RULES = (
    Rule(
        name="reward_flat",
        stage="reward",
        severity="warn",
        action="warn",
        sees=(
            "The mean `reward` of the last 20 steps exceeds that of the first 10 by at most {errors} standard "
            "errors, half-way through `max_steps` (not before {minimum} steps after warm-up; {unplanned} where "
            "`max_steps` is open). The `value_warmup_steps`, in which the policy stands still, do not count."
        ),
        limits={"errors": 2, "minimum": 60, "unplanned": 200},
        meaning=(
            "Nothing is learnt: the learning rate is too small, the reward too rare or equal for all, the task too "
            "hard for the model, or already solved when the run began. A curriculum that grows harder can look flat "
            "too."
        ),
        advice=(
            "Score a few completions by hand. Look at `frac_reward_zero_std` and `grad_norm`; make the reward "
            "denser, start with easier prompts, raise the learning rate or `num_generations`. See slow learning in "
            "tuning.md."
        ),
        check=reward_flat,
    ),
    Rule(
        name="reward_crashed",
        stage="reward",
        severity="error",
        action="checkpoint",
        sees=(
            "The median `reward` of 5 steps is below the best 10-step median by more than {noises} times the step "
            "noise, {share:.0%} of what had been gained and {share:.0%} of the typical `reward_std`, from step "
            "{minimum} on."
        ),
        limits={"noises": 6, "share": 0.5, "minimum": 20},
        meaning="An update has broken the policy, or the reward function has begun to answer differently.",
        advice=(
            "Read the latest completions. If they are nonsense, continue from a checkpoint before the fall with a "
            "lower learning rate and a higher `kl_coef` or `beta`. If they read well, check the reward function. See "
            "instability in tuning.md."
        ),
        check=reward_crashed,
    ),
    Rule(
        name="heldout_fell",
        stage="reward",
        severity="warn",
        action="checkpoint",
        sees=(
            "The mean of the last 3 `eval/reward` (or `eval_reward`) is below the best 3 in a row by more than "
            "{noises} times their noise, while the training `reward` has risen significantly since. Needs 6 "
            "evaluations."
        ),
        limits={"noises": 3},
        meaning=(
            "The policy is learning the training prompts, or a loophole of the training reward, instead of the task."
        ),
        advice=(
            "Keep the checkpoint with the best held-out reward (`metric_for_best_model`). Use more or more varied "
            "prompts, a higher `beta` or `kl_coef`, fewer `num_epochs`, and read the best-scored completions for a "
            "loophole."
        ),
        check=heldout_fell,
    ),
    Rule(
        name="groups_tied",
        stage="reward",
        severity="warn",
        action="warn",
        sees=(
            "`frac_reward_zero_std` has a median above {fraction:.0%} over {steps} steps (algorithms with a group "
            "baseline). Only a note where the reward has risen: a solved task looks the same."
        ),
        limits={"fraction": 0.8, "steps": 20},
        meaning=(
            "A group whose completions all score the same has no gradient: most of the sampling is wasted. Prompts "
            "are too hard, too easy, or the reward has too few levels."
        ),
        advice=(
            "Choose prompts that the model solves sometimes, raise `num_generations` or `temperature`, or give part "
            "marks."
        ),
        check=groups_tied,
    ),
    Rule(
        name="reward_outlier",
        stage="reward",
        severity="warn",
        action="warn",
        sees=(
            "`reward_std` exceeds {factor} times its highest value in the last 200 steps, after at least {minimum} "
            "steps."
        ),
        limits={"factor": 8, "minimum": 10},
        meaning="One or a few completions got an extreme reward: a bug in the reward function, or a loophole in it.",
        advice=(
            "Sort `completions.jsonl` of this step by reward and read the extremes. Bound the reward with "
            "`reward_clip`, or repair the function."
        ),
        check=reward_outlier,
    ),
    Rule(
        name="many_unscored",
        stage="reward",
        severity="warn",
        action="warn",
        sees="`unscored_fraction` has a median above {fraction:.0%} over {steps} steps.",
        limits={"fraction": 0.2, "steps": 10},
        meaning=(
            "Reward functions return None, or fail and `on_reward_error` hides it. The run learns only from "
            "completions that could be scored, which are seldom a fair sample."
        ),
        advice=(
            "Run with `on_reward_error: raise` to see the error. Return a low reward instead of None where the "
            "completion is to blame."
        ),
        check=many_unscored,
    ),
)
