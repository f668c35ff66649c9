"""Faults in what was sampled: cut off, all alike, without variety, or not from the policy that is trained."""

from __future__ import annotations

import math
from statistics import fmean

from quintain.monitor.history import History, step_noise
from quintain.monitor.rules.base import Rule, Sighting


def completions_cut_off(history: History, *, fraction: float, steps: int, short: int) -> Sighting | None:
    """Most completions reach the length limit, unless their length is fixed by design."""
    limit = history.setting("max_completion_length", float("inf"))
    if history.setting("min_completion_length", 0) == limit:
        return None
    cut = history.typical("completions/clipped_ratio", steps)
    if cut is None or cut <= fraction:
        return None
    return Sighting(
        f"{cut:.0%} of completions reach max_completion_length before they end",
        {"completions/clipped_ratio": cut, "limit": fraction},
        size=cut,
        harmless=limit <= short,
    )


def duplicate_completions(history: History, *, fraction: float, steps: int, long: float) -> Sighting | None:
    """Most completions repeat another of their prompt, though they are long enough to differ."""
    duplicates = history.typical("completions/duplicate_fraction", steps)
    length = history.typical("completions/mean_length", steps)
    # The first of each group repeats nothing, so identical groups of n show a fraction of 1 - 1/n.
    possible = 1 - 1 / max(history.setting("num_generations", 8), 2)
    if duplicates is None or length is None or duplicates <= fraction * possible or length < long:
        return None
    return Sighting(
        f"{duplicates:.0%} of completions repeat another of their prompt, at {length:.0f} tokens on average",
        {"completions/duplicate_fraction": duplicates, "completions/mean_length": length, "limit": fraction * possible},
        size=duplicates,
    )


def entropy_collapse(history: History, *, share: float, steps: int, minimum: int) -> Sighting | None:
    """Entropy is a small share of what the run began with."""
    first, now = history.first("entropy"), history.typical("entropy", steps)
    if now is None or history.count < minimum:
        return None
    start = fmean(first) if first else 0.0
    if start <= 0 or now >= share * start:
        return None
    return Sighting(
        f"entropy fell from {start:.3g} to {now:.3g} nats a token"
        + ("" if history.has_learnt else " and the reward has not risen"),
        {"entropy": now, "entropy_at_start": start, "limit": share * start},
        size=share * start / max(now, 1e-6),
        harmless=history.has_learnt,
    )


def sampler_disagrees(history: History, *, difference: float, steps: int) -> Sighting | None:
    """The engine's log-probabilities are not those of the trainer for the same tokens."""
    gap = history.typical("sampling_logprob_difference", steps)
    if gap is None or gap <= difference:
        return None
    return Sighting(
        f"sampler and trainer differ by {gap:.3g} nats a token about the same tokens",
        {"sampling_logprob_difference": gap, "limit": difference},
        size=gap,
    )


NARROWING = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "min_completion_length": 0}
"""Settings that change what is sampled and not the log-probabilities it is given, with the value that is off."""


def kl_negative(history: History, *, limit: float, steps: int, errors: float) -> Sighting | None:
    """The k1 estimate of KL is below zero on average, which no number of honest samples explains."""
    in_reward = [kl for (kl,) in history.table("reward_kl/k1", rows=steps)]
    # Once the online policy has left the one that sampled, the estimate in a loss is KL(old || reference) less
    # KL(old || online), and may well be negative. `kl` is what was taken off.
    in_loss = [kl + moved for kl, moved in history.table("loss_kl/k1", "kl", rows=steps)]
    for key, values in (("reward_kl/k1", in_reward), ("loss_kl/k1", in_loss)):
        if len(values) < steps:
            continue
        mean, error = fmean(values), step_noise(values) / math.sqrt(steps)
        if mean < -max(limit, errors * error):
            narrowed = [
                f"{name}={history.setting(name, off):g}"
                for name, off in NARROWING.items()
                if history.setting(name, off) != off
            ]
            return Sighting(
                f"{key} averages {mean:.3g} nats a token over {steps} steps"
                + (f", sampled with {', '.join(narrowed)}" if narrowed else ""),
                {key: mean, "standard_error": error, "limit": -limit},
                size=-mean,
            )
    return None


ROLLOUT_RULES = (
    Rule(
        name="completions_cut_off",
        stage="rollout",
        severity="warn",
        action="warn",
        sees=(
            "`completions/clipped_ratio` has a median above {fraction:.0%} over {steps} steps. Only a note where "
            "`max_completion_length` is at most {short} (a short limit is usually meant); silent where "
            "`min_completion_length` equals `max_completion_length`."
        ),
        limits={"fraction": 0.5, "steps": 20, "short": 64},
        meaning=(
            "The model does not get to finish, so an answer at the end is never seen and the reward judges half a "
            "text. It may also never emit its stop token: a base model, a chat template that does not fit, or a "
            "wrong stop set."
        ),
        advice=(
            "Read a few completions. Raise `max_completion_length`, check `stop_token_ids` and the chat template, or "
            "ask for shorter answers with `missing_eos_penalty` or `length_penalty`. `mask_truncated_completions` "
            "keeps cut-off rows out of the loss."
        ),
        check=completions_cut_off,
    ),
    Rule(
        name="duplicate_completions",
        stage="rollout",
        severity="warn",
        action="warn",
        sees=(
            "`completions/duplicate_fraction` has a median above {fraction:.0%} of its greatest possible value (1 - "
            "1/`num_generations`) over {steps} steps, while completions average {long} tokens or more (shorter "
            "answers repeat by nature)."
        ),
        limits={"fraction": 0.5, "steps": 10, "long": 16},
        meaning=(
            "The policy has settled on a few texts, often one that the reward overrates. Copies carry no information "
            "about which text is better."
        ),
        advice=(
            "Read the completions. Raise `temperature` or `entropy_coef`, raise `beta` (or `kl_coef`), lower the "
            "learning rate, and add the `repetition` reward if the text repeats itself. Continue from a checkpoint "
            "before the collapse."
        ),
        check=duplicate_completions,
    ),
    Rule(
        name="entropy_collapse",
        stage="rollout",
        severity="warn",
        action="checkpoint",
        sees=(
            "`entropy` has a median over {steps} steps below {share:.0%} of its mean in the first ten steps, from "
            "step {minimum} on. Only a note where the reward has risen: a solved task looks the same."
        ),
        limits={"share": 0.1, "steps": 10, "minimum": 20},
        meaning=(
            "The policy is almost deterministic: it no longer explores, so it cannot find anything better than what "
            "it now says."
        ),
        advice=(
            "Lower the learning rate, set `entropy_coef` above 0, raise `temperature` or `epsilon_high`, and "
            "continue from a checkpoint before the fall. If the task is solved, stop the run."
        ),
        check=entropy_collapse,
    ),
    Rule(
        name="sampler_disagrees",
        stage="rollout",
        severity="warn",
        action="warn",
        sees="`sampling_logprob_difference` has a median above {difference} nats a token over {steps} steps.",
        limits={"difference": 0.1, "steps": 5},
        meaning=(
            "The engine that samples does not run the model that is trained: other precision or kernels, weights "
            "that were not pushed after an update, or another temperature. Updates are then off-policy without "
            "knowing it."
        ),
        advice=(
            "Run a few steps with `rollout_engine=native`. If that cures it, give both sides the same `dtype` and "
            "check that weights reach the engine after every step."
        ),
        check=sampler_disagrees,
    ),
    Rule(
        name="kl_negative",
        stage="rollout",
        severity="warn",
        action="warn",
        sees=(
            "The mean of `reward_kl/k1` over {steps} steps is below -{limit} nats a token and below 0 by more than "
            "{errors} of its standard errors; or that of `loss_kl/k1` plus `kl`. Single negative steps are ordinary, "
            "most of all at the start, where KL is about 0."
        ),
        limits={"limit": 0.01, "steps": 10, "errors": 3},
        meaning=(
            "KL may be negative under k1. It is an unbiased estimate from the sampled tokens, so single steps fall on "
            "either side of the truth; but the truth is never negative, and neither is the mean of many steps. If it "
            "is, the log-probabilities compared do not belong to the distribution that sampled: `top_p`, `top_k`, "
            "`min_p`, `repetition_penalty` or `min_completion_length` narrowed it, or the text was generated elsewhere "
            "or at another temperature. The policy can then game the estimate: probability moved to tokens that are "
            "never drawn makes the drawn ones look unlikely, and minus KL becomes a bonus."
        ),
        advice=(
            "Switch truncation of sampling off (`top_p: 1`, `top_k: 0`, `min_p: 0`, `repetition_penalty: 1`, "
            "`min_completion_length: 0`), and generate with the policy that is trained, at `temperature`. "
            "`kl_estimator: exact` sums over the whole vocabulary: never negative, nothing to game, for whoever wants "
            "no argument."
        ),
        check=kl_negative,
    ),
)
