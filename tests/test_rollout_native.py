"""The native engine's own business: what it forwards, when rows leave, which models it takes, how "auto" decides."""

from __future__ import annotations

import logging

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from tiny_models import EOS, FAMILIES, PAD, chain_model, tiny_model
from transformers import MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

from quintain.errors import ConfigError
from quintain.rollout import NativeEngine, TransformersEngine, make_engine
from quintain.rollout.cache import preallocated_cache
from quintain.rollout.native import unsupported_by_native
from quintain.types import SamplingParams


def sampling(**changes) -> SamplingParams:
    fields = {"num_generations": 2, "max_completion_length": 8, "stop_token_ids": (EOS,), "pad_token_id": PAD}
    return SamplingParams(**{**fields, **changes})


def tiny_mamba() -> MambaForCausalLM:
    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4))


def shapes_forwarded(
    model: torch.nn.Module, prompts: list[list[int]], params: SamplingParams, **options: int
) -> list[tuple[int, int]]:
    """Rows and tokens of every forward pass, checking that the head saw the last position only."""
    shapes = []
    engine = NativeEngine(model, **options)

    def record(module: object, args: tuple, kwargs: dict, output: object) -> None:
        shapes.append(tuple(kwargs["input_ids"].shape))
        assert output.logits.shape[1] == 1

    handle = model.register_forward_hook(record, with_kwargs=True)
    engine.generate(prompts, params, torch.Generator().manual_seed(0))
    handle.remove()
    return shapes


def test_each_distinct_prompt_is_read_once():
    params = sampling(num_generations=5, max_completion_length=3, stop_token_ids=())
    shapes = shapes_forwarded(tiny_model(), [[3, 4, 5], [6], [3, 4, 5]], params)
    assert shapes == [(2, 3), (15, 1), (15, 1)]


def test_rows_that_have_ended_leave_the_batch():
    """Chains that stop after 1, 2 and 4 tokens, two rows each; the last token is never fed."""
    model = chain_model({10: EOS, 20: 21, 21: EOS, 30: 31, 31: 32, 32: 33, 33: EOS})
    shapes = shapes_forwarded(model, [[10], [20], [30]], sampling())
    assert shapes == [(3, 1), (4, 1), (2, 1), (2, 1)]


def test_waiting_prompts_take_the_place_of_rows_that_have_ended():
    """Room for two groups of two: the third prompt is read once the first group has ended, while the second goes on."""
    model = chain_model({10: EOS, 20: 21, 21: 22, 22: 23, 23: EOS, 30: 31, 31: EOS})
    token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, key heads, head size, bytes
    shapes = shapes_forwarded(model, [[10], [20], [30]], sampling(), cache_bytes=4 * 8 * token)
    assert shapes == [(2, 1), (2, 1), (1, 1), (4, 1), (2, 1)]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_do_not_depend_on_how_many_rows_have_room(family):
    model = tiny_model(family)
    prompts = [[3, 4, 5], [6], [7, 8, 9, 10, 11], [6], [12, 13]]
    params = sampling(num_generations=3, max_completion_length=12, temperature=0.8)
    one, many = (
        NativeEngine(model, cache_bytes=room).generate(prompts, params, torch.Generator().manual_seed(0))
        for room in (1, 2**30)
    )
    assert torch.equal(one.completion_ids, many.completion_ids)
    torch.testing.assert_close(one.logprobs, many.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_attend_to_one_copy_of_their_prompt_where_the_model_attends_by_a_plan(family):
    """Gemma 2 caps its attention scores, which transformers computes by its own function only."""
    engine = NativeEngine(tiny_model(family))
    assert (engine._longest_shared > 0) == (family != "gemma2")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma2"])
def test_one_copy_of_a_prompt_gives_the_tokens_and_logprobs_of_a_copy_a_row(family):
    engine = NativeEngine(tiny_model(family, **({"sliding_window": None} if family == "mistral" else {})))
    prompts = [[3, 4, 5], [6], [7, 8, 9, 10, 11]]
    params = sampling(num_generations=4, max_completion_length=12)
    shared = engine.generate(prompts, params, torch.Generator().manual_seed(0))
    engine._longest_shared = 0
    copied = engine.generate(prompts, params, torch.Generator().manual_seed(0))
    assert torch.equal(shared.completion_ids, copied.completion_ids)
    torch.testing.assert_close(shared.logprobs, copied.logprobs, atol=1e-5, rtol=0)


def test_the_cache_is_allocated_once_and_written_in_place():
    """Growing by concatenation would copy the whole cache at every token."""
    cache = preallocated_cache(capacity=6)
    states = torch.randn(2, 3, 4, 5)
    keys, values = cache.update(states, -states, layer_idx=0)
    assert torch.equal(keys, states) and torch.equal(values, -states)
    storage = cache.layers[0].keys.data_ptr()
    for token in range(2):
        more = torch.randn(2, 3, 1, 5)
        keys, _ = cache.update(more, more, layer_idx=0)
        assert keys.data_ptr() == storage and cache.get_seq_length() == 5 + token
        assert torch.equal(keys[:, :, -1:], more) and torch.equal(keys[:, :, :4], states)
    cache.batch_select_indices(torch.tensor([1]))
    kept = cache.layers[0].keys
    assert kept.data_ptr() == storage and torch.equal(kept[:, :, :4], states[1:])


def test_rows_of_the_cache_can_be_repeated_and_reordered():
    cache = preallocated_cache(capacity=3)
    states = torch.randn(2, 1, 2, 4)
    cache.update(states, states, layer_idx=0)
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    keys, _ = cache.update(torch.zeros(3, 1, 1, 4), torch.zeros(3, 1, 1, 4), layer_idx=0)
    assert torch.equal(keys[:, :, :2], states[[1, 0, 1]])
    with pytest.raises(RuntimeError):
        cache.update(torch.zeros(3, 1, 1, 4), torch.zeros(3, 1, 1, 4), layer_idx=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_is_native_for_decoders_with_a_standard_cache(family):
    assert make_engine("auto", tiny_model(family)).name == "native"


def test_auto_is_transformers_for_other_models_and_says_why(caplog):
    with caplog.at_level(logging.INFO, logger="quintain"):
        engine = make_engine("auto", tiny_mamba())
    assert engine.name == "transformers"
    assert "not native: its layers keep a recurrent state" in caplog.text


def test_a_model_without_a_standard_cache_runs_on_the_transformers_engine():
    samples = TransformersEngine(tiny_mamba()).generate([[3, 4], [5, 6]], sampling(), torch.Generator().manual_seed(0))
    assert len(samples.completion_ids) == 4


def test_native_refuses_what_it_cannot_run_and_says_why():
    with pytest.raises(ConfigError, match=r"recurrent state.*'transformers'"):
        make_engine("native", tiny_mamba())
    virtual = get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert "virtual tokens" in unsupported_by_native(virtual)


@pytest.mark.parametrize("name", ["auto", "native", "transformers"])
def test_encoder_decoders_are_refused(name):
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16))
    with pytest.raises(ConfigError, match="encoder-decoder"):
        make_engine(name, model)


def test_unknown_and_unavailable_engines_are_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"auto, native, transformers.*Did you mean 'native'"):
        make_engine("nativ", tiny_model())
    with pytest.raises(ConfigError, match="'vllm' is not available"):
        make_engine("vllm", tiny_model())


def test_the_engine_reads_the_weights_of_the_moment():
    model = chain_model({10: 11})
    engine = NativeEngine(model)
    params = sampling(num_generations=1, max_completion_length=1)
    assert engine.generate([[10]], params, torch.Generator()).completion_ids.tolist() == [[11]]
    with torch.no_grad():
        model.get_output_embeddings().weight[:, 10] = 0.0
        model.get_output_embeddings().weight[12, 10] = 50.0
    assert engine.generate([[10]], params, torch.Generator()).completion_ids.tolist() == [[12]]
