"""Faults in the update: too large, clipped away, left out, a target that does not move."""

from __future__ import annotations

from quintain.monitor.history import History
from quintain.monitor.rules.base import Rule, Sighting

MUST_BE_FINITE = {
    "loss",
    "grad_norm",
    "value_grad_norm",
    "kl",
    "ref_kl",
    "target_kl_gap",
    "entropy",
    "reward",
    "ratio_max",
}
FINITE_FAMILIES = ("loss/", "reward_kl/", "loss_kl/")


def non_finite(history: History) -> Sighting | None:
    """A number that steers the run is NaN or infinite."""
    bad = [key for key in history.non_finite if key in MUST_BE_FINITE or key.startswith(FINITE_FAMILIES)]
    if not bad:
        return None
    return Sighting(f"not finite: {', '.join(bad)}", {"non_finite_metrics": len(bad)}, size=1.0)


def kl_jump(
    history: History, *, factor: float, window: int, floor: float, ref_floor: float, ceiling: float
) -> Sighting | None:
    """KL to the sampling policy, or for two steps KL to the reference, leaps above all of the recent past."""
    # `ref_kl` is a level that stays after a jump; one freak token can lift a single step's estimate of it.
    for key, least, lasting in (("kl", floor, 1), ("ref_kl", ref_floor, 2)):
        # The zeros of a policy that stands still while its critic learns are no yardstick for its first steps.
        values = history.recent(key, min(window + lasting, history.policy_steps))
        if len(values) < lasting:
            continue
        before, now = values[:-lasting], min(values[-lasting:])
        before_max = max(before, default=0.0)
        leapt = len(before) >= 5 and now > max(least, factor * before_max)
        if leapt or (key == "kl" and now > ceiling):
            return Sighting(
                f"{key} is {now:.3g} nats a token, at most {before_max:.3g} in the {len(before)} steps before",
                {key: now, "highest_before": before_max},
                size=now,
            )
    return None


def ratio_blow_up(history: History, *, typical: float, steps: int, extreme: float) -> Sighting | None:
    """A token or sequence has become vastly likelier than when it was sampled."""
    latest, usual = history.recent("ratio_max", 1), history.typical("ratio_max", steps)
    worst = max(usual or 0.0, latest[0] if latest and latest[0] > extreme else 0.0)
    if worst <= typical:
        return None
    return Sighting(f"the largest probability ratio is {worst:.3g}", {"ratio_max": worst, "limit": typical}, size=worst)


def _clips(history: History) -> bool:
    """Whether the loss has a clip range and rollouts are used often enough for it to matter."""
    return history.reuses_rollouts and bool({"epsilon", "cliprange"} & history.settings.keys())


def clip_fraction_high(history: History, *, fraction: float, steps: int) -> Sighting | None:
    """Too large a part of the tokens is clipped, so that much of the signal is thrown away."""
    clipped = history.typical("clip_fraction", steps)
    if not _clips(history) or history.steps_since_warmup < steps or clipped is None or clipped <= fraction:
        return None
    return Sighting(f"{clipped:.0%} of tokens are clipped", {"clip_fraction": clipped, "limit": fraction}, size=clipped)


def clip_fraction_low(history: History, *, fraction: float, steps: int) -> Sighting | None:
    """Hardly anything is clipped although rollouts are reused: updates are small."""
    clipped = history.typical("clip_fraction", steps)
    if not _clips(history) or history.steps_since_warmup < steps or clipped is None or clipped >= fraction:
        return None
    return Sighting(
        f"only {clipped:.1%} of tokens are clipped", {"clip_fraction": clipped, "limit": fraction}, size=1.0
    )


def updates_left_out(history: History, *, steps: int) -> Sighting | None:
    """The ratio threshold has kept updates of this step from the weights."""
    now = sum(left_out for (left_out,) in history.table("updates_skipped", rows=1))
    if now <= 0:
        return None
    lately = sum(left_out for (left_out,) in history.table("updates_skipped", rows=steps))
    limit = history.setting("ratio_threshold", 10.0)
    return Sighting(
        f"{now:.0f} updates were left out, {lately:.0f} in the last {steps} steps: the mean probability ratio of their "
        f"mini-batches was above {limit:g}",
        {"updates_skipped": now, f"in_last_{steps}_steps": lately, "limit": limit},
        size=lately,
    )


def target_not_moving(history: History, *, steps: int) -> Sighting | None:
    """The target policy equals the online one step after step, although gradients flow."""
    gaps = history.recent("target_kl_gap", steps)
    moves = history.recent("grad_norm", steps) or [1.0]
    rates = history.recent("learning_rate", steps) or [1.0]
    if not history.settings.get("use_target_policy") or min(len(gaps), history.policy_steps) < steps or any(gaps):
        return None
    if history.settings.get("target_update") == "copy" and history.setting("target_update_every", 1) <= 1:
        return None  # a target copied after every update equals the online policy whenever it is measured
    if min(moves) <= 0 or min(rates) <= 0:
        return None
    return Sighting(
        f"target_kl_gap has been exactly 0 for {steps} steps in which gradients were not",
        {"target_kl_gap": 0.0, "steps": steps},
        size=1.0,
    )


OPTIMISATION_RULES = (
    Rule(
        name="non_finite",
        stage="optimisation",
        severity="error",
        action="checkpoint",
        sees="A loss, gradient norm, KL, entropy, ratio or reward is NaN or infinite.",
        limits={},
        meaning=(
            "One such step changes no weight, because an update with a gradient that is not finite is left out. A "
            "second one means that weights, log-probabilities or rewards have gone out of range."
        ),
        advice=(
            "If it comes again, continue from an earlier checkpoint with a lower learning rate, `max_grad_norm` of 1 "
            "or less, and `dtype` bfloat16 or float32 instead of float16. If the reward is the culprit, repair the "
            "function."
        ),
        check=non_finite,
    ),
    Rule(
        name="kl_jump",
        stage="optimisation",
        severity="error",
        action="checkpoint",
        sees=(
            "`kl` above {floor} nats a token, or `ref_kl` above {ref_floor} for two steps, and more than {factor} "
            "times its highest in the {window} steps before (leaving out `value_warmup_steps`, where both are 0); or "
            "`kl` above {ceiling} at any time."
        ),
        limits={"factor": 5, "window": 10, "floor": 0.5, "ref_floor": 0.5, "ceiling": 3.0},
        meaning="One update moved the policy very far: it has probably collapsed, and nonsense often follows.",
        advice=(
            "Read the completions of the next step. Lower the learning rate, lengthen `warmup_steps`, raise "
            "`kl_coef` or `beta`, use fewer `num_epochs` or set `stop_kl`, and continue from a checkpoint before the "
            "jump. See instability in tuning.md."
        ),
        check=kl_jump,
    ),
    Rule(
        name="ratio_blow_up",
        stage="optimisation",
        severity="warn",
        action="checkpoint",
        sees=("`ratio_max` has a median above {typical} over {steps} steps, or is above {extreme:,.0f} in one step."),
        limits={"typical": 100, "steps": 5, "extreme": 1_000_000},
        meaning=(
            "Some completions are far likelier now than when they were sampled. A few tokens then dominate the "
            "update; with negative advantages the clip does not bound it."
        ),
        advice=(
            "Lower the learning rate or `num_epochs`, set `stop_kl`, and bound the loss for negative advantages: "
            "`delta` (GRPO) or `dual_clip` (PPO)."
        ),
        check=ratio_blow_up,
    ),
    Rule(
        name="clip_fraction_high",
        stage="optimisation",
        severity="warn",
        action="warn",
        sees=(
            "`clip_fraction` has a median above {fraction:.0%} over {steps} steps after warm-up, where a rollout is "
            "reused (`num_epochs` x `num_mini_batches` above 1)."
        ),
        limits={"fraction": 0.3, "steps": 10},
        meaning=(
            "Updates overshoot: the policy leaves the clip range early in each rollout and the rest of the data is "
            "wasted."
        ),
        advice="Lower the learning rate or `num_epochs`, or set `stop_kl`. Widening the clip range hides it.",
        check=clip_fraction_high,
    ),
    Rule(
        name="clip_fraction_low",
        stage="optimisation",
        severity="note",
        action="note",
        sees=(
            "`clip_fraction` has a median below {fraction:.0%} over {steps} steps after warm-up, where a rollout is "
            "reused. With one update a rollout, and during `value_warmup_steps`, the fraction is 0 by definition and "
            "the rule is silent."
        ),
        limits={"fraction": 0.1, "steps": 50},
        meaning=(
            "Updates are small. Many language-model runs learn well below the classic 10-30% band, so this matters "
            "only if learning is slow."
        ),
        advice="If the reward is rising, leave it. If not, raise the learning rate or `num_epochs`.",
        check=clip_fraction_low,
    ),
    Rule(
        name="updates_left_out",
        stage="optimisation",
        severity="warn",
        action="warn",
        sees="`updates_skipped` is above 0: a mini-batch had a mean probability ratio above `ratio_threshold`.",
        limits={"steps": 10},
        meaning=(
            "The left-out update changed no weight, but the updates before it had carried the policy far from the one "
            "that sampled: too large steps, or too many on one rollout. A mean is lifted by a few tokens that were "
            "very unlikely when sampled. Where even the first update of a rollout is left out, the log-probabilities "
            "of sampling are not this policy's: text made elsewhere, another temperature, weights that did not arrive."
        ),
        advice=(
            "Lower the learning rate, `num_epochs` or `num_mini_batches`, or set `stop_kl`, which ends a rollout's "
            "epochs before they get there. Look at `ratio_max`, `kl` and `sampling_logprob_difference` of this step. "
            "A higher `ratio_threshold` only hides it."
        ),
        check=updates_left_out,
    ),
    Rule(
        name="target_not_moving",
        stage="optimisation",
        severity="warn",
        action="warn",
        sees=(
            "`target_kl_gap` is exactly 0 for {steps} steps although `use_target_policy` is on, the learning rate is "
            "above 0 and gradients flow."
        ),
        limits={"steps": 10},
        meaning=(
            "Target and online policy are the same: the target shares the online weights, or updates do not reach "
            "them (all of them frozen, or another optimizer passed in). The KL to the target then restrains nothing."
        ),
        advice=(
            "Check that the parameters meant to be trained have `requires_grad` and are in the optimizer, and that "
            "`maybe_update_target` was not overridden to hand back the online weights."
        ),
        check=target_not_moving,
    ),
)
