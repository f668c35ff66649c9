"""Optimizer, learning-rate schedule and gradient clipping behind one object with one `step()`."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from quintain.configs.shared import OnlineRLConfig
from quintain.errors import ConfigError

FUSED_DEVICES = ("cpu", "cuda")
"""Where torch updates all of a parameter's AdamW state in one pass. Elsewhere it takes several, to the same formula."""
BLOCK_8BIT = 256
"""Numbers that share a scale in bitsandbytes' 8-bit state."""
SMALLEST_8BIT = 4096
"""Numbers from which on a parameter's state has 8 bits there; smaller ones keep float32."""


class Lion(Optimizer):
    """Sign of an interpolation between gradient and momentum. Source: Chen et al. 2023, arXiv:2302.06675, alg. 2."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                direction = momentum.lerp(parameter.grad, 1 - first).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - second)
        return loss


def build_optimizers(config: OnlineRLConfig, parameters: Mapping[str, nn.Parameter]) -> list[Optimizer]:
    """The optimizers that together own every trainable parameter.

    Value-model parameters form a group with their own learning rate. "muon" takes the hidden matrices; embeddings,
    output layer, value head, vectors and scalars, for which it is not meant, go to an AdamW beside it.
    """
    betas, decay = (config.adam_beta1, config.adam_beta2), config.weight_decay
    adam: dict[str, Any] = {"betas": betas, "eps": config.adam_epsilon, "weight_decay": decay}
    makers: dict[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
        "adamw": lambda groups: torch.optim.AdamW(groups, fused=_can_fuse(groups) or None, **adam),
        "adamw_8bit": lambda groups: _adamw_8bit(groups, **adam),
        "sgd": lambda groups: torch.optim.SGD(groups, weight_decay=decay),
        "adafactor": lambda groups: torch.optim.Adafactor(groups, weight_decay=decay),
        "lion": lambda groups: Lion(groups, betas=betas, weight_decay=decay),
        "muon": lambda groups: torch.optim.Muon(groups, weight_decay=decay),
    }
    if config.optim != "muon":
        return [makers[config.optim](list(_groups(config, parameters)))]
    matrices = {name: value for name, value in parameters.items() if _is_hidden_matrix(name, value)}
    others = {name: value for name, value in parameters.items() if name not in matrices}
    return [makers[kind](list(_groups(config, part))) for kind, part in (("muon", matrices), ("adamw", others)) if part]


def require_optimizer(name: str) -> None:
    """Raise ConfigError for an optimizer whose package is not installed; the trainer asks before the model loads."""
    if name == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "optim='adamw_8bit' needs the package bitsandbytes, which is not installed: pip install bitsandbytes. Or "
            "use optim='adamw'."
        )


def state_bytes(optim: str, parameters: Mapping[str, nn.Parameter]) -> int:
    """Memory that the optimizer's state takes, in bytes, once it has made its first step.

    Args:
        optim: as in the config.
        parameters: everything that is trained, by name.
    """

    def kept(name: str, value: nn.Parameter) -> float:
        """Bytes of state for each byte of the parameter."""
        if optim == "adafactor":  # a mean for each row and each column of a matrix
            return sum(1 / size for size in value.shape[-2:]) if value.ndim > 1 else 1.0
        if optim == "adamw_8bit" and value.numel() >= SMALLEST_8BIT:  # two bytes a number, two float32 scales a block
            return (2 + 2 * 4 / BLOCK_8BIT) / value.element_size()
        if optim == "muon" and _is_hidden_matrix(name, value):
            return 1.0
        return {"sgd": 0.0, "lion": 1.0}.get(optim, 2.0)

    return round(sum(value.nbytes * kept(name, value) for name, value in parameters.items()))


def _adamw_8bit(groups: list[dict[str, Any]], **settings: Any) -> Optimizer:
    """AdamW whose moments have 8 bits a number. Source: Dettmers et al. 2022, arXiv:2110.02861, section 2."""
    from bitsandbytes.optim import AdamW8bit

    optimizer: Optimizer = AdamW8bit(groups, **settings)
    return optimizer


def _can_fuse(groups: Iterable[Mapping[str, Any]]) -> bool:
    parameters = [value for group in groups for value in group["params"]]
    return all(value.device.type in FUSED_DEVICES and value.is_floating_point() for value in parameters)


def _groups(config: OnlineRLConfig, parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Any]]:
    value_rate = getattr(config, "value_learning_rate", None) or config.learning_rate
    for role, rate in (("policy", config.learning_rate), ("value", value_rate)):
        members = [value for name, value in parameters.items() if name.startswith("value_model.") == (role == "value")]
        if members:
            yield {"params": members, "lr": rate, "role": role}


def _is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    outside = ("embed", "lm_head", "wte", "wpe", "score", "value_model.score")
    return parameter.ndim == 2 and not any(part in name for part in outside)


class Optimization:
    """Clip, step, zero; and a schedule that moves once a training step.

    Args:
        parameters: everything that is trained, by name; those of the value model begin with "value_model.".
        optimizers: as `build_optimizers` made them, or one given by the user.
        schedulers: one for each optimizer.
        max_grad_norm: the total gradient norm is scaled down to this; None or 0 leaves it.
        value_max_grad_norm: the same for the value model's gradient by itself, and max_grad_norm is then for the rest;
            None clips both together.
        value_warmup_steps: training steps at the start in which the policy stands still.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizers: list[Optimizer],
        schedulers: list[Any],
        *,
        max_grad_norm: float | None,
        value_max_grad_norm: float | None = None,
        value_warmup_steps: int = 0,
    ) -> None:
        self.parameters = dict(parameters)
        self.policy = [value for name, value in parameters.items() if not name.startswith("value_model.")]
        self.value = [value for name, value in parameters.items() if name.startswith("value_model.")]
        self.optimizers, self.schedulers = optimizers, schedulers
        self.max_grad_norm, self.value_max_grad_norm = max_grad_norm, value_max_grad_norm
        self.value_warmup_steps, self.steps = value_warmup_steps, 0

    @property
    def policy_stands_still(self) -> bool:
        """Whether only the value model learns in this training step."""
        return self.steps < self.value_warmup_steps

    def step(self, *, leave_out: bool = False) -> dict[str, float]:
        """Update the parameters from their gradients.

        A step whose gradient is not finite changes no weight; the norms returned say so.

        Args:
            leave_out: forget the gradients instead.
        Returns:
            `grad_norm`, of the whole gradient before clipping, and `value_grad_norm`, of the value model's part.
        """
        self._sum_over_processes()
        if self.policy_stands_still:
            _zero(self.policy)
        norms = {"grad_norm": _norm(self.parameters.values())}
        if self.value:
            norms["value_grad_norm"] = _norm(self.value)
        if bool(torch.isfinite(norms["grad_norm"])) and not leave_out:
            self._clip(norms)
            self._match_layouts()
            for optimizer in self.optimizers:
                optimizer.step()
        self.zero()
        return {name: float(norm) for name, norm in norms.items()}

    def _clip(self, norms: Mapping[str, Tensor]) -> None:
        if self.value_max_grad_norm is None:
            parts = [(list(self.parameters.values()), self.max_grad_norm, norms["grad_norm"])]
        else:
            parts = [
                (self.policy, self.max_grad_norm, _norm(self.policy)),
                (self.value, self.value_max_grad_norm, norms["value_grad_norm"]),
            ]
        for parameters, limit, norm in parts:
            if limit:
                nn.utils.clip_grads_with_norm_(parameters, limit, norm)

    def _match_layouts(self) -> None:
        """Fused optimizers pair weights and gradients as they lie in memory, whatever their strides say."""
        for parameter in self.parameters.values():
            if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)

    def _sum_over_processes(self) -> None:
        """Add up the gradients of all data-parallel processes, whatever number of micro-batches each of them had."""
        if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
            return
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)

    def zero(self) -> None:
        """Forget the accumulated gradients."""
        _zero(self.parameters.values())

    def next_rate(self) -> None:
        """Advance the schedules by one training step."""
        self.steps += 1
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Detected call of `lr_scheduler.step", UserWarning
            )  # updates may be left out
            for scheduler in self.schedulers:
                scheduler.step()

    def learning_rates(self) -> dict[str, float]:
        """The rates now in force, by their metric names."""
        names = {"policy": "learning_rate", "value": "value_learning_rate"}
        return {
            names[group.get("role", "policy")]: float(group["lr"])
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "kinds": self._kinds(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises ValueError for the state of another kind of optimizer."""
        if state["kinds"] != self._kinds():  # torch would take it, and fail or go astray at the next step
            raise ValueError(
                f"it holds the state of {', '.join(state['kinds'])}, this run has {', '.join(self._kinds())}"
            )
        self.steps = int(state["steps"])
        for optimizer, part in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(part)
        for scheduler, part in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(part)

    def _kinds(self) -> list[str]:
        return [type(optimizer).__name__ for optimizer in self.optimizers]


def _norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    gradients = [value.grad for value in parameters if value.grad is not None]
    return nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())


def _zero(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def build_optimization(
    config: OnlineRLConfig,
    parameters: Mapping[str, nn.Parameter],
    *,
    max_steps: int,
    given: tuple[Optimizer | None, Any | None] = (None, None),
) -> Optimization:
    """Optimizers and schedules for a run of `max_steps` training steps."""
    optimizer, scheduler = given
    optimizers = [optimizer] if optimizer is not None else build_optimizers(config, parameters)
    _require_value_model(optimizers, parameters)
    return Optimization(
        parameters,
        optimizers,
        [build_schedule(config, item, max_steps) if scheduler is None else scheduler for item in optimizers],
        max_grad_norm=config.max_grad_norm,
        value_max_grad_norm=getattr(config, "value_max_grad_norm", None),
        value_warmup_steps=getattr(config, "value_warmup_steps", 0),
    )


def build_schedule(config: OnlineRLConfig, optimizer: Optimizer, max_steps: int) -> LambdaLR:
    """Each parameter group's learning rate over the training steps: `lr_scheduler_type`, after the group's warm-up.

    The schedule is read from its first step on: warm-up starts above zero, since a rollout spent at learning rate 0
    would teach nothing, and a decay ends just above zero for the same reason.
    """
    from transformers import get_scheduler

    shape_name = {"constant": "constant_with_warmup"}.get(config.lr_scheduler_type, config.lr_scheduler_type)
    own = getattr(config, "value_lr_warmup_steps", None)
    warmup = {"policy": config.warmup_steps, "value": config.warmup_steps if own is None else own}

    def share_of_peak(role: str) -> Callable[[int], float]:
        steps = warmup[role]
        steps = round(steps * max_steps) if 0 < steps < 1 else int(steps)
        unit = torch.optim.SGD([torch.zeros(())], lr=1.0)
        library = get_scheduler(shape_name, unit, num_warmup_steps=steps, num_training_steps=max_steps + 1)
        shape: Callable[[int], float] = library.lr_lambdas[0]
        return lambda step: shape(step + 1)

    return LambdaLR(optimizer, [share_of_peak(group.get("role", "policy")) for group in optimizer.param_groups])


def _require_value_model(optimizers: list[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """A given optimizer that lacks the critic would leave it as it started, and nothing else would show it."""
    held = {id(value) for item in optimizers for group in item.param_groups for value in group["params"]}
    critic = {name: value for name, value in parameters.items() if name.startswith("value_model.")}
    if critic and not any(id(value) in held for value in critic.values()):
        raise ConfigError(
            f"optimizers was given an optimizer that holds none of the value model's {len(critic)} parameters. Pass a "
            f"loaded value_model and give the optimizer its parameters too, or leave optimizers out and set optim, "
            f"learning_rate and value_learning_rate."
        )
