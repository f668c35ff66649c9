"""Parts of a decoder layer as one function each: the same numbers, with less kept for the backward pass.

Two parts of most decoders keep more activations than their gradients need: the norm keeps its normalised input, and the
gated feed-forward block keeps the activated gate and its product with the other branch. Here both are computed again
from what has to be kept anyway.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import silu

from quintain.matmul import linear, product

PROBE_TOLERANCE = 1e-5
"""Largest difference, relative to the largest output, between a module and its fused form that rounding explains."""


def fuse(model: nn.Module) -> None:
    """Let the model's RMS norms and SiLU-gated feed-forward blocks compute by the functions below (in place).

    A module is taken by its attributes, and only if it gives the same output on random numbers. Parameters, their names
    and what is saved stay as they are.
    """
    for module in model.modules():
        if _is_rms_norm(module):
            _replace(module, _norm_forward, module.weight.shape[0])
        elif _is_gated_block(module):
            _replace(module, _gated_forward, module.gate_proj.in_features)


def rms_norm(
    inputs: Float[Tensor, "*axes width"], weight: Float[Tensor, " width"], epsilon: float
) -> Float[Tensor, "*axes width"]:
    """weight * inputs / sqrt(mean(inputs^2) + epsilon). Source: Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4."""
    return _RMSNorm.apply(inputs, weight, epsilon)


def gated_linear(
    gate: Float[Tensor, "*axes inner"],
    other: Float[Tensor, "*axes inner"],
    weight: Float[Tensor, "outer inner"],
    bias: Float[Tensor, " outer"] | None = None,
) -> Float[Tensor, "*axes outer"]:
    """(silu(gate) * other) @ weight.T + bias. Source: Shazeer 2020 (SwiGLU), arXiv:2002.05202, eq. 6."""
    if not torch.is_grad_enabled():
        return linear(silu(gate).mul_(other), weight, bias)
    return _GatedLinear.apply(gate, other, weight, bias)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        size = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True)
        scale = (size.square_() / inputs.shape[-1] + epsilon).rsqrt_()
        context.save_for_backward(inputs, weight, scale)
        return (inputs * scale).mul_(weight)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        inputs, weight, scale = context.saved_tensors
        normed = inputs * scale
        weight_gradient = None
        if context.needs_input_grad[1]:
            weight_gradient = (gradient * normed).flatten(0, -2).sum(dim=0)
        if not context.needs_input_grad[0]:
            return None, weight_gradient, None
        scaled = gradient * weight
        along = (scaled * normed).mean(dim=-1, keepdim=True)
        return scaled.sub_(normed.mul_(along)).mul_(scale), weight_gradient, None


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gate: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        context.save_for_backward(gate, other, weight)
        return linear(silu(gate).mul_(other), weight, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gate, other, weight = context.saved_tensors
        wanted = context.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        open_ = gate.sigmoid()
        active = gate * open_
        weight_gradient = None
        if wanted[2]:
            weight_gradient = product(flat.t(), (active * other).reshape(-1, weight.shape[1]))
        inner = product(flat, weight).view(gate.shape)
        other_gradient = inner * active
        # d silu / d gate = open * (1 + gate * (1 - open)) = open + active * (1 - open)
        slope = torch.addcmul(open_, active, 1 - open_)
        gate_gradient = inner.mul_(other).mul_(slope)
        return gate_gradient, other_gradient, weight_gradient, flat.sum(dim=0) if wanted[3] else None


def _norm_forward(module: Any, hidden_states: Tensor) -> Tensor:
    if hidden_states.dtype != module.weight.dtype or hidden_states.dtype not in (torch.float32, torch.float64):
        return type(module).forward(module, hidden_states)  # half precision has casts of its own in between
    if torch.is_inference_mode_enabled():  # sampling; elsewhere with and without gradient must be equal to the bit
        return nn.functional.rms_norm(hidden_states, module.weight.shape, module.weight, module.variance_epsilon)
    return rms_norm(hidden_states, module.weight, module.variance_epsilon)


def _gated_forward(module: Any, x: Tensor) -> Tensor:
    down = module.down_proj
    if torch.is_autocast_enabled(x.device.type) or not torch.is_grad_enabled() or not isinstance(down, nn.Linear):
        return type(module).forward(module, x)
    return gated_linear(module.gate_proj(x), module.up_proj(x), down.weight, down.bias)


def _is_rms_norm(module: Any) -> bool:
    return (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(getattr(module, "weight", None), Tensor)
        and module.weight.ndim == 1
        and isinstance(getattr(module, "variance_epsilon", None), float)
    )


def _is_gated_block(module: Any) -> bool:
    parts = ("gate_proj", "up_proj", "down_proj")
    activation = getattr(module, "act_fn", None)
    is_silu = isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
    return is_silu and all(isinstance(getattr(module, name, None), nn.Linear) for name in parts)


def _replace(module: nn.Module, forward: Any, width: int) -> None:
    """Give the module this forward function, if it agrees with its own."""
    if "forward" in vars(module):  # done before, or wrapped by someone else
        return
    parameter = next(module.parameters())
    if parameter.dtype not in (torch.float32, torch.float64):
        return
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(1, 2, width, generator=generator).to(parameter.device, parameter.dtype)
    with torch.no_grad():
        own = module(probe)
    ours = forward(module, probe).detach()
    if float((own - ours).abs().max()) <= PROBE_TOLERANCE * max(1.0, float(own.abs().max())):
        module.forward = MethodType(forward, module)  # type: ignore[method-assign]
