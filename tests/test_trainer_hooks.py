"""Overriding one of the documented hooks changes what `train()` does, with the documented signature."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from quintain import GRPOTrainer, PPOTrainer, TPOTrainer


def metrics(trainer) -> list[dict]:
    return [json.loads(line) for line in (Path(trainer.config.output_dir) / "metrics.jsonl").read_text().splitlines()]


def test_compute_rewards_may_be_overridden_with_its_four_usual_parameters(make_trainer):
    """S54, W4: TRL 0.4's signature."""

    class Doubled(PPOTrainer):
        calls = 0

        def compute_rewards(self, scores, logprobs, ref_logprobs, masks=None):
            Doubled.calls += 1
            return super().compute_rewards(2 * scores, logprobs, ref_logprobs, masks)

    make_trainer(Doubled).train()
    assert Doubled.calls == 2


def test_an_overridden_generate_is_what_training_samples_with(make_trainer):
    """S37: `generate(queries)` is the rollout stage; 4 and 5 are the characters 0 and 1."""

    class Scripted(GRPOTrainer):
        def generate(self, queries, **generation_kwargs):
            return [torch.tensor([4, 5])] * len(queries)

    trainer = make_trainer(Scripted)
    trainer.train()
    rows = (Path(trainer.config.output_dir) / "completions.jsonl").read_text().splitlines()
    assert {json.loads(row)["completion"] for row in rows} == {"01"}
    assert trainer.generate_rollouts().group_ids.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_hook_that_returns_a_mean_survives_a_micro_batch_without_tokens(make_trainer):
    """S14: cut-off completions alone in their micro-batch have no token in the loss, and the mean of nothing is NaN."""

    class MeanPPO(PPOTrainer):
        def actor_loss(self, ratio, advantages):
            return -(ratio * advantages).mean()

    class MeanTPO(TPOTrainer):
        def tpo_loss(self, logp_online, logp_target, advantages, mask):
            return -(advantages * logp_online)[mask].mean()

    settings = {"min_completion_length": 0, "mask_truncated_completions": True, "micro_batch_tokens": 1}
    for trainer_class, own in ((MeanPPO, {}), (MeanTPO, {"loss_type": "policy_gradient"})):
        trainer = make_trainer(trainer_class, **settings, **own)
        trainer.train()
        for row in metrics(trainer):
            assert row["completions/clipped_ratio"] > 0  # else nothing was tried
            assert row["loss"] is not None and math.isfinite(row["loss"])
