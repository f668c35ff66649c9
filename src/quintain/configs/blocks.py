"""The shared settings in blocks: optimisation, model, rollout, data, rewards, policies, run.

The docstring under a field is its only documentation; `quintain train --help` and the reference page show it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class OptimisationFields:
    """How the weights move."""

    learning_rate: float = 1e-5
    """Peak learning rate of the policy. 1e-6 to 1e-4 is usual; adapters (LoRA) take the upper end."""
    lr_scheduler_type: str = "linear"
    """Shape of the learning rate after warm-up: "linear" and "cosine" fall to 0 at the last step, "constant" stays."""
    warmup_steps: float = 0
    """Optimizer steps over which the learning rate rises from 0; below 1, a fraction of all optimizer steps."""
    optim: str = "adamw"
    """Optimizer: "adamw", "adamw_8bit" (needs bitsandbytes), "muon", "sgd", "adafactor" or "lion"."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    adam_beta1: float = 0.9
    """Decay of the first moment, for optimizers of the Adam family."""
    adam_beta2: float = 0.999
    """Decay of the second moment, for optimizers of the Adam family."""
    adam_epsilon: float = 1e-8
    """Term that keeps Adam's division finite."""
    max_grad_norm: float | None = 1.0
    """Norm to which the gradient of the whole policy is clipped; unset leaves it as it is."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a fifth more time."""
    num_epochs: int = 1
    """How many times one rollout is used. Not passes over the dataset: see num_train_epochs."""
    num_mini_batches: int = 1
    """Optimizer steps in one pass over a rollout. Parts may differ in size by one unit."""
    micro_batch_tokens: int | str | None = None
    """Tokens whose activations are held at once, a group's prompt counted once where its completions share it. Changes
    memory and speed, and no gradient. "auto" chooses as many as memory_limit_gb leaves room for. Unset: on a CPU
    as many as take about 1 GiB, from 512 to 8192, and 8192 on a GPU."""
    memory_limit_gb: float | None = None
    """Peak memory of an update, in GiB, that micro_batch_tokens="auto" stays below: of this process, or on its GPU.
    Unset: what is in use when the trainer is built, and 80% of what is free then."""


@dataclass
class ModelFields:
    """How a model named by text is loaded, and in which precision it computes."""

    dtype: str = "float32"
    """Precision of the forward pass: "float32", or "bfloat16" for autocast over float32 weights. "auto" is bfloat16
    where the accelerator computes in it, else float32."""
    model_init_kwargs: dict[str, Any] | None = None
    """Keyword arguments for `from_pretrained`, when the model is given by name."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model or dataset. Only for sources you have read."""


@dataclass
class RolloutFields:
    """What is sampled, and how."""

    prompts_per_step: int = 8
    """Distinct prompts of one training step, over all processes."""
    num_generations: int = 8
    """Completions sampled for each prompt."""
    max_completion_length: int = 256
    """Most new tokens of a completion."""
    min_completion_length: int = 0
    """Fewest new tokens before a completion may stop."""
    temperature: float = 1.0
    """Sampling temperature, also applied to every log-probability. Higher explores more."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability; 1 is off."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest one; 0 is off."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that already appear are made less likely; 1 is off."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion; the text itself is kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, besides the tokenizer's end-of-sequence token."""
    rollout_engine: str = "auto"
    """What samples: "native", "transformers" or "vllm"; "auto" is native for models that it can run."""
    rollout_dtype: str = "auto"
    """Precision of the native engine's matrix products while it samples: "float32" or "bfloat16"; "auto" is that of the
    forward pass (dtype)."""
    sampling_correction: float | None = 2.0
    """Where sampling or the forward pass is in half precision, tokens are drawn from a slightly other policy than the
    one that is trained. Each token's gradient is then weighted by its probability under the trainer's forward pass over
    the one it was sampled with, up to this much; unset is no such weight."""


@dataclass
class DataFields:
    """Which prompts, in which order, for how long."""

    max_steps: int | None = None
    """Training steps (rollouts). Unset: as many as num_train_epochs takes. Set: wins over num_train_epochs."""
    num_train_epochs: float | None = None
    """Passes over the prompts when max_steps is unset; 1 when both are."""
    shuffle: bool = True
    """Draw prompts in a seeded random order, a new one each pass. Off for a curriculum sorted from easy to hard."""
    max_prompt_length: int | None = None
    """Most tokens of a prompt; unset means what the model's context leaves beside max_completion_length."""
    overlong_prompts: str = "error"
    """For longer prompts: "error", "drop" (counted and reported), or "cut_left" (keep the end)."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Keyword arguments for the tokenizer's chat template, such as {enable_thinking: false}."""
    system_prompt: str | None = None
    """System message put before chat prompts that have none. Plain text prompts become a user message after it."""
    seed: int = 42
    """Seed of weights that are made, of the prompt order and of sampling."""


@dataclass
class RewardFields:
    """What happens to rewards between the functions and the algorithm."""

    reward_weights: tuple[float, ...] | None = None
    """Weight of each reward function in the total; unset: 1 each."""
    scale_rewards: str = "none"
    """Divide rewards by the standard deviation of their "group", of the "batch", or not at all ("none")."""
    reward_clip: tuple[float, float] | None = None
    """Lowest and highest total reward; those outside are set to the end and counted."""
    reward_timeout: float | None = None
    """Seconds that one call of a reward function may take."""
    on_reward_error: str = "raise"
    """When a reward function fails: "raise", or "unscored" to leave that completion out of the step."""
    missing_eos_penalty: float | None = None
    """Subtracted from the reward of a completion that was cut off at max_completion_length."""
    length_penalty: float | None = None
    """Subtracted from the reward in proportion to length: this much at max_completion_length."""
    mask_truncated_completions: bool = False
    """Keep completions that were cut off out of the loss."""


@dataclass
class PolicyFields:
    """The target policy, and the restraint towards a reference policy."""

    use_target_policy: bool = False
    """Keep a slowly moving copy of the policy, and measure KL against it."""
    target_update: str = "ema"
    """How the target moves: "ema" (a weighted mean with the online policy) or "copy" (becomes the online policy)."""
    ema_decay: float = 0.99
    """Share of its old value that the target keeps at an update, with target_update="ema". Strictly between 0 and 1:
    at 1 the target would never update, at 0 it would be the online policy."""
    target_update_every: int = 1
    """Optimizer steps between updates of the target."""
    kl_reference: str = "auto"
    """The policy that KL is measured against: "ref" (the model passed in), "old" (the policy that sampled) or "target"
    (the moving copy). "auto" is the target where use_target_policy is on, else the model passed in."""
    kl_estimator: str = "k2"
    """How KL is estimated: "k1" is the log-ratio, "k2" half its square, "k3" exp(-x) - 1 + x, "exact" sums over the
    vocabulary. In a loss, k2 has the gradient of KL(online || reference); k1 has an expected gradient of zero, so that
    its coefficient adds noise and no restraint. In a reward, k1 is the unbiased choice."""
    kl_control: str = "fixed"
    """Whether the KL coefficient is "fixed" or "adaptive": raised while KL is above target_kl, lowered while below."""
    target_kl: float | None = None
    """KL a completion, in nats, that adaptive control steers to."""
    kl_horizon: int = 10000
    """Completions over which adaptive control acts; smaller is quicker."""
    stop_kl: float | None = None
    """Mean KL a token from the sampling policy at which a rollout's remaining epochs are skipped; unset is never."""
    ratio_threshold: float | None = None
    """Mean probability ratio of a mini-batch, online over sampling policy, above which its update is left out, with a
    warning. Clipping bounds what a token earns and not what the loss may do on average; unset is never."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus in the loss."""


@dataclass
class RunFields:
    """Where a run is kept, and what is reported of it."""

    output_dir: str = "runs/run"
    """The run's folder."""
    save_steps: int | None = 50
    """Steps between checkpoints; 0 or unset keeps only what the end or an interruption writes."""
    save_total_limit: int | None = None
    """Checkpoints to keep, newest first (and the best, with metric_for_best_model); unset keeps all."""
    eval_steps: int | None = None
    """Steps between evaluations on the evaluation prompts; unset is never."""
    eval_num_prompts: int | None = None
    """Evaluation prompts to use, the first ones; unset is all."""
    num_generations_eval: int = 1
    """Completions sampled for each evaluation prompt."""
    metric_for_best_model: str | None = None
    """Metric whose highest value marks the checkpoint to keep, such as "reward" or "eval_reward"."""
    report_to: tuple[str, ...] = ()
    """Trackers besides the run's own files: any of "tensorboard", "wandb", "trackio"."""
    run_name: str | None = None
    """Name of the run in trackers; unset is the name of its folder."""
    logging_steps: int = 1
    """Steps between console lines and tracker entries. metrics.jsonl has every step."""
    log_completions: bool = True
    """Write each step's completions to completions.jsonl and show one on the console."""
