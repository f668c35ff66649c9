"""What every rollout engine promises, on several kinds of model."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import EOS, FAMILIES, PAD, chain_model, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import GenerationConfig

from quintain.errors import ConfigError, DataError, RolloutError
from quintain.rollout import NativeEngine, TransformersEngine, completion_mask
from quintain.types import Samples, SamplingParams

SHORT, LONG = [5, 9, 11], [7, 3, 12, 40, 41, 8, 8, 20, 33]

every_engine = pytest.mark.parametrize("engine_class", [NativeEngine, TransformersEngine], ids=lambda e: e.name)
every_family = pytest.mark.parametrize("family", FAMILIES)


def sampling(**changes) -> SamplingParams:
    fields = {"num_generations": 3, "max_completion_length": 10, "stop_token_ids": (EOS,), "pad_token_id": PAD}
    return SamplingParams(**{**fields, **changes})


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(samples: Samples) -> list[list[int]]:
    return [ids[mask].tolist() for ids, mask in zip(samples.completion_ids, samples.completion_mask, strict=True)]


def plain_logprobs(model: torch.nn.Module, prompt: list[int], completion: list[int], temperature: float) -> Tensor:
    """Log-probabilities of a completion from one forward pass over one sequence: no padding, no cache, no batch."""
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].float()
    model.train(training)
    logprobs = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(dim=-1)
    return logprobs.gather(1, torch.tensor(completion)[:, None]).squeeze(1)


def lora(model: torch.nn.Module) -> torch.nn.Module:
    """The model with an adapter that already does something."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.1)
        return get_peft_model(model, config)


# Masks and stops


@every_engine
def test_each_way_of_ending_gives_its_mask(engine_class):
    """T02 with pad = EOS: stopped early, cut off, stopped by an extra id, stopped on the last token allowed."""
    early, cut_off = {20: 21, 21: 22, 22: EOS}, {30: 31, 31: 32, 32: 33, 33: 34, 34: 35}
    extra, last = {40: 41, 41: 8}, {50: 51, 51: 52, 52: 53, 53: 54, 54: EOS}
    model = chain_model({**early, **cut_off, **extra, **last})
    # The second prompt is a chat that holds the pad, stop and end-of-sequence id 2 twice.
    prompts = [[20], [11, EOS, 12, EOS, 30], [7, 40], [50]]
    params = sampling(num_generations=1, max_completion_length=5, stop_token_ids=(EOS, 8), pad_token_id=EOS)

    samples = engine_class(model).generate(prompts, params, generator())

    assert samples.completion_ids.tolist() == [
        [21, 22, EOS, EOS, EOS],
        [31, 32, 33, 34, 35],
        [41, 8, EOS, EOS, EOS],
        [51, 52, 53, 54, EOS],
    ]
    assert samples.completion_mask.sum(dim=1).tolist() == [3, 5, 2, 5]
    assert samples.stopped.tolist() == [True, False, True, True]
    mask, stopped = completion_mask(samples.completion_ids, (EOS, 8))
    assert torch.equal(mask, samples.completion_mask) and torch.equal(stopped, samples.stopped)
    assert bool((samples.logprobs[~samples.completion_mask] == 0).all())


@every_engine
def test_completions_stay_within_minimum_and_maximum_length(engine_class):
    """S40. With half the vocabulary as stop tokens, rows end as soon as they may."""
    params = sampling(
        num_generations=40, max_completion_length=6, min_completion_length=4, stop_token_ids=tuple(range(0, 64, 2))
    )
    samples = engine_class(tiny_model()).generate([SHORT, LONG], params, generator())
    lengths = samples.completion_mask.sum(dim=1)
    assert int(lengths.min()) == 4 and int(lengths.max()) <= 6
    assert not bool(torch.isin(samples.completion_ids[:, :3], torch.arange(0, 64, 2)).any())
    assert bool(samples.stopped[lengths == 4].all())


@every_engine
@pytest.mark.parametrize("stop_string", ["abca", "cab", "bca"])
def test_a_stop_string_ends_a_completion_wherever_its_tokens_begin_and_end(engine_class, stop_string):
    """The chain says x, ab, cab, y: text "xabcaby". Every one of the strings is completed by the token "cab"."""
    tokenizer = tiny_tokenizer()
    start, x, ab, cab, y = (tokenizer.convert_tokens_to_ids(token) for token in ("z", "x", "ab", "cab", "y"))
    model = chain_model({start: x, x: ab, ab: cab, cab: y})
    params = sampling(num_generations=2, stop_strings=(stop_string, "never said"))

    samples = engine_class(model, tokenizer).generate([[start], [y, start]], params, generator())

    assert rows_of(samples) == [[x, ab, cab]] * 4
    assert samples.stopped.tolist() == [True] * 4


@every_engine
def test_a_stop_string_completed_before_the_minimum_length_does_not_stop(engine_class):
    """The chain says a, b, a, b, ...; "b" is complete at tokens 2, 4, 6, and a completion has at least 3."""
    tokenizer = tiny_tokenizer()
    a, b = tokenizer.convert_tokens_to_ids("a"), tokenizer.convert_tokens_to_ids("b")
    params = sampling(num_generations=1, stop_strings=("b",), min_completion_length=3)
    samples = engine_class(chain_model({a: b, b: a}), tokenizer).generate([[b]], params, generator())
    assert rows_of(samples) == [[a, b, a, b]]


@every_engine
def test_an_empty_stop_set_runs_to_the_maximum_length(engine_class):
    samples = engine_class(tiny_model()).generate([SHORT], sampling(stop_token_ids=()), generator())
    assert bool(samples.completion_mask.all()) and samples.completion_ids.shape == (3, 10)
    assert not bool(samples.stopped.any())


# Log-probabilities and tokens


@every_engine
@every_family
def test_logprobs_equal_a_plain_forward_pass(engine_class, family):
    """T06: prompts of 3 and 9 tokens in one batch, temperature 0.7, a model in training mode with dropout 0.1."""
    model = tiny_model(family)
    params = sampling(temperature=0.7, top_k=20, top_p=0.9, repetition_penalty=1.3, min_completion_length=2)
    samples = engine_class(model).generate([SHORT, LONG], params, generator())
    for row, completion in enumerate(rows_of(samples)):
        prompt = [SHORT, LONG][row // 3]
        expected = plain_logprobs(model, prompt, completion, temperature=0.7)
        assert torch.allclose(samples.logprobs[row, : len(completion)], expected, atol=1e-4)


@every_engine
@every_family
@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_top_k_one_says_what_greedy_decoding_says(engine_class, family, penalty):
    model = tiny_model(family).eval()
    params = sampling(
        num_generations=2, top_k=1, stop_token_ids=(), max_completion_length=12, repetition_penalty=penalty
    )
    samples = engine_class(model).generate([SHORT, LONG], params, generator())
    for row, completion in enumerate(rows_of(samples)):
        prompt = torch.tensor([[SHORT, LONG][row // 2]])
        config = GenerationConfig(do_sample=False, max_new_tokens=12, repetition_penalty=penalty)
        model.generation_config = GenerationConfig()
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
        assert completion == expected[0, prompt.shape[1] :].tolist()


@every_family
def test_both_engines_sample_the_same_tokens_from_the_same_seed(family):
    model = tiny_model(family)
    params = sampling(num_generations=8, top_p=0.9, min_p=0.01, repetition_penalty=1.1, stop_token_ids=(EOS, 8, 9, 10))
    native, transformers = (
        engine_class(model).generate([SHORT, LONG], params, generator())
        for engine_class in (NativeEngine, TransformersEngine)
    )
    assert torch.equal(native.completion_ids, transformers.completion_ids)
    assert torch.equal(native.completion_mask, transformers.completion_mask)
    assert torch.equal(native.stopped, transformers.stopped)
    assert 0 < int(native.stopped.sum()) < 16
    assert torch.allclose(native.logprobs, transformers.logprobs, atol=1e-4)


@every_engine
def test_an_adapter_is_part_of_the_policy(engine_class):
    model = lora(tiny_model())
    samples = engine_class(model).generate([SHORT, LONG], sampling(), generator())
    for row, completion in enumerate(rows_of(samples)):
        expected = plain_logprobs(model, [SHORT, LONG][row // 3], completion, temperature=1.0)
        assert torch.allclose(samples.logprobs[row, : len(completion)], expected, atol=1e-4)
    with model.disable_adapter():
        plain = engine_class(model).generate([SHORT, LONG], sampling(), generator())
    assert rows_of(plain) != rows_of(samples)


@every_engine
def test_logprobs_are_float32_when_the_model_is_not(engine_class):
    """The log-softmax over bfloat16 logits is taken in float32: it must match one to float32 precision."""
    model = tiny_model().to(torch.bfloat16)
    params = sampling(num_generations=1, max_completion_length=1, stop_token_ids=())
    samples = engine_class(model).generate([SHORT], params, generator())
    expected = plain_logprobs(model, SHORT, rows_of(samples)[0], temperature=1.0)
    assert samples.logprobs.dtype == torch.float32
    assert torch.allclose(samples.logprobs[0], expected, atol=1e-6)


@every_engine
def test_row_i_times_n_plus_j_is_completion_j_of_prompt_i(engine_class):
    model = chain_model({20: 21, 30: 31, 40: 41})
    params = sampling(num_generations=2, max_completion_length=1)
    samples = engine_class(model).generate([[20], [7, 30], [40], [20]], params, generator())
    assert samples.completion_ids.squeeze(1).tolist() == [21, 21, 31, 31, 41, 41, 21, 21]


# Randomness


@every_engine
def test_the_seed_alone_decides_the_tokens(engine_class):
    model = tiny_model("gpt2")
    engine = engine_class(model)
    before = torch.get_rng_state()
    first = engine.generate([SHORT, LONG], sampling(), generator(3))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    second = engine.generate([SHORT, LONG], sampling(), generator(3))
    third = engine.generate([SHORT, LONG], sampling(), generator(4))
    assert torch.equal(first.completion_ids, second.completion_ids)
    assert rows_of(first) != rows_of(third)
    one = generator(3)
    assert rows_of(engine.generate([SHORT], sampling(), one)) != rows_of(engine.generate([SHORT], sampling(), one))


@every_engine
def test_completions_of_one_prompt_differ(engine_class):
    samples = engine_class(tiny_model()).generate([SHORT], sampling(num_generations=8), generator())
    assert len({tuple(row) for row in rows_of(samples)}) > 4


@every_engine
def test_a_row_does_not_depend_on_the_other_rows(engine_class):
    """Other prompts, shorter or longer, end at other times and so leave the batch at other times."""
    engine = engine_class(tiny_model())
    params = sampling(num_generations=4, stop_token_ids=(EOS, *range(10, 22)), max_completion_length=20)
    alone = engine.generate([LONG], params, generator())
    for others in ([SHORT], [[33] * 15, [4]], [LONG, SHORT, [6, 6]]):
        together = engine.generate([LONG, *others], params, generator())
        assert rows_of(together)[:4] == rows_of(alone)
        width = alone.logprobs.shape[1]
        assert torch.allclose(together.logprobs[:4, :width], alone.logprobs, atol=1e-5)


@every_engine
def test_sampled_frequencies_match_the_softmax(engine_class):
    """4000 draws of one token at temperature 2: Pearson's statistic is below its 99.99% bound."""
    model, draws = tiny_model("llama", vocab_size=8, bos_token_id=0, eos_token_id=0), 4000
    params = sampling(num_generations=draws, max_completion_length=1, stop_token_ids=(), temperature=2.0)
    samples = engine_class(model).generate([[1, 2, 3]], params, generator())
    observed = samples.completion_ids.squeeze(1).bincount(minlength=8).double()
    expected = draws * torch.stack(
        [plain_logprobs(model, [1, 2, 3], [token], 2.0).exp().squeeze() for token in range(8)]
    )
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert float(expected.min()) > 5
    assert statistic < 29.9  # chi-square, 7 degrees of freedom
    assert statistic > 0.1  # not an allotment either


# What is left alone


@every_engine
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "lora"])
def test_generation_defaults_of_the_model_never_leak(engine_class, wrapped):
    model = lora(tiny_model()) if wrapped else tiny_model()
    engine = engine_class(model)
    params = sampling(stop_token_ids=())
    expected = engine.generate([SHORT, LONG], params, generator())
    inner = model.get_base_model() if wrapped else model
    defaults = GenerationConfig(
        do_sample=True,
        temperature=0.1,
        top_k=2,
        top_p=0.2,
        max_length=12,
        max_new_tokens=2,
        min_length=500,
        repetition_penalty=3.0,
        no_repeat_ngram_size=1,
        suppress_tokens=list(range(8, 60)),
        begin_suppress_tokens=[5],
        forced_bos_token_id=7,
        forced_eos_token_id=7,
        bad_words_ids=[[9]],
        eos_token_id=list(range(64)),
        stop_strings=["a"],
        num_beams=3,
        num_return_sequences=2,
        return_dict_in_generate=True,
    )
    inner.generation_config = defaults
    wanted = defaults.to_dict()
    actual = engine.generate([SHORT, LONG], params, generator())
    assert torch.equal(actual.completion_ids, expected.completion_ids)
    assert torch.equal(actual.completion_mask, expected.completion_mask)
    assert torch.equal(actual.logprobs, expected.logprobs)
    assert inner.generation_config is defaults and defaults.to_dict() == wanted


@every_engine
def test_training_flags_come_back_as_they_were_even_after_an_error(engine_class, monkeypatch):
    model = tiny_model("gpt2").train()
    model.transformer.h[0].attn.eval()
    flags = [module.training for module in model.modules()]
    defaults = model.generation_config
    engine_class(model).generate([SHORT], sampling(), generator())
    assert [module.training for module in model.modules()] == flags
    model.get_output_embeddings().weight.data.fill_(torch.nan)
    with pytest.raises(RolloutError, match="not finite"):
        engine_class(model).generate([SHORT], sampling(), generator())
    assert [module.training for module in model.modules()] == flags
    assert model.generation_config is defaults


@every_engine
def test_samples_can_enter_a_graph_and_training_under_autocast_still_gets_gradients(engine_class):
    """Sampling inside an autocast caches casts of the weights that carry no gradient; they must not outlive it."""
    model = tiny_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        samples = engine_class(model).generate([SHORT], sampling(num_generations=2), generator())
        logits = model(input_ids=samples.completion_ids).logits
        logprobs = logits.log_softmax(dim=-1).gather(2, samples.completion_ids[:, :, None]).squeeze(2)
        (torch.exp(logprobs - samples.logprobs) * samples.logprobs).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not samples.completion_ids.is_inference() and not samples.stopped.is_inference()


# What is refused


@every_engine
def test_what_the_model_cannot_continue_is_refused_by_name(engine_class):
    engine = engine_class(tiny_model("gpt2"))
    with pytest.raises(DataError, match="prompt 1 is empty"):
        engine.generate([SHORT, []], sampling(), generator())
    with pytest.raises(DataError, match="got none"):
        engine.generate([], sampling(), generator())
    with pytest.raises(DataError, match="prompt 0 holds token id 64, but the model has 64"):
        engine.generate([[5, 64]], sampling(), generator())
    with pytest.raises(ConfigError, match="max_completion_length=6 or less"):
        engine.generate([[5] * 250], sampling(), generator())
    with pytest.raises(ConfigError, match="need a tokenizer"):
        engine.generate([SHORT], sampling(stop_strings=("x",)), generator())
    with pytest.raises(ConfigError, match="temperature"):
        engine.generate([SHORT], sampling(temperature=0.0), generator())
