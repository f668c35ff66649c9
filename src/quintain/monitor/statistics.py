"""One step's numbers. Collecting them reads the run and changes nothing in it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from quintain.advantages.group import tied_fraction
from quintain.masking import masked_sum
from quintain.types import LossOutput, PolicyOutputs, Rollouts


class StepStatistics:
    """Accumulates what the stages of a step report and turns it into one flat row of metrics.

    Means are kept as sums and counts, so that every micro-batch weighs by its tokens.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.rollouts: Rollouts | None = None
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._losses: dict[str, list[float]] = defaultdict(list)
        self._seconds: dict[str, float] = defaultdict(float)
        self._marks: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}

    def set(self, **values: float) -> None:
        """Record numbers under their own names."""
        self.values.update(values)

    def update(self, values: Mapping[str, float]) -> None:
        """Record numbers whose names hold a slash."""
        self.values.update(values)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the seconds spent inside to `time/STAGE`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] += time.perf_counter() - start

    def add_means(self, means: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        for name, (total, count) in means.items():
            self._sums[name] = self._sums.get(name, 0) + total.detach().cpu().double()
            self._counts[name] = self._counts.get(name, 0) + count.detach().cpu().double()

    def add_maxima(self, maxima: Mapping[str, Tensor]) -> None:
        for name, value in maxima.items():
            value = value.detach().cpu().double()
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def add(self, loss: LossOutput) -> None:
        """Statistics that a loss returned beside its terms."""
        self.add_means(loss.means)
        self.add_maxima(loss.maxima)

    def count(self, name: str, number: float) -> None:
        """Add to a count that starts at 0."""
        self.values[name] = self.values.get(name, 0.0) + number

    def add_losses(self, losses: Mapping[str, float], norms: Mapping[str, float]) -> None:
        """The losses of one optimizer step, by term, and its gradient norms before clipping."""
        for name, value in losses.items():
            self._losses[f"loss/{name}"].append(value)
        self._losses["loss"].append(sum(losses.values()))
        for name, value in norms.items():
            self._losses[name].append(value)

    def observe_policy(self, outputs: PolicyOutputs, rollouts: Rollouts) -> None:
        """How far the online policy is from the one that sampled, and how undecided it is.

        `kl` estimates KL(old || online), and `ref_kl` and `target_kl_gap` KL(old || reference), on tokens that `old`
        sampled, by k3: unbiased there, and never negative.
        """
        mask = rollouts.loss_mask
        count = mask.sum()
        logprobs = outputs.logprobs.detach()
        difference = torch.where(mask, logprobs - rollouts.old_logprobs, 0.0)
        self.add_means(
            {
                "kl": (masked_sum(difference.expm1() - difference, mask), count),
                "entropy": (masked_sum(outputs.entropy.detach(), mask), count),
                "ratio_mean": (masked_sum(difference.exp(), mask), count),
            }
        )
        self.add_maxima({"ratio_max": difference.exp().max()})
        for name, reference in (("ref_kl", rollouts.ref_logprobs), ("target_kl_gap", rollouts.target_logprobs)):
            if reference is not None:
                gap = torch.where(mask, reference - rollouts.old_logprobs, 0.0)
                self.add_means({name: (masked_sum(gap.expm1() - gap, mask), count)})

    def mean(self, name: str) -> float | None:
        """A mean accumulated so far, or None where nothing was reported under this name."""
        if name not in self._sums:
            return None
        return float(self._sums[name] / self._counts[name].clamp(min=1))

    def mark(self, stage: str) -> None:
        """Remember where the means stand, for `mean_since`."""
        self._marks[stage] = (dict(self._sums), dict(self._counts))

    def mean_since(self, stage: str, name: str) -> float | None:
        """As `mean`, over what was reported since `mark(stage)`."""
        if name not in self._sums:
            return None
        sums, counts = self._marks[stage]
        count = self._counts[name] - counts.get(name, 0)
        return float((self._sums[name] - sums.get(name, 0)) / count.clamp(min=1))

    def result(self) -> dict[str, float]:
        """All numbers of the step, as floats."""
        means = {name: float(self._sums[name] / self._counts[name].clamp(min=1)) for name in self._sums}
        losses = {name: sum(values) / len(values) for name, values in self._losses.items()}
        seconds = {f"time/{stage}": value for stage, value in self._seconds.items()}
        maxima = {name: float(value) for name, value in self._maxima.items()}
        return {**self.values, **means, **maxima, **losses, **seconds}


def rollout_statistics(rollouts: Rollouts, max_completion_length: int) -> dict[str, float]:
    """Lengths, cut-offs and duplicates of the sampled completions."""
    lengths, stopped = rollouts.lengths.cpu().double(), rollouts.stopped.cpu()
    texts = [str(completion) for completion in rollouts.completions]
    ends = lengths[stopped]
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/mean_terminated_length": float(ends.mean()) if len(ends) else 0.0,
        "completions/clipped_ratio": float((~stopped).double().mean()),
        "completions/duplicate_fraction": _duplicates(texts, rollouts.group_ids.tolist()),
    }


def _duplicates(texts: list[str], group_ids: list[int]) -> float:
    """Share of completions that repeat an earlier one of the same prompt."""
    return 1.0 - len(set(zip(group_ids, texts))) / max(len(texts), 1)


def reward_statistics(rollouts: Rollouts) -> dict[str, float]:
    """Means over scored rows; `reward` is what training uses, after penalties and clipping.

    `reward_std` is the sample standard deviation over all scored completions of the step.
    """
    scored = rollouts.scored
    kept = rollouts.rewards[scored].cpu().double()
    numbers = {
        "reward": float(kept.mean()) if len(kept) else 0.0,
        "reward_std": float(kept.std()) if len(kept) > 1 else 0.0,
        "unscored_fraction": float((~scored).float().mean()),
        "frac_reward_zero_std": float(tied_fraction(rollouts.rewards, rollouts.group_ids, scored)),
    }
    if rollouts.reward_output is None:
        return numbers
    for name, component in rollouts.reward_output.components.items():
        present = component[~component.isnan()].double()
        numbers[f"rewards/{name}/mean"] = float(present.mean()) if len(present) else 0.0
        numbers[f"rewards/{name}/std"] = float(present.std()) if len(present) > 1 else 0.0
    return {**numbers, **rollouts.reward_output.metrics}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over valid tokens; 0 where the returns do not vary."""
    kept_returns, kept_values = returns[mask].cpu().double(), values[mask].cpu().double()
    spread = kept_returns.var() if kept_returns.numel() > 1 else torch.zeros(())
    if float(spread) == 0.0:
        return 0.0
    return float(1 - (kept_returns - kept_values).var() / spread)
