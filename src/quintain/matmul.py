"""Float32 matrix products on a CPU, by whichever of PyTorch's two libraries is the faster.

PyTorch multiplies float32 matrices with MKL. It also carries oneDNN, which it uses for other precisions and for
compiled code. On AMD processors with AVX-512 oneDNN takes less than half of MKL's time for the same float32 product
(measured: `docs/performance.md`); on others PyTorch's choice is left alone. Both are float32 throughout and differ by
rounding.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

LEAST_WORK = 2**20
"""Multiplications below which a product is left to MKL: calling oneDNN takes about ten microseconds."""


@cache
def onednn_is_faster() -> bool:
    """Whether this processor is one on which oneDNN's float32 products are the faster.

    The answer follows from the processor and never from a timing, so that the same machine always gives the same
    numbers. The environment variable QUINTAIN_ONEDNN (0 or 1) overrides it.
    """
    if not _has_onednn():
        return False
    wish = os.environ.get("QUINTAIN_ONEDNN")
    if wish is not None:
        return wish == "1"
    return "AuthenticAMD" in _processor() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    return facts.read_text() if facts.exists() else platform.processor()


def product(left: Float[Tensor, "rows inner"], right: Float[Tensor, "inner columns"]) -> Float[Tensor, "rows columns"]:
    """`left @ right`, either of which may be transposed; carries no gradient of its own."""
    return _multiply(left, right.t(), None) if _pays(left, right.numel()) else left @ right


def product_into(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """`product(left, right)`, written to `out` or to new memory; the result says where."""
    return product(left, right) if _pays(left, right.numel()) else torch.mm(left, right, out=out)


def linear(
    inputs: Float[Tensor, "*axes inner"],
    weight: Float[Tensor, "outer inner"],
    bias: Float[Tensor, " outer"] | None = None,
) -> Float[Tensor, "*axes outer"]:
    """`inputs @ weight.T + bias`, as `torch.nn.functional.linear`, with its gradients."""
    autocast = inputs.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    if autocast or weight.dtype != torch.float32 or not _pays(inputs, weight.numel()):
        return nn.functional.linear(inputs, weight, bias)
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (inputs, weight, bias)):
        return _Linear.apply(inputs, weight, bias)
    return _multiply(inputs, weight, bias)


def _pays(left: Tensor, right_numbers: int) -> bool:
    return (
        left.dtype == torch.float32
        and left.device.type == "cpu"
        and left.numel() // max(left.shape[-1], 1) * right_numbers >= LEAST_WORK
        and onednn_is_faster()
    )


def _multiply(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """A linear layer whose three products are oneDNN's."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        context.save_for_backward(inputs, weight)
        return _multiply(inputs, weight, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[override]
        inputs, weight = context.saved_tensors
        wanted = context.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        return (
            product(flat, weight).view(inputs.shape) if wanted[0] else None,
            product(flat.t(), inputs.reshape(-1, inputs.shape[-1])) if wanted[1] else None,
            flat.sum(dim=0) if wanted[2] else None,
        )


class Linear(nn.Linear):
    """A linear layer of PyTorch's that computes by `linear` above."""

    packed: Tensor | None = None
    """The weight in oneDNN's own order, while `packed_linears` is open."""

    def forward(self, input: Tensor) -> Tensor:
        packed = self.packed
        if packed is None or torch.is_grad_enabled():
            return linear(input, self.weight, self.bias)
        if packed.dtype == input.dtype:
            return _multiply(input, packed, self.bias)
        output = _multiply(input.to(packed.dtype), packed, None).to(input.dtype)
        return output if self.bias is None else output + self.bias


def use_fast_linears(model: nn.Module) -> None:
    """Let the model's linear layers compute by `linear` above (in place).

    Parameters, their names and what is saved stay as they are.
    """
    if _has_onednn():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear


@contextmanager
def packed_linears(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Keep a copy of each weight in the order that suits products with few rows; for sampling, without gradients.

    The weights must not change inside.

    Args:
        dtype: of the products; None is that of the weights. The output layer keeps the weights' own: rounded logits
            would be another policy.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    copies: dict[tuple[int, torch.dtype], Tensor] = {}
    layers: list[Linear] = []
    try:
        for layer in (module for module in model.modules() if isinstance(module, Linear)):
            wanted = dtype if dtype is not None and layer is not head else layer.weight.dtype
            if not _packs(layer, wanted):
                continue
            key = (layer.weight.data_ptr(), wanted)
            if key not in copies:
                copies[key] = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().to(wanted))
            layer.packed = copies[key]
            layers.append(layer)
        yield
    finally:
        for layer in layers:
            layer.packed = None


def packs_half() -> bool:
    """Whether this processor multiplies bfloat16 matrices itself, so that packing them pays."""
    return _has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packs(layer: Linear, dtype: torch.dtype) -> bool:
    if layer.weight.device.type != "cpu" or layer.weight.numel() < LEAST_WORK // 16:
        return False
    return onednn_is_faster() if dtype == torch.float32 else dtype == torch.bfloat16 and packs_half()


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
