"""From logits to tokens: what each filter keeps, what a uniform number selects, which log-probability is recorded."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopPLogitsWarper

from quintain.errors import ConfigError, RolloutError
from quintain.rollout import validate_sampling
from quintain.rollout.sampling import (
    ban,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    next_tokens,
    penalise_repetition,
    token_logprobs,
)
from quintain.types import SamplingParams

PROBABILITIES = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
LOGITS = PROBABILITIES.log()


def sampling(**changes) -> SamplingParams:
    fields = {"num_generations": 1, "max_completion_length": 4, "stop_token_ids": (), "pad_token_id": 0}
    return SamplingParams(**{**fields, **changes})


def support(logits: torch.Tensor) -> list[int]:
    return logits[0].isfinite().nonzero().squeeze(1).tolist()


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.142932), (1.0, -0.407606), (2.0, -0.680270)])
def test_logprobs_are_those_of_the_tempered_softmax(temperature, expected):
    """T06: logits (2, 1, 0), token 0."""
    logprobs = token_logprobs(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), temperature=temperature)
    assert float(logprobs) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 0), (0.0999, 0), (0.1001, 1), (0.4999, 1), (0.5001, 2), (0.7001, 3), (1 - 2**-53, 3), (1.0, 3)],
)
def test_a_uniform_number_selects_the_token_whose_share_it_falls_into(uniform, token):
    """Shares 0.1, 0.4, 0.2, 0.3 end at 0.1, 0.5, 0.7, 1. A number just below 1 becomes 1 in float32."""
    assert int(draw(LOGITS, torch.tensor([uniform], dtype=torch.float64))) == token


@given(
    st.lists(st.one_of(st.floats(-40, 40), st.just(-math.inf)), min_size=2, max_size=12),
    st.floats(0, 1, exclude_max=True),
)
def test_an_excluded_token_is_never_drawn(values, uniform):
    values[len(values) // 2] = 0.0
    token = int(draw(torch.tensor([values]), torch.tensor([uniform], dtype=torch.float64)))
    assert values[token] > -math.inf


def test_rare_tokens_keep_their_share_of_the_numbers():
    """Token 2 owns the last 1e-9 of the interval: float32 numbers or sums could not tell it from token 1."""
    logits = torch.tensor([[0.5, 0.5, 1e-9]], dtype=torch.float64).log().float()
    assert int(draw(logits, torch.tensor([1 - 5e-10], dtype=torch.float64))) == 2
    assert int(draw(logits, torch.tensor([1 - 2e-9], dtype=torch.float64))) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_raise(bad):
    logits = torch.tensor([[0.0, 1.0], [0.0, bad]])
    with pytest.raises(RolloutError, match="row 1 of 2"):
        draw(logits, torch.tensor([0.5, 0.5]))


def test_top_k_keeps_exactly_k_even_among_ties():
    assert support(keep_top_k(LOGITS, top_k=2)) == [1, 3]
    assert len(support(keep_top_k(torch.zeros(1, 9), top_k=4))) == 4
    assert support(keep_top_k(LOGITS, top_k=99)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, [1]), (0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 2, 3])]
)
def test_top_p_keeps_the_smallest_set_with_that_probability(top_p, kept):
    assert support(keep_top_p(LOGITS, top_p=top_p)) == kept


@pytest.mark.parametrize(("min_p", "kept"), [(0.2, [0, 1, 2, 3]), (0.3, [1, 2, 3]), (0.6, [1, 3]), (1.0, [1])])
def test_min_p_keeps_tokens_by_their_ratio_to_the_likeliest(min_p, kept):
    """Ratios to 0.4: 0.25, 1, 0.5, 0.75."""
    assert support(keep_min_p(LOGITS, min_p=min_p)) == kept


def test_filters_keep_the_same_tokens_as_transformers_does():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, 40, generator=generator)
    for value in (0.1, 0.5, 0.9):
        assert torch.equal(keep_top_p(logits, top_p=value), TopPLogitsWarper(value)(None, logits))
        assert torch.equal(keep_min_p(logits, min_p=value), MinPLogitsWarper(value)(None, logits))
    ids = torch.randint(0, 40, (50, 7), generator=generator)
    seen = torch.zeros(50, 40, dtype=torch.bool).scatter(1, ids, True)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits)
    assert torch.equal(penalise_repetition(logits, seen, penalty=1.7), expected)


def test_banned_tokens_are_excluded_and_ids_beyond_the_vocabulary_ignored():
    assert support(ban(LOGITS, (1, 3, 900), torch.tensor([True]))) == [0, 2]
    assert support(ban(LOGITS, (1, 3, 900), torch.tensor([False]))) == [0, 1, 2, 3]


def test_support_is_restricted_exactly_over_many_draws():
    """Every token of the kept set is drawn, and no other: top-k 3 of (0.1, 0.4, 0.2, 0.3) leaves 1, 2, 3."""
    uniforms = torch.linspace(0, 1 - 1e-9, 1000, dtype=torch.float64)
    logits = LOGITS.expand(1000, 4)
    assert next_tokens(logits, uniforms, sampling(top_k=3))[0].unique().tolist() == [1, 2, 3]
    assert next_tokens(logits, uniforms, sampling(top_p=0.5))[0].unique().tolist() == [1, 3]
    assert next_tokens(logits, uniforms, sampling(min_p=0.45))[0].unique().tolist() == [1, 2, 3]
    banned = next_tokens(logits, uniforms, sampling(stop_token_ids=(1,)), ban_stops=uniforms < 2)[0]
    assert banned.unique().tolist() == [0, 2, 3]


def test_recorded_logprobs_ignore_truncation_penalty_and_bans():
    params = sampling(temperature=0.5, top_k=1, repetition_penalty=100.0, stop_token_ids=(1,))
    logits = torch.tensor([[2.0, 5.0, 1.0, 0.0]])
    seen = torch.tensor([[True, False, False, False]])
    token, logprob = next_tokens(logits, torch.tensor([0.3]), params, seen=seen, ban_stops=torch.tensor([True]))
    # Token 1 is banned and token 0 penalised down to 0.02, so token 2 is the likeliest.
    assert int(token) == 2
    assert float(logprob) == pytest.approx(float((logits / 0.5).log_softmax(dim=1)[0, 2]), abs=1e-6)


def test_bfloat16_logits_are_widened_before_anything_is_computed():
    logits = torch.linspace(-3, 3, 50).to(torch.bfloat16).expand(200, 50)
    uniforms = torch.linspace(0, 0.999, 200, dtype=torch.float64)
    params = sampling(temperature=0.7, top_p=0.9)
    expected_tokens, expected = next_tokens(logits.float(), uniforms, params)
    tokens, logprobs = next_tokens(logits, uniforms, params)
    assert torch.equal(tokens, expected_tokens) and torch.equal(logprobs, expected)
    assert torch.equal(token_logprobs(logits, tokens, temperature=0.7), expected)


def test_inputs_are_left_as_they_were():
    logits = torch.tensor([[2.0, -5.0, 1.0, 0.0]])
    before = logits.clone()
    params = sampling(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=2.0, stop_token_ids=(1,))
    banned = torch.tensor([True])
    next_tokens(logits, torch.tensor([0.3]), params, seen=torch.ones(1, 4, dtype=torch.bool), ban_stops=banned)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [0.0, -1.0, math.nan, math.inf]),
        ("top_p", [0.0, -0.1, 1.1, math.nan]),
        ("top_k", [-1]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0.0, -1.0, math.inf]),
        ("num_generations", [0, -2]),
        ("max_completion_length", [0, -1]),
        ("min_completion_length", [-1, 5]),
        ("pad_token_id", [-1]),
        ("stop_token_ids", [(2, -1)]),
        ("stop_strings", [("",), "END", (3,)]),
    ],
)
def test_settings_outside_their_range_are_refused_by_name(field, values):
    """T06: a temperature of 0 or below is an error."""
    for value in values:
        with pytest.raises(ConfigError, match=field):
            validate_sampling(sampling(**{field: value}))


def test_settings_at_the_ends_of_their_ranges_are_accepted():
    validate_sampling(sampling(temperature=1e-3, top_p=1.0, min_p=1.0, top_k=0, min_completion_length=4))
    validate_sampling(sampling(stop_token_ids=(0,), stop_strings=("x",), min_completion_length=0))
