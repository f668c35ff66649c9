"""One forward pass of a policy over sampled completions: log-probabilities, entropy, values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from quintain.kl.estimators import exact_kl
from quintain.policies.layout import Layout, PackingCost, lay_out
from quintain.policies.value_head import SharedValueHead
from quintain.types import PolicyOutputs, Rollouts

ENTROPY_CHUNK_TOKENS = 256
"""Tokens whose whole distribution is held at once when entropies are computed."""
SHARING_TOLERANCE = 1e-3
"""Largest log-probability difference, in nats, between shared and plain prompts that rounding explains."""

_log = logging.getLogger(__name__)


class ActorCritic(nn.Module):
    """The language model and, for PPO, its value model, as the one module that is trained.

    Args:
        language_model: a causal language model of transformers, PEFT-wrapped or not.
        value_model: maps the policy's last hidden states, or the tokens themselves, to one value a token; see
            `value_head.py`. None for algorithms without a critic.
    """

    def __init__(self, language_model: nn.Module, value_model: nn.Module | None = None) -> None:
        super().__init__()
        self.language_model = language_model
        self.value_model = value_model
        base = language_model.get_base_model() if hasattr(language_model, "get_base_model") else language_model
        self._head: nn.Module = base.get_output_embeddings()
        config = base.config.get_text_config()
        linear = sum(value.numel() for name, value in base.named_parameters() if "embed" not in name)
        self._packing = PackingCost(token=2.0 * linear, pair=4.0 * config.hidden_size * config.num_hidden_layers)
        self.backbone_passes = 1 if value_model is None or isinstance(value_model, SharedValueHead) else 2
        """Backbones whose activations an update holds: the policy's, and a critic's that is not a head on them."""
        self.shares_prompts = can_share_prompts(self, config.vocab_size)

    def forward(
        self,
        rollouts: Rollouts,
        temperature: float,
        reference_logits: Tensor | None = None,
        entropy_gradient: bool = False,
        want_values: bool = True,
        want_entropy: bool = True,
    ) -> PolicyOutputs:
        """Log-probabilities, entropy and values of every completion token, at the sampling temperature.

        Args:
            rollouts: the sequences; only ids, masks and groups are read.
            temperature: divides the logits, as it did when sampling; > 0.
            reference_logits: another policy's `completion_logits`, for the exact KL to it.
            entropy_gradient: keep the graph through the entropy (needed only for an entropy bonus).
            want_values: also run the value model, where there is one.
            want_entropy: also compute the entropy, which takes a pass over the whole distribution.
        """
        layout = self.lay_out(rollouts)
        logits, hidden = self._logits_and_hidden(layout)
        ids = rollouts.completion_ids[rollouts.completion_mask]
        values = kl = entropy = None
        if self.value_model is not None and want_values:
            values = layout.scatter(self.value_model(layout, hidden).float())
        if reference_logits is not None:
            kl = layout.scatter(exact_kl(logits / temperature, reference_logits / temperature))
        if want_entropy:
            with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
                entropy = layout.scatter(token_entropy(logits, temperature))
        logprobs = layout.scatter(token_logprobs(logits, ids, temperature))
        return PolicyOutputs(logprobs=logprobs, entropy=entropy, values=values, exact_kl=kl)

    def completion_logits(self, rollouts: Rollouts) -> Float[Tensor, "valid vocab"]:
        """Logits that predict each valid completion token, in row order, in float32, before the temperature."""
        return self._logits_and_hidden(self.lay_out(rollouts))[0]

    def lay_out(self, rollouts: Rollouts) -> Layout:
        """The layout with the least arithmetic that this model computes rightly."""
        return lay_out(rollouts, self._packing if self.shares_prompts else 1)

    def _logits_and_hidden(self, layout: Layout) -> tuple[Float[Tensor, "valid vocab"], Float[Tensor, "valid width"]]:
        with self._head_at(layout) as caught:
            logits = self.language_model(**layout.inputs, use_cache=False).logits[0]
        return at_least_float32(logits), caught[0]

    @contextmanager
    def _head_at(self, layout: Layout) -> Iterator[list[Tensor]]:
        """Apply the output embedding at the predicting positions only, and catch the hidden states that enter it.

        A hook keeps whatever the model does to its logits afterwards, such as scaling or soft-capping.
        """
        caught: list[Tensor] = []

        def keep_predicting(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            caught.append(layout.gather(arguments[0]))
            return (caught[0][None], *arguments[1:])

        handle = self._head.register_forward_pre_hook(keep_predicting)
        try:
            yield caught
        finally:
            handle.remove()


def can_share_prompts(module: ActorCritic, vocabulary: int) -> bool:
    """Whether the model honours a mask of who sees whom: measured once, on two completions of one prompt.

    Sliding windows, recurrent layers and position biases do not, and such models get each prompt once a completion. So
    does a policy whose value model, which reads the same layout, is of that kind.
    """
    modes = {part: part.training for part in module.modules()}
    with torch.no_grad():
        module.eval()
        generator = torch.Generator().manual_seed(0)
        length = _probe_length(module)
        ids = torch.randint(vocabulary, (2, length), generator=generator).to(_device(module))
        prompt = ids[:1].expand(2, -1)
        ones = torch.ones_like(ids, dtype=torch.bool)
        probe = Rollouts(
            prompt_ids=prompt,
            prompt_mask=ones,
            completion_ids=ids.flip(0),
            completion_mask=ones,
            stopped=ones[:, 0],
            sampling_logprobs=torch.zeros_like(ids, dtype=torch.float32),
            group_ids=torch.zeros_like(ids[:, 0]),
            prompts=["", ""],
            completions=["", ""],
        )
        try:
            plain, shared = (_probe_result(module, probe, completions_per_pack) for completions_per_pack in (1, 2))
        except (ValueError, TypeError, RuntimeError) as error:
            _log.info("prompts are not shared in the training pass: the model refused the mask (%s)", error)
            return False
        finally:
            for part, training in modes.items():
                part.training = training
    difference = float((plain - shared).abs().max())
    if difference > SHARING_TOLERANCE:
        _log.info("prompts are not shared in the training pass: log-probabilities would differ by %.3g", difference)
    return difference <= SHARING_TOLERANCE


def _probe_result(module: ActorCritic, probe: Rollouts, completions_per_pack: int) -> Float[Tensor, " numbers"]:
    """Every number that a wrong mask would change: log-probabilities, and the value model's states up to their size."""
    layout = lay_out(probe, completions_per_pack)
    logits, hidden = module._logits_and_hidden(layout)
    logprobs = token_logprobs(logits, probe.completion_ids.flatten(), 1.0)
    if module.value_model is None:
        return logprobs
    states = module.value_model.states(layout, hidden).float()  # type: ignore[operator]
    return torch.cat([logprobs, (states / states.abs().max().clamp(min=1.0)).flatten()])


def _probe_length(module: ActorCritic) -> int:
    """Tokens a side: enough to reach past a sliding window, where a model in there has one."""
    configs = [part.config.get_text_config() for part in module.modules() if isinstance(part, PreTrainedModel)]
    window = max(int(getattr(config, "sliding_window", None) or 8) for config in configs)
    return min(window + 2, *(int(getattr(config, "max_position_embeddings", 64)) // 2 for config in configs))


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def at_least_float32(values: Tensor) -> Tensor:
    """Half-precision numbers as float32; others as they are."""
    return values if values.dtype == torch.float64 else values.float()


def token_logprobs(
    logits: Float[Tensor, "*tokens vocab"], ids: Int[Tensor, "*tokens"], temperature: float
) -> Float[Tensor, "*tokens"]:
    """Log-probability of each id under softmax(logits / temperature), in nats and at least float32."""
    scaled = at_least_float32(logits)
    if temperature != 1.0:
        scaled = scaled / temperature
    return scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(dim=-1)


def token_entropy(logits: Float[Tensor, "tokens vocab"], temperature: float) -> Float[Tensor, " tokens"]:
    """Entropy of softmax(logits / temperature) at each position, in nats, a chunk at a time to bound memory."""
    chunks = []
    for chunk in logits.split(ENTROPY_CHUNK_TOKENS):
        logprobs = (at_least_float32(chunk) / temperature).log_softmax(dim=-1)
        chunks.append(-(logprobs.exp() * logprobs).sum(dim=-1))
    return torch.cat(chunks)
