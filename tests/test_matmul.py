"""oneDNN's float32 products are MKL's up to rounding, and a model that uses them is otherwise the same."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import tiny_model

from quintain import matmul
from quintain.matmul import Linear, linear, packed_linears, product, product_into, use_fast_linears

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    reason="this build of PyTorch has no oneDNN",
)


@pytest.fixture
def fast(monkeypatch):
    """Use oneDNN for every product, whatever the processor and the size."""
    matmul.onednn_is_faster.cache_clear()
    monkeypatch.setenv("QUINTAIN_ONEDNN", "1")
    monkeypatch.setattr(matmul, "LEAST_WORK", 0)
    yield
    matmul.onednn_is_faster.cache_clear()


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24), (1, 24)])
def test_a_linear_layer_and_its_gradients_equal_pytorchs(fast, shape, bias):
    results = []
    for function in (torch.nn.functional.linear, linear):
        inputs, weight = numbers(*shape).requires_grad_(), numbers(40, 24).requires_grad_()
        offset = numbers(40).requires_grad_() if bias else None
        output = function(inputs, weight, offset)
        (output * numbers(*output.shape)).sum().backward()
        results.append([output.detach(), inputs.grad, weight.grad] + ([offset.grad] if bias else []))
    for plain, ours in zip(*results):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


def test_products_take_transposed_operands(fast):
    left, right = numbers(24, 7), numbers(40, 24)
    torch.testing.assert_close(product(left.t(), right.t()), left.t() @ right.t(), atol=1e-5, rtol=1e-5)
    out = torch.empty(7, 40)
    torch.testing.assert_close(product_into(left.t(), right.t(), out), left.t() @ right.t(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_left_to_pytorch(fast, dtype):
    inputs, weight = numbers(7, 24).to(dtype), numbers(40, 24).to(dtype)
    assert torch.equal(linear(inputs, weight), torch.nn.functional.linear(inputs, weight))


def test_autocast_is_left_to_pytorch(fast):
    inputs, weight = numbers(7, 24), numbers(40, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(inputs, weight).dtype == torch.bfloat16


def test_a_frozen_weight_gets_no_gradient_and_passes_one_on(fast):
    inputs, weight = numbers(7, 24).requires_grad_(), numbers(40, 24)
    linear(inputs, weight).sum().backward()
    torch.testing.assert_close(inputs.grad, weight.sum(0).expand(7, -1), atol=1e-5, rtol=1e-5)
    assert weight.grad is None


def test_a_model_with_fast_linears_keeps_its_numbers_parameters_and_copies(fast):
    plain, model = tiny_model().eval(), tiny_model().eval()
    names = list(model.state_dict())
    use_fast_linears(model)
    ids = torch.arange(3, 12)[None]
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-4)
    assert list(model.state_dict()) == names
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert float(model(ids).logits.abs().max()) == 0 < float(copied(ids).logits.abs().max())


def test_packed_weights_give_the_same_and_are_gone_afterwards_even_after_an_error(fast):
    model = tiny_model().eval()
    use_fast_linears(model)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        plain = model(ids).logits
        with pytest.raises(KeyError), packed_linears(model):
            assert all(part.packed is not None for part in model.modules() if isinstance(part, Linear))
            torch.testing.assert_close(model(ids).logits, plain, atol=1e-4, rtol=1e-4)
            raise KeyError
    assert all(part.packed is None for part in model.modules() if isinstance(part, Linear))


def test_tied_weights_are_packed_once(fast, monkeypatch):
    model = tiny_model(tie_word_embeddings=True)
    second = torch.nn.Linear(32, 64, bias=False)
    second.weight = model.lm_head.weight
    pair = torch.nn.ModuleList([model.lm_head, second])
    use_fast_linears(pair)
    with packed_linears(pair):
        assert pair[0].packed is pair[1].packed


def test_a_packed_weight_is_not_used_where_a_gradient_is_wanted(fast):
    layer = torch.nn.Sequential(torch.nn.Linear(24, 40))
    use_fast_linears(layer)
    with packed_linears(layer):
        layer(numbers(7, 24)).sum().backward()
    torch.testing.assert_close(layer[0].weight.grad, numbers(7, 24).sum(0).expand(40, -1), atol=1e-5, rtol=1e-5)


def test_nothing_changes_where_onednn_is_not_the_faster(monkeypatch):
    matmul.onednn_is_faster.cache_clear()
    monkeypatch.setenv("QUINTAIN_ONEDNN", "0")
    model, ids = tiny_model().eval(), torch.arange(3, 12)[None]
    before = model(ids).logits
    use_fast_linears(model)
    monkeypatch.setattr(matmul, "_multiply", None)  # nothing calls oneDNN
    with packed_linears(model):
        assert torch.equal(model(ids).logits, before)
    matmul.onednn_is_faster.cache_clear()


def test_half_precision_products_leave_the_logits_in_float32(fast):
    """All layers but the last are rounded to bfloat16: near the plain logits, and not rounded themselves."""
    if not matmul.packs_half():
        pytest.skip("this processor does not multiply bfloat16 matrices")
    model, ids = tiny_model(initializer_range=0.05).eval(), torch.arange(3, 12)[None]
    use_fast_linears(model)
    with torch.no_grad():
        plain = model(ids).logits
        with packed_linears(model, torch.bfloat16):
            rounded = model(ids).logits
    assert rounded.dtype == torch.float32 and not torch.equal(rounded, rounded.bfloat16().float())
    assert 0 < float((rounded - plain).abs().max()) < 0.05 * float(plain.abs().max())
