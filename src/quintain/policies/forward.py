"""One forward pass of a policy over sampled completions: log-probabilities, entropy, values."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from quintain.kl.estimators import exact_kl
from quintain.types import PolicyOutputs, Rollouts


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
        self._keeps_logits = "logits_to_keep" in inspect.signature(base.forward).parameters
        self._head: nn.Module = base.get_output_embeddings()

    def forward(
        self,
        rollouts: Rollouts,
        temperature: float,
        reference_logits: Tensor | None = None,
        entropy_gradient: bool = False,
        want_values: bool = True,
    ) -> PolicyOutputs:
        """Log-probabilities, entropy and values of every completion token, at the sampling temperature.

        Args:
            rollouts: the sequences; only ids and masks are read.
            temperature: divides the logits, as it did when sampling; > 0.
            reference_logits: another policy's `completion_logits`, for the exact KL to it.
            entropy_gradient: keep the graph through the entropy (needed only for an entropy bonus).
            want_values: also run the value model, where there is one.
        """
        with self._hidden_states() as captured:
            logits = self.completion_logits(rollouts)
        mask = rollouts.completion_mask
        values = None
        if self.value_model is not None and want_values:
            hidden = captured["hidden"][:, -mask.shape[1] - 1 : -1]
            values = torch.where(mask, self.value_model(rollouts, hidden).float(), 0.0)
        kl = None
        if reference_logits is not None:
            kl = torch.where(mask, exact_kl(logits / temperature, reference_logits / temperature), 0.0)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            entropy = torch.where(mask, token_entropy(logits, temperature), 0.0)
        logprobs = torch.where(mask, token_logprobs(logits, rollouts.completion_ids, temperature), 0.0)
        return PolicyOutputs(logprobs=logprobs, entropy=entropy, values=values, exact_kl=kl)

    def completion_logits(self, rollouts: Rollouts) -> Float[Tensor, "batch completion vocab"]:
        """Logits that predict each completion token, in float32, before the temperature."""
        keep = rollouts.completion_ids.shape[1] + 1
        inputs = model_inputs(rollouts)
        if self._keeps_logits:
            inputs["logits_to_keep"] = keep
        logits = self.language_model(**inputs, use_cache=False).logits
        # The head ran on the last prompt token and all completion tokens; the last of these predicts nothing sampled.
        return logits[:, -keep:-1].float()

    @contextmanager
    def _hidden_states(self) -> Iterator[dict[str, Tensor]]:
        """Catch what enters the output embedding: the last hidden states of exactly the positions it is applied to."""
        captured: dict[str, Tensor] = {}
        if self.value_model is None:
            yield captured
            return

        def catch(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            captured["hidden"] = arguments[0]

        handle = self._head.register_forward_pre_hook(catch)
        try:
            yield captured
        finally:
            handle.remove()


def model_inputs(rollouts: Rollouts) -> dict[str, Any]:
    """Token ids, attention mask and position ids of prompt and completion, as a transformers model takes them."""
    mask = torch.cat([rollouts.prompt_mask, rollouts.completion_mask], dim=1)
    return {
        "input_ids": torch.cat([rollouts.prompt_ids, rollouts.completion_ids], dim=1),
        "attention_mask": mask.long(),
        # Counted over valid tokens, so that left padding does not shift absolute positions.
        "position_ids": (mask.long().cumsum(dim=1) - 1).clamp(min=0),
    }


def token_logprobs(
    logits: Float[Tensor, "batch completion vocab"], ids: Int[Tensor, "batch completion"], temperature: float
) -> Float[Tensor, "batch completion"]:
    """Log-probability of each id under softmax(logits / temperature), in nats and float32."""
    scaled = logits.float() / temperature if temperature != 1.0 else logits.float()
    return scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(dim=-1)


def token_entropy(
    logits: Float[Tensor, "batch completion vocab"], temperature: float
) -> Float[Tensor, "batch completion"]:
    """Entropy of softmax(logits / temperature) at each position, in nats, one row at a time to bound memory."""
    rows = []
    for row in logits:
        logprobs = (row.float() / temperature).log_softmax(dim=-1)
        rows.append(-(logprobs.exp() * logprobs).sum(dim=-1))
    return torch.stack(rows)
