"""The shared-prompt layout computes what each sequence alone does, values and gradients, wherever it is used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import FAMILIES, tiny_model

from quintain.policies.forward import ActorCritic, token_logprobs
from quintain.policies.layout import PackingCost, _sequences, best_pack_size, lay_out
from quintain.policies.value_head import SharedValueHead
from quintain.types import Rollouts

SLIDING = {"gemma2", "mistral"}


def ragged(prompt_lengths=(3, 9), completions=4, seed=0) -> Rollouts:
    """Rows of several prompts, completions of 1 to 5 tokens, random ids under the padding too."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(prompt_lengths) * completions
    width = max(prompt_lengths)
    prompts = torch.randint(3, 64, (len(prompt_lengths), width), generator=generator).repeat_interleave(completions, 0)
    lengths = torch.tensor(prompt_lengths).repeat_interleave(completions)
    completion_lengths = torch.randint(1, 6, (rows,), generator=generator)
    return Rollouts(
        prompt_ids=prompts,
        prompt_mask=torch.arange(width) >= (width - lengths)[:, None],
        completion_ids=torch.randint(3, 64, (rows, 5), generator=generator),
        completion_mask=torch.arange(5) < completion_lengths[:, None],
        stopped=torch.ones(rows, dtype=torch.bool),
        sampling_logprobs=torch.zeros(rows, 5),
        group_ids=torch.arange(rows) // completions,
        prompts=[""] * rows,
        completions=[""] * rows,
    )


def reference_logprobs(model, rollouts, row):
    """One sequence alone, without padding, mask or position ids: the plainest forward pass there is."""
    prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
    completion = rollouts.completion_ids[row][rollouts.completion_mask[row]]
    logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
    return token_logprobs(logits, completion, 0.7)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_each_sequence_alone(family):
    model = tiny_model(family).eval()
    module = ActorCritic(model)
    rollouts = ragged()
    with torch.no_grad():
        logprobs = module(rollouts, 0.7).logprobs
        for row in range(len(rollouts)):
            alone = reference_logprobs(model, rollouts, row)
            torch.testing.assert_close(logprobs[row, : len(alone)], alone, atol=1e-5, rtol=0)
            assert bool((logprobs[row, len(alone) :] == 0).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_shared_where_the_model_honours_the_mask_and_only_there(family):
    assert ActorCritic(tiny_model(family)).shares_prompts == (family not in SLIDING)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - SLIDING))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients_of_packs_equal_those_of_single_sequences(family, size):
    """In float64, to 1e-9; families whose normalisation computes in float32 whatever it is given, to 1e-5."""
    close = {"atol": 1e-9 if family in ("gpt2", "gpt_neox") else 1e-5, "rtol": 0}
    model = tiny_model(family).double().eval()
    module = ActorCritic(model, SharedValueHead(model.config.hidden_size).double())
    torch.nn.init.ones_(module.value_model.score.weight)
    rollouts = ragged()
    weights = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for pack_size in (1, size):
        module.lay_out = lambda rollouts, pack_size=pack_size: lay_out(rollouts, pack_size)
        module.zero_grad()
        layout = module.lay_out(rollouts)
        logits, hidden = module._logits_and_hidden(layout)
        ids = rollouts.completion_ids[rollouts.completion_mask]
        logprobs = layout.scatter(token_logprobs(logits, ids, 0.7))
        values = layout.scatter(module.value_model(layout, hidden))
        ((logprobs + values) * weights).sum().backward()
        gradients = {name: value.grad.clone() for name, value in module.named_parameters()}
        results.append((logprobs.detach(), values.detach(), gradients))
    (plain, plain_values, plain_gradients), (packed, packed_values, packed_gradients) = results
    torch.testing.assert_close(packed, plain, **close)
    torch.testing.assert_close(packed_values, plain_values, **close)
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, **close)


def test_a_pack_is_the_prompt_once_and_every_completion_after_it():
    rollouts = ragged(prompt_lengths=(3,), completions=2)
    layout = lay_out(rollouts, 2)
    lengths = rollouts.lengths.tolist()
    read = [length - 1 for length in lengths]  # a last token is predicted and predicts nothing
    assert layout.input_ids.shape == (1, 3 + sum(read))
    assert layout.position_ids[0].tolist() == [0, 1, 2, *range(3, 3 + read[0]), *range(3, 3 + read[1])]
    second_starts = 3 + read[0]
    seen = layout.attention_mask[0, 0]
    assert seen[second_starts].nonzero().flatten().tolist() == [0, 1, 2, second_starts]
    assert layout.predicting[0] == layout.predicting[lengths[0]] == 2  # both first tokens: the end of the prompt


@pytest.mark.parametrize("pack_size", [1, 4])
def test_a_completion_sampled_twice_is_computed_once_and_counts_twice(pack_size):
    """Rows 0 and 2 are one sequence: the pass is shorter by its tokens, and the gradient is that of two rows."""
    rollouts = ragged(prompt_lengths=(4,), completions=4)
    ids, mask = rollouts.completion_ids.clone(), rollouts.completion_mask.clone()
    ids[2], mask[2] = ids[0], mask[0]
    ids[2][~mask[2]] = 7  # whatever stands under the padding
    rollouts = replace(rollouts, completion_ids=ids, completion_mask=mask)
    layout = lay_out(rollouts, pack_size)
    lengths = rollouts.lengths.tolist()
    distinct = [lengths[row] for row in (0, 1, 3)]
    assert layout.attention_mask.shape[0] == (3 if pack_size == 1 else 1)
    read = [length - 1 for length in distinct]  # a last token is predicted and predicts nothing
    assert layout.input_ids.shape[1] == 4 + (max(read) if pack_size == 1 else sum(read))

    model = tiny_model().double().eval()
    module = ActorCritic(model)
    module.lay_out = lambda rollouts: lay_out(rollouts, pack_size)
    weights = torch.arange(1.0, 5.0, dtype=torch.float64)[:, None]
    (module(rollouts, 0.7).logprobs * weights).sum().backward()
    packed = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    sum(weights[row] * reference_logprobs(model, rollouts, row).sum() for row in range(4)).backward()
    for ours, plain in zip(packed, [parameter.grad for parameter in model.parameters()]):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


def test_packs_are_small_where_one_prompt_has_many_more_distinct_completions_than_the_others():
    """Padding to the longest pack would cost more than sharing one prompt saves."""
    many, one = {(index, 0): [index] for index in range(8)}, {(1, 1): [9]}
    lopsided = {(1,): many, **{(9, index): one for index in range(50)}}
    assert best_pack_size(lopsided, PackingCost(token=1.0, pair=0.0)) == 1
    assert best_pack_size({(1,): lopsided[(1,)]}, PackingCost(token=1.0, pair=0.0)) == 8


def test_long_completions_are_packed_in_smaller_numbers():
    """Attention over other completions' tokens is wasted: it must not outweigh the prompt tokens saved."""
    rollouts = ragged(prompt_lengths=(1,), completions=4)
    assert best_pack_size(_sequences(rollouts), PackingCost(token=1.0, pair=0.0)) == 4
    assert best_pack_size(_sequences(rollouts), PackingCost(token=1.0, pair=100.0)) == 1


def test_rows_of_one_prompt_need_not_stand_together():
    model = tiny_model().eval()
    module = ActorCritic(model)
    rollouts = ragged()
    order = torch.tensor([7, 0, 5, 2, 1, 6, 3, 4])
    with torch.no_grad():
        straight = module(rollouts, 1.0).logprobs[order]
        shuffled = module(rollouts.select(order), 1.0).logprobs
    torch.testing.assert_close(shuffled, straight, atol=1e-5, rtol=0)
