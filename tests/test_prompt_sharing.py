"""The shared-prompt layout computes what each sequence alone does, values and gradients, wherever it is used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import FAMILIES, tiny_model

from quintain import attention
from quintain.policies.forward import ActorCritic
from quintain.policies.head import outputs_of_logits
from quintain.policies.layout import repeat_prompts, share_prompts
from quintain.policies.value_head import SharedValueHead
from quintain.types import Rollouts


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
    return outputs_of_logits(logits, completion, temperature=0.7).logprobs


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


def computes_by_plan(family: str) -> bool:
    """Gemma 2 caps its attention scores, which transformers computes by its own function only."""
    return family != "gemma2"


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_shared_where_the_model_attends_by_a_plan_and_only_there(family):
    assert ActorCritic(tiny_model(family)).shares_prompts == computes_by_plan(family)


def test_prompts_are_shared_within_a_sliding_window_and_not_beyond_it():
    module = ActorCritic(tiny_model("mistral").eval())  # a window of 6 tokens
    assert module.lay_out(ragged(prompt_lengths=(1,))).input_ids.shape[0] == 1
    assert module.lay_out(ragged(prompt_lengths=(3, 9))).input_ids.shape[0] == 8


@pytest.mark.parametrize("family", [family for family in FAMILIES if computes_by_plan(family)])
@pytest.mark.parametrize(
    ("few_pairs", "block"), [(0, 64), (2**17, 64), (2**17, 2)], ids=["by length", "together", "blocks"]
)
def test_gradients_with_shared_prompts_equal_those_of_single_sequences(family, few_pairs, block, monkeypatch):
    """In float64, to 1e-9; families whose normalisation computes in float32 whatever it is given, to 1e-5."""
    monkeypatch.setattr(attention, "FEW_PAIRS", few_pairs)
    monkeypatch.setattr(attention, "BLOCK", block)
    close = {"atol": 1e-9 if family in ("gpt2", "gpt_neox", "phi") else 1e-5, "rtol": 0}
    model = tiny_model(family, **({"sliding_window": None} if family == "mistral" else {})).double().eval()
    module = ActorCritic(model, SharedValueHead(model.config.hidden_size).double())
    torch.nn.init.ones_(module.value_model.score.weight)
    rollouts = ragged()
    weights = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for lay_out in (repeat_prompts, share_prompts):
        module.lay_out = lay_out
        module.zero_grad()
        outputs = module(rollouts, 0.7)
        ((outputs.logprobs + outputs.values) * weights).sum().backward()
        gradients = {name: value.grad.clone() for name, value in module.named_parameters()}
        results.append((outputs.logprobs.detach(), outputs.values.detach(), gradients))
    (plain, plain_values, plain_gradients), (shared, shared_values, shared_gradients) = results
    torch.testing.assert_close(shared, plain, **close)
    torch.testing.assert_close(shared_values, plain_values, atol=1e-5, rtol=0)  # values are float32
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(shared_gradients[name], gradient, **close)


def test_gradients_with_shared_prompts_survive_gradient_checkpointing():
    """The layers are computed again in the backward pass, by the same plan."""
    model, rollouts = tiny_model(), ragged()
    module = ActorCritic(model)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        module.zero_grad()
        module(rollouts, 1.0).logprobs.sum().backward()
        gradients.append([value.grad.clone() for value in model.parameters()])
    assert module.shares_prompts
    for plain, checkpointed in zip(*gradients):
        assert torch.equal(plain, checkpointed)


def test_every_prompt_stands_once_and_every_completion_after_it_on_one_axis_without_padding():
    rollouts = ragged(prompt_lengths=(3, 2), completions=2)
    layout = share_prompts(rollouts)
    lengths = rollouts.lengths.tolist()
    read = [length - 1 for length in lengths]  # a last token is predicted and predicts nothing
    assert layout.input_ids.shape == (1, 3 + 2 + sum(read))
    first = [0, 1, 2, *range(3, 3 + read[0]), *range(3, 3 + read[1])]
    assert layout.position_ids[0].tolist() == [*first, 0, 1, *range(2, 2 + read[2]), *range(2, 2 + read[3])]
    assert layout.predicting[0] == layout.predicting[lengths[0]] == 2  # both first tokens: the end of the prompt
    assert layout.predicting[sum(lengths[:2])] == len(first) + 1


def test_a_completion_sampled_twice_is_computed_once_and_counts_twice():
    """Rows 0 and 2 are one sequence: the pass is shorter by its tokens, and the gradient is that of two rows."""
    rollouts = ragged(prompt_lengths=(4,), completions=4)
    ids, mask = rollouts.completion_ids.clone(), rollouts.completion_mask.clone()
    ids[2], mask[2] = ids[0], mask[0]
    ids[2][~mask[2]] = 7  # whatever stands under the padding
    rollouts = replace(rollouts, completion_ids=ids, completion_mask=mask)
    lengths = rollouts.lengths.tolist()
    assert share_prompts(rollouts).input_ids.shape == (1, 4 + sum(lengths[row] - 1 for row in (0, 1, 3)))

    model = tiny_model().double().eval()
    weights = torch.arange(1.0, 5.0, dtype=torch.float64)[:, None]
    (ActorCritic(model)(rollouts, 0.7).logprobs * weights).sum().backward()
    shared = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    sum(weights[row] * reference_logprobs(model, rollouts, row).sum() for row in range(4)).backward()
    for ours, plain in zip(shared, [parameter.grad for parameter in model.parameters()]):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


def test_a_model_that_loses_the_plan_fails_and_does_not_go_on_with_a_wrong_mask():
    model, layout = tiny_model().eval(), share_prompts(ragged())
    ActorCritic(model)
    with pytest.raises(RuntimeError):
        model(**{**layout.inputs, "attention_mask": layout.attention_mask.clone()})


def test_a_model_whose_attention_was_adopted_is_the_same_for_everyone_else(tmp_path):
    plain, adopted = tiny_model().eval(), tiny_model().eval()
    ActorCritic(adopted)
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        torch.testing.assert_close(
            adopted(ids, attention_mask=mask).logits[:, 3:], plain(ids, attention_mask=mask).logits[:, 3:]
        )
    adopted.save_pretrained(tmp_path)
    assert "quintain" not in (tmp_path / "config.json").read_text()
    assert type(adopted).from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_rows_of_one_prompt_need_not_stand_together():
    model = tiny_model().eval()
    module = ActorCritic(model)
    rollouts = ragged()
    order = torch.tensor([7, 0, 5, 2, 1, 6, 3, 4])
    with torch.no_grad():
        straight = module(rollouts, 1.0).logprobs[order]
        shuffled = module(rollouts.select(order), 1.0).logprobs
    torch.testing.assert_close(shuffled, straight, atol=1e-5, rtol=0)
