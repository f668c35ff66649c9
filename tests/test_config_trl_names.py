"""Options of TRL scripts: each is mapped, noted, or refused, and none is silently dropped."""

from __future__ import annotations

import dataclasses

import pytest

from quintain.configs import GRPOConfig, OnlineRLConfig, PPOConfig, RLOOConfig
from quintain.configs.trl_names import NO_EFFECT, REFUSED, RENAMED, TRLNames
from quintain.errors import ConfigError


@pytest.mark.parametrize(
    ("config_class", "given", "expected"),
    [
        # 8 completions a device, 4 backward passes: 32 completions, 8 a prompt.
        (GRPOConfig, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}, (4, 1)),
        # TRL's default of 8 a device where it is not given.
        (GRPOConfig, {"gradient_accumulation_steps": 3}, (3, 1)),
        # A rollout that serves 8 backward passes, of which an optimizer step takes 2: 4 optimizer steps.
        (
            GRPOConfig,
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 8},
            (8, 4),
        ),
        # Rollouts smaller than an optimizer step: the optimizer sees 32 completions either way.
        (
            GRPOConfig,
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
            (4, 1),
        ),
        (GRPOConfig, {"generation_batch_size": 64}, (8, 1)),
        (GRPOConfig, {"generation_batch_size": 64, "per_device_train_batch_size": 16}, (8, 4)),
        (RLOOConfig, {"per_device_train_batch_size": 8}, (4, 1)),
        # TRL 0.4's PPO; 3 does not divide 8, so that the parts are 3, 3 and 2.
        (PPOConfig, {"batch_size": 8, "mini_batch_size": 3}, (8, 3)),
        (PPOConfig, {"batch_size": 16}, (16, 1)),
        (PPOConfig, {"batch_size": 16, "mini_batch_size": 2, "gradient_accumulation_steps": 4}, (16, 2)),
        # TRL's second PPO: an optimizer step of 2 x 4 completions, num_mini_batches of them in a rollout.
        (
            PPOConfig,
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_mini_batches": 3},
            (24, 3),
        ),
    ],
)
def test_batch_arithmetic_gives_prompts_and_mini_batches(config_class, given, expected):
    """T08 j among others."""
    config = config_class(**given)
    assert (config.prompts_per_step, config.num_mini_batches) == expected
    assert "prompts_per_step" in config.notes[0] and next(iter(given)) in config.notes[0]


def test_batch_arithmetic_counts_the_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert GRPOConfig(per_device_train_batch_size=8).prompts_per_step == 4


def test_completions_that_do_not_fill_groups_are_refused_with_the_nearest_numbers():
    """T08 a."""
    with pytest.raises(ConfigError, match=r"6 completions.*num_generations=4.*4 or 8"):
        GRPOConfig(per_device_train_batch_size=6, num_generations=4)


@pytest.mark.parametrize(
    ("config_class", "given", "ours", "value"),
    [
        (GRPOConfig, {"num_iterations": 3}, "num_epochs", 3),
        (PPOConfig, {"ppo_epochs": 2}, "num_epochs", 2),
        (PPOConfig, {"num_ppo_epochs": 2}, "num_epochs", 2),
        (PPOConfig, {"response_length": 53}, "max_completion_length", 53),
        (PPOConfig, {"beta": 0.3}, "kl_coef", 0.3),
        (PPOConfig, {"init_kl_coef": 0.2}, "kl_coef", 0.2),
        (PPOConfig, {"target": 6.0}, "target_kl", 6.0),
        (RLOOConfig, {"rloo_k": 4}, "num_generations", 4),
        (RLOOConfig, {"kl_coef": 0.2}, "beta", 0.2),
        (RLOOConfig, {"reward_clip_range": (-5.0, 5.0)}, "reward_clip", (-5.0, 5.0)),
        (GRPOConfig, {"warmup_ratio": 0.1}, "warmup_steps", 0.1),
        (GRPOConfig, {"shuffle_dataset": False}, "shuffle", False),
        (GRPOConfig, {"log_with": "wandb"}, "report_to", ("wandb",)),
        (GRPOConfig, {"bf16": True}, "dtype", "bfloat16"),
        (GRPOConfig, {"use_vllm": True}, "rollout_engine", "vllm"),
        (GRPOConfig, {"save_strategy": "no"}, "save_steps", None),
        (GRPOConfig, {"eval_strategy": "steps", "logging_steps": 7}, "eval_steps", 7),
    ],
)
def test_a_name_from_trl_is_mapped_with_a_note_and_cleared(config_class, given, ours, value):
    config = config_class(**given)
    theirs = next(iter(given))
    assert getattr(config, ours) == value
    assert theirs in config.notes[0] and ours in config.notes[0]
    assert getattr(config, theirs) is None


def test_contradicting_names_are_refused_with_both_named():
    with pytest.raises(ConfigError, match=r"num_iterations.*num_epochs=3.*num_epochs=2"):
        GRPOConfig(num_iterations=3, num_epochs=2)
    assert GRPOConfig(num_iterations=2, num_epochs=2).num_epochs == 2


def test_a_moving_reference_is_the_ema_target():
    """TRL: ref = alpha * policy + (1 - alpha) * ref, every ref_model_sync_steps."""
    config = GRPOConfig(beta=0.04, sync_ref_model=True, ref_model_mixup_alpha=0.1, ref_model_sync_steps=4)
    assert config.use_target_policy and config.ema_decay == pytest.approx(0.9) and config.target_update_every == 4
    copied = GRPOConfig(beta=0.04, sync_ref_model=True, ref_model_mixup_alpha=1.0)
    assert copied.target_update == "copy" and copied.target_update_every == 512


@pytest.mark.parametrize(("config_class", "weight"), [(GRPOConfig, {}), (RLOOConfig, {"beta": 0.0})])
def test_a_moving_reference_without_kl_is_refused_with_both_fields_named(config_class, weight):
    """T08 e."""
    with pytest.raises(ConfigError, match=r"sync_ref_model=True and beta=0\.0"):
        config_class(sync_ref_model=True, **weight)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"push_to_hub": True}, "push_to_hub=True"),
        ({"generation_kwargs": {"num_beams": 2}}, "temperature"),
        ({"fp16": True}, "fp16=True"),
        ({"save_strategy": "epoch"}, "save_steps"),
        ({"generation_batch_size": 64, "steps_per_generation": 2}, "set one"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile"),
    ],
)
def test_what_cannot_be_honoured_is_refused(given, named):
    with pytest.raises(ConfigError, match=named):
        GRPOConfig(**given)


@pytest.mark.parametrize(
    "given", [{"push_to_hub": False}, {"generation_kwargs": {}}, {"top_entropy_quantile": 1.0}, {"use_vllm": False}]
)
def test_a_refused_option_that_is_off_passes_without_a_note(given):
    assert GRPOConfig(**given).notes == []


def test_harmless_options_pass_with_a_note():
    config = GRPOConfig(disable_tqdm=True, remove_unused_columns=False)
    assert len(config.notes) == 2 and all("no effect" in note for note in config.notes)


def test_max_steps_is_explained_where_trl_counts_otherwise():
    assert any(
        "max_steps" in note for note in GRPOConfig(num_iterations=2, gradient_accumulation_steps=1, max_steps=9).notes
    )
    assert GRPOConfig(max_steps=-1).max_steps is None


def test_every_name_from_trl_has_one_fate():
    handled_by_hand = {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "steps_per_generation",
        "generation_batch_size",
        "batch_size",
        "mini_batch_size",
        "total_episodes",
        "bf16",
        "use_vllm",
        "save_strategy",
        "eval_strategy",
        "sync_ref_model",
        "ref_model_mixup_alpha",
        "ref_model_sync_steps",
    }
    fates = [*RENAMED, *NO_EFFECT, *REFUSED, *handled_by_hand]
    assert sorted(fates) == sorted(item.name for item in dataclasses.fields(TRLNames))
    own = {item.name for item in dataclasses.fields(OnlineRLConfig)}
    assert set(RENAMED.values()) <= own


def test_a_resolved_config_holds_our_names_only():
    settings = RLOOConfig(rloo_k=4, per_device_train_batch_size=8).to_dict()
    assert settings["num_generations"] == 4 and settings["prompts_per_step"] == 2
    assert not {"rloo_k", "kl_coef", "notes", "per_device_train_batch_size"} & set(settings)
    assert RLOOConfig(**settings).to_dict() == settings


def test_names_of_trls_first_ppo_are_understood():
    """S38: adaptive control, the estimator of KL and the scaling of scores were switches of other names."""
    config = PPOConfig(target=6.0, horizon=500, init_kl_coef=0.2, kl_penalty="full", use_score_scaling=True)
    assert (config.kl_control, config.target_kl, config.kl_horizon, config.kl_coef) == ("adaptive", 6.0, 500, 0.2)
    assert (config.kl_estimator, config.scale_rewards) == ("exact", "running")
    assert any("use_score_scaling was mapped to scale_rewards='running'" in note for note in config.notes)
    assert config.to_dict().keys().isdisjoint({"adap_kl_ctrl", "kl_penalty", "use_score_scaling"})
    with pytest.raises(ConfigError, match=r"kl_penalty \(from TRL\) must be one of 'kl', 'mse', 'full': got 'abs'"):
        PPOConfig(kl_penalty="abs")


def test_the_length_of_trls_second_ppo_is_counted_in_completions():
    """S38: 1000 episodes in rollouts of 4 x 8."""
    config = PPOConfig(
        total_episodes=1000, per_device_train_batch_size=8, gradient_accumulation_steps=4, stop_token="eos"
    )
    assert (config.prompts_per_step, config.max_steps) == (32, 31)
    assert any(note.startswith("stop_token has no effect") for note in config.notes)
