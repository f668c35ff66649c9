"""From logits to tokens: pure functions, float32 or better whatever the model computes in.

A filter returns logits in which what it excludes is -inf.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from quintain.errors import RolloutError
from quintain.types import SamplingParams

Logits = Float[Tensor, "batch vocab"]
BLOCK = 256
"""Tokens that are summed together when a cumulative distribution is inverted."""


def next_tokens(
    logits: Logits,
    uniforms: Float[Tensor, " batch"],
    sampling: SamplingParams,
    *,
    seen: Bool[Tensor, "batch vocab"] | None = None,
    ban_stops: Bool[Tensor, " batch"] | None = None,
) -> tuple[Int[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Sample one token a row: penalty, bans, temperature, top-k, top-p, min-p, in that order.

    Args:
        logits: of the model, in any floating dtype.
        uniforms: one number in [0, 1) a row; it alone decides the row's token.
        seen: tokens of the prompt and the completion so far; needed only with a repetition penalty.
        ban_stops: rows that are still shorter than their minimum length; None: no row is.
    Returns:
        The tokens, and their log-probabilities under softmax(logits / temperature), before everything else above.
    Raises:
        RolloutError: the logits hold NaN or positive infinity.
    """
    scaled = logits.float() / sampling.temperature if sampling.temperature != 1 else logits.float()
    shaped = scaled
    if seen is not None:
        shaped = penalise_repetition(shaped, seen, penalty=sampling.repetition_penalty)
    if ban_stops is not None:
        shaped = ban(shaped, sampling.stop_token_ids, ban_stops)
    if sampling.top_k:
        shaped = keep_top_k(shaped, top_k=sampling.top_k)
    if sampling.top_p < 1:
        shaped = keep_top_p(shaped, top_p=sampling.top_p)
    if sampling.min_p:
        shaped = keep_min_p(shaped, min_p=sampling.min_p)
    tokens = draw(shaped, uniforms)
    return tokens, token_logprobs(scaled, tokens, temperature=1.0)


def token_logprobs(logits: Logits, tokens: Int[Tensor, " batch"], *, temperature: float) -> Float[Tensor, " batch"]:
    """log softmax(logits / temperature) of one token a row, in nats and in float32."""
    scaled = logits.float() / temperature if temperature != 1 else logits.float()
    return scaled.gather(1, tokens[:, None]).squeeze(1) - scaled.logsumexp(dim=1)


def draw(logits: Logits, uniforms: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Inverse of the cumulative distribution: the first token whose cumulative probability exceeds the uniform number.

    Unlike an argmax over noise, it needs one random number a row, so a row's tokens depend on its own numbers only. The
    sum over the vocabulary is made in blocks: the number falls into one of them, and only that one is summed token by
    token.

    Raises:
        RolloutError: a row has no distribution, because its logits hold NaN or positive infinity.
    """
    precise = uniform_dtype(logits.device)
    weights = (logits - logits.amax(dim=1, keepdim=True)).exp_()
    weights = nn.functional.pad(weights, (0, -weights.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    ends = weights.sum(dim=2, dtype=precise).cumsum(dim=1)
    total = ends[:, -1:]
    if not torch.isfinite(total).all():
        row = int((~torch.isfinite(total)).nonzero()[0, 0])
        raise RolloutError(
            f"the model's logits are not finite (row {row} of {len(logits)} in this decoding step), so there is "
            "nothing to sample from. Weights or activations have overflowed: lower the learning rate, or use bfloat16 "
            "or float32 in place of float16."
        )
    target = _below(uniforms[:, None].to(precise) * total, total)
    block = torch.searchsorted(ends, target, right=True)
    inside = weights.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1).cumsum(dim=1, dtype=precise)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    # The block's own sum is rounded in another order than the sum of its tokens.
    token = torch.searchsorted(inside, _below(target - before, inside[:, -1:]), right=True)
    return (block * BLOCK + token).squeeze(1)


def _below(target: Tensor, total: Tensor) -> Tensor:
    """The target, or the largest number below the total, which no cumulative probability exceeds."""
    return torch.minimum(target, total.nextafter(torch.zeros_like(total)))


def uniform_dtype(device: torch.device) -> torch.dtype:
    """Precision of the cumulative distribution: a float32 sum over a large vocabulary loses its rare tokens."""
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def ban(logits: Logits, token_ids: tuple[int, ...], rows: Bool[Tensor, " batch"]) -> Logits:
    """Exclude the given tokens in the given rows; ids beyond the vocabulary cannot be sampled anyway."""
    logits = logits.clone()
    for token in token_ids:
        if token < logits.shape[1]:
            logits[:, token].masked_fill_(rows, -math.inf)
    return logits


def penalise_repetition(logits: Logits, seen: Bool[Tensor, "batch vocab"], *, penalty: float) -> Logits:
    """Divide positive logits of seen tokens by `penalty` and multiply negative ones by it.

    Source: Keskar et al. 2019, arXiv:1909.05858, section 4.1, with the sign rule that came into common use after it.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Logits, *, top_k: int) -> Logits:
    """Exclude all but the `top_k` most likely tokens of each row; exactly that many stay, ties or not."""
    top = logits.topk(min(top_k, logits.shape[1]), dim=1)
    return torch.full_like(logits, -math.inf).scatter(1, top.indices, top.values)


def keep_top_p(logits: Logits, *, top_p: float) -> Logits:
    """Keep the smallest set of most likely tokens whose probabilities sum to at least `top_p`."""
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=1)
    mass_before = probabilities.cumsum(dim=1) - probabilities
    excluded = mass_before >= top_p
    return logits.masked_fill(torch.zeros_like(excluded).scatter(1, order, excluded), -math.inf)


def keep_min_p(logits: Logits, *, min_p: float) -> Logits:
    """Exclude tokens less than `min_p` times as likely as the most likely one."""
    floor = logits.amax(dim=1, keepdim=True) + math.log(min_p)
    return logits.masked_fill(logits < floor, -math.inf)
