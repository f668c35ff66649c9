"""The settings that every trainer has, as one flat dataclass, and what each must satisfy."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from quintain.configs.blocks import (
    DataFields,
    ModelFields,
    OptimisationFields,
    PolicyFields,
    RewardFields,
    RolloutFields,
    RunFields,
)
from quintain.configs.declaration import check_declaration
from quintain.configs.rules import ListOf, Number, OfType, OneOf, Rule, rule_for
from quintain.configs.trl_mapping import map_trl_names
from quintain.configs.trl_names import TRLNames
from quintain.errors import ConfigError

SHARED_RULES: dict[str, Rule] = {
    "learning_rate": Number("(0, inf)", hint="1e-6 to 1e-4 is usual."),
    "lr_scheduler_type": OneOf(("linear", "cosine", "constant")),
    "warmup_steps": Number("[0, inf)", hint="Below 1 it is a fraction of all optimizer steps, otherwise their number."),
    "optim": OneOf(("adamw", "adamw_8bit", "muon", "sgd", "adafactor", "lion")),
    "weight_decay": Number("[0, inf)"),
    "adam_beta1": Number("[0, 1)"),
    "adam_beta2": Number("[0, 1)"),
    "adam_epsilon": Number("(0, inf)"),
    "max_grad_norm": Number("(0, inf)", optional=True),
    "num_epochs": Number("[1, inf)", whole=True),
    "num_mini_batches": Number("[1, inf)", whole=True),
    "micro_batch_tokens": Number("[1, inf)", whole=True, optional=True, word="auto"),
    "memory_limit_gb": Number("(0, inf)", optional=True),
    "dtype": OneOf(("float32", "bfloat16", "auto")),
    "rollout_dtype": OneOf(("auto", "float32", "bfloat16")),
    "sampling_correction": Number("[1, inf)", optional=True, hint="Usual: 2, or unset for no weight."),
    "prompts_per_step": Number("[1, inf)", whole=True),
    "num_generations": Number("[1, inf)", whole=True),
    "max_completion_length": Number("[1, inf)", whole=True),
    "min_completion_length": Number("[0, inf)", whole=True),
    "temperature": Number("(0, inf)", hint="Training needs samples with a density: use a small value for near-greedy."),
    "top_p": Number("(0, 1]", hint="1 turns it off."),
    "top_k": Number("[0, inf)", whole=True, hint="0 turns it off."),
    "min_p": Number("[0, 1)", hint="0 turns it off."),
    "repetition_penalty": Number("(0, inf)", hint="1 turns it off."),
    "stop_strings": ListOf(OfType(str)),
    "stop_token_ids": ListOf(Number("[0, inf)", whole=True)),
    "rollout_engine": OneOf(("auto", "native", "transformers", "vllm")),
    "max_steps": Number("[1, inf)", whole=True, optional=True),
    "num_train_epochs": Number("(0, inf)", optional=True),
    "max_prompt_length": Number("[1, inf)", whole=True, optional=True),
    "overlong_prompts": OneOf(("error", "drop", "cut_left")),
    "seed": Number("[0, 4294967295]", whole=True),
    "reward_weights": ListOf(Number("(-inf, inf)"), optional=True),
    "scale_rewards": OneOf(("group", "batch", "running", "none")),
    "reward_clip": ListOf(Number("(-inf, inf)"), optional=True, length=2),
    "reward_timeout": Number("(0, inf)", optional=True),
    "on_reward_error": OneOf(("raise", "unscored")),
    "missing_eos_penalty": Number("[0, inf)", optional=True, hint="It is subtracted, so give it as a positive number."),
    "length_penalty": Number("[0, inf)", optional=True, hint="It is subtracted, so give it as a positive number."),
    "target_update": OneOf(("ema", "copy")),
    "ema_decay": Number(
        "(0, 1)",
        hint="At 1 the target would never update; at 0 it would be the online policy. Use 0.9 to 0.999, or "
        "target_update='copy' with target_update_every for a periodic copy.",
    ),
    "target_update_every": Number("[1, inf)", whole=True),
    "kl_reference": OneOf(("auto", "ref", "old", "target")),
    "kl_estimator": OneOf(("k1", "k2", "k3", "exact")),
    "kl_control": OneOf(("fixed", "adaptive")),
    "target_kl": Number("(0, inf)", optional=True),
    "kl_horizon": Number("[1, inf)", whole=True),
    "stop_kl": Number("(0, inf)", optional=True),
    "ratio_threshold": Number("(1, inf)", optional=True, hint="On the sampling policy itself the ratio is 1."),
    "entropy_coef": Number("[0, inf)"),
    "save_steps": Number("[1, inf)", whole=True, optional=True),
    "save_total_limit": Number("[1, inf)", whole=True, optional=True),
    "eval_steps": Number("[1, inf)", whole=True, optional=True),
    "eval_num_prompts": Number("[1, inf)", whole=True, optional=True),
    "num_generations_eval": Number("[1, inf)", whole=True),
    "report_to": ListOf(OneOf(("tensorboard", "wandb", "trackio"))),
    "logging_steps": Number("[1, inf)", whole=True),
}


@dataclass
class OnlineRLConfig(
    TRLNames, RunFields, PolicyFields, RewardFields, DataFields, RolloutFields, ModelFields, OptimisationFields
):
    """Settings of `OnlineRLTrainer`, shared by every algorithm. Everything is checked when the config is made.

    Raises:
        ConfigError: (a ValueError) a value is out of range, or two settings contradict each other. The message names
            the field, the value, what is allowed, and the fix.
    """

    rules: ClassVar[dict[str, Rule]] = SHARED_RULES
    """What a field must satisfy beyond its type. A config of your own adds to it: `{**OnlineRLConfig.rules, ...}`."""
    kl_weights: ClassVar[tuple[str, ...]] = ()
    """Fields that weigh KL to the reference policy, if the algorithm has such a term."""
    group_baseline: ClassVar[str] = ""
    """What the algorithm compares a completion with the rest of its group for; empty if it does not."""
    reward_scales: ClassVar[tuple[str, ...]] = ("none", "group", "batch")
    """Values of scale_rewards that the algorithm has a meaning for."""
    trl_renamed: ClassVar[dict[str, str]] = {}
    """TRL names of this algorithm's own fields, to ours."""
    trl_valued: ClassVar[dict[str, dict[Any, tuple[str, Any] | None]]] = {}
    """TRL names whose values are other values of a field of ours: name, to value, to field and value, or to None for a
    value that asks for nothing."""

    greater_is_better: ClassVar[bool] = True
    """`metric_for_best_model` is better when it is higher; callbacks of transformers read this."""

    notes: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """What became of options that were mapped, and settings worth a second look."""

    def __post_init__(self) -> None:
        check_declaration(type(self), SHARED_RULES)
        self._normalise()
        self.notes = map_trl_names(self, self.trl_renamed, self.trl_valued)
        for item in fields(self):
            rule = self.rules.get(item.name) or rule_for(item.type)
            if rule is not None:
                setattr(self, item.name, rule.check(item.name, getattr(self, item.name)))
        self.check()
        if self.max_steps is None and self.num_train_epochs is None:
            self.num_train_epochs = 1.0

    def check(self) -> None:
        """Settings that must agree with each other. A subclass extends it and calls this one."""
        self._check_rollout()
        self._check_policies()
        if self.memory_limit_gb is not None and self.micro_batch_tokens != "auto":
            self.notes.append(
                f"memory_limit_gb={self.memory_limit_gb:g} has no effect: only micro_batch_tokens='auto' "
                f"is chosen by it, and it is {self.micro_batch_tokens}."
            )
        if (self.metric_for_best_model or "").startswith("eval_") and self.eval_steps is None:
            raise ConfigError(
                f"metric_for_best_model={self.metric_for_best_model!r} needs eval_steps, which is unset. "
                "Set eval_steps to the number of steps between evaluations."
            )

    def check_length(self, max_steps: int) -> None:
        """Settings that must agree with the run's number of training steps, once that is known."""

    @property
    def completions_per_step(self) -> int:
        """Completions sampled in one training step, over all processes."""
        return self.prompts_per_step * self.num_generations

    @property
    def reference_slot(self) -> Literal["ref", "old", "target"]:
        """The policy slot that KL is measured against, with "auto" resolved."""
        if self.kl_reference == "auto":
            return "target" if self.use_target_policy else "ref"
        return self.kl_reference  # type: ignore[return-value]

    def to_dict(self) -> dict[str, Any]:
        """Every setting by name, without the TRL names (which are None by now) and the notes."""
        mapped = {item.name for item in fields(TRLNames)} | {"notes"} | {*self.trl_renamed, *self.trl_valued}
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in mapped}

    def _normalise(self) -> None:
        """Other ways in which TRL and transformers write a value of the same field."""
        self.dtype = str(self.dtype).removeprefix("torch.")
        self.output_dir = str(self.output_dir)
        schedule = getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type)
        self.lr_scheduler_type = {"constant_with_warmup": "constant"}.get(schedule, schedule)
        optimizer = getattr(self.optim, "value", self.optim)
        ours = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_bnb_8bit": "adamw_8bit"}
        self.optim = ours.get(optimizer, optimizer)
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        if self.report_to in ("none", ["none"], ("none",), None):
            self.report_to = ()
        if self.max_steps == -1:
            self.max_steps = None
        if self.save_steps == 0:
            self.save_steps = None
        if self.min_p is None:
            self.min_p = 0.0
        if self.top_k is None:
            self.top_k = 0
        if self.num_generations_eval is None:
            self.num_generations_eval = 1
        if self.max_grad_norm == 0:
            self.max_grad_norm = None

    def _check_rollout(self) -> None:
        if self.group_baseline and self.num_generations < 2:
            raise ConfigError(
                f"num_generations must be 2 or more because {self.group_baseline}: got {self.num_generations}. "
                "Use num_generations=2 or more, or PPO (PPOConfig), which learns its baseline and takes 1."
            )
        if self.scale_rewards == "group" and self.num_generations < 2:
            raise ConfigError(
                f"scale_rewards='group' needs num_generations of 2 or more: got {self.num_generations}. "
                "Use scale_rewards='batch' or 'none'."
            )
        if self.stop_kl is not None and self.num_epochs == 1:
            self.notes.append(f"stop_kl={self.stop_kl} has no effect: num_epochs=1 leaves no epoch to skip.")
        if self.scale_rewards not in self.reward_scales:
            known = " or ".join(map(repr, self.reward_scales))
            raise ConfigError(
                f"{type(self).__name__} does not scale rewards in this way: scale_rewards={self.scale_rewards!r}. "
                f"Use {known}, or another algorithm."
            )
        if self.min_completion_length > self.max_completion_length:
            raise ConfigError(
                f"min_completion_length={self.min_completion_length} is above "
                f"max_completion_length={self.max_completion_length}. Lower one or raise the other."
            )
        if self.num_mini_batches > self.completions_per_step:
            raise ConfigError(
                f"num_mini_batches={self.num_mini_batches} is more than the {self.completions_per_step} completions of "
                f"a step (prompts_per_step * num_generations). Use {self.completions_per_step} or fewer."
            )
        if self.reward_clip is not None and self.reward_clip[0] >= self.reward_clip[1]:
            raise ConfigError(f"reward_clip must be (low, high) with low < high: got {self.reward_clip}.")

    def _check_policies(self) -> None:
        if self.kl_reference == "target" and not self.use_target_policy:
            raise ConfigError(
                "kl_reference='target' needs a target policy, and use_target_policy=False. Set use_target_policy=True."
            )
        if self.kl_control == "adaptive":
            if self.target_kl is None:
                raise ConfigError("kl_control='adaptive' needs target_kl, which is unset. Set target_kl, such as 6.0.")
            if not self.kl_weights or not getattr(self, self.kl_weights[0]):
                named = next(iter(self.kl_weights), "a KL coefficient, which this algorithm does not have")
                raise ConfigError(f"kl_control='adaptive' scales {named}, which is 0. Use kl_control='fixed'.")
        elif self.target_kl is not None:
            raise ConfigError(
                f"target_kl={self.target_kl} is what kl_control='adaptive' steers to, and kl_control is 'fixed'. Set "
                "kl_control='adaptive', or stop_kl to end a rollout's epochs at some KL."
            )
        if self.use_target_policy and self.kl_weights and not self._target_is_used():
            named = " and ".join(f"{name}={getattr(self, name)}" for name in self.kl_weights)
            raise ConfigError(
                f"use_target_policy=True keeps a target policy that nothing uses: {named}, "
                f"kl_reference={self.kl_reference!r}. Set {self.kl_weights[0]} above 0 with kl_reference='auto', or "
                "use_target_policy=False."
            )

    @property
    def kl_weight(self) -> float:
        """The largest weight on KL to the reference policy; 0 if the algorithm has none or it is off."""
        return max((float(getattr(self, name)) for name in self.kl_weights), default=0.0)

    def _target_is_used(self) -> bool:
        return self.kl_weight > 0 and self.reference_slot == "target"
