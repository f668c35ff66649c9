"""One forward pass of a policy over sampled completions: log-probabilities, entropy, values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quintain.adapters import unwrapped
from quintain.attention import adopt, longest_unwindowed
from quintain.fused import fuse
from quintain.matmul import use_fast_linears
from quintain.policies.head import (
    HeadOutputs,
    LogitMap,
    Reference,
    checkpointed_head_outputs,
    find_logit_map,
    head_outputs,
    outputs_of_logits,
    softmax_dtype,
)
from quintain.policies.layout import Layout, repeat_prompts, share_prompts
from quintain.policies.probe import evaluating, two_completions
from quintain.policies.value_head import SharedValueHead
from quintain.types import PolicyOutputs, Rollouts

SHARING_TOLERANCE = 1e-3
"""Largest log-probability difference, in nats, between shared and plain prompts that rounding explains."""

_log = logging.getLogger(__name__)


class ActorCritic(nn.Module):
    """The language model and, for PPO, its value model, as the one module that is trained.

    Args:
        language_model: a causal language model of transformers, PEFT-wrapped or not. Its attention, linear
            layers, norms and feed-forward blocks may be computed by other functions from here on, with the same
            results; see `attention.py`, `matmul.py` and `fused.py`.
        value_model: maps the policy's last hidden states, or the tokens themselves, to one value a token; see
            `value_head.py`. None for algorithms without a critic.
    """

    def __init__(self, language_model: nn.Module, value_model: nn.Module | None = None) -> None:
        super().__init__()
        self.language_model = language_model
        self.value_model = value_model
        base = unwrapped(language_model)
        self._head: nn.Module = base.get_output_embeddings()
        config = base.config.get_text_config()
        use_fast_linears(self)
        fuse(self)
        self.backbone_passes = 1 if value_model is None or isinstance(value_model, SharedValueHead) else 2
        """Backbones whose activations an update holds: the policy's, and a critic's that is not a head on them."""
        self._logit_map: LogitMap | None = find_logit_map(config)
        self._window = min(longest_unwindowed(part) for part in self._backbones())
        self.shares_prompts = False
        """Whether the completions of a prompt share its tokens in the forward pass."""
        probe = _probe(self, config.vocab_size)
        with evaluating(self):
            if not _maps_logits(self, probe, self._logit_map):
                self._logit_map = None
            adopted = [adopt(part) for part in self._backbones()]
            self.shares_prompts = all(adopted) and can_share_prompts(self, probe)

    def forward(
        self,
        rollouts: Rollouts,
        temperature: float,
        reference: Reference | None = None,
        entropy_gradient: bool = False,
        want_values: bool = True,
        want_entropy: bool = True,
    ) -> PolicyOutputs:
        """Log-probabilities, entropy and values of every completion token, at the sampling temperature.

        Args:
            rollouts: the sequences; only ids, masks and groups are read.
            temperature: divides the logits, as it did when sampling; > 0.
            reference: another policy's `head_inputs`, for the exact KL to it.
            entropy_gradient: keep the graph through the entropy (needed only for an entropy bonus).
            want_values: also run the value model, where there is one.
            want_entropy: also compute the entropy, which takes a pass over the whole distribution.
        """
        layout = self.lay_out(rollouts)
        values = None
        options: dict[str, Any] = {
            "temperature": temperature,
            "want_entropy": want_entropy,
            "entropy_gradient": want_entropy and entropy_gradient,
            "reference": reference,
        }
        hidden, outputs = self._outputs(layout, options)
        if self.value_model is not None and want_values:
            values = layout.scatter(self.value_model(layout, hidden).float())

        def place(numbers: Tensor | None) -> Tensor | None:
            return None if numbers is None else layout.scatter(numbers)

        return PolicyOutputs(
            logprobs=layout.scatter(outputs.logprobs),
            entropy=place(outputs.entropy),  # type: ignore[arg-type]
            values=values,
            exact_kl=place(outputs.exact_kl),
        )

    def head_inputs(self, rollouts: Rollouts) -> Reference:
        """The hidden states that predict each valid completion token, and the output layer's weight and bias as now."""
        hidden, _ = self._hidden(self.lay_out(rollouts))
        if isinstance(self._head, nn.Linear):
            return hidden, self._head.weight.detach(), None if self._head.bias is None else self._head.bias.detach()
        # With an adapter on it, the layer is still affine: what it makes of 0 and of each unit says all.
        bias = self._head(hidden.new_zeros(1, hidden.shape[1]))
        units = self._head(torch.eye(hidden.shape[1], dtype=hidden.dtype, device=hidden.device))
        return hidden, (units - bias).t().contiguous(), bias[0]

    def values(self, rollouts: Rollouts) -> Float[Tensor, "batch completion"]:
        """The value model's numbers alone, without a pass over the vocabulary."""
        assert self.value_model is not None
        layout = self.lay_out(rollouts)
        return layout.scatter(self.value_model(layout, self._hidden(layout)[0]).float())

    @property
    def computes_exact_kl(self) -> bool:
        """Whether what the model does to its logits is known: another policy's are made from its hidden states."""
        return self._logit_map is not None

    def lay_out(self, rollouts: Rollouts) -> Layout:
        """The layout with the least arithmetic that this model computes rightly."""
        return share_prompts(rollouts) if self.shares_prompts_of(rollouts) else repeat_prompts(rollouts)

    def shares_prompts_of(self, rollouts: Rollouts) -> bool:
        """Whether completions share their prompts' tokens in a pass over these: not beyond a sliding window."""
        longest = int((rollouts.prompt_mask.sum(dim=1) + rollouts.lengths).max()) if len(rollouts) else 0
        return self.shares_prompts and longest <= self._window

    def _outputs(self, layout: Layout, options: dict[str, Any]) -> tuple[Float[Tensor, "valid width"], HeadOutputs]:
        """Hidden states and what the head says of them: in chunks, or from all logits where their map is unknown."""
        ids = layout.completion_ids
        if self._logit_map is None:
            hidden, logits = self._hidden(layout, want_logits=True)
            options = {name: value for name, value in options.items() if name != "reference"}
            return hidden, outputs_of_logits(logits, ids, **options)
        hidden, _ = self._hidden(layout)
        options = {**options, "logit_map": self._logit_map}
        if isinstance(self._head, nn.Linear):
            return hidden, head_outputs(hidden, self._head.weight, self._head.bias, ids, **options)
        return hidden, checkpointed_head_outputs(hidden, self._head, ids, **options)

    def _hidden(
        self, layout: Layout, *, want_logits: bool = False
    ) -> tuple[Float[Tensor, "valid width"], Float[Tensor, "rows vocab"]]:
        """The hidden states that predict the completion tokens, and the model's own logits for them (or for none)."""
        with self._head_at(layout, want_logits) as caught:
            logits = self.language_model(**layout.inputs, use_cache=False).logits[0]
        return caught[0], logits

    @contextmanager
    def _head_at(self, layout: Layout, want_logits: bool) -> Iterator[list[Tensor]]:
        """Catch the hidden states that enter the output layer, and let it compute at those positions, or at none.

        A hook keeps whatever the model does to its logits afterwards, such as scaling or soft-capping.
        """
        caught: list[Tensor] = []

        def keep_predicting(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            caught.append(layout.gather(arguments[0]))
            rows = caught[0] if want_logits else caught[0][:0].detach()
            return (rows[None], *arguments[1:])

        handle = self._head.register_forward_pre_hook(keep_predicting)
        try:
            yield caught
        finally:
            handle.remove()

    def _backbones(self) -> list[nn.Module]:
        """The language model, and a critic's classifier where it is a model of its own."""
        return [
            part for part in (self.language_model, getattr(self.value_model, "classifier", None)) if part is not None
        ]


def can_share_prompts(module: ActorCritic, probe: Rollouts) -> bool:
    """Whether the model honours a plan of who sees whom: measured, on two completions of one prompt.

    Recurrent layers and position biases do not, and such models get each prompt once a completion. So does a policy
    whose value model, which reads the same layout, is of that kind.
    """
    try:
        plain, shared = (_probe_result(module, lay_out(probe)) for lay_out in (repeat_prompts, share_prompts))
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        _log.info("prompts are not shared in the training pass: the model refused the plan (%s)", error)
        return False
    difference = float((plain - shared).abs().max())
    if not difference <= SHARING_TOLERANCE:
        _log.info("prompts are not shared in the training pass: log-probabilities would differ by %.3g", difference)
    return difference <= SHARING_TOLERANCE


def _probe(module: ActorCritic, vocabulary: int) -> Rollouts:
    """Two completions of one prompt, all of random tokens."""
    limits = [getattr(part.config.get_text_config(), "max_position_embeddings", None) for part in module._backbones()]  # type: ignore[union-attr]
    length = int(min(10, module._window // 2, *(limit // 2 for limit in limits if limit)))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (2, length), generator=generator).to(next(module.parameters()).device)
    return two_completions(ids[0], ids.flip(0))


@torch.no_grad()
def _probe_result(module: ActorCritic, layout: Layout) -> Float[Tensor, " numbers"]:
    """Every number that a wrong mask would change: log-probabilities, and the value model's states up to their size."""
    hidden, outputs = module._outputs(layout, {})
    if module.value_model is None:
        return outputs.logprobs
    states = module.value_model.states(layout, hidden).float()  # type: ignore[operator]
    return torch.cat([outputs.logprobs, (states / states.abs().max().clamp(min=1.0)).flatten()])


@torch.no_grad()
def _maps_logits(module: ActorCritic, probe: Rollouts, logit_map: LogitMap | None) -> bool:
    """Whether the model's logits are its output layer's under this map, up to rounding."""
    assert logit_map is not None
    hidden, logits = module._hidden(repeat_prompts(probe), want_logits=True)
    ours = logit_map(module._head(hidden).to(softmax_dtype(hidden)))
    if ours.shape != logits.shape:
        return False
    limit = 1e-4 if logits.dtype in (torch.float32, torch.float64) else 0.05
    alike = float((ours - logits).abs().max()) <= limit * max(1.0, float(logits.abs().max()))
    if not alike:
        _log.info("the log-probabilities come from whole logits: the model does something of its own to them")
    return alike
