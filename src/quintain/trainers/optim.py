"""Optimizer, learning-rate schedule and gradient clipping behind one object with one `step()`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from quintain.configs.shared import OnlineRLConfig
from quintain.errors import ConfigError


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
    makers: dict[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
        "adamw": lambda groups: torch.optim.AdamW(groups, betas=betas, eps=config.adam_epsilon, weight_decay=decay),
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
        optimizers: as `build_optimizers` made them, or one given by the user.
        schedulers: one for each optimizer.
        max_grad_norm: the total gradient norm is scaled down to this; None or 0 leaves it.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizers: list[Optimizer],
        schedulers: list[Any],
        *,
        max_grad_norm: float | None,
    ) -> None:
        self.parameters = dict(parameters)
        self.optimizers, self.schedulers, self.max_grad_norm = optimizers, schedulers, max_grad_norm

    def step(self) -> float:
        """Update the parameters from their gradients and return the gradient norm before clipping.

        A step whose gradient is not finite changes no weight; the norm returned says so.
        """
        self._sum_over_processes()
        gradients = [value.grad for value in self.parameters.values() if value.grad is not None]
        norm = nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
        if bool(torch.isfinite(norm)):
            if self.max_grad_norm:
                nn.utils.clip_grads_with_norm_(self.parameters.values(), self.max_grad_norm, norm)
            for optimizer in self.optimizers:
                optimizer.step()
        self.zero()
        return float(norm)

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
        for parameter in self.parameters.values():
            parameter.grad = None

    def next_rate(self) -> None:
        """Advance the schedule by one training step."""
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
        for optimizer, part in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(part)
        for scheduler, part in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(part)

    def _kinds(self) -> list[str]:
        return [type(optimizer).__name__ for optimizer in self.optimizers]


def build_optimization(
    config: OnlineRLConfig,
    parameters: Mapping[str, nn.Parameter],
    *,
    max_steps: int,
    given: tuple[Optimizer | None, Any | None] = (None, None),
) -> Optimization:
    """Optimizers and schedules for a run of `max_steps` training steps.

    The schedule is read from its first step on: warm-up starts above zero, since a rollout spent at learning rate 0
    would teach nothing, and a decay ends just above zero for the same reason.
    """
    from transformers import get_scheduler

    optimizer, scheduler = given
    optimizers = [optimizer] if optimizer is not None else build_optimizers(config, parameters)
    _require_value_model(optimizers, parameters)
    warmup = config.warmup_steps
    warmup = round(warmup * max_steps) if 0 < warmup < 1 else int(warmup)
    schedulers = []
    for item in optimizers:
        if scheduler is None:
            made = get_scheduler(
                config.lr_scheduler_type, item, num_warmup_steps=warmup, num_training_steps=max_steps + 1
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch expects an optimizer step first; here the order is meant
                made.step()
            schedulers.append(made)
        else:
            schedulers.append(scheduler)
    return Optimization(parameters, optimizers, schedulers, max_grad_norm=config.max_grad_norm)


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
