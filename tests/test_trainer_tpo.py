"""What a candidate's logit is under each `group_logits`, and that the KL term is reduced in the same way."""

from __future__ import annotations

import pytest
import torch

from quintain import TPOConfig, TPOTrainer
from quintain.types import Rollouts

OLD = torch.tensor([[-1.0, -1.0], [-2.0, torch.nan]])
NOW = torch.tensor([[-0.5, -1.0], [-3.0, torch.nan]])
"""Log-probabilities of a completion of two tokens and one of one; what stands under the padding must not matter."""


def pair(**fields):
    return Rollouts(
        prompt_ids=torch.zeros(2, 1, dtype=torch.long),
        prompt_mask=torch.ones(2, 1, dtype=torch.bool),
        completion_ids=torch.zeros(2, 2, dtype=torch.long),
        completion_mask=torch.tensor([[True, True], [True, False]]),
        stopped=torch.ones(2, dtype=torch.bool),
        sampling_logprobs=torch.zeros(2, 2),
        group_ids=torch.zeros(2, dtype=torch.long),
        prompts=["", ""],
        completions=["a", "b"],
        rewards=torch.tensor([1.0, 0.0]),
        scored=torch.ones(2, dtype=torch.bool),
        old_logprobs=OLD,
        **fields,
    )


def trainer(group_logits, **settings):
    """A trainer as far as its formulas go: no model behind it."""
    made = object.__new__(TPOTrainer)
    made.config = TPOConfig(group_logits=group_logits, use_target_policy=False, beta=0.0, **settings)
    return made


@pytest.mark.parametrize(
    ("group_logits", "expected"),
    [("logprob", [-1.5, -3.0]), ("logratio", [0.5, -1.0]), ("averaged", [-0.75, -3.0])],
)
def test_a_candidates_logit(group_logits, expected):
    assert trainer(group_logits).group_logits(NOW, pair()).tolist() == expected


@pytest.mark.parametrize(
    ("group_logits", "expected"),
    [
        # Scores 1 and -1 lie 2 apart. Old logits: both -2; both 0; -1 and -2, which are 1 apart.
        ("logprob", 0.880797),
        ("logratio", 0.880797),
        ("averaged", 0.952574),
    ],
)
def test_the_target_is_tilted_from_the_old_logits(group_logits, expected):
    weights = trainer(group_logits).estimate(pair()).target_weights
    assert weights.tolist() == pytest.approx([expected, 1 - expected], abs=1e-6)


def test_tempered_logits_are_sums_scaled_until_the_group_is_broad_enough():
    """Old sums of 0 and -10: one candidate has all. At the factor f the weights' squares must sum to 1 / 1.5.

    1 / (p^2 + (1 - p)^2) = 1.5 at p = 0.788675, whose logit is 1.316958, so f = 0.1316958.
    """
    tempered = trainer("tempered", num_generations=2, min_effective_group=1.5)
    rollouts = pair().replace(old_logprobs=torch.tensor([[0.0, 0.0], [-10.0, torch.nan]]))
    estimated = tempered.estimate(rollouts)
    assert estimated.signals["group_scale"].tolist() == pytest.approx([0.1316958] * 2, abs=1e-5)
    assert estimated.statistics["group/effective_size"] == pytest.approx(1.5, abs=1e-4)
    assert tempered.group_logits(NOW, estimated).tolist() == pytest.approx(
        [-1.5 * 0.1316958, -3.0 * 0.1316958], abs=1e-5
    )


@pytest.mark.parametrize(
    ("group_logits", "expected"), [("logprob", 8.0), ("logratio", 8.0), ("tempered", 8.0), ("averaged", 6.5)]
)
def test_the_kl_term_is_summed_or_averaged_as_the_logits_are(group_logits, expected):
    """1 and 2 in the first completion, 5 in the second: 3 + 5, or 1.5 + 5."""
    term = trainer(group_logits).aggregate(torch.tensor([[1.0, 2.0], [5.0, torch.nan]]), pair())
    assert (float(term.total), term.unit) == (expected, "sequence")
