"""The order of prompts: every one once an epoch, none twice in a step, and resumable anywhere."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from quintain.data import PromptFormat, PromptSampler
from quintain.errors import CheckpointError, ConfigError, DataError
from quintain.policies.scratch import scratch_tokenizer

TOKENIZER = scratch_tokenizer("0123456789")


def rows(count: int) -> list[dict]:
    return [{"prompt": str(10 + index), "answer": index} for index in range(count)]


def sampler(count: int = 10, per_step: int = 4, *, stream: bool = False, format: dict | None = None, **rest):
    data = rows(count)
    dataset = IterableDataset.from_generator(lambda: iter(data)) if stream else Dataset.from_list(data)
    return PromptSampler(dataset, PromptFormat(TOKENIZER, **(format or {})), prompts_per_step=per_step, **rest)


def draw(sampler: PromptSampler, steps: int) -> list[list[int]]:
    return [sampler.next_batch().columns["answer"] for _ in range(steps)]


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 12), per_step=st.integers(1, 12), shuffle=st.booleans(), seed=st.integers(0, 9))
def test_every_epoch_uses_every_prompt_once_and_no_step_uses_one_twice(count, per_step, shuffle, seed):
    source = sampler(count, per_step, shuffle=shuffle, seed=seed)
    steps = draw(source, 2 * count)
    drawn = [index for step in steps for index in step]
    for epoch in range(2 * per_step):
        assert sorted(drawn[epoch * count : (epoch + 1) * count]) == list(range(count))
    if per_step <= count:
        assert all(len(set(step)) == per_step for step in steps)
        assert source.num_repeated == 0
    else:
        assert source.num_repeated == 2 * count * (per_step - count)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 9), per_step=st.integers(1, 9), stop=st.integers(0, 9), stream=st.booleans())
def test_a_resumed_order_equals_an_unbroken_one(count, per_step, stop, stream):
    """T09; the state survives being written as JSON, and the new process was given another seed."""
    unbroken, first = (sampler(count, per_step, stream=stream, seed=3) for _ in range(2))
    expected = draw(unbroken, stop + 4)
    draw(first, stop)
    state = json.loads(json.dumps(first.state_dict()))
    second = sampler(count, per_step, stream=stream, seed=4)
    second.load_state_dict(state)
    assert draw(second, 4) == expected[stop:]
    assert second.state_dict() == unbroken.state_dict()


def test_four_prompts_two_a_step_are_each_used_three_times_in_six_steps():
    """T09."""
    assert Counter(index for step in draw(sampler(4, 2), 6) for index in step) == {0: 3, 1: 3, 2: 3, 3: 3}


def test_epochs_and_seeds_differ_in_order():
    source = sampler(10, 10, seed=0)
    first, second = draw(source, 2)
    assert first != second
    assert draw(sampler(10, 10, seed=1), 1) != [first]
    assert draw(sampler(10, 10, seed=0), 1) == [first]


def test_without_shuffling_the_dataset_order_stands():
    """S66: a dataset sorted from easy to hard is a curriculum."""
    assert draw(sampler(5, 2, shuffle=False), 3) == [[0, 1], [2, 3], [4, 0]]
    assert draw(sampler(5, 2, shuffle=False, stream=True), 3) == [[0, 1], [2, 3], [4, 0]]


@pytest.mark.parametrize("stream", [False, True])
def test_processes_share_each_step_between_them(stream):
    whole = draw(sampler(10, 5, stream=stream), 6)
    parts = [draw(sampler(10, 5, stream=stream, rank=rank, world_size=2), 6) for rank in range(2)]
    assert [first + second for first, second in zip(*parts)] == whole
    assert {len(part) for part in parts[0]} == {2}


def test_more_processes_than_prompts_are_refused():
    with pytest.raises(ConfigError, match=r"prompts_per_step=2.*4 processes"):
        sampler(10, 2, world_size=4)


@pytest.mark.parametrize("stream", [False, True])
def test_dropped_prompts_are_replaced_and_counted(stream):
    data = [{"prompt": "1" * (1 + index % 2), "answer": index} for index in range(6)]
    dataset = IterableDataset.from_generator(lambda: iter(data)) if stream else Dataset.from_list(data)
    limit = PromptFormat(TOKENIZER, max_prompt_length=1, overlong_prompts="drop")
    source = PromptSampler(dataset, limit, prompts_per_step=3, shuffle=False)
    assert draw(source, 1) == [[0, 2, 4]]
    assert source.num_dropped == (2 if stream else 3)  # a stream has not yet seen its last row
    assert source.num_prompts == (None if stream else 3)


def test_cut_prompts_are_counted():
    source = sampler(3, 3, format={"max_prompt_length": 1, "overlong_prompts": "cut_left"})
    assert source.num_cut == 3
    assert {len(ids) for ids in source.next_batch().token_ids} == {1}


def test_a_shuffled_stream_mixes_and_has_a_new_order_each_epoch():
    source = sampler(30, 30, stream=True)
    first, second = draw(source, 2)
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second
    assert first != list(range(30))


def test_a_stream_with_nothing_to_use_ends_in_an_error():
    with pytest.raises(DataError, match="stream is empty"):
        sampler(0, 2, stream=True)
    source = sampler(3, 2, stream=True, format={"max_prompt_length": 1, "overlong_prompts": "drop"})
    with pytest.raises(DataError, match="A whole pass over the stream gave no prompt"):
        source.next_batch()


def test_an_unusable_prompt_anywhere_is_refused_at_construction():
    data = [*rows(3), {"prompt": "", "answer": 0}]
    with pytest.raises(DataError, match="Row 3: the prompt is empty"):
        PromptSampler(Dataset.from_list(data), PromptFormat(TOKENIZER), prompts_per_step=2)


@pytest.mark.parametrize("stream", [False, True])
def test_one_pass_covers_every_prompt_in_order_and_moves_nothing(stream):
    source = sampler(5, 2, stream=stream)
    before = source.state_dict()
    assert [part.columns["answer"] for part in source.one_pass()] == [[0, 1], [2, 3], [4]]
    assert [part.columns["answer"] for part in source.one_pass(limit=3)] == [[0, 1], [2]]
    assert source.state_dict() == before


def test_one_pass_shares_out_between_processes_and_skips_an_empty_share():
    first, second = (sampler(5, 2, rank=rank, world_size=2) for rank in range(2))
    assert [part.columns["answer"] for part in first.one_pass()] == [[0], [2]]
    assert [part.columns["answer"] for part in second.one_pass()] == [[1], [3], [4]]


def test_a_state_of_another_dataset_or_without_a_part_is_refused():
    state = sampler(5, 2).state_dict()
    with pytest.raises(CheckpointError, match="had 5 usable prompts and has 6"):
        sampler(6, 2).load_state_dict(state)
    with pytest.raises(CheckpointError, match="lacks order"):
        sampler(5, 2).load_state_dict({name: value for name, value in state.items() if name != "order"})
    del state["order"]["position"]
    with pytest.raises(CheckpointError, match="lacks position"):
        sampler(5, 2).load_state_dict(state)
