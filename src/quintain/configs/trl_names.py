"""Options that a script written for TRL may pass, and what they are called here.

Every option is mapped, noted as having no effect, or refused with the way to get the same thing. After mapping each is
None again, so that a config holds one name for one thing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class TRLNames:
    """Names accepted from TRL's GRPO, RLOO and PPO configs; all None once the config is built."""

    # The batch: completions a device and counts of steps, instead of prompts_per_step.
    per_device_train_batch_size: int | None = None
    """From TRL: completions a device takes in one backward pass. Mapped to prompts_per_step."""
    gradient_accumulation_steps: int | None = None
    """From TRL: backward passes of one optimizer step. Mapped to prompts_per_step."""
    steps_per_generation: int | None = None
    """From TRL: backward passes served by one rollout. Mapped to prompts_per_step and num_mini_batches."""
    generation_batch_size: int | None = None
    """From TRL: completions of one rollout over all devices. Mapped to prompts_per_step."""
    batch_size: int | None = None
    """From TRL's first PPO: completions of one rollout. Mapped to prompts_per_step."""
    mini_batch_size: int | None = None
    """From TRL's first PPO: completions of one backward pass. Mapped to num_mini_batches."""
    total_episodes: int | None = None
    """From TRL's second PPO: completions of the whole run. Mapped to max_steps."""

    # The same thing under another name.
    num_iterations: int | None = None
    """From TRL: num_epochs."""
    ppo_epochs: int | None = None
    """From TRL: num_epochs."""
    num_ppo_epochs: int | None = None
    """From TRL: num_epochs."""
    exp_name: str | None = None
    """From TRL: run_name."""
    response_length: int | None = None
    """From TRL: max_completion_length."""
    shuffle_dataset: bool | None = None
    """From TRL: shuffle."""
    reward_clip_range: tuple[float, float] | None = None
    """From TRL: reward_clip."""
    warmup_ratio: float | None = None
    """From TRL: warmup_steps, as a fraction of all steps."""
    log_with: str | None = None
    """From TRL: report_to."""

    # One value of one of our fields.
    bf16: bool | None = None
    """From TRL: dtype="bfloat16"."""
    use_vllm: bool | None = None
    """From TRL: rollout_engine="vllm"."""
    save_strategy: str | None = None
    """From TRL: "no" turns save_steps off."""
    eval_strategy: str | None = None
    """From TRL: "no" turns eval_steps off."""
    sync_ref_model: bool | None = None
    """From TRL: use_target_policy, with the two fields below."""
    ref_model_mixup_alpha: float | None = None
    """From TRL: 1 - ema_decay; 1 is target_update="copy"."""
    ref_model_sync_steps: int | None = None
    """From TRL: target_update_every."""

    # No effect here.
    stop_token: str | None = None
    """From TRL: no effect."""
    local_rollout_forward_batch_size: int | None = None
    """From TRL: no effect."""
    optimize_cuda_cache: bool | None = None
    """From TRL: no effect."""
    disable_tqdm: bool | None = None
    """From TRL: no effect."""
    remove_unused_columns: bool | None = None
    """From TRL: no effect."""
    per_device_eval_batch_size: int | None = None
    """From TRL: no effect."""
    num_sample_generations: int | None = None
    """From TRL: no effect."""
    num_completions_to_print: int | None = None
    """From TRL: no effect."""
    logging_first_step: bool | None = None
    """From TRL: no effect."""
    log_on_each_node: bool | None = None
    """From TRL: no effect."""
    disable_dropout: bool | None = None
    """From TRL: no effect; dropout is always off."""
    dataloader_num_workers: int | None = None
    """From TRL: no effect."""
    ds3_gather_for_generation: bool | None = None
    """From TRL: no effect."""
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    """From TRL: no effect."""
    overwrite_output_dir: bool | None = None
    """From TRL: no effect."""
    do_train: bool | None = None
    """From TRL: no effect."""
    do_eval: bool | None = None
    """From TRL: no effect."""
    logging_dir: str | None = None
    """From TRL: no effect."""
    dataloader_drop_last: bool | None = None
    """From TRL: no effect."""

    # Refused unless switched off.
    fp16: bool | None = None
    """From TRL: refused."""
    push_to_hub: bool | None = None
    """From TRL: refused."""
    load_best_model_at_end: bool | None = None
    """From TRL: refused."""
    generation_kwargs: dict[str, Any] | None = None
    """From TRL: refused."""
    use_liger_kernel: bool | None = None
    """From TRL: refused."""
    auto_find_batch_size: bool | None = None
    """From TRL: refused."""
    resume_from_checkpoint: str | bool | None = None
    """From TRL: refused."""
    deepspeed: Any = None
    """From TRL: refused."""
    fsdp: Any = None
    """From TRL: refused."""
    top_entropy_quantile: float | None = None
    """From TRL: refused."""
    use_cpu: bool | None = None
    """From TRL: refused."""
    data_seed: int | None = None
    """From TRL: refused."""
    lr_scheduler_kwargs: dict[str, Any] | None = None
    """From TRL: refused."""
    torch_compile: bool | None = None
    """From TRL: refused."""
    logging_strategy: str | None = None
    """From TRL: refused, but for "steps"."""
    multi_objective_aggregation: str | None = None
    """From TRL: refused, but for "sum_then_normalize"."""
    vllm_mode: str | None = None
    """From TRL: refused."""
    vllm_gpu_memory_utilization: float | None = None
    """From TRL: refused."""
    vllm_server_host: str | None = None
    """From TRL: refused."""
    vllm_server_port: int | None = None
    """From TRL: refused."""


RENAMED = {
    "exp_name": "run_name",
    "num_iterations": "num_epochs",
    "ppo_epochs": "num_epochs",
    "num_ppo_epochs": "num_epochs",
    "response_length": "max_completion_length",
    "shuffle_dataset": "shuffle",
    "reward_clip_range": "reward_clip",
    "warmup_ratio": "warmup_steps",
    "log_with": "report_to",
}

NO_EFFECT = {
    "stop_token": "the end-of-sequence token always stops a completion",
    "local_rollout_forward_batch_size": "forward passes are cut by micro_batch_tokens",
    "optimize_cuda_cache": "micro_batch_tokens bounds memory",
    "disable_tqdm": "progress is drawn on a terminal only",
    "remove_unused_columns": "every dataset column reaches the reward functions",
    "per_device_eval_batch_size": "evaluation is cut by micro_batch_tokens",
    "num_sample_generations": "completions of every step are in completions.jsonl",
    "num_completions_to_print": "completions of every step are in completions.jsonl",
    "logging_first_step": "the first step is always logged",
    "log_on_each_node": "only the first process logs",
    "disable_dropout": "dropout is always off, so that the ratio of the first update is 1",
    "dataloader_num_workers": "prompts are tokenised once, before training",
    "ds3_gather_for_generation": "accelerate decides how weights are gathered",
    "overwrite_output_dir": "an earlier run in the folder is moved aside, never overwritten",
    "do_train": "call train()",
    "do_eval": "call evaluate(), or set eval_steps",
    "logging_dir": "everything is written into output_dir",
    "dataloader_drop_last": "a step straddles passes over the data, so that no prompt is lost",
    "gradient_checkpointing_kwargs": "checkpointing is always the non-reentrant kind",
}

REFUSED = {
    "fp16": "Use bf16=True or dtype='bfloat16', which needs no loss scaling.",
    "push_to_hub": "Upload the run's model/ folder with `hf upload` when training is done.",
    "load_best_model_at_end": "Set metric_for_best_model and load the checkpoint that it keeps.",
    "generation_kwargs": "Set temperature, top_p, top_k, min_p, repetition_penalty, stop_strings or stop_token_ids.",
    "use_liger_kernel": "Pass a model that has the kernels applied.",
    "auto_find_batch_size": "Set micro_batch_tokens, which changes memory and no gradient.",
    "resume_from_checkpoint": "Call trainer.train(resume_from=RUN), or `quintain train --resume RUN`.",
    "deepspeed": "Configure it with `accelerate config` and start with `accelerate launch`.",
    "fsdp": "Configure it with `accelerate config` and start with `accelerate launch`.",
    "top_entropy_quantile": "No trainer here masks tokens by entropy; override `loss` in a subclass.",
    "use_cpu": "Set ACCELERATE_USE_CPU=true in the environment.",
    "data_seed": "seed decides the order of the prompts too.",
    "lr_scheduler_kwargs": "Pass a schedule of your own: optimizers=(optimizer, schedule).",
    "torch_compile": "Pass a compiled model.",
    "logging_strategy": "Set logging_steps.",
    "multi_objective_aggregation": "Rewards are weighted, summed, then normalised.",
    "vllm_mode": "Set rollout_engine.",
    "vllm_gpu_memory_utilization": "Set rollout_engine.",
    "vllm_server_host": "Set rollout_engine.",
    "vllm_server_port": "Set rollout_engine.",
}
