"""The record of a rollout: what each row holds, and the manual way in."""

from __future__ import annotations

import pytest
import torch
from tiny_models import EOS, PAD, tiny_tokenizer

from quintain.errors import RolloutError
from quintain.rollout import build_rollouts, rollouts_from_tokens
from quintain.types import Prompts, Rollouts, Samples

A, B, C = 3, 4, 5


def samples(rows: list[list[int]], stopped: list[bool]) -> Samples:
    width = max(len(row) for row in rows)
    return Samples(
        completion_ids=torch.tensor([row + [PAD] * (width - len(row)) for row in rows]),
        completion_mask=torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows]),
        stopped=torch.tensor(stopped),
        logprobs=torch.zeros(len(rows), width),
    )


def test_prompts_are_repeated_padded_on_the_left_and_masked_by_length():
    """T02: the second prompt holds the pad id and the stop id, and its mask is all ones."""
    prompts = Prompts([[A], [PAD, EOS, B]], ["a", "b"], {"answer": ["1", "2"]})
    rollouts = build_rollouts(prompts, samples([[A], [B], [C], [A, B]], [False] * 4), tiny_tokenizer(), 2)
    assert rollouts.prompt_ids.tolist() == [[PAD, PAD, A]] * 2 + [[PAD, EOS, B]] * 2
    assert rollouts.prompt_mask.tolist() == [[False, False, True]] * 2 + [[True] * 3] * 2
    assert rollouts.group_ids.tolist() == [0, 0, 1, 1]
    assert rollouts.prompts == ["a", "a", "b", "b"]
    assert rollouts.columns == {"answer": ["1", "1", "2", "2"]}


def test_completions_take_the_form_of_their_prompt_without_special_tokens():
    chat = [{"role": "user", "content": "hi"}]
    prompts = Prompts([[A], [B]], ["text", chat])
    rollouts = build_rollouts(prompts, samples([[A, B, EOS], [C]], [True, False]), tiny_tokenizer(), 1)
    assert rollouts.completions == ["ab", [{"role": "assistant", "content": "c"}]]


def test_ids_outside_the_mask_are_not_part_of_the_text():
    made = samples([[A, B], [C]], [False, False])
    made.completion_ids[1, 1] = B
    rollouts = build_rollouts(Prompts([[A], [B]], ["x", "y"]), made, tiny_tokenizer(), 1)
    assert rollouts.completions == ["ab", "c"]


def test_a_tokenizer_without_a_pad_token_is_enough():
    """T08 d."""
    tokenizer = tiny_tokenizer(pad_token=None)
    rollouts = build_rollouts(Prompts([[A], [A, B]], ["x", "y"]), samples([[A], [B]], [False] * 2), tokenizer, 1)
    assert rollouts.prompt_mask.tolist() == [[False, True], [True, True]]


def test_a_wrong_number_of_completions_is_an_error():
    with pytest.raises(RolloutError, match=r"returned 3 completions for 2 prompts.*expected 4"):
        build_rollouts(Prompts([[A], [B]], ["x", "y"]), samples([[A]] * 3, [False] * 3), tiny_tokenizer(), 2)


def test_ragged_tokens_become_the_same_record():
    rollouts = rollouts_from_tokens(
        queries=[[A], torch.tensor([B, C]), [A]],
        responses=[[A, EOS, B, B], torch.tensor([C]), [B, B]],
        tokenizer=tiny_tokenizer(),
        stop_token_ids=(EOS,),
        sampling_logprobs=[[-1.0, -2.0, -3.0, -4.0], torch.tensor([-5.0]), [-6.0, -7.0]],
        columns={"answer": ["1", "2", "3"]},
    )
    assert rollouts.prompt_ids.tolist() == [[PAD, A], [B, C], [PAD, A]]
    assert rollouts.prompt_mask.tolist() == [[False, True], [True, True], [False, True]]
    assert rollouts.lengths.tolist() == [2, 1, 2]
    assert rollouts.stopped.tolist() == [True, False, False]
    assert rollouts.completion_ids[0, :2].tolist() == [A, EOS]
    assert rollouts.sampling_logprobs.tolist() == [[-1, -2, 0, 0], [-5, 0, 0, 0], [-6, -7, 0, 0]]
    assert rollouts.group_ids.tolist() == [0, 1, 0]
    assert rollouts.prompts == ["a", "bc", "a"] and rollouts.completions == ["a", "c", "bb"]
    assert rollouts.columns == {"answer": ["1", "2", "3"]}


def test_padding_of_a_response_is_not_taken_for_a_stop():
    """The tokenizer pads with its stop token, and the shorter response never stopped."""
    tokenizer = tiny_tokenizer(pad_token="<eos>")
    rollouts = rollouts_from_tokens([[A], [A]], [[B], [B, C, C]], tokenizer, stop_token_ids=(EOS,))
    assert rollouts.lengths.tolist() == [1, 3]
    assert rollouts.stopped.tolist() == [False, False]


def test_unknown_sampling_logprobs_are_nan_and_never_a_number():
    rollouts = rollouts_from_tokens([[A], [A]], [[B], [B, C]], tiny_tokenizer(), stop_token_ids=())
    assert rollouts.sampling_logprobs.isnan().tolist() == rollouts.completion_mask.tolist()
    assert float(rollouts.sampling_logprobs[0, 1]) == 0.0


def test_manual_completions_of_chats_are_message_lists():
    chat = [{"role": "user", "content": "hi"}]
    rollouts = rollouts_from_tokens([[A]], [[B]], tiny_tokenizer(), stop_token_ids=(), prompts=[chat])
    assert rollouts.completions == [[{"role": "assistant", "content": "b"}]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"responses": [[B]]}, "one entry of responses for each of 2 queries: got 1"),
        ({"responses": [[B], []]}, "row 1 has an empty response"),
        ({"queries": [[], [A]]}, "row 0 has an empty query"),
        ({"queries": [], "responses": []}, "at least one query"),
        ({"sampling_logprobs": [[-1.0], [-1.0]]}, "row 1 has 2 response tokens but 1 sampling_logprobs"),
        ({"columns": {"answer": ["1"]}}, "one entry of answer"),
    ],
)
def test_tokens_that_do_not_line_up_are_refused(changes, message):
    given = {"queries": [[A], [A]], "responses": [[B], [B, C]], **changes}
    with pytest.raises(RolloutError, match=message):
        rollouts_from_tokens(**given, tokenizer=tiny_tokenizer(), stop_token_ids=())


def test_micro_batches_are_as_few_as_can_be_and_about_equally_large():
    """Four groups of 2 + 4 x 3 tokens: 30 hold two of them, and 40 two and a half, which would leave a small rest."""
    rows = 16
    rollouts = Rollouts(
        prompt_ids=torch.zeros(rows, 2, dtype=torch.long),
        prompt_mask=torch.ones(rows, 2, dtype=torch.bool),
        completion_ids=torch.zeros(rows, 3, dtype=torch.long),
        completion_mask=torch.ones(rows, 3, dtype=torch.bool),
        stopped=torch.ones(rows, dtype=torch.bool),
        sampling_logprobs=torch.zeros(rows, 3),
        group_ids=torch.arange(rows) // 4,
        prompts=[""] * rows,
        completions=[""] * rows,
    )

    def sizes(budget: int, keep: str, shared: bool = True) -> list[int]:
        parts = rollouts.partition(budget, keep, share_prompts=shared)
        assert [row for part in parts for row in part] == list(range(rows))
        return [len(part) for part in parts]

    assert sizes(30, "token") == sizes(30, "group") == sizes(40, "token") == [8, 8]
    assert sizes(41, "group") == [8, 8]
    assert sizes(1000, "token") == [16]
    assert sizes(1, "group") == [4, 4, 4, 4]
    assert sizes(30, "token", shared=False) == [6, 6, 4]
