"""A run from the outside: its folder, interruption, callbacks, evaluation, and what is refused before a model loads."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

from quintain import ConfigError, GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, RewardError, TPOTrainer


def test_a_finished_run_holds_every_file_and_its_model_loads(make_trainer, tmp_path):
    trainer = make_trainer(PPOTrainer, save_steps=2)
    trainer.train()
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} >= {
        "config.yaml",
        "metrics.jsonl",
        "completions.jsonl",
        "findings.jsonl",
        "checkpoints",
        "model",
        "value_model",
        "report.html",
    }
    policy = AutoModelForCausalLM.from_pretrained(run / "model")
    ids = torch.tensor([[4, 5, 6]])
    torch.testing.assert_close(policy(ids).logits, trainer.model(ids).logits)
    critic = AutoModelForSequenceClassification.from_pretrained(run / "value_model")
    assert torch.equal(critic.score.weight, trainer.policies.module.value_model.score.weight)
    assert AutoTokenizer.from_pretrained(run / "model").decode([4]) in "01="


def test_metrics_rows_carry_the_documented_names(make_trainer, tmp_path):
    make_trainer(PPOTrainer, kl_coef=0.1, num_mini_batches=2).train()
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    documented = """step reward reward_std rewards/fraction_right/mean frac_reward_zero_std unscored_fraction kl ref_kl
        entropy clip_fraction ratio_max loss loss/policy loss/value explained_variance grad_norm learning_rate
        value_learning_rate kl_coef completions/mean_length completions/clipped_ratio completions/duplicate_fraction
        time/rollout time/reward time/annotate time/fit tokens_per_second memory_peak_gb"""
    assert set(documented.split()) <= set(row)


def test_completions_are_recorded_with_rewards_and_signal(make_trainer, tmp_path):
    make_trainer(TPOTrainer, max_steps=1).train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 4
    assert {"step", "prompt", "completion", "reward", "rewards", "target_weight"} <= set(rows[0])
    assert sum(row["target_weight"] for row in rows) == pytest.approx(2.0)  # two prompts, each summing to 1


def test_a_second_run_sets_the_first_one_aside(make_trainer, tmp_path):
    make_trainer(GRPOTrainer, max_steps=1).train()
    make_trainer(GRPOTrainer, max_steps=2).train()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert len((tmp_path / "run" / "earlier-1" / "metrics.jsonl").read_text().splitlines()) == 1


def test_ctrl_c_finishes_the_step_writes_a_checkpoint_and_says_how_to_resume(make_trainer, tmp_path, capsys):
    class Interrupt(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    trainer = make_trainer(GRPOTrainer, max_steps=5, trainer={"callbacks": [Interrupt()]})
    trainer.train()
    assert trainer.run.interrupted
    assert trainer.run.step == 2
    assert (tmp_path / "run" / "checkpoints" / "step-000002" / "manifest.json").exists()
    assert f"quintain train --resume {tmp_path / 'run'}" in capsys.readouterr().err
    resumed = make_trainer(GRPOTrainer, max_steps=5)
    resumed.train(resume_from=tmp_path / "run")
    assert resumed.run.step == 5


def test_a_callback_can_stop_the_run(make_trainer, tmp_path):
    class Enough(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            control.should_training_stop = logs["step"] == 2

    trainer = make_trainer(GRPOTrainer, max_steps=5, trainer={"callbacks": [Enough]})
    trainer.train()
    assert trainer.run.step == 2
    assert (tmp_path / "run" / "model" / "config.json").exists()


def test_evaluation_scores_held_out_prompts_and_disturbs_no_number_of_the_run(make_trainer, reversal):
    plain = make_trainer(GRPOTrainer, max_steps=4)
    plain.train()
    evaluated = make_trainer(GRPOTrainer, max_steps=4, eval_steps=2, trainer={"eval_dataset": reversal})
    evaluated.train()
    rewards = [row["reward"] for row in evaluated.run.state.log_history]
    assert rewards == [row["reward"] for row in plain.run.state.log_history]
    assert [("eval_reward" in row) for row in evaluated.run.state.log_history] == [False, True, False, True]


def test_a_failing_reward_leaves_the_weights_as_they_were(make_trainer):
    """T07: bit-identical."""

    def fails_later(completions, trainer_state, **_):
        if trainer_state.global_step == 1:
            raise ValueError("out of quota")
        return [1.0, 0.0] * (len(completions) // 2)

    trainer = make_trainer(GRPOTrainer, reward_funcs=fails_later, max_steps=3)
    seen = []
    trainer.run.callbacks.callbacks.append(
        type("Snapshot", (), {"on_step_end": lambda *_: seen.append([p.clone() for p in trainer.model.parameters()])})()
    )
    with pytest.raises(RewardError, match="fails_later") as caught:
        trainer.train()
    assert isinstance(caught.value.__cause__, ValueError)
    assert all(torch.equal(old, new) for old, new in zip(seen[-1], trainer.model.parameters()))


def test_evaluation_without_data_is_refused_before_the_model_is_touched(reversal):
    """T08 i: the model named here does not exist, and nobody finds out."""
    with pytest.raises(ConfigError, match=r"eval_steps=2.*eval_dataset"):
        GRPOTrainer("no/such-model", lambda completions, **_: [0], GRPOConfig(eval_steps=2), reversal)


def test_a_missing_reward_column_is_refused_before_the_model_is_touched(reversal):
    """T07 j."""

    def wants_solution(completions, solution):
        return [0.0] * len(completions)

    with pytest.raises(ConfigError, match=r"wants_solution.*solution.*answer"):
        GRPOTrainer("no/such-model", wants_solution, GRPOConfig(), reversal)


def test_weights_that_do_not_match_the_functions_are_refused_naming_both(reversal):
    """T08 h."""
    functions = [lambda completions, **_: [0.0], lambda completions, **_: [0.0]]
    with pytest.raises(ConfigError, match=r"reward_weights.*reward_funcs|weights.*2"):
        GRPOTrainer("no/such-model", functions, GRPOConfig(reward_weights=(1.0,)), reversal)


def test_args_of_another_algorithm_are_refused(reversal):
    with pytest.raises(ConfigError, match="GRPOTrainer takes args of type GRPOConfig: got PPOConfig"):
        GRPOTrainer("no/such-model", lambda completions, **_: [0], PPOConfig(), reversal)


def test_the_last_incomplete_group_of_mini_batches_still_counts_every_row(make_trainer):
    """T08 j: 8 completions in 3 mini-batches."""
    trainer = make_trainer(PPOTrainer, num_mini_batches=3, num_generations=4)
    sizes = [len(part) for part in trainer.generate_rollouts().minibatches(3, "token", trainer.generators["minibatch"])]
    assert sorted(sizes) == [2, 3, 3]
    trainer.train()


def test_pad_equal_to_eos_keeps_the_stop_token_in_the_loss(make_trainer):
    """T08 d: the padding id is the stop token's, and the mask still ends with it."""
    trainer = make_trainer(GRPOTrainer, min_completion_length=0, max_completion_length=6)
    trainer.processing_class.pad_token = trainer.processing_class.eos_token
    rollouts = trainer.generate_rollouts()
    for row in range(len(rollouts)):
        if rollouts.stopped[row]:
            last = int(rollouts.lengths[row]) - 1
            assert int(rollouts.completion_ids[row, last]) in trainer.sampling.stop_token_ids
            assert bool(rollouts.loss_mask.logical_or(rollouts.completion_mask)[row, last])


def test_training_again_goes_on_in_the_same_folder(make_trainer, tmp_path):
    """A trainer that was stopped continues its own run; only an earlier run of another trainer is set aside."""

    class StopOnce:
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 1

    trainer = make_trainer(GRPOTrainer, max_steps=3, trainer={"callbacks": [StopOnce()]})
    trainer.train()
    assert trainer.run.step == 1
    trainer.train()
    rows = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3]
    assert not (tmp_path / "run" / "earlier-1").exists()


def test_a_callback_that_asked_to_stop_once_does_not_stop_the_next_training(make_trainer):
    class StopAtOne:
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 1:
                control.should_training_stop = True

    trainer = make_trainer(GRPOTrainer, max_steps=3, trainer={"callbacks": [StopAtOne()]})
    trainer.train()
    trainer.train()
    assert trainer.run.step == 3


def test_early_stopping_of_transformers_ends_a_run_that_does_not_improve(make_trainer, reversal):
    from transformers import EarlyStoppingCallback

    trainer = make_trainer(
        GRPOTrainer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        max_steps=5,
        eval_steps=1,
        metric_for_best_model="eval_reward",
        trainer={"eval_dataset": reversal, "callbacks": [EarlyStoppingCallback(early_stopping_patience=1)]},
    )
    trainer.train()
    assert trainer.run.step == 2


def test_stop_kl_looks_at_the_last_epoch_alone(make_trainer, monkeypatch):
    """KL 0, 0, 0.2 in three epochs: the third is beyond 0.1 although the mean of the three is not."""
    trainer = make_trainer(GRPOTrainer, num_epochs=5, stop_kl=0.1, max_steps=1)
    epochs = []

    def pretend(minibatch, statistics):
        epochs.append(0.2 if len(epochs) == 2 else 0.0)
        statistics.add_means({"kl": (torch.tensor(10 * epochs[-1]), torch.tensor(10))})

    monkeypatch.setattr(trainer, "train_minibatch", pretend)
    trainer.run_step()
    assert epochs == [0.0, 0.0, 0.2]


def test_a_model_with_contradictory_generation_defaults_can_still_be_saved(make_trainer, tmp_path):
    """transformers loads a temperature without do_sample, and refuses to write it."""
    from quintain.policies.loading import load_model

    model = load_model("scratch:tiny", model_init_kwargs={"characters": "01="})
    model.generation_config.temperature, model.generation_config.do_sample = 0.6, False
    make_trainer(GRPOTrainer, model=model).train()
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_save_model_writes_a_loadable_policy_where_it_is_told_to(make_trainer, tmp_path):
    """The last line of many scripts written for TRL."""
    trainer = make_trainer(GRPOTrainer)
    trainer.save_model(tmp_path / "exported")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
