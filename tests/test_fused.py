"""The fused parts of a layer give the values and gradients of the plain formulas, and keep less for them."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, tiny_model
from torch.nn.functional import linear, silu

from quintain.fused import fuse, gated_linear, rms_norm


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def test_the_norm_by_hand():
    """The root of the mean square of (3, 4) is sqrt(12.5)."""
    normed = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(normed, torch.tensor([[3.0, 8.0]]) / 12.5**0.5)


def test_gradients_of_the_norm_are_those_of_finite_differences():
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (numbers(2, 3, 5), numbers(5, seed=1)))


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_the_gated_block_are_those_of_finite_differences(bias):
    offset = [numbers(4, seed=3)] if bias else []
    inputs = (numbers(2, 3, 6), numbers(2, 3, 6, seed=1), numbers(4, 6, seed=2), *offset)
    assert torch.autograd.gradcheck(gated_linear, inputs)
    plain = linear(silu(inputs[0]) * inputs[1], *inputs[2:])
    torch.testing.assert_close(gated_linear(*inputs), plain)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_fused_model_has_the_same_logits_and_gradients(family, adapter):
    def model():
        made = tiny_model(family).double().eval()
        config = LoraConfig(target_modules="all-linear", init_lora_weights=False)
        torch.manual_seed(0)
        return get_peft_model(made, config).double() if adapter and family != "gpt2" else made

    ids = torch.arange(3, 12)[None]
    results = []
    for part in (model(), model()):
        if results:
            fuse(part)
        logits = part(ids).logits
        logits.square().sum().backward()
        results.append([logits.detach(), *(value.grad for value in part.parameters() if value.grad is not None)])
    for plain, fused in zip(*results, strict=True):  # transformers' norm computes in float32
        torch.testing.assert_close(fused, plain, atol=1e-6 * float(plain.abs().max()), rtol=1e-4)


def test_a_copy_of_a_fused_model_computes_with_its_own_weights():
    model = tiny_model().eval()
    fuse(model)
    ids = torch.arange(3, 12)[None]
    copied = copy.deepcopy(model)
    before = copied(ids).logits.detach()
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    assert torch.equal(copied(ids).logits, before)


def test_a_fused_layer_keeps_less_for_its_backward_pass():
    def kept(model: torch.nn.Module) -> int:
        storages = {}
        own = {value.untyped_storage().data_ptr() for value in model.parameters()}

        def note(value: torch.Tensor) -> torch.Tensor:
            if value.untyped_storage().data_ptr() not in own:
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
            model.model(torch.arange(3, 60)[None]).last_hidden_state.sum()
        return sum(storages.values())

    plain, fused = tiny_model().eval(), tiny_model().eval()
    fuse(fused)
    assert kept(fused) < 0.8 * kept(plain)


def test_a_module_that_looks_alike_and_computes_something_else_is_left_alone():
    model = tiny_model()
    norm = model.model.norm

    class OddRMSNorm(type(norm)):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + 1

    norm.__class__ = OddRMSNorm
    fuse(model)
    assert "forward" not in vars(norm) and "forward" in vars(model.model.layers[0].mlp)
