"""What each setting may be, and what is said when it is not."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintain.configs import (
    DGConfig,
    GRPOConfig,
    OnlineRLConfig,
    PPOConfig,
    ReinforceConfig,
    RLOOConfig,
    TPOConfig,
)
from quintain.configs.rules import Number, Rule
from quintain.errors import ConfigError

ALL = [OnlineRLConfig, PPOConfig, GRPOConfig, RLOOConfig, ReinforceConfig, DGConfig, TPOConfig]


@pytest.mark.parametrize("config_class", ALL)
def test_every_config_works_without_arguments(config_class):
    """S21."""
    config = config_class()
    assert config.notes == []
    assert config.num_train_epochs == 1.0 and config.max_steps is None


def test_defaults_are_those_of_the_design():
    """S9, S21, S24 and the algorithms table."""
    tpo = TPOConfig()
    assert (tpo.loss_type, tpo.group_logits, tpo.eta, tpo.anchor) == ("target_matching", "logratio", 1.0, "old")
    assert (tpo.use_target_policy, tpo.ema_decay, tpo.beta, tpo.num_generations) == (True, 0.99, 0.04, 8)
    ppo = PPOConfig()
    assert (ppo.kl_coef, ppo.cliprange, ppo.cliprange_value, ppo.vf_coef) == (0.05, 0.2, 0.2, 0.1)
    assert (ppo.gamma, ppo.lam, ppo.num_epochs, ppo.num_generations) == (1.0, 0.95, 4, 1)
    assert (ppo.whiten_rewards, ppo.whiten_advantages, ppo.value_model) == (False, True, "shared")
    assert (ppo.value_learning_rate, ppo.dual_clip, ppo.kl_in_loss, ppo.kl_estimator) == (None, None, 0.0, "k1")
    grpo = GRPOConfig()
    assert (grpo.beta, grpo.epsilon, grpo.epsilon_high, grpo.delta, grpo.loss_type) == (0.0, 0.2, None, None, "dapo")
    assert (grpo.importance_sampling_level, grpo.scale_rewards, grpo.num_generations) == ("token", "group", 8)
    assert (grpo.group_std, tpo.group_std) == ("sample", "population")
    rloo = RLOOConfig()
    assert (rloo.beta, rloo.num_generations, rloo.kl_estimator) == (0.05, 2, "k1")
    assert (DGConfig().eta, DGConfig().num_epochs) == (1.0, 1)
    assert (ReinforceConfig().baseline, ReinforceConfig().normalize_advantages) == ("batch", True)
    assert not any(config_class().use_target_policy for config_class in ALL if config_class is not TPOConfig)


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_ema_decay_outside_the_open_interval_is_refused_and_the_ends_are_explained(decay):
    """S22, S23."""
    with pytest.raises(ValueError) as error:
        TPOConfig(ema_decay=decay)
    message = str(error.value)
    assert "ema_decay" in message and str(decay) in message and "(0, 1)" in message
    assert "never update" in message and "be the online policy" in message


@pytest.mark.parametrize("config_class", [GRPOConfig, RLOOConfig, TPOConfig])
def test_a_group_of_one_is_refused_and_ppo_is_named(config_class):
    """T08 b."""
    with pytest.raises(ConfigError, match=r"num_generations must be 2 or more.*got 1.*PPO"):
        config_class(num_generations=1)


@pytest.mark.parametrize(
    ("config_class", "settings", "named"),
    [
        (GRPOConfig, {"temperature": 0.0}, ["temperature", "(0, inf)", "0.0"]),
        (GRPOConfig, {"temperature": -1.0}, ["temperature", "-1.0"]),
        (GRPOConfig, {"top_p": 0.0}, ["top_p", "(0, 1]"]),
        (GRPOConfig, {"max_steps": 2.5}, ["max_steps", "whole number", "2.5"]),
        (GRPOConfig, {"learning_rate": "1e-5"}, ["learning_rate", "'1e-5'"]),
        (GRPOConfig, {"learning_rate": True}, ["learning_rate", "True"]),
        (GRPOConfig, {"shuffle": "no"}, ["shuffle", "true or false", "'no'"]),
        (GRPOConfig, {"optim": "adamv"}, ["optim", "'adamv'", "Did you mean 'adamw'"]),
        (GRPOConfig, {"stop_token_ids": [5, -1]}, ["stop_token_ids[1]", "-1"]),
        (GRPOConfig, {"reward_weights": 0.5}, ["reward_weights", "list"]),
        (GRPOConfig, {"reward_clip": (1.0, 1.0)}, ["reward_clip", "low < high"]),
        (GRPOConfig, {"reward_clip": (1.0,)}, ["reward_clip", "2 items"]),
        (GRPOConfig, {"run_name": 7}, ["run_name", "text", "7"]),
        (GRPOConfig, {"min_completion_length": 9, "max_completion_length": 8}, ["min_completion_length=9", "=8"]),
        (GRPOConfig, {"kl_control": "adaptive", "beta": 0.1}, ["kl_control", "target_kl"]),
        (GRPOConfig, {"kl_control": "adaptive", "target_kl": 6.0}, ["kl_control", "beta", "0"]),
        (GRPOConfig, {"kl_reference": "target", "beta": 0.1}, ["kl_reference", "use_target_policy"]),
        (GRPOConfig, {"use_target_policy": True}, ["use_target_policy", "beta"]),
        (PPOConfig, {"use_target_policy": True, "kl_coef": 0.0}, ["use_target_policy", "kl_coef"]),
        (PPOConfig, {"scale_rewards": "group"}, ["scale_rewards", "num_generations"]),
        (PPOConfig, {"num_mini_batches": 9}, ["num_mini_batches=9", "8 completions"]),
        (PPOConfig, {"dual_clip": 0.5}, ["dual_clip", "(1, inf)"]),
        (PPOConfig, {"gamma": 0.0}, ["gamma", "(0, 1]"]),
        (GRPOConfig, {"delta": 1.1}, ["delta=1.1", "1.2"]),
        (GRPOConfig, {"loss_type": "cispo", "importance_sampling_level": "sequence"}, ["cispo", "sequence"]),
        (TPOConfig, {"anchor": "target", "use_target_policy": False}, ["anchor", "use_target_policy"]),
        (TPOConfig, {"beta": 0.0}, ["use_target_policy", "beta=0.0"]),
        (TPOConfig, {"min_effective_group": 4}, ["min_effective_group", "tempered"]),
        (TPOConfig, {"min_effective_group": 9, "group_logits": "tempered"}, ["min_effective_group=9", "8"]),
        (TPOConfig, {"num_mini_batches": 9}, ["num_mini_batches=9", "prompts_per_step=8", "groups"]),
        (GRPOConfig, {"metric_for_best_model": "eval_reward"}, ["metric_for_best_model", "eval_steps"]),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_name_and_value(config_class, settings, named):
    """T08: errors name the fields, and need neither a model nor a GPU."""
    with pytest.raises(ConfigError) as error:
        config_class(**settings)
    for text in named:
        assert text in str(error.value)


def test_the_target_may_serve_as_anchor_instead_of_as_reference():
    assert TPOConfig(anchor="target", beta=0.0).use_target_policy


def test_the_papers_form_is_one_line():
    """S20."""
    config = TPOConfig(group_logits="logprob", use_target_policy=False, beta=0.0)
    assert config.kl_weight == 0 and config.anchor == "old"


@pytest.mark.parametrize(
    ("settings", "slot"),
    [
        ({}, "ref"),
        ({"use_target_policy": True}, "target"),
        ({"use_target_policy": False, "kl_reference": "old"}, "old"),
    ],
)
def test_auto_reference_is_the_target_where_there_is_one_and_the_start_model_elsewhere(settings, slot):
    """S12, S15."""
    assert GRPOConfig(beta=0.04, **settings).reference_slot == slot


@pytest.mark.parametrize("config_class", [GRPOConfig, ReinforceConfig, DGConfig, TPOConfig])
def test_k1_in_a_loss_is_allowed_with_a_note(config_class):
    """W1."""
    assert "expected gradient of zero" in " ".join(config_class(beta=0.1, kl_estimator="k1").notes)
    assert config_class(beta=0.1, kl_estimator="k2").notes == []


def test_values_are_stored_in_their_plain_form():
    config = GRPOConfig(
        max_steps=100.0,
        save_steps=0,
        report_to="none",
        stop_strings="\n",
        scale_rewards=False,
        reward_clip=[-1, 1],
        optim="adamw_torch",
        lr_scheduler_type="constant_with_warmup",
        dtype="torch.bfloat16",
    )
    assert config.max_steps == 100 and isinstance(config.max_steps, int)
    assert config.save_steps is None and config.report_to == ()
    assert config.stop_strings == ("\n",) and config.reward_clip == (-1, 1)
    assert (config.scale_rewards, config.optim) == ("none", "adamw")
    assert (config.lr_scheduler_type, config.dtype) == ("constant", "bfloat16")


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_number_passes_exactly_when_it_is_finite_and_inside(value):
    inside = -1 < value <= 2
    if inside:
        assert Number("(-1, 2]").check("x", value) == value
    else:
        with pytest.raises(ConfigError, match="x must be a number in"):
            Number("(-1, 2]").check("x", value)


@pytest.mark.parametrize("config_class", ALL)
def test_every_rule_belongs_to_a_field(config_class):
    assert set(config_class.rules) <= {item.name for item in dataclasses.fields(config_class)}


@pytest.mark.parametrize("config_class", ALL)
def test_every_field_has_a_docstring_under_it(config_class):
    """The docstring feeds `--help` and the reference page."""
    undocumented = []
    for owner in config_class.__mro__[:-1]:
        lines = inspect.getsource(owner).splitlines()
        for position, line in enumerate(lines):
            name = line.strip().partition(":")[0]
            is_field = line.startswith("    ") and not line.startswith("     ") and name in owner.__annotations__
            if is_field and "ClassVar" not in line and not lines[position + 1].strip().startswith('"""'):
                undocumented.append(name)
    assert undocumented == []


def test_a_config_of_ones_own_is_checked_by_type_and_by_its_rules():
    @dataclasses.dataclass
    class MyConfig(OnlineRLConfig):
        strength: float = 1.0
        level: int | None = None
        rules: ClassVar[dict[str, Rule]] = {**OnlineRLConfig.rules, "strength": Number("(0, 1]")}

    assert MyConfig(strength=0.5, level=3).level == 3
    with pytest.raises(ConfigError, match=r"strength.*\(0, 1\].*got 2"):
        MyConfig(strength=2)
    with pytest.raises(ConfigError, match=r"level.*whole number.*'deep'"):
        MyConfig(level="deep")


def test_a_config_survives_being_replaced():
    config = dataclasses.replace(GRPOConfig(per_device_train_batch_size=16), learning_rate=1e-6)
    assert (config.prompts_per_step, config.learning_rate) == (2, 1e-6)


def test_importing_the_configs_needs_neither_torch_nor_transformers():
    code = "import sys, quintain.configs; print([m for m in ('torch', 'transformers', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
