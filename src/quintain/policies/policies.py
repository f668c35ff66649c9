"""Who computes with which weights: the online policy, and its slots evaluated in the same module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quintain.errors import ConfigError
from quintain.policies.forward import ActorCritic
from quintain.policies.slots import Slot, SlotName, TargetUpdate, swapped
from quintain.types import PolicyOutputs, Rollouts, Unit

KEPT_TOLERANCE = 1e-4
"""Largest log-probability difference, in nats, at which the engine's log-probabilities stand for the trainer's own."""


def corrected(
    logprobs: Float[Tensor, "batch completion"], rollouts: Rollouts, *, cap: float
) -> Float[Tensor, "batch completion"]:
    """The same log-probabilities, with each token's gradient weighted for the policy that really drew it.

        weight = min(exp(old_logprobs - sampling_logprobs), cap)

    `old_logprobs` are the trainer's own of the policy that sampled, `sampling_logprobs` the engine's, and 1 is the
    weight where the engine reported none. Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", truncated importance sampling.
    """
    old = logprobs.detach() if rollouts.old_logprobs is None else rollouts.old_logprobs
    log_weight = (old - rollouts.sampling_logprobs).nan_to_num(0.0)
    weight = log_weight.exp().clamp(max=cap)
    fixed = logprobs.detach()
    return fixed + weight * (logprobs - fixed)


class Policies:
    """The online module and the slots that share it.

    Args:
        module: the language model and, where there is one, its value model.
        slots: which of "ref", "old" and "target" exist.
        temperature: sampling temperature, applied to every policy alike; > 0.
        micro_batch_tokens: tokens whose activations may be held at once, a prompt that is shared counted once. A
            critic that runs the backbone a second time leaves half of them for each.
        target_update: moves the target; needed when "target" is among the slots.
        exact_kl_to: the slot to which the exact KL is measured, or None: always when the sampling policy is recorded,
            and in every online pass if `exact_kl_in_loss`.
        entropy_gradient: keep the graph through the entropy, for an entropy bonus.
        autocast: makes the context in which forward passes run.
        sampling_correction: largest weight of a token's gradient for the engine having sampled from a policy that is
            rounded otherwise; None where it computes as this module does.
        target_values: keep the value model in the target slot too, and let the target supply `values` (S16).
    """

    def __init__(
        self,
        module: ActorCritic,
        *,
        slots: Collection[SlotName],
        temperature: float,
        micro_batch_tokens: int,
        target_update: TargetUpdate | None = None,
        exact_kl_to: SlotName | None = None,
        exact_kl_in_loss: bool = True,
        entropy_gradient: bool = False,
        target_values: bool = False,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        sampling_correction: float | None = None,
    ) -> None:
        if exact_kl_to is not None and not module.computes_exact_kl:
            raise ConfigError(
                f"kl_estimator='exact' cannot be used with {type(module.language_model).__name__}, which changes its "
                f"logits in a way of its own. Use 'k2' in a loss or 'k1' in a reward."
            )
        self.module, self.autocast = module, autocast
        self.sampling_correction = sampling_correction
        self._moved = False
        self.temperature = temperature
        self.micro_batch_tokens = max(1, micro_batch_tokens // module.backbone_passes)
        self.target_update, self.exact_kl_to, self.exact_kl_in_loss = target_update, exact_kl_to, exact_kl_in_loss
        self.entropy_gradient, self.target_values = entropy_gradient, target_values
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
        }
        policy = {name: value for name, value in self.parameters.items() if name.startswith("language_model.")}
        self.slots: dict[SlotName, Slot] = {
            name: Slot(
                self.parameters if name == "target" and target_values else policy, full_precision=name == "target"
            )
            for name in slots
        }

    def online(self, rollouts: Rollouts) -> PolicyOutputs:
        """The policy being trained, with gradient."""
        outputs = self._evaluate(rollouts, exact=self.exact_kl_in_loss, entropy=True)
        if self.sampling_correction is None or not rollouts.on_policy:
            return outputs
        return replace(outputs, logprobs=corrected(outputs.logprobs, rollouts, cap=self.sampling_correction))

    def micro_batches(self, rollouts: Rollouts, keep: Unit) -> Iterator[Rollouts]:
        """The rollouts in parts whose activations fit, each trimmed to its own longest row."""
        return (rollouts.select(rows) for rows in self._partition(rollouts, keep))

    def _partition(self, rollouts: Rollouts, keep: Unit) -> list[list[int]]:
        return rollouts.partition(self.micro_batch_tokens, keep, share_prompts=self.module.shares_prompts_of(rollouts))

    @torch.no_grad()
    def annotate(self, rollouts: Rollouts, *, old: bool, keep: Unit = "token") -> Rollouts:
        """Add what every slot says about the sampled tokens, and the values the critic gives them.

        Args:
            old: also record the log-probabilities of the policy that sampled, unless these are given already. What the
                engine kept, values too, stands where a first completion shows that it computes as the online policy
                does; else it is computed now.
            keep: what micro-batches keep whole; the loop passes the algorithm's unit, so that an update on the whole
                rollout repeats exactly these micro-batches.
        """
        old = old and rollouts.old_logprobs is None
        if old or rollouts.values is not None:
            alike = self._sampled_alike(rollouts)
            rollouts = rollouts.replace(
                old_logprobs=rollouts.sampling_logprobs if old and alike else rollouts.old_logprobs,
                values=rollouts.values if alike and not self.target_values else None,
            )
            old = old and not alike
        if "old" in self.slots:
            self.slots["old"].copy(self.parameters)
        recorded: dict[str, Tensor] = {}

        def record(name: str, rows: list[int], values: Tensor) -> None:
            if name not in recorded:
                recorded[name] = torch.zeros(rollouts.completion_ids.shape, device=values.device)
            recorded[name][rows, : values.shape[1]] = values

        values_wanted = self.module.value_model is not None and rollouts.values is None and not self.target_values
        others = [name for name in self.slots if name != "old"]
        if not (old or values_wanted or others):
            return rollouts
        for rows in self._partition(rollouts, keep):
            micro = rollouts.select(rows)
            if old:
                outputs = self._evaluate(micro, exact=True, values=values_wanted)
                record("old_logprobs", rows, outputs.logprobs)
                if outputs.exact_kl is not None:
                    record("reference_kl", rows, outputs.exact_kl)
                if outputs.values is not None:
                    record("values", rows, outputs.values)
            elif values_wanted:
                with self.autocast():
                    record("values", rows, self.module.values(micro))
            for name in others:
                outputs = self._evaluate(micro, slot=name, values=name == "target" and self.target_values)
                record(f"{name}_logprobs", rows, outputs.logprobs)
                if outputs.values is not None:
                    record("values", rows, outputs.values)
        return rollouts.replace(**recorded)

    def _sampled_alike(self, rollouts: Rollouts) -> bool:
        """Whether the engine's log-probabilities are this module's up to rounding, by a rollout's first completion.

        Never before the first update: KL to a copy of the policy is exactly 0 there, and is measured so.
        """
        if not (self._moved and rollouts.on_policy and self.exact_kl_to is None and len(rollouts)):
            return False
        first = rollouts.select([0])
        difference = (self._evaluate(first, values=False).logprobs - first.sampling_logprobs).abs().max()
        return bool(difference <= KEPT_TOLERANCE)

    def after_step(self) -> None:
        """Move the target; called once after every optimizer step."""
        self._moved = True
        if "target" in self.slots and self.target_update is not None:
            self.target_update(self.slots["target"], self.parameters)

    def _evaluate(
        self,
        rollouts: Rollouts,
        *,
        slot: SlotName | None = None,
        exact: bool = False,
        entropy: bool = False,
        values: bool = True,
    ) -> PolicyOutputs:
        reference = None
        if exact and self.exact_kl_to is not None:
            with torch.no_grad(), self.autocast(), swapped(self.parameters, self.slots[self.exact_kl_to]):
                reference = self.module.head_inputs(rollouts)
        with swapped(self.parameters, self.slots[slot]) if slot is not None else nullcontext(), self.autocast():
            outputs: PolicyOutputs = self.module(
                rollouts,
                self.temperature,
                reference,
                entropy_gradient=self.entropy_gradient,
                want_values=values,
                want_entropy=entropy,
            )
        return outputs

    def state_dict(self) -> dict[str, Tensor]:
        """Trainable parameters of the online policy and of every slot, under "online/..." and "SLOT/..."."""
        state = {f"online/{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for slot_name, slot in self.slots.items():
            state.update({f"{slot_name}/{name}": tensor for name, tensor in slot.tensors.items()})
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; the caller has checked that the names agree."""
        self._moved = True
        for name, parameter in self.parameters.items():
            parameter.copy_(state[f"online/{name}"])
        for slot_name, slot in self.slots.items():
            slot.load_state_dict({name: state[f"{slot_name}/{name}"] for name in slot.tensors})
