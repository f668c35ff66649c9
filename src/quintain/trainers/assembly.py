"""From a trainer's arguments to the parts of a run. Whatever can be refused is refused before the model loads."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn

from quintain.checkpoints.state import Generators
from quintain.configs.shared import OnlineRLConfig
from quintain.data import PromptFormat, PromptSampler, load_dataset_reference
from quintain.errors import ConfigError
from quintain.kl.controllers import AdaptiveKLController, FixedKLController
from quintain.policies.forward import ActorCritic
from quintain.policies.loading import ensure_pad_token, load_model
from quintain.policies.memory import GIB, SHARE_OF_FREE, Lengths, activation_cost, free_bytes, token_budget, used_bytes
from quintain.policies.policies import Policies
from quintain.policies.slots import TargetUpdate
from quintain.policies.value_head import SharedValueHead
from quintain.rewards import RewardPipeline
from quintain.rollout.engine import make_engine, resolve_stop_token_ids, validate_sampling
from quintain.rollout.native import NativeEngine
from quintain.trainers.models import ModelAssembly
from quintain.trainers.optim import build_optimization, require_optimizer, state_bytes
from quintain.types import SamplingParams

if TYPE_CHECKING:
    from quintain.trainers.base import OnlineRLTrainer

_log = logging.getLogger(__name__)

ENDLESS = 10**9
"""Steps of a run that is driven by hand: no end is known, so that a falling learning rate in effect stays."""

LEAST_TOKENS, MOST_TOKENS = 512, 8192
"""Tokens of a micro-batch unless the config says: on a CPU those of about 1 GiB of activations, on a GPU most."""
NUMBERS_A_UNIT = 20
"""Activations kept of a token and layer, for each unit of width: measured on Llama models in float32."""
GENERATORS = ("rollout", "minibatch", "eval", "init")


class Assembly(ModelAssembly):
    """Builds, in this order: rewards and data checks, model and tokenizer, policies, optimizer, engine.

    Every attribute is a part that the trainer takes over.
    """

    def __init__(
        self,
        trainer: OnlineRLTrainer,
        *,
        model: Any,
        reward_funcs: Any,
        train_dataset: Any,
        eval_dataset: Any,
        processing_class: Any,
        reward_processing_classes: Any,
        optimizers: tuple[Any, Any],
        peft_config: Any,
        ref_model: Any,
        value_model: Any,
    ) -> None:
        config = self.config = trainer.config
        if value_model is not None and getattr(config, "detach_value_head", False):
            raise ConfigError(
                "detach_value_head=True concerns a head on the policy's own backbone, and value_model was passed to "
                "the trainer. Leave one of them out."
            )
        if optimizers[0] is not None:
            _refuse_value_rates(config)
        else:
            require_optimizer(config.optim)
        if config.eval_steps and eval_dataset is None:
            raise ConfigError(
                f"eval_steps={config.eval_steps} asks for evaluation, but eval_dataset is missing. Pass eval_dataset, "
                f"or leave eval_steps unset."
            )
        train_dataset = None if train_dataset is None else load_dataset_reference(train_dataset)
        eval_dataset = None if eval_dataset is None else load_dataset_reference(eval_dataset)
        for note in config.notes:
            _log.warning("note: %s", note)
        self.generators = Generators(config.seed, GENERATORS)
        self.accelerator = _accelerator(
            mixed_precision=_mixed_precision(config.dtype),
            log_with=list(config.report_to) or None,
            project_dir=config.output_dir,
        )
        self.reward = self._rewards(reward_funcs, reward_processing_classes, train_dataset)
        if self.reward is not None and config.eval_steps:
            self.reward.check_columns(getattr(eval_dataset, "column_names", None))
        self.tokenizer = ensure_pad_token(processing_class or self._load_tokenizer(model))
        self.prompts = self._sampler(train_dataset, shuffle=config.shuffle)
        self.eval_prompts = self._sampler(eval_dataset, shuffle=False)
        self.max_steps = self._max_steps(self.prompts)
        config.check_length(self.max_steps)
        longest_prompt = self._longest_prompt() if config.micro_batch_tokens == "auto" else 0

        self._reference = model
        self.model = self._wrap_peft(self._load_model(model), peft_config)
        self.value_model = self._start_value_model(
            value_model if value_model is not None else getattr(config, "value_model", None)
        )
        if config.gradient_checkpointing:
            self._checkpoint_activations()
        self.policies = self._policies(trainer, ref_model)
        if config.micro_batch_tokens == "auto":
            self._size_micro_batches(longest_prompt, together=trainer.unit == "group")
        self.optimizer = build_optimization(
            config, self.policies.parameters, max_steps=self.max_steps, given=optimizers
        )
        self.sampling = self._sampling()
        self.engine = make_engine(
            config.rollout_engine, self.model, self.tokenizer, dtype=torch.bfloat16 if self._samples_in_half() else None
        )
        if isinstance(self.value_model, SharedValueHead) and isinstance(self.engine, NativeEngine):
            self.engine.critic = self.value_model.read

    @property
    def _half(self) -> bool:
        """Whether forward passes are in half precision."""
        return _mixed_precision(self.config.dtype) != "no"

    def _samples_in_half(self) -> bool:
        wanted = self.config.rollout_dtype
        return self._half if wanted == "auto" else wanted == "bfloat16"

    # ---- data and rewards ---------------------------------------------------------------------------------------

    def _rewards(self, reward_funcs: Any, tokenizers: Any, dataset: Any) -> RewardPipeline | None:
        if reward_funcs is None:
            return None
        config = self.config
        return RewardPipeline(
            reward_funcs,
            weights=config.reward_weights,
            columns=getattr(dataset, "column_names", None),
            processing_classes=tokenizers,
            on_reward_error=config.on_reward_error,
            reward_timeout=config.reward_timeout,
            reward_clip=config.reward_clip,
        ).to(self.accelerator.device)

    def _sampler(self, dataset: Any, *, shuffle: bool) -> PromptSampler | None:
        if dataset is None:
            return None
        config, processes = self.config, self.accelerator.num_processes
        if config.prompts_per_step % processes:
            raise ConfigError(
                f"prompts_per_step={config.prompts_per_step} must be a multiple of the {processes} processes. "
                f"Use {(config.prompts_per_step // processes + 1) * processes}."
            )
        return PromptSampler(
            dataset,
            PromptFormat(
                self.tokenizer,
                max_prompt_length=config.max_prompt_length,
                overlong_prompts=config.overlong_prompts,  # type: ignore[arg-type]
                chat_template_kwargs=config.chat_template_kwargs,
                system_prompt=config.system_prompt,
            ),
            prompts_per_step=config.prompts_per_step,
            shuffle=shuffle,
            seed=config.seed,
            rank=self.accelerator.process_index,
            world_size=processes,
        )

    def _max_steps(self, prompts: PromptSampler | None) -> int:
        config = self.config
        if config.max_steps is not None:
            return config.max_steps
        if prompts is None or prompts.num_prompts is None:
            fractions = [
                f"{name}={value} (a fraction)"
                for name in ("warmup_steps", "value_lr_warmup_steps")
                if 0 < (value := getattr(config, name, None) or 0) < 1
            ]
            if prompts is None and not fractions:
                return ENDLESS
            why = "a streamed dataset" if prompts else fractions[0]
            raise ConfigError(f"max_steps must be set for {why}: the number of steps is not known otherwise.")
        return max(1, round((config.num_train_epochs or 1) * prompts.num_prompts / config.prompts_per_step))

    # ---- policies and sampling -----------------------------------------------------------------------------------

    def _policies(self, trainer: OnlineRLTrainer, ref_model: Any) -> Policies:
        config = self.config
        device = self.accelerator.device
        if self.value_model is not None:
            self.value_model.to(device)
        module = ActorCritic(self.model.to(device), self.value_model)
        if not any(value.requires_grad for value in self.model.parameters()):
            raise ConfigError(
                "no weight of the model can be trained: every parameter has requires_grad=False. An adapter that was "
                "loaded for inference does that; load it with PeftModel.from_pretrained(..., is_trainable=True)."
            )
        # Dropout off, also where a model applies it by rate: two passes over the same tokens must agree.
        module.train(config.gradient_checkpointing)
        if config.gradient_checkpointing:
            _zero_dropout(module)
        exact = config.kl_estimator == "exact" and config.kl_weight > 0
        trainer.kl_controller = self.kl_controller = _kl_controller(config)  # `slots` may ask for the coefficient
        slots = set(trainer.slots)
        if "old" in slots and not exact:
            slots.discard("old")  # its recorded log-probabilities are all that is read of it
        policies = Policies(
            module,
            slots=slots,  # type: ignore[arg-type]
            temperature=config.temperature,
            micro_batch_tokens=_tokens_at_once(config, self.model, device),
            target_update=TargetUpdate(
                decay=config.ema_decay if config.target_update == "ema" else None, every=config.target_update_every
            ),
            exact_kl_to=config.reference_slot if exact else None,  # type: ignore[arg-type]
            exact_kl_in_loss=trainer.kl_loss_coef > 0,
            entropy_gradient=config.entropy_coef != 0,
            target_values=getattr(config, "target_values", False),
            autocast=self.accelerator.autocast,
            sampling_correction=config.sampling_correction if self._samples_in_half() or self._half else None,
        )
        if ref_model is not None:
            _copy_reference(policies, ref_model, self.config, self._init_kwargs(ref_model))
        return policies

    def _longest_prompt(self) -> int:
        """Tokens of the longest prompt that can be drawn."""
        limit = self.config.max_prompt_length
        survey = None if self.prompts is None else self.prompts.survey
        if survey is not None:
            longest = max(survey.lengths[row] for row in survey.kept)
            return longest if limit is None else min(longest, limit)
        if limit is None:
            raise ConfigError(
                f"micro_batch_tokens='auto' must know how long prompts can be, and "
                f"{'a streamed dataset' if self.prompts else 'a run without train_dataset'} does not tell. Set "
                f"max_prompt_length, or micro_batch_tokens to a number."
            )
        return limit

    def _size_micro_batches(self, longest_prompt: int, *, together: bool) -> None:
        """Give an update as many tokens at once as memory has room for: the same number in every process."""
        config, policies, device = self.config, self.policies, self.accelerator.device
        lengths = Lengths(
            prompt=longest_prompt,
            completion=config.max_completion_length,
            group=config.num_generations,
            shared=policies.module.shares_prompts,
            together=together,
            prompts=config.prompts_per_step // self.accelerator.num_processes,
        )
        cost = activation_cost(
            policies.online,
            policies.module,
            layers=self.model.config.get_text_config().num_hidden_layers,
            checkpointing=config.gradient_checkpointing,
            longest=lengths.sequence,
        )
        used = used_bytes(device, policies.module)
        if config.memory_limit_gb is None:
            limit, setting = (
                used + SHARE_OF_FREE * free_bytes(device),
                f"{SHARE_OF_FREE:.0%} of the memory that is free",
            )
        else:
            limit, setting = config.memory_limit_gb * GIB, f"memory_limit_gb={config.memory_limit_gb:g}"
        gradients = [value.nbytes for value in policies.parameters.values()]
        # A gradient is there before it is added to the last one; that of tied embeddings comes from both ends.
        to_come = sum(gradients) + 2 * max(gradients) + state_bytes(config.optim, policies.parameters)
        budget = token_budget(cost, lengths, limit=limit, used=used, to_come=to_come, setting=setting)
        budget = int(self.accelerator.gather(torch.tensor(budget, device=device)).min())
        policies.micro_batch_tokens = budget
        _log.warning(
            "note: micro_batch_tokens='auto' is %d: it takes about %.2f MiB a token, and has %.2f GiB.",
            budget * policies.module.backbone_passes,
            cost.of(1000, lengths.width) / 1000 / 2**20,
            (limit - used - to_come) / GIB,
        )

    def _sampling(self) -> SamplingParams:
        config = self.config
        sampling = SamplingParams(
            num_generations=config.num_generations,
            max_completion_length=config.max_completion_length,
            min_completion_length=config.min_completion_length,
            stop_token_ids=tuple(resolve_stop_token_ids(self.tokenizer, self.model, config.stop_token_ids)),
            pad_token_id=self.tokenizer.pad_token_id,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty,
            stop_strings=tuple(config.stop_strings),
        )
        validate_sampling(sampling)
        return sampling


def _tokens_at_once(config: OnlineRLConfig, model: Any, device: torch.device) -> int:
    """Tokens of a micro-batch as far as settings, model and device decide; "auto" is measured later."""
    if config.micro_batch_tokens == "auto":
        return 1
    if config.micro_batch_tokens is not None:
        return int(config.micro_batch_tokens)
    if device.type != "cpu":
        return MOST_TOKENS
    sizes = model.config.get_text_config()
    token = 4 * NUMBERS_A_UNIT * sizes.hidden_size * sizes.num_hidden_layers
    return min(max(GIB // token, LEAST_TOKENS), MOST_TOKENS)


def _kl_controller(config: OnlineRLConfig) -> FixedKLController | AdaptiveKLController:
    """The coefficient that the algorithm's first KL weight starts from."""
    start = float(getattr(config, config.kl_weights[0])) if config.kl_weights else 0.0
    if config.kl_control == "adaptive":
        assert config.target_kl is not None  # the config has checked
        return AdaptiveKLController(start, target=config.target_kl, horizon=config.kl_horizon)
    return FixedKLController(start)


def _refuse_value_rates(config: OnlineRLConfig) -> None:
    """Settings of the critic's own learning rate, which a given optimizer has decided already."""
    for name in ("value_learning_rate", "value_lr_warmup_steps"):
        if getattr(config, name, None) is not None:
            raise ConfigError(
                f"{name}={getattr(config, name)} is not used where an optimizer is given. Set the rate in the "
                f"optimizer's own parameter groups, or leave optimizers out."
            )


def _accelerator(*, mixed_precision: str, **arguments: Any) -> Accelerator:
    """An accelerator of our own precision, also where an earlier trainer of this process chose another.

    Data-parallel training needs no wrapper around the model: gradients are summed once an optimizer step.
    """
    state = AcceleratorState._shared_state
    if state and state.get("_mixed_precision") != mixed_precision:
        AcceleratorState._reset_state()
    accelerator = Accelerator(mixed_precision=mixed_precision, **arguments)
    if accelerator.distributed_type not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise ConfigError(
            f"this version trains on one process or data-parallel: got {accelerator.distributed_type.value} from "
            f"accelerate's configuration. Use `accelerate launch --multi_gpu`."
        )
    return accelerator


def _mixed_precision(dtype: str) -> str:
    if dtype == "auto":
        dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"
    return {"float32": "no", "bfloat16": "bf16"}[dtype]


def _zero_dropout(module: nn.Module) -> None:
    """Training mode, which gradient checkpointing asks for, without its dropout."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("attention_dropout", "dropout", "dropout_p"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)


def _copy_reference(
    policies: Policies, ref_model: Any, config: OnlineRLConfig, init_kwargs: dict[str, Any] | None
) -> None:
    """Make the ref slot another model of the same architecture."""
    if "ref" not in policies.slots:
        settings = "".join(f"{name}={getattr(config, name)}, " for name in config.kl_weights)
        raise ConfigError(
            f"ref_model was given and nothing reads it: {settings}kl_reference={config.kl_reference!r}, "
            f"use_target_policy={config.use_target_policy}. Raise the KL weight above 0 and set kl_reference='ref', or "
            f"leave ref_model out."
        )
    if not isinstance(ref_model, nn.Module):
        ref_model = load_model(ref_model, model_init_kwargs=init_kwargs, trust_remote_code=config.trust_remote_code)
    weights = {f"language_model.{name}": value for name, value in ref_model.named_parameters()}
    slot = policies.slots["ref"]
    missing = [
        name for name, value in slot.tensors.items() if name not in weights or weights[name].shape != value.shape
    ]
    if missing:
        raise ConfigError(
            f"ref_model must have the policy's trainable parameters: it lacks {missing[0]} of the same shape "
            f"({len(missing)} in all). Pass a model of the same architecture, or leave ref_model out."
        )
    slot.load_state_dict({name: weights[name].detach() for name in slot.tensors})
