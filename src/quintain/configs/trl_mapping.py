"""How options of TRL become settings of ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quintain.configs.trl_names import NO_EFFECT, REFUSED, RENAMED, TRLNames
from quintain.errors import ConfigError

# What is always so here, and may therefore be asked for.
_ALWAYS = {
    "top_entropy_quantile": 1.0,
    "logging_strategy": "steps",
    "multi_objective_aggregation": "sum_then_normalize",
}
_OFF: tuple[Any, ...] = (None, False, 0, "", {}, [], "no")


def map_trl_names(
    config: Any, renamed: dict[str, str], valued: Mapping[str, Mapping[Any, tuple[str, Any] | None]]
) -> list[str]:
    """Move every TRL option of `config` to our field, clear it, and return notes saying what became of each.

    Args:
        config: a config under construction; changed in place.
        renamed: TRL names that only this config's class takes, to our names.
        valued: TRL names that only this config's class takes, and what each of their values amounts to here.
    Raises:
        ConfigError: an option contradicts our own field, or cannot be honoured.
    """
    notes: list[str] = []
    for name, reason in REFUSED.items():
        value = getattr(config, name)
        if value not in _OFF and value != _ALWAYS.get(name):
            raise ConfigError(f"{name}={value!r} is an option of TRL that Quintain does not have. {reason}")
    for name, reason in NO_EFFECT.items():
        if getattr(config, name) is not None:
            notes.append(f"{name} has no effect: {reason}.")
    for name, ours in {**RENAMED, **renamed}.items():
        _take(config, name, ours, getattr(config, name), notes)
    for name, meanings in valued.items():
        value = getattr(config, name)
        if value is not None and value not in meanings:
            known = ", ".join(map(repr, meanings))
            raise ConfigError(f"{name} (from TRL) must be one of {known}: got {value!r}.")
        meaning = None if value is None else meanings[value]
        if meaning is not None:
            _take(config, name, *meaning, notes)
    _map_single_values(config, notes)
    _map_reference_sync(config, notes)
    _map_batch(config, notes)
    if config.total_episodes is not None:
        steps = max(1, round(config.total_episodes / (config.prompts_per_step * config.num_generations)))
        _take(config, f"total_episodes={config.total_episodes}", "max_steps", steps, notes)
    for item in fields(TRLNames):
        setattr(config, item.name, None)
    for name in (*renamed, *valued):
        setattr(config, name, None)
    return notes


def _take(config: Any, name: str, ours: str, value: Any, notes: list[str]) -> None:
    """Set our field from the TRL option `name`, unless the user gave our field another value too."""
    if value is None:
        return
    current = getattr(config, ours)
    default = type(config).__dataclass_fields__[ours].default
    if current not in (default, value):
        raise ConfigError(
            f"{name} (from TRL) and {ours} contradict each other: {name} amounts to {ours}={value!r}, "
            f"but {ours}={current!r}. Set only {ours}."
        )
    setattr(config, ours, value)
    notes.append(f"{name} was mapped to {ours}={value!r}.")


def _map_single_values(config: Any, notes: list[str]) -> None:
    """Options that stand for one value of one of our fields."""
    if config.bf16:
        _take(config, "bf16", "dtype", "bfloat16", notes)
    if config.use_vllm:
        _take(config, "use_vllm", "rollout_engine", "vllm", notes)
    for name, ours in (("save_strategy", "save_steps"), ("eval_strategy", "eval_steps")):
        strategy = getattr(getattr(config, name), "value", getattr(config, name))
        if strategy == "no":
            setattr(config, ours, None)
            notes.append(f"{name}='no' was mapped to {ours}=None.")
        elif strategy == "steps" and getattr(config, ours) is None:
            setattr(config, ours, config.logging_steps)
            notes.append(f"{name}='steps' was mapped to {ours}={config.logging_steps} (logging_steps).")
        elif strategy not in (None, "steps"):
            raise ConfigError(f"{name} must be 'no' or 'steps': got {strategy!r}. Set {ours} to a number of steps.")


def _map_reference_sync(config: Any, notes: list[str]) -> None:
    """TRL's moving reference, `ref = alpha * policy + (1 - alpha) * ref`, is our EMA target."""
    if not config.sync_ref_model:
        for name in ("ref_model_mixup_alpha", "ref_model_sync_steps"):
            if getattr(config, name) is not None:
                notes.append(f"{name} has no effect: sync_ref_model is off.")
        return
    if config.kl_weights and config.kl_weight == 0:
        weight = config.kl_weights[0]
        raise ConfigError(
            f"sync_ref_model=True and {weight}=0.0 contradict each other: the reference would move and nothing would "
            f"be measured against it. Set {weight} above 0 or sync_ref_model=False."
        )
    # TRL's own defaults, which a script that sets only sync_ref_model relies on.
    alpha = 0.6 if config.ref_model_mixup_alpha is None else config.ref_model_mixup_alpha
    _take(config, "sync_ref_model", "use_target_policy", True, notes)
    if alpha == 1:
        _take(config, "ref_model_mixup_alpha", "target_update", "copy", notes)
    else:
        _take(config, "ref_model_mixup_alpha", "ema_decay", 1 - alpha, notes)
    _take(config, "ref_model_sync_steps", "target_update_every", config.ref_model_sync_steps or 512, notes)


def _map_batch(config: Any, notes: list[str]) -> None:
    """TRL counts completions a device; we count prompts. See `_completions` for the arithmetic."""
    names = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "steps_per_generation",
        "generation_batch_size",
        "batch_size",
        "mini_batch_size",
    )
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1: got {value!r}.")
    if not given:
        return
    source = ", ".join(f"{name}={value}" for name, value in given.items())
    completions, update = _completions(config)
    group = config.num_generations
    if completions % group:
        lower = completions - completions % group
        legal = f"{lower} or {lower + group}" if lower else str(group)
        raise ConfigError(
            f"{source} gives {completions} completions a step, which num_generations={group} does not divide: a prompt "
            f"has num_generations completions. Make it {legal}, or set prompts_per_step instead."
        )
    _take(config, source, "prompts_per_step", completions // group, notes)
    mini_batches = -(-completions // update)
    if mini_batches != config.num_mini_batches:
        _take(config, source, "num_mini_batches", mini_batches, notes)
    if config.max_steps is not None and config.max_steps > 0 and config.num_mini_batches * config.num_epochs > 1:
        notes.append("max_steps counts rollouts here; TRL counts optimizer steps, of which a rollout has several.")


def _completions(config: Any) -> tuple[int, int]:
    """Completions of one rollout, and of one optimizer step, over all processes.

    TRL: an optimizer step takes `per_device_train_batch_size * processes * gradient_accumulation_steps` completions,
    and a rollout serves `steps_per_generation` backward passes, by default those of one optimizer step. A rollout
    smaller than an optimizer step is, seen from the optimizer, one rollout of the optimizer step's size.
    """
    accumulation = config.gradient_accumulation_steps or 1
    if config.batch_size is not None or config.mini_batch_size is not None:
        rollout = config.batch_size or config.prompts_per_step * config.num_generations
        if config.mini_batch_size is None:
            return rollout, -(-rollout // config.num_mini_batches)
        return rollout, min(rollout, config.mini_batch_size * accumulation)
    if config.generation_batch_size is not None and config.steps_per_generation is not None:
        raise ConfigError("generation_batch_size and steps_per_generation are two ways to say one thing: set one.")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if config.per_device_train_batch_size is None and config.generation_batch_size is not None:
        return config.generation_batch_size, -(-config.generation_batch_size // config.num_mini_batches)
    backward = (config.per_device_train_batch_size or 8) * processes  # 8: TRL's default
    update = backward * accumulation
    if config.generation_batch_size is None and config.steps_per_generation is None:
        return update * config.num_mini_batches, update
    rollout = config.generation_batch_size or backward * (config.steps_per_generation or 1)
    return max(rollout, update), update
