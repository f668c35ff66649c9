"""One dataclass an algorithm: its own settings, and the shared ones whose default it changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from quintain.configs.rules import Number, OneOf, Rule
from quintain.configs.shared import OnlineRLConfig
from quintain.errors import ConfigError, nearest


@dataclass
class PPOConfig(OnlineRLConfig):
    """Settings of `PPOTrainer`: a learned value baseline, clipped updates, KL as part of the reward."""

    num_generations: int = 1
    """Completions sampled for each prompt. PPO needs no group: the value model is its baseline."""
    num_epochs: int = 4
    """How many times one rollout is used."""
    kl_estimator: str = "k1"
    """How KL in the reward is estimated: "k1" (the log-ratio, unbiased, of either sign), "k2", "k3", or "exact": never
    negative, with its own gradient in the loss, since no token drawn can be credited with it."""
    kl_coef: float = 0.05
    """Weight of KL to the reference policy, subtracted from each token's reward."""
    kl_in_loss: float = 0.0
    """Weight of KL to the reference policy in the loss, besides clipping. Where kl_estimator is "k1", whose expected
    gradient in a loss is zero, the loss uses "k2", whose gradient is KL's own."""
    cliprange: float = 0.2
    """Half-width of the interval around 1 in which the probability ratio earns gradient."""
    dual_clip: float | None = None
    """For negative advantages, the ratio beyond which the gradient is cut off (above 1; 3 is usual); unset is off."""
    cliprange_value: float = 0.2
    """How far from its old prediction a value may move in the value loss."""
    vf_coef: float = 0.1
    """Weight of the value loss."""
    gamma: float = 1.0
    """Discount a token of later rewards."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation: 0 trusts the value model, 1 the observed rewards."""
    scale_rewards: str = "none"
    """Standardise scores by the mean and standard deviation of the "batch", or of all scores of the run so far
    ("running"); "none" leaves them as they are. Metrics and completions.jsonl keep the scores as they came."""
    score_clip: float | None = None
    """After scaling, scores are kept within plus and minus this. reward_clip bounds them before."""
    whiten_rewards: bool = False
    """Scale per-token rewards to unit variance over the batch, keeping their mean."""
    whiten_advantages: bool = True
    """Scale advantages to mean 0 and variance 1 over the batch's valid tokens."""
    value_model: str = "shared"
    """Where values come from: a head on the policy ("shared"); weights of its own, started from the policy's
    ("separate"); or the name of a model. Beside an adapter (LoRA), "separate" is a second adapter on the same frozen
    backbone, and otherwise a whole copy."""
    detach_value_head: bool = False
    """Keep the value loss out of the policy's weights: of a "shared" value model, only the head learns from it."""
    value_learning_rate: float | None = None
    """Learning rate of the value model or head; unset is learning_rate."""
    value_lr_warmup_steps: float | None = None
    """As warmup_steps, for the value model's learning rate; unset is warmup_steps."""
    value_max_grad_norm: float | None = None
    """Norm to which the gradient of the value model or head is clipped by itself; unset clips it with the policy's."""
    value_warmup_steps: int = 0
    """Training steps at the start in which only the value model or head learns, and the policy stands still."""
    ratio_threshold: float | None = 10.0
    """Mean probability ratio of a mini-batch, online over sampling policy, above which its update is left out, with a
    warning; unset is never."""
    target_values: bool = False
    """Let the EMA target policy supply the values of GAE (with use_target_policy); it then holds the critic too."""

    # Names from TRL; None once the config is built.
    beta: float | None = None
    """From TRL: kl_coef."""
    init_kl_coef: float | None = None
    """From TRL: kl_coef."""
    horizon: int | None = None
    """From TRL: kl_horizon."""
    target: float | None = None
    """From TRL: target_kl."""
    adap_kl_ctrl: bool | None = None
    """From TRL: kl_control."""
    kl_penalty: str | None = None
    """From TRL: kl_estimator."""
    use_score_scaling: bool | None = None
    """From TRL: scale_rewards."""
    use_score_norm: bool | None = None
    """From TRL: scale_rewards."""

    kl_weights: ClassVar[tuple[str, ...]] = ("kl_coef", "kl_in_loss")
    reward_scales: ClassVar[tuple[str, ...]] = ("none", "batch", "running")
    trl_renamed: ClassVar[dict[str, str]] = {
        "beta": "kl_coef",
        "init_kl_coef": "kl_coef",
        "horizon": "kl_horizon",
        "target": "target_kl",
    }
    trl_valued: ClassVar[dict[str, dict[Any, tuple[str, Any] | None]]] = {
        "adap_kl_ctrl": {True: ("kl_control", "adaptive"), False: ("kl_control", "fixed")},
        "kl_penalty": {"kl": ("kl_estimator", "k1"), "mse": ("kl_estimator", "k2"), "full": ("kl_estimator", "exact")},
        "use_score_scaling": {True: ("scale_rewards", "running"), False: None},
        "use_score_norm": {True: ("scale_rewards", "running"), False: None},
    }
    rules: ClassVar[dict[str, Rule]] = {
        **OnlineRLConfig.rules,
        "kl_coef": Number("[0, inf)"),
        "kl_in_loss": Number("[0, inf)"),
        "cliprange": Number("(0, 1)", hint="0.1 to 0.3 is usual."),
        "dual_clip": Number("(1, inf)", optional=True),
        "cliprange_value": Number("(0, inf)"),
        "vf_coef": Number("(0, inf)"),
        "gamma": Number("(0, 1]", hint="0.99 to 1 is usual."),
        "lam": Number("[0, 1]", hint="0.9 to 0.95 is usual."),
        "score_clip": Number("(0, inf)", optional=True),
        "value_learning_rate": Number("(0, inf)", optional=True),
        "value_lr_warmup_steps": Number("[0, inf)", optional=True),
        "value_max_grad_norm": Number("(0, inf)", optional=True),
        "value_warmup_steps": Number("[0, inf)", whole=True),
    }

    def _normalise(self) -> None:
        super()._normalise()
        if self.target is not None and self.adap_kl_ctrl is None:
            self.adap_kl_ctrl = True  # as in TRL, where a target is there for nothing else

    def check(self) -> None:
        super().check()
        if self.target_values and not self.use_target_policy:
            raise ConfigError(
                "target_values=True takes values from a target policy, and use_target_policy=False. Set "
                "use_target_policy=True."
            )
        if self.kl_in_loss > 0 and self.kl_estimator == "k1":
            self.notes.append("kl_in_loss is estimated by k2, since k1 in a loss has an expected gradient of zero.")
        known = ("shared", "separate")
        if self.value_model not in known and (meant := nearest(str(self.value_model), known)):
            raise ConfigError(f"value_model={self.value_model!r} is neither of {known}, nor a model's name.{meant}")
        if self.detach_value_head and self.value_model != "shared":
            raise ConfigError(
                f"detach_value_head=True concerns a head on the policy's own backbone, and value_model="
                f"{self.value_model!r} has weights of its own. Use value_model='shared' or detach_value_head=False."
            )
        if self.max_steps is not None:
            self.check_length(self.max_steps)
        if self.dual_clip is not None and self.dual_clip <= 1 + self.cliprange:
            raise ConfigError(
                f"dual_clip={self.dual_clip} must be above 1 + cliprange = {1 + self.cliprange}: below it, it would "
                f"cut what the clip range allows. Use dual_clip=3 or leave it unset."
            )

    def check_length(self, max_steps: int) -> None:
        if self.value_warmup_steps >= max_steps:
            raise ConfigError(
                f"value_warmup_steps={self.value_warmup_steps} leaves the policy none of the run's {max_steps} "
                f"training steps. Use fewer, or raise max_steps."
            )

    def _target_is_used(self) -> bool:
        return self.target_values or super()._target_is_used()


@dataclass
class GRPOConfig(OnlineRLConfig):
    """Settings of `GRPOTrainer`: advantages relative to the prompt's group, clipped updates."""

    scale_rewards: str = "group"
    """Divide advantages by the standard deviation of the "group", of the "batch", or not at all ("none")."""
    group_std: str = "sample"
    """Standard deviation with n - 1 ("sample") or n ("population") in the denominator."""
    kl_estimator: str = "k3"
    """How KL in the loss is estimated: "k3" as in the paper, "k2" (its gradient is KL's own), "k1" or "exact"."""
    beta: float = 0.0
    """Weight of KL to the reference policy in the loss."""
    epsilon: float = 0.2
    """How far below 1 the probability ratio may fall before its gradient is cut off."""
    epsilon_high: float | None = None
    """How far above 1 it may rise; unset is epsilon. DAPO uses 0.28; CISPO caps the weight at 1 + epsilon_high."""
    delta: float | None = None
    """For negative advantages, the ratio beyond which the gradient is cut off: above 1 + epsilon_high; unset is off."""
    importance_sampling_level: str = "token"
    """Whether the ratio is a "token"'s, or the geometric mean over a "sequence" (GSPO)."""
    loss_type: str = "dapo"
    """What the loss is divided by: "dapo" the tokens of the mini-batch, over all micro-batches and processes; "grpo"
    each completion's own length; "dr_grpo" max_completion_length. "cispo" is dapo with a clipped, detached weight.
    "bnpo" is the same as dapo: in TRL they differ by the micro-batch, which changes no gradient here."""

    kl_weights: ClassVar[tuple[str, ...]] = ("beta",)
    group_baseline: ClassVar[str] = "GRPO compares a completion with the others of its prompt"
    rules: ClassVar[dict[str, Rule]] = {
        **OnlineRLConfig.rules,
        "group_std": OneOf(("sample", "population")),
        "beta": Number("[0, inf)"),
        "epsilon": Number("(0, 1)", hint="0.1 to 0.3 is usual."),
        "epsilon_high": Number("(0, inf)", optional=True),
        "delta": Number("(1, inf)", optional=True),
        "importance_sampling_level": OneOf(("token", "sequence")),
        "loss_type": OneOf(("dapo", "grpo", "dr_grpo", "bnpo", "cispo")),
    }

    def check(self) -> None:
        super().check()
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.delta is not None and self.delta <= 1 + high:
            raise ConfigError(
                f"delta={self.delta} must be above 1 + epsilon_high = {1 + high}: below it, delta would cut what the "
                f"clip range allows. Use delta={1 + 2 * high:g} or leave it unset."
            )
        if self.loss_type == "cispo" and (self.importance_sampling_level != "token" or self.delta is not None):
            raise ConfigError(
                "loss_type='cispo' weighs each token by its own clipped ratio: it takes "
                f"importance_sampling_level='token' and no delta, and got {self.importance_sampling_level!r} and "
                f"{self.delta}. Unset them or choose another loss_type."
            )
        if self.beta > 0:
            _note_k1_in_loss(self, "beta")


@dataclass
class RLOOConfig(OnlineRLConfig):
    """Settings of `RLOOTrainer`: the mean reward of the group's other completions as baseline, KL in the reward."""

    num_generations: int = 2
    """Completions sampled for each prompt, at least 2."""
    kl_estimator: str = "k1"
    """How KL in the reward is estimated: "k1" (the log-ratio, unbiased), "k2", "k3" or "exact"."""
    beta: float = 0.05
    """Weight of KL to the reference policy, summed over a completion and subtracted from its reward."""
    epsilon: float = 0.2
    """How far below 1 a completion's probability ratio may fall before its gradient is cut off."""
    epsilon_high: float | None = None
    """How far above 1 it may rise; unset is epsilon."""
    normalize_advantages: bool = False
    """Scale advantages to mean 0 and variance 1 over the batch."""

    # Names from TRL; None once the config is built.
    rloo_k: int | None = None
    """From TRL: num_generations."""
    kl_coef: float | None = None
    """From TRL: beta."""

    kl_weights: ClassVar[tuple[str, ...]] = ("beta",)
    reward_scales: ClassVar[tuple[str, ...]] = ("none",)
    group_baseline: ClassVar[str] = "RLOO's baseline is the mean of the group's other completions"
    trl_renamed: ClassVar[dict[str, str]] = {"rloo_k": "num_generations", "kl_coef": "beta"}
    rules: ClassVar[dict[str, Rule]] = {
        **OnlineRLConfig.rules,
        "beta": Number("[0, inf)"),
        "epsilon": Number("(0, 1)", hint="0.1 to 0.3 is usual."),
        "epsilon_high": Number("(0, inf)", optional=True),
    }


@dataclass
class ReinforceConfig(OnlineRLConfig):
    """Settings of `ReinforceTrainer`: the plain score function. With normalised advantages it is REINFORCE++."""

    baseline: str = "batch"
    """What is subtracted from a reward: the mean of the "batch", or "none"."""
    normalize_advantages: bool = True
    """Divide advantages by their standard deviation over the batch."""
    beta: float = 0.0
    """Weight of KL to the reference policy in the loss."""

    kl_weights: ClassVar[tuple[str, ...]] = ("beta",)
    reward_scales: ClassVar[tuple[str, ...]] = ("none",)
    rules: ClassVar[dict[str, Rule]] = {
        **OnlineRLConfig.rules,
        "baseline": OneOf(("batch", "none")),
        "beta": Number("[0, inf)"),
    }

    def check(self) -> None:
        super().check()
        if self.beta > 0:
            _note_k1_in_loss(self, "beta")


@dataclass
class DGConfig(OnlineRLConfig):
    """Settings of `DGTrainer`: the policy gradient, gated by how surprising a rewarded token was."""

    num_epochs: int = 1
    """How many times one rollout is used. The gate assumes samples of the current policy."""
    eta: float = 1.0
    """Temperature of the gate sigmoid(advantage * surprisal / eta); large values make it a constant 1/2."""
    beta: float = 0.0
    """Weight of KL to the reference policy in the loss."""

    kl_weights: ClassVar[tuple[str, ...]] = ("beta",)
    reward_scales: ClassVar[tuple[str, ...]] = ("none",)
    rules: ClassVar[dict[str, Rule]] = {
        **OnlineRLConfig.rules,
        "eta": Number("(0, inf)"),
        "beta": Number("[0, inf)"),
    }

    def check(self) -> None:
        super().check()
        if self.beta > 0:
            _note_k1_in_loss(self, "beta")


@dataclass
class TPOConfig(OnlineRLConfig):
    """Settings of `TPOTrainer`, Target Policy Optimization (not Triple Preference Optimization, an offline method).

    `TPOConfig(group_logits="logprob", use_target_policy=False, beta=0.0)` is exactly the paper, arXiv:2604.06159.
    """

    scale_rewards: str = "group"
    """Divide scores by the standard deviation of the "group", of the "batch", or not at all ("none")."""
    group_std: str = "population"
    """Standard deviation with n ("population", as in the paper) or n - 1 ("sample") in the denominator."""
    use_target_policy: bool = True
    """Keep a slowly moving copy of the policy, and measure KL against it."""
    loss_type: str = "target_matching"
    """"target_matching" fits a tilted distribution over each group by cross-entropy (the paper); "policy_gradient" is
    -(advantage * logprob) with group advantages, the other form that goes by the name."""
    group_logits: str = "logratio"
    """A candidate's score within its group: "logprob" summed log-probability (the paper); "logratio" its change since
    sampling; "averaged" mean log-probability a token; "tempered" the summed log-probability scaled down until the group
    keeps min_effective_group."""
    min_effective_group: float | None = None
    """Effective group size that group_logits="tempered" keeps; unset is half of num_generations."""
    anchor: str = "old"
    """The policy that is tilted by the scores: "old" (that sampled; the paper), "target" or "ref"."""
    eta: float = 1.0
    """Temperature of the tilt exp(score / eta): smaller follows the best completion more closely."""
    beta: float = 0.04
    """Weight of KL(online || reference) in the loss."""

    kl_weights: ClassVar[tuple[str, ...]] = ("beta",)
    group_baseline: ClassVar[str] = "TPO builds its target over the completions of one prompt"
    rules: ClassVar[dict[str, Rule]] = {
        **OnlineRLConfig.rules,
        "group_std": OneOf(("sample", "population")),
        "loss_type": OneOf(("target_matching", "policy_gradient")),
        "group_logits": OneOf(("logprob", "logratio", "averaged", "tempered")),
        "min_effective_group": Number("[1, inf)", optional=True),
        "anchor": OneOf(("old", "target", "ref")),
        "eta": Number("(0, inf)"),
        "beta": Number("[0, inf)"),
    }

    def check(self) -> None:
        super().check()
        if self.anchor == "target" and not self.use_target_policy:
            raise ConfigError(
                "anchor='target' needs a target policy, and use_target_policy=False. Set use_target_policy=True, or "
                "anchor='old' as in the paper."
            )
        if self.min_effective_group is not None and self.group_logits != "tempered":
            raise ConfigError(
                f"min_effective_group={self.min_effective_group} is used by group_logits='tempered' only: got "
                f"group_logits={self.group_logits!r}. Set that, or leave min_effective_group unset."
            )
        if self.min_effective_group is not None and self.min_effective_group > self.num_generations:
            raise ConfigError(
                f"min_effective_group={self.min_effective_group} is above num_generations={self.num_generations}, the "
                f"size of a group. Use a number from 1 to {self.num_generations}."
            )
        if self.loss_type == "target_matching" and self.num_mini_batches > self.prompts_per_step:
            raise ConfigError(
                f"num_mini_batches={self.num_mini_batches} is more than prompts_per_step={self.prompts_per_step}: TPO "
                f"fits whole groups. Use num_mini_batches={self.prompts_per_step} or less."
            )
        if self.beta > 0:
            _note_k1_in_loss(self, "beta")

    def _target_is_used(self) -> bool:
        return self.anchor == "target" or super()._target_is_used()


def _note_k1_in_loss(config: OnlineRLConfig, weight: str) -> None:
    """The k1 estimator is allowed in a loss, because published code uses it, but it restrains nothing on average."""
    if config.kl_estimator == "k1":
        config.notes.append(
            f"kl_estimator='k1' in a loss has an expected gradient of zero: {weight} adds noise and no restraint. "
            "kl_estimator='k2' has the gradient of KL."
        )
