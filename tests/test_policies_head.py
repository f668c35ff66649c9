"""The chunked head: equal to whole logits in ordinary autograd, in the memory of a chunk, for the heads models have."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quintain.errors import ConfigError
from quintain.policies.head import (
    CHUNK_BYTES,
    PRODUCT_ROWS,
    LogitMap,
    checkpointed_head_outputs,
    find_logit_map,
    head_outputs,
    outputs_of_logits,
    plain_head_outputs,
)

TOKENS, WIDTH, VOCAB = 23, 6, 17
MAPS = [LogitMap(), LogitMap(scale=0.3), LogitMap(softcap=2.0), LogitMap(scale=1.7, softcap=3.0)]


class Head:
    """Random inputs of a head; every one of the policy's carries gradient."""

    def __init__(self, dtype=torch.float64, tokens=TOKENS, width=WIDTH, vocab=VOCAB, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.hidden, self.weight, self.bias = random(tokens, width), random(vocab, width), random(vocab)
        self.inputs = [tensor.requires_grad_() for tensor in (self.hidden, self.weight, self.bias)]
        self.ids = torch.randint(vocab, (tokens,), generator=generator)
        self.reference = (random(tokens, width + 2), random(vocab, width + 2), random(vocab))
        self.coefficients = {name: random(tokens).double() for name in ("logprobs", "entropy", "exact_kl")}

    def run(self, outputs_of, **options):
        return outputs_of(self.hidden, self.weight, self.bias, self.ids, **options)

    def values_and_gradients(self, outputs_of, differentiate=("logprobs",), **options):
        """Every output, then the gradients of hidden states, weight and bias of a sum with random coefficients."""
        outputs = self.run(outputs_of, **options)
        total = sum((getattr(outputs, name) * self.coefficients[name]).sum() for name in differentiate)
        gradients = torch.autograd.grad(total, self.inputs)
        values = [outputs.logprobs, outputs.entropy, outputs.exact_kl]
        return [value.detach() for value in values if value is not None], list(gradients)

    def as_callable(self):
        """The same head as a function of hidden states alone."""
        return lambda hidden: nn.functional.linear(hidden, self.weight, self.bias)

    def run_checkpointed(self, hidden, _weight, _bias, ids, **options):
        return checkpointed_head_outputs(hidden, self.as_callable(), ids, **options)


def agree(head, outputs_of, tolerance, differentiate, **options):
    """The two give the same; a difference counts relative to the largest number of its tensor."""
    chunk = {"chunk_tokens": options.pop("chunk_tokens", 5)}
    values, gradients = head.values_and_gradients(outputs_of, differentiate, **options, **chunk)
    plain_values, plain_gradients = head.values_and_gradients(plain_head_outputs, differentiate, **options)
    assert len(values) == len(plain_values)
    for ours, plain in zip(values + gradients, plain_values + plain_gradients):
        assert ours.dtype == plain.dtype and ours.shape == plain.shape
        largest = plain.abs().max().clamp(min=1e-30).item()
        torch.testing.assert_close(ours, plain, rtol=0, atol=tolerance * largest)


ENTROPY = {"want_entropy": True, "entropy_gradient": True}
SELECTIONS = [
    (("logprobs",), {}),
    (("logprobs",), {"want_entropy": True}),
    (("entropy",), ENTROPY),
    (("logprobs", "entropy"), ENTROPY),
    (("exact_kl",), "reference"),
    (("logprobs", "exact_kl"), "reference"),
    (("logprobs",), "reference"),
    (("logprobs", "entropy", "exact_kl"), "both"),
]


def options_for(head, selection):
    if not isinstance(selection, str):
        return selection
    return dict(reference=head.reference, **(ENTROPY if selection == "both" else {}))


@pytest.mark.parametrize("logit_map", MAPS, ids=["plain", "scale", "softcap", "scale+softcap"])
@pytest.mark.parametrize("differentiate, selection", SELECTIONS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_values_and_gradients_are_those_of_whole_logits(dtype, tolerance, differentiate, selection, logit_map):
    head = Head(dtype)
    options = options_for(head, selection)
    agree(head, head_outputs, tolerance, differentiate, temperature=0.7, logit_map=logit_map, **options)


@pytest.mark.parametrize("differentiate, selection", SELECTIONS)
def test_a_checkpointed_head_gives_what_whole_logits_give(differentiate, selection):
    head = Head()
    options = options_for(head, selection)
    agree(head, head.run_checkpointed, 1e-9, differentiate, temperature=0.7, logit_map=MAPS[3], **options)


@pytest.mark.parametrize("by_onednn", [False, True])
def test_a_vocabulary_of_several_parts_gives_what_whole_logits_give(by_onednn, monkeypatch):
    """Large enough for oneDNN's products, and for a weight gradient in three parts, the last one smaller."""
    if by_onednn and not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr("quintain.matmul.onednn_is_faster", lambda: by_onednn)
    monkeypatch.setattr("quintain.policies.head.onednn_is_faster", lambda: by_onednn)
    head = Head(torch.float32, tokens=30, width=24, vocab=2 * PRODUCT_ROWS + 900)
    options = options_for(head, "both")
    agree(head, head_outputs, 2e-5, ("logprobs", "entropy", "exact_kl"), chunk_tokens=12, temperature=3.0, **options)


def test_logits_that_a_model_made_itself_give_the_same():
    head = Head()
    logits = nn.functional.linear(head.hidden, head.weight, head.bias)
    ours = outputs_of_logits(logits, head.ids, temperature=0.7, **ENTROPY)
    plain = head.run(plain_head_outputs, temperature=0.7, **ENTROPY)
    torch.testing.assert_close(ours.logprobs, plain.logprobs)
    torch.testing.assert_close(ours.entropy, plain.entropy)
    assert ours.exact_kl is None and ours.entropy.requires_grad


@pytest.mark.parametrize("chunk_tokens", [1, 5, 22, 23, 1000, None])
def test_the_size_of_a_chunk_does_not_matter(chunk_tokens):
    head = Head()
    for outputs_of in (head_outputs, head.run_checkpointed):
        options = dict(temperature=1.3, chunk_tokens=chunk_tokens, **options_for(head, "both"))
        agree(head, outputs_of, 1e-9, ("logprobs", "entropy", "exact_kl"), **options)


def test_chunks_hold_their_share_of_bytes_when_no_size_is_given(monkeypatch):
    """7 tokens' float32 logits fit: 23 tokens make 4 chunks of at most 6."""
    monkeypatch.setattr("quintain.policies.head.CHUNK_BYTES", 7 * 4 * VOCAB + 3)
    head = Head()
    with Shapes() as seen:
        head.run(head_outputs)
    assert [rows for _, _, (rows, _) in seen.products] == [6, 6, 6, 5]
    assert CHUNK_BYTES > 2**20


def test_gradcheck():
    head = Head(tokens=5, vocab=7)
    reference = head.reference

    def function(hidden, weight, bias):
        outputs = head_outputs(
            hidden, weight, bias, head.ids, temperature=0.7, logit_map=MAPS[3], reference=reference, chunk_tokens=2,
            **ENTROPY,
        )  # fmt: skip
        return outputs.logprobs, outputs.entropy, outputs.exact_kl

    assert torch.autograd.gradcheck(function, head.inputs)


def test_a_three_token_vocabulary_by_hand():
    """Width 1, hidden state 1: the weight is the logits, log(1), log(2), log(5), so p = 1/8, 2/8, 5/8."""
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[1.0], [2.0], [5.0]]).log().requires_grad_()
    reference = (torch.ones(1, 1), torch.zeros(3, 1), None)  # uniform: KL = log 3 - entropy
    options = {"want_entropy": True, "reference": reference}
    outputs = head_outputs(hidden, weight, None, torch.tensor([1]), **options)
    entropy = 1 / 8 * math.log(8) + 2 / 8 * math.log(4) + 5 / 8 * math.log(8 / 5)
    assert outputs.logprobs.item() == pytest.approx(math.log(1 / 4), abs=1e-6)
    assert outputs.entropy.item() == pytest.approx(entropy, abs=1e-6)
    assert outputs.exact_kl.item() == pytest.approx(math.log(3) - entropy, abs=1e-6)
    outputs.logprobs.backward()
    torch.testing.assert_close(weight.grad[:, 0], torch.tensor([-1 / 8, 6 / 8, -5 / 8]))
    expected = 6 / 8 * math.log(2) - 5 / 8 * math.log(5)
    assert hidden.grad.item() == pytest.approx(expected, abs=1e-6)
    # At temperature 1/2 probabilities go as squares: 1, 4, 25 of 30; a factor of 2 does the same.
    for options in ({"temperature": 0.5}, {"logit_map": LogitMap(scale=2.0)}):
        outputs = head_outputs(hidden, weight, None, torch.tensor([1]), **options)
        assert outputs.logprobs.item() == pytest.approx(math.log(4 / 30), abs=1e-6)


def test_equal_policies_are_exactly_0_apart():
    head = Head(torch.float32, vocab=1000)
    for temperature in (1.0, 0.7):
        outputs = head.run(head_outputs, reference=tuple(head.inputs), temperature=temperature, chunk_tokens=4)
        assert (outputs.exact_kl == 0).all()


def test_an_entropy_without_gradient_has_none():
    head = Head()
    for outputs_of in (head_outputs, plain_head_outputs, head.run_checkpointed):
        outputs = head.run(outputs_of, want_entropy=True)
        assert not outputs.entropy.requires_grad and outputs.logprobs.requires_grad


def test_a_reference_gets_no_gradient():
    head = Head()
    reference = tuple(tensor.requires_grad_() for tensor in head.reference)
    for outputs_of in (head_outputs, plain_head_outputs, head.run_checkpointed):
        head.run(outputs_of, reference=reference).exact_kl.sum().backward()
        assert all(tensor.grad is None for tensor in reference)


@pytest.mark.parametrize("under_autocast", [False, True])
def test_half_precision_stays_close_and_keeps_the_dtypes_of_its_inputs(under_autocast):
    """The products run in bfloat16, whose numbers are 2^-8 apart; sums over the vocabulary stay in float32."""
    dtype = torch.float32 if under_autocast else torch.bfloat16
    head = Head(dtype, tokens=64, width=32, vocab=300)
    exact = Head(torch.float64, tokens=64, width=32, vocab=300)
    options = {
        "temperature": 2.0,
        "logit_map": LogitMap(scale=0.2, softcap=4.0),
        "want_entropy": True,
        "entropy_gradient": True,
    }
    everything = ("logprobs", "entropy", "exact_kl")
    with torch.autocast("cpu", torch.bfloat16, enabled=under_autocast):
        half = head.values_and_gradients(head_outputs, everything, reference=head.reference, chunk_tokens=10, **options)
    plain = exact.values_and_gradients(plain_head_outputs, everything, reference=exact.reference, **options)
    assert all(value.dtype == torch.float32 for value in half[0])
    assert all(gradient.dtype == dtype for gradient in half[1])
    for ours, theirs in zip(half[0] + half[1], plain[0] + plain[1]):
        error = (ours.double() - theirs).abs().max() / theirs.abs().max()
        assert 1e-6 < error < 2e-2


def test_autocast_runs_the_products_in_its_dtype_and_casts_each_weight_once_a_pass():
    head = Head(torch.float32)
    with Shapes() as seen, torch.autocast("cpu", torch.bfloat16):
        head.run(head_outputs, chunk_tokens=4).logprobs.sum().backward()
    assert {dtype for _, dtype, _ in seen.products} == {torch.bfloat16}
    assert seen.casts.count((VOCAB, WIDTH)) == 2


def test_a_backward_pass_under_autocast_keeps_the_precision_of_its_forward_pass():
    gradients = []
    for under_autocast in (False, True):
        head = Head(torch.float32)
        total = head.run(head_outputs, chunk_tokens=4).logprobs.sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=under_autocast):
            gradients.append(torch.autograd.grad(total, head.inputs))
    assert all(torch.equal(one, other) for one, other in zip(*gradients))


def test_the_weight_gradient_of_half_precision_accumulates_in_float32():
    """Each chunk adds 1/512 of what is there after 512 chunks, which a bfloat16 sum would round away from 256 on."""
    tokens = 600
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.zeros(tokens, dtype=torch.int64)
    head_outputs(hidden, weight, None, ids, chunk_tokens=1).logprobs.sum().backward()
    torch.testing.assert_close(weight.grad[:, 0].float(), torch.tensor([300.0, -300.0]), rtol=1e-2, atol=0)


class Shapes(TorchDispatchMode):
    """Records the shape of every tensor that an operation allocates, every matrix product, and every cast."""

    def __init__(self):
        super().__init__()
        self.shapes, self.products, self.casts = [], [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        result = function(*args, **(kwargs or {}))
        name = function.__name__.split(".")[0].rstrip("_")
        if name in ("mm", "addmm"):
            self.products.append((name, args[-1].dtype, tuple(result.shape)))
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in before:
                self.shapes.append(tuple(leaf.shape))
                if name == "_to_copy":
                    self.casts.append(tuple(leaf.shape))
        return result

    def largest(self):
        return max(math.prod(shape) for shape in self.shapes)


@pytest.mark.parametrize("under_autocast", [False, True])
def test_nothing_larger_than_the_hidden_states_is_made_where_whole_logits_are_8_times_that(under_autocast):
    head = Head(torch.float32, tokens=120, width=4, vocab=50)
    options = dict(reference=head.reference, logit_map=MAPS[3], **ENTROPY)
    largest = []
    for outputs_of, chunk in ((head_outputs, {"chunk_tokens": 8}), (plain_head_outputs, {})):
        with Shapes() as seen, torch.autocast("cpu", torch.bfloat16, enabled=under_autocast):
            outputs = head.run(outputs_of, **options, **chunk)
            (outputs.logprobs + outputs.entropy + outputs.exact_kl).sum().backward()
        largest.append(seen.largest())
    assert largest[0] <= 120 * 6 and largest[1] == 120 * 50


def test_a_checkpointed_head_makes_no_tensor_larger_than_a_chunk():
    head = Head(torch.float32, tokens=120, width=4, vocab=50)
    with Shapes() as seen:
        head.run(head.run_checkpointed, chunk_tokens=10).logprobs.sum().backward()
    assert seen.largest() == 500


def test_no_logits_are_kept_for_the_backward_pass():
    head = Head(torch.float32)
    for outputs_of, keeps in ((head_outputs, False), (head.run_checkpointed, False), (plain_head_outputs, True)):
        kept = []

        def keep(tensor, kept=kept):
            kept.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            head.run(outputs_of, **options_for(head, "both"))
        assert any(len(shape) == 2 and shape[0] != VOCAB and shape[1] == VOCAB for shape in kept) == keeps


def test_buffers_are_made_once_a_pass_not_once_a_chunk():
    head = Head(torch.float32, tokens=40)
    with Shapes() as seen:
        head.run(head_outputs, chunk_tokens=4).logprobs.sum().backward()
    assert seen.shapes.count((4, VOCAB)) == 2


def test_a_frozen_weight_gets_no_gradient_and_no_buffer():
    head = Head(torch.float32, width=40)
    head.weight.requires_grad_(False)
    head.bias.requires_grad_(False)
    with Shapes() as seen:
        head.run(head_outputs, chunk_tokens=4).logprobs.sum().backward()
    assert head.weight.grad is None and head.bias.grad is None
    assert (VOCAB, 40) not in seen.shapes and len(seen.products) == 3 * 6
    agree_inputs = Head(torch.float32, width=40)
    agree_inputs.run(plain_head_outputs).logprobs.sum().backward()
    torch.testing.assert_close(head.hidden.grad, agree_inputs.hidden.grad, rtol=1e-4, atol=1e-5)


def test_frozen_hidden_states_get_no_product_of_their_own():
    head = Head(torch.float32)
    head.hidden.requires_grad_(False)
    with Shapes() as seen:
        head.run(head_outputs, chunk_tokens=4).logprobs.sum().backward()
    assert len(seen.products) == 3 * 6 and head.weight.grad is not None


def test_without_gradient_there_is_one_product_a_chunk_and_no_graph():
    head = Head(torch.float32)
    with torch.no_grad(), Shapes() as seen:
        outputs = head.run(head_outputs, chunk_tokens=4)
    assert len(seen.products) == 6 and not outputs.logprobs.requires_grad


def test_the_same_inputs_give_the_same_bits():
    head = Head(torch.float32, vocab=300)
    options = dict(temperature=0.7, chunk_tokens=4, **options_for(head, "both"))
    first, second = (head.values_and_gradients(head_outputs, ("logprobs", "exact_kl"), **options) for _ in range(2))
    for one, other in zip(first[0] + first[1], second[0] + second[1]):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_spoils_only_its_own_outputs_and_gradient(bad):
    clean, spoilt = Head(), Head()
    with torch.no_grad():
        spoilt.hidden[7] = bad
    others = torch.arange(TOKENS) != 7
    for head in (clean, spoilt):
        head.outputs = head.run(head_outputs, reference=head.reference, chunk_tokens=5, **ENTROPY)
        total = head.outputs.logprobs + head.outputs.entropy + head.outputs.exact_kl
        (head.hidden_grad,) = torch.autograd.grad(total.sum(), [head.hidden])
    assert spoilt.outputs.logprobs[7].isnan()
    for name in ("logprobs", "entropy", "exact_kl"):
        assert torch.equal(getattr(spoilt.outputs, name)[others], getattr(clean.outputs, name)[others])
    assert torch.equal(spoilt.hidden_grad[others], clean.hidden_grad[others])


def test_logits_beyond_the_range_of_exp_do_not_overflow():
    """Logits of 1000 and -1000 in float32, whose exp ends at 88."""
    hidden = torch.tensor([[1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    outputs = head_outputs(hidden, weight, None, torch.tensor([1]), want_entropy=True, reference=(hidden, weight, None))
    outputs.logprobs.sum().backward()
    assert outputs.logprobs.item() == -2000.0 and outputs.entropy.item() == 0.0 and outputs.exact_kl.item() == 0.0
    assert hidden.grad.item() == -2.0 and weight.grad[:, 0].tolist() == [-1000.0, 1000.0]


def test_no_tokens_give_empty_outputs_with_a_graph():
    head = Head(tokens=0)
    for outputs_of in (head_outputs, plain_head_outputs, head.run_checkpointed):
        head.weight.grad = None
        outputs = head.run(outputs_of, **options_for(head, "both"))
        assert outputs.logprobs.shape == outputs.entropy.shape == outputs.exact_kl.shape == (0,)
        (outputs.logprobs.sum() + outputs.exact_kl.sum()).backward()
        assert (head.weight.grad == 0).all() and head.hidden.grad.shape == (0, WIDTH)


def test_a_tied_embedding_gets_the_gradient_of_both_its_uses():
    head = Head()
    rows = torch.arange(TOKENS) % VOCAB
    gradients = []
    for outputs_of in (head_outputs, plain_head_outputs):
        head.weight.grad = None
        outputs_of(head.weight[rows].tanh(), head.weight, None, head.ids).logprobs.sum().backward()
        gradients.append(head.weight.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"temperature": 0.0}, "temperature must be finite and > 0: got 0.0"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"temperature": float("inf")}, "temperature must be finite"),
        ({"entropy_gradient": True}, "needs want_entropy=True"),
        ({"chunk_tokens": 0}, "chunk_tokens must be >= 1: got 0"),
        ({"hidden": torch.zeros(1, TOKENS, WIDTH)}, "hidden must be"),
        ({"ids": torch.zeros(TOKENS + 1, dtype=torch.int64)}, "ids"),
        ({"ids": torch.zeros(TOKENS, dtype=torch.int32)}, "int64"),
        ({"weight": torch.zeros(VOCAB, WIDTH + 1, dtype=torch.float64)}, "weight"),
        ({"bias": torch.zeros(VOCAB + 1, dtype=torch.float64)}, "bias"),
        ({"weight": torch.zeros(VOCAB, WIDTH)}, "share a dtype"),
        ({"reference": (torch.zeros(TOKENS - 1, 2), torch.zeros(VOCAB, 2), None)}, "same tokens"),
        ({"reference": (torch.zeros(TOKENS, 2), torch.zeros(VOCAB + 1, 2), None)}, "same vocabulary"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, message):
    head = Head()
    arguments = {"hidden": head.hidden, "weight": head.weight, "bias": head.bias, "ids": head.ids}
    with pytest.raises(ConfigError, match=message):
        head_outputs(**{**arguments, **change})


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"scale": float("inf")}, {"softcap": -1.0}])
def test_a_logit_map_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LogitMap(**wrong)


SMALL = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "name, settings, expected",
    [
        ("Llama", {}, LogitMap()),
        ("Gemma2", {"final_logit_softcapping": 0.5}, LogitMap(softcap=0.5)),
        ("Gemma2", {"final_logit_softcapping": None}, LogitMap()),
        ("Gemma3", {"final_logit_softcapping": 0.5}, LogitMap(softcap=0.5)),
        ("NanoChat", {"final_logit_softcapping": 0.5}, LogitMap(softcap=0.5)),
        (
            "RecurrentGemma",
            {"logits_soft_cap": 0.5, "lru_width": 16, "block_types": ["recurrent"]},
            LogitMap(softcap=0.5),
        ),
        ("Cohere", {"logit_scale": 0.25}, LogitMap(scale=0.25)),
        ("Cohere2", {"logit_scale": 0.25}, LogitMap(scale=0.25)),
        ("Granite", {"logits_scaling": 8.0}, LogitMap(scale=1 / 8)),
        ("HyperCLOVAX", {"logits_scaling": 8.0}, LogitMap(scale=8.0)),
        ("FalconH1", {"lm_head_multiplier": 0.25}, LogitMap(scale=0.25)),
        ("MiniCPM3", {"dim_model_base": 4, "num_key_value_heads": 2}, LogitMap()),
    ],
)
def test_the_map_that_a_config_declares_is_what_its_model_does(name, settings, expected):
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    model = model_class(config_class(**{**SMALL, **settings})).eval()
    caught = []
    model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, output: caught.append(output))
    with torch.no_grad():
        for parameter in model.get_output_embeddings().parameters():
            parameter.mul_(30.0)  # logits large enough that a cap bends them
        logits = model(input_ids=torch.arange(5)[None] + 3, use_cache=False).logits
    assert find_logit_map(model.config.get_text_config()) == expected
    torch.testing.assert_close(expected(caught[0]), logits)


def test_a_factor_comes_before_a_softcap():
    """As in transformers' Muse models: softcap * tanh(output_multiplier * logits / softcap)."""
    config = SimpleNamespace(output_multiplier=0.5, final_logit_softcapping=2.0)
    assert find_logit_map(config) == LogitMap(scale=0.5, softcap=2.0)
    logits = torch.tensor([3.0])
    torch.testing.assert_close(find_logit_map(config)(logits), 2.0 * torch.tanh(torch.tensor([0.75])))


def test_a_setting_that_its_model_does_not_read_is_left_alone():
    assert find_logit_map(transformers.MptConfig(logit_scale="inv_sqrt_d_model")) == LogitMap()
