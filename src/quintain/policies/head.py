"""The language-model head in chunks: log-probability, entropy and exact KL without the whole matrix of logits.

The logits of a micro-batch are its largest tensor by far: one number a token and vocabulary entry, against one a token
and unit of width. `head_outputs` holds those of a chunk of tokens at a time and recomputes them in the backward pass,
where the gradient of the logits z (after the map and the temperature) has a closed form. With p = softmax(z):

    d logprob / dz_v = [v = id] - p_v
    d entropy / dz_v = -p_v * (log p_v + entropy)
    d kl / dz_v      = p_v * (log p_v - log reference_v - kl)

The cost is four matrix products of tokens x width x vocabulary (one forward; logits, hidden states and weight
backward), or three if the weight is frozen; a reference adds two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from quintain.errors import ConfigError
from quintain.kl.estimators import exact_kl
from quintain.matmul import onednn_is_faster, product_into
from quintain.matmul import product as product_of

CHUNK_BYTES = 32 * 2**20
"""Size of a chunk's float32 logits unless the caller says otherwise."""

PRODUCT_ROWS = 4096
"""Vocabulary entries whose gradient is a tensor of its own before it is added, where it cannot be added at once."""

Reference = tuple[Float[Tensor, "tokens ref_width"], Float[Tensor, "vocab ref_width"], Float[Tensor, " vocab"] | None]
"""Another policy's hidden states, output weight and bias. It may have another width, but the same vocabulary."""


@dataclass(frozen=True)
class LogitMap:
    """What a model does to its logits after the output layer, elementwise: scale first, then cap.

        map(x) = softcap * tanh(scale * x / softcap),  or  scale * x  without a cap

    Args:
        scale: factor of the logits; finite and > 0.
        softcap: bound that the logits approach; finite and > 0, or None for no bound.
    Raises:
        ConfigError: a number is outside its range.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("scale", self.scale), ("softcap", self.softcap)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} of a LogitMap must be finite and > 0: got {value}.")

    def __call__(self, logits: Float[Tensor, "*tokens vocab"]) -> Float[Tensor, "*tokens vocab"]:
        """The mapped logits, with their gradient."""
        if self.softcap is None:
            return logits * self.scale
        return self.softcap * torch.tanh(logits * (self.scale / self.softcap))


@dataclass(frozen=True)
class HeadOutputs:
    """What the head says of each token, in nats; float64 if the hidden states are, else float32.

    Args:
        logprobs: log-probability of the token's id.
        entropy: of the whole distribution; None if it was not wanted.
        exact_kl: KL(policy || reference) over the vocabulary; None without a reference.
    """

    logprobs: Float[Tensor, " tokens"]
    entropy: Float[Tensor, " tokens"] | None = None
    exact_kl: Float[Tensor, " tokens"] | None = None


def head_outputs(
    hidden: Float[Tensor, "tokens width"],
    weight: Float[Tensor, "vocab width"],
    bias: Float[Tensor, " vocab"] | None,
    ids: Int[Tensor, " tokens"],
    *,
    temperature: float = 1.0,
    logit_map: LogitMap = LogitMap(),
    want_entropy: bool = False,
    entropy_gradient: bool = False,
    reference: Reference | None = None,
    chunk_tokens: int | None = None,
) -> HeadOutputs:
    """Log-probabilities, entropy and exact KL of softmax(logit_map(hidden @ weight.T + bias) / temperature).

    Values and gradients are those of `plain_head_outputs` up to rounding; the number of chunks changes rounding only.
    Matrix products run in the dtype of the inputs, or in that of `torch.autocast` where it is on; the rest, and the
    sum over chunks that is the weight's gradient, in float32 (float64 inputs: all in float64). A half-precision model
    that scales or caps its logits itself does so in half precision, and differs by that rounding.

    A token whose hidden state is not finite spoils its own outputs and gradient, and the gradients of weight and bias,
    even if the gradient that reaches it is 0, because 0 * nan is nan.

    Args:
        hidden: what enters the output layer, one row a token.
        weight: of the output layer. If it needs no gradient, none is computed.
        bias: of the output layer.
        ids: int64, whose log-probability is wanted, in [0, vocab).
        temperature: divides the mapped logits; finite and > 0.
        logit_map: what the model does to its logits after the output layer.
        want_entropy: also compute the entropy.
        entropy_gradient: keep the graph through the entropy; needs `want_entropy`.
        reference: the policy to which the exact KL is measured. It gets no gradient, and the map and the temperature
            apply to it too.
        chunk_tokens: tokens whose logits are held at once, >= 1. By default as many as CHUNK_BYTES allows.
    Raises:
        ConfigError: shapes or dtypes do not match, or a number is outside its range.
    """
    options = _Options(temperature, logit_map, want_entropy, entropy_gradient)
    _check_tokens(hidden, ids)
    layers = (hidden, weight, bias), *(() if reference is None else (reference,))
    for layer in layers:
        _check_layer(*layer, tokens=len(hidden), vocabulary=len(weight))
    rows = _chunks(len(hidden), len(weight), chunk_tokens)
    # Autocast is read here and switched off inside, instead of torch.amp.custom_fwd: the softmax stays in float32
    # beside half-precision products, each weight is cast once a pass, and the reference may have a dtype of its own.
    dtypes = [_product_dtype(layer[0]) for layer in layers]
    reference_layer = (None, None, None) if reference is None else reference
    return HeadOutputs(*_Head.apply(hidden, weight, bias, ids, *reference_layer, options, rows, dtypes))


def plain_head_outputs(
    hidden: Float[Tensor, "tokens width"],
    weight: Float[Tensor, "vocab width"],
    bias: Float[Tensor, " vocab"] | None,
    ids: Int[Tensor, " tokens"],
    *,
    temperature: float = 1.0,
    logit_map: LogitMap = LogitMap(),
    want_entropy: bool = False,
    entropy_gradient: bool = False,
    reference: Reference | None = None,
) -> HeadOutputs:
    """What `head_outputs` computes, said plainly: all logits at once, in ordinary autograd. Arguments as there."""
    options = _Options(temperature, logit_map, want_entropy, entropy_gradient)
    return _outputs_of_logits(F.linear(hidden, weight, bias), ids, reference, options)


def outputs_of_logits(
    logits: Float[Tensor, "tokens vocab"],
    ids: Int[Tensor, " tokens"],
    *,
    temperature: float = 1.0,
    want_entropy: bool = False,
    entropy_gradient: bool = False,
) -> HeadOutputs:
    """The same from logits that a model has made itself, by a map that is not known. Arguments as in `head_outputs`."""
    return _outputs_of_logits(logits, ids, None, _Options(temperature, LogitMap(), want_entropy, entropy_gradient))


def checkpointed_head_outputs(
    hidden: Float[Tensor, "tokens width"],
    head: Callable[[Tensor], Tensor],
    ids: Int[Tensor, " tokens"],
    *,
    temperature: float = 1.0,
    logit_map: LogitMap = LogitMap(),
    want_entropy: bool = False,
    entropy_gradient: bool = False,
    reference: Reference | None = None,
    chunk_tokens: int | None = None,
) -> HeadOutputs:
    """`head_outputs` for an output layer that is no plain linear map, such as one with an adapter.

    Each chunk runs through ordinary autograd under activation checkpointing. No logits outlive their chunk, but a
    chunk takes several times the memory that it takes in `head_outputs`, and brings its own gradient of every weight
    that is trained.

    Args:
        head: maps hidden states `[n, width]` to logits `[n, vocab]`, row by row, for n >= 0. It runs again in the
            backward pass, and must then give the same.
        hidden, ids, temperature, logit_map, want_entropy, entropy_gradient, reference, chunk_tokens: see
            `head_outputs`.
    Raises:
        ConfigError: shapes do not match, or a number is outside its range.
    """
    options = _Options(temperature, logit_map, want_entropy, entropy_gradient)
    _check_tokens(hidden, ids)
    with torch.no_grad():
        vocabulary = head(hidden[:0]).shape[-1]
    if reference is not None:
        _check_layer(*reference, tokens=len(hidden), vocabulary=vocabulary)

    def outputs(hidden: Tensor, ids: Tensor, reference: Reference | None) -> tuple[Tensor | None, ...]:
        chunk = _outputs_of_logits(head(hidden), ids, reference, options)
        return chunk.logprobs, chunk.entropy, chunk.exact_kl

    chunks = []
    for rows in _chunks(len(hidden), vocabulary, chunk_tokens) or [slice(0, 0)]:
        part = None if reference is None else (reference[0][rows], reference[1], reference[2])
        chunks.append(checkpoint(outputs, hidden[rows], ids[rows], part, use_reentrant=False))
    return HeadOutputs(*(None if column[0] is None else torch.cat(column) for column in zip(*chunks)))


_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def find_logit_map(config: Any) -> LogitMap:
    """The map that a model of transformers applies to its logits, read from its text config.

    Covered, as of transformers 5.24: the softcap of Gemma 2, 3, 3n and 4, VaultGemma, T5Gemma, RecurrentGemma,
    NanoChat, Beam, Inkling 2 and xLSTM; the factor of Cohere, Cohere 2, Granite and its kin, HyperCLOVA X and
    Falcon-H1; both in Muse, where the factor comes first. Not covered: models that mask logits, cut some off or add to
    them (Chameleon, Inkling, BART and its kin), the image-reading Gemma 3, which ignores a softcap in its text config,
    and code outside transformers. Compare the map with the model's own logits before relying on it.

    Args:
        config: `model.config.get_text_config()`.
    """
    kind = getattr(config, "model_type", None)

    def number(name: str) -> float:
        value = getattr(config, name, None)
        return 1.0 if value is None else float(value)

    # MPT's config has a `logit_scale`, a word or a number, which its model in transformers does not read.
    scale = 1.0 if kind == "mpt" else math.prod(number(name) for name in _FACTORS)
    if kind == "hyperclovax":  # multiplies by what Granite and its kin divide by
        scale *= number("logits_scaling")
    elif kind != "minicpm3":  # divides before the output layer, not after it
        scale /= number("logits_scaling")
    softcaps = [softcap for name in _SOFTCAPS if (softcap := getattr(config, name, None)) is not None]
    return LogitMap(scale=scale, softcap=float(softcaps[0]) if softcaps else None)


@dataclass(frozen=True)
class _Options:
    temperature: float
    logit_map: LogitMap
    want_entropy: bool
    entropy_gradient: bool

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"temperature must be finite and > 0: got {self.temperature}.")
        if self.entropy_gradient and not self.want_entropy:
            raise ConfigError("entropy_gradient=True needs want_entropy=True: there is no entropy to differentiate.")


class _Buffers:
    """Tensors of [chunk, vocab] by name, allocated once a pass: fresh memory costs more than the sums that fill it.

    Args:
        chunks: the rows of each chunk.
        like: gives the device, and the dtype unless `get` is told another.
    """

    def __init__(self, chunks: list[slice], vocabulary: int, like: Tensor) -> None:
        self._shape = (max((_size(rows) for rows in chunks), default=0), vocabulary)
        self._like = like
        self._tensors: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, name: str, rows: slice, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer with one row for each of `rows`, holding whatever was last written there."""
        key = (name, dtype or self._like.dtype)
        if key not in self._tensors:
            self._tensors[key] = torch.empty(self._shape, dtype=key[1], device=self._like.device)
        return self._tensors[key][: _size(rows)]


class _Layer:
    """An output layer and the hidden states that enter it, in the dtype of its matrix products."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, options: _Options
    ) -> None:
        self.dtype = dtype
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        self.scale, self.softcap = options.logit_map.scale, options.logit_map.softcap
        self.temperature = options.temperature

    def write_logits(self, rows: slice, out: Tensor, buffers: _Buffers) -> Tensor:
        """The rows' logits, mapped and divided by the temperature, in `out` or in new memory."""
        product = out if out.dtype == self.dtype else buffers.get("product", rows, self.dtype)
        product = product_into(self.hidden[rows], self.weight.t(), product)
        if self.bias is not None:
            product.add_(self.bias)
        out = out.copy_(product) if product.dtype != out.dtype else product
        if self.softcap is not None:
            return out.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        return out if self.scale == self.temperature else out.mul_(self.scale / self.temperature)

    def write_cap_slope(self, logits: Tensor, out: Tensor) -> Tensor:
        """Fill `out` with 1 - tanh^2: the slope of the capped `logits`, but for the factor scale / temperature."""
        assert self.softcap is not None
        return torch.mul(logits, self.temperature / self.softcap, out=out).square_().neg_().add_(1.0)


class _Head(torch.autograd.Function):
    """The chunked pass. Saved for backward: its inputs and a few numbers a token."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        ref_hidden: Tensor | None,
        ref_weight: Tensor | None,
        ref_bias: Tensor | None,
        options: _Options,
        chunks: list[slice],
        dtypes: list[torch.dtype],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logprobs = torch.empty(len(hidden), dtype=softmax_dtype(hidden), device=hidden.device)
        normaliser, ref_normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs) if options.want_entropy else None
        kl = torch.empty_like(logprobs) if ref_hidden is not None else None
        with torch.autocast(hidden.device.type, enabled=False):
            policy, reference = _layers((hidden, weight, bias), (ref_hidden, ref_weight, ref_bias), dtypes, options)
            buffers = _Buffers(chunks, len(weight), logprobs)
            for rows in chunks:
                logits = policy.write_logits(rows, buffers.get("logits", rows), buffers)
                chosen = logits.gather(1, ids[rows, None])[:, 0]
                top = logits.amax(dim=1)
                logits.sub_(top[:, None])
                # The differences from the largest logit are needed again only for the entropy and the KL.
                weights = logits if entropy is None and kl is None else buffers.get("weights", rows)
                if reference is not None:
                    ref_logits = reference.write_logits(rows, buffers.get("ref_logits", rows), buffers)
                    ref_top = ref_logits.amax(dim=1)
                    ref_log_sum = torch.exp(ref_logits.sub_(ref_top[:, None]), out=weights).sum(dim=1).log()
                    ref_normaliser[rows] = ref_top + ref_log_sum
                total = torch.exp(logits, out=weights).sum(dim=1)
                log_sum = total.log()
                normaliser[rows] = top + log_sum
                logprobs[rows] = chosen - top - log_sum
                if kl is not None:
                    # By differences, so that equal policies are exactly 0 apart.
                    lead = ref_logits.sub_(logits).mul_(weights).sum(dim=1) / total
                    kl[rows] = ref_log_sum - log_sum - lead
                if entropy is not None:
                    entropy[rows] = log_sum - logits.mul_(weights).sum(dim=1) / total
        if entropy is not None and not options.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.chunks, ctx.dtypes = options, chunks, dtypes
        ctx.save_for_backward(
            hidden, weight, bias, ids, normaliser, entropy, kl, ref_hidden, ref_weight, ref_bias, ref_normaliser
        )
        return logprobs, entropy, kl

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, logprob_grad: Tensor | None, entropy_grad: Tensor | None, kl_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, normaliser, entropy, kl, *reference_layer, ref_normaliser = ctx.saved_tensors
        if kl_grad is None:
            reference_layer = [None, None, None]
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=normaliser.dtype) if wants_weight else None
        bias_grad = torch.zeros_like(bias, dtype=normaliser.dtype) if wants_bias else None

        # With p the probabilities, the gradient of the scaled logits is, each factor but p being one number a token,
        #   chosen * [v = id] - p * (constant + slope * log p + kl_grad * log reference).
        factor = ctx.options.logit_map.scale / ctx.options.temperature
        chosen = torch.zeros_like(normaliser) if logprob_grad is None else logprob_grad * factor
        constant, slope = chosen, None
        if entropy_grad is not None:
            slope = entropy_grad * factor
            constant = constant + slope * entropy
        if kl_grad is not None:
            kl_grad = kl_grad * factor
            constant = constant + kl_grad * kl
            slope = -kl_grad if slope is None else slope - kl_grad

        with torch.autocast(hidden.device.type, enabled=False):
            policy, reference = _layers((hidden, weight, bias), tuple(reference_layer), ctx.dtypes, ctx.options)
            buffers = _Buffers(ctx.chunks, len(weight), normaliser)
            for rows in ctx.chunks:
                logits = policy.write_logits(rows, buffers.get("logits", rows), buffers)
                if policy.softcap is not None:
                    cap_slope = policy.write_cap_slope(logits, buffers.get("cap_slope", rows))
                logits.sub_(normaliser[rows, None])
                if slope is None:
                    gradient = logits.exp_().mul_(-constant[rows, None])
                else:
                    weights = torch.exp(logits, out=buffers.get("weights", rows))
                    gradient = logits.mul_(slope[rows, None]).add_(constant[rows, None])
                    if reference is not None and kl_grad is not None:
                        ref_logits = reference.write_logits(rows, buffers.get("ref_logits", rows), buffers)
                        gradient.addcmul_(ref_logits.sub_(ref_normaliser[rows, None]), kl_grad[rows, None])
                    gradient.mul_(weights).neg_()
                gradient[torch.arange(len(gradient), device=ids.device), ids[rows]] += chosen[rows]
                if policy.softcap is not None:
                    gradient.mul_(cap_slope)
                if bias_grad is not None:
                    bias_grad += gradient.sum(dim=0)
                if policy.dtype != gradient.dtype:
                    gradient = buffers.get("product", rows, policy.dtype).copy_(gradient)
                if hidden_grad is not None:
                    hidden_grad[rows] = product_of(gradient, policy.weight)
                if weight_grad is not None:
                    _add_product(weight_grad, gradient, policy.hidden[rows])
        weight_grad = None if weight_grad is None else weight_grad.to(weight.dtype)
        bias_grad = None if bias_grad is None else bias_grad.to(bias.dtype)
        return hidden_grad, weight_grad, bias_grad, *[None] * 7


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """Add gradient.T @ hidden to `total`, in the dtype of `total`."""
    by_onednn = total.dtype == torch.float32 and total.device.type == "cpu" and onednn_is_faster()
    if total.dtype == hidden.dtype and not by_onednn:
        total.addmm_(gradient.t(), hidden)
        return
    # Neither a half-precision product nor one of oneDNN's can be added to a float32 sum in the same call. A part of the
    # vocabulary at a time, it needs no second tensor of the weight's size and is added while it is in the cache.
    for part, columns in zip(total.split(PRODUCT_ROWS), gradient.split(PRODUCT_ROWS, dim=1)):
        part += product_of(columns.t(), hidden)


def _layers(
    policy: tuple[Tensor, Tensor, Tensor | None],
    reference: tuple[Tensor | None, Tensor | None, Tensor | None],
    dtypes: list[torch.dtype],
    options: _Options,
) -> tuple[_Layer, _Layer | None]:
    hidden, weight, bias = reference
    if hidden is None or weight is None:
        return _Layer(*policy, dtypes[0], options), None
    return _Layer(*policy, dtypes[0], options), _Layer(hidden, weight, bias, dtypes[1], options)


def _outputs_of_logits(logits: Tensor, ids: Tensor, reference: Reference | None, options: _Options) -> HeadOutputs:
    """The plain formulas, on the logits of all the ids."""

    def scaled(logits: Tensor) -> Tensor:
        return options.logit_map(logits.to(softmax_dtype(logits))) / options.temperature

    logprobs = scaled(logits).log_softmax(dim=-1)
    entropy = kl = None
    if options.want_entropy:
        with torch.set_grad_enabled(torch.is_grad_enabled() and options.entropy_gradient):
            entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    if reference is not None:
        with torch.no_grad():
            reference_logits = scaled(F.linear(*reference))
        kl = exact_kl(scaled(logits), reference_logits)
    return HeadOutputs(logprobs.gather(-1, ids[:, None])[:, 0], entropy, kl)


def _chunks(tokens: int, vocabulary: int, chunk_tokens: int | None) -> list[slice]:
    """Rows of each chunk, in order: of `chunk_tokens`, or of equal sizes that CHUNK_BYTES allows."""
    if chunk_tokens is None:
        most = max(1, CHUNK_BYTES // (4 * vocabulary))
        chunk_tokens = max(1, math.ceil(tokens / max(1, math.ceil(tokens / most))))
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens must be >= 1: got {chunk_tokens}. Leave it out to have it chosen.")
    return [slice(start, min(start + chunk_tokens, tokens)) for start in range(0, tokens, chunk_tokens)]


def _size(rows: slice) -> int:
    return int(rows.stop - rows.start)


def softmax_dtype(values: Tensor) -> torch.dtype:
    """In which a distribution over the vocabulary is computed: float32, or what is finer already."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """What autocast would make of a linear layer's input; it leaves float64 alone."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _check_tokens(hidden: Tensor, ids: Tensor) -> None:
    if hidden.ndim != 2 or ids.shape != hidden.shape[:1] or ids.dtype != torch.int64:
        raise ConfigError(
            f"hidden must be [tokens, width] and ids [tokens] in int64: got {list(hidden.shape)} and "
            f"{list(ids.shape)} in {ids.dtype}. Flatten the valid tokens first."
        )


def _check_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, tokens: int, vocabulary: int) -> None:
    shapes = [list(tensor.shape) for tensor in (hidden, weight, bias) if tensor is not None]
    width = hidden.shape[-1]
    if shapes != [[tokens, width], [vocabulary, width], [vocabulary]][: len(shapes)]:
        raise ConfigError(
            f"hidden, weight and bias must be [tokens, width], [vocab, width] and [vocab] with tokens={tokens} and "
            f"vocab={vocabulary}: got {shapes}. A reference scores the same tokens over the same vocabulary."
        )
    dtypes = [tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None]
    if len(set(dtypes)) > 1 and not torch.is_autocast_enabled(hidden.device.type):
        raise ConfigError(f"hidden, weight and bias must share a dtype outside torch.autocast: got {dtypes}.")
