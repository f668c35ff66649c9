"""Rows to prompts: special tokens, chat template, length limit, and what is refused."""

from __future__ import annotations

import pytest
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from quintain.data.prompts import PromptFormat, collect_prompts, read_prompt
from quintain.data.survey import survey
from quintain.errors import DataError
from quintain.policies.scratch import scratch_tokenizer

TOKENIZER = scratch_tokenizer("ab ")  # <pad> <bos> <eos> <unk> a b space: 0 to 6
USER = {"role": "user", "content": "ab"}


def tokenizer_with(pattern: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """One that puts special tokens around a text, as `pattern` says with $A for the text."""
    backend = scratch_tokenizer("ab ").backend_tokenizer
    backend.post_processor = TemplateProcessing(single=pattern, special_tokens=[("<bos>", 1), ("<eos>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", chat_template=template, name_or_path="my/model"
    )


def ids(prompt, tokenizer=TOKENIZER, **settings) -> list[int]:
    return PromptFormat(tokenizer, **settings).encode([{"prompt": prompt}], [0])[0].token_ids


def test_text_gets_the_start_token_once_and_never_an_end_token():
    assert ids("ab") == [4, 5]
    assert ids("ab", tokenizer_with("<bos> $A")) == [1, 4, 5]
    assert ids("<bos>ab", tokenizer_with("<bos> $A")) == [1, 4, 5]
    assert ids("ab", tokenizer_with("<bos> $A <eos>")) == [1, 4, 5]


def test_an_end_token_that_the_text_itself_ends_with_stays():
    """T02: a prompt may hold the end-of-sequence id; only what the tokenizer adds is taken away."""
    assert ids("ab<eos>", tokenizer_with("<bos> $A")) == [1, 4, 5, 2]
    assert ids("ab<eos>", tokenizer_with("$A <eos>")) == [4, 5, 2]


def test_a_template_that_writes_the_start_token_does_not_get_a_second_one():
    template = "<bos>{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    assert ids([USER], tokenizer_with("<bos> $A <eos>", template)) == [1, 4, 5, 2]


def test_a_chat_prompt_asks_for_the_assistants_turn():
    assert ids([USER]) == [1, 4, 5, 2, 1]


def test_a_begun_answer_is_continued():
    assert ids([USER, {"role": "assistant", "content": "b"}]) == [1, 4, 5, 2, 1, 5]


def test_template_variables_reach_the_template():
    template = "{{ 'a' if mood == 'a' else 'b' }}"
    tokenizer = tokenizer_with("$A", template)
    assert ids([USER], tokenizer, chat_template_kwargs={"mood": "a"}) == [4]
    assert ids([USER], tokenizer) == [5]


def test_the_system_prompt_goes_before_chats_that_have_none_and_turns_text_into_a_chat():
    own = [{"role": "system", "content": "a"}, USER]
    rows = [{"prompt": [USER]}, {"prompt": "ab"}, {"prompt": own}]
    first, second, third = PromptFormat(TOKENIZER, system_prompt="b").encode(rows, range(3))
    assert first.prompt == second.prompt == [{"role": "system", "content": "b"}, USER]
    assert first.token_ids == [1, 5, 2, 1, 4, 5, 2, 1]
    assert third.prompt == own


def test_columns_and_prompts_stay_in_row_order():
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "bb", "answer": 2}]
    prompts = collect_prompts(PromptFormat(TOKENIZER).encode(rows, range(2)))
    assert prompts.token_ids == [[4], [5, 5]]
    assert prompts.prompts == ["a", "bb"]
    assert prompts.columns == {"answer": [1, 2]}


def test_entries_that_a_dataset_filled_with_none_are_left_out_of_messages():
    rows = [{"prompt": [USER]}, {"prompt": [{**USER, "name": "x"}]}]
    dataset = Dataset.from_list(rows)
    assert dataset[0]["prompt"] == [{**USER, "name": None}]
    assert read_prompt(dataset[0], 0) == [USER]


def test_a_prompt_as_long_as_the_limit_passes_and_a_longer_one_is_an_error():
    assert ids("ab", max_prompt_length=2) == [4, 5]
    with pytest.raises(DataError, match=r"Row 0: the prompt has 3 tokens.*max_prompt_length=2.*drop.*cut_left"):
        ids("aba", max_prompt_length=2)


def test_cut_left_keeps_the_last_tokens_and_the_whole_text():
    limited = PromptFormat(TOKENIZER, max_prompt_length=2, overlong_prompts="cut_left")
    (item,) = limited.encode([{"prompt": "aab"}], [0])
    assert (item.token_ids, item.prompt, item.length, item.outcome) == ([4, 5], "aab", 3, "cut")


def test_the_survey_counts_what_is_dropped_and_cut():
    dataset = Dataset.from_list([{"prompt": text} for text in ("a", "aaa", "ab", "abab")])
    dropping = survey(dataset, PromptFormat(TOKENIZER, max_prompt_length=2, overlong_prompts="drop"))
    assert (dropping.kept, dropping.lengths) == ([0, 2], [1, 3, 2, 4])
    assert (dropping.num_dropped, dropping.num_cut) == (2, 0)
    cutting = survey(dataset, PromptFormat(TOKENIZER, max_prompt_length=2, overlong_prompts="cut_left"))
    assert (cutting.kept, cutting.num_dropped, cutting.num_cut) == ([0, 1, 2, 3], 0, 2)


def test_a_dataset_whose_prompts_are_all_dropped_is_refused():
    dataset = Dataset.from_list([{"prompt": "abab"}, {"prompt": "aba"}])
    with pytest.raises(DataError, match=r"No prompt is left: all 2 .*the shortest has 3"):
        survey(dataset, PromptFormat(TOKENIZER, max_prompt_length=2, overlong_prompts="drop"))


def test_chat_prompts_without_template_name_the_tokenizer_and_two_fixes():
    """T08 c."""
    with pytest.raises(DataError) as caught:
        ids([USER], tokenizer_with("$A"))
    assert all(word in str(caught.value) for word in ("my/model", "processing_class", "plain text")), caught.value


def test_a_missing_prompt_column_lists_what_there_is():
    with pytest.raises(DataError, match=r"It has: id, question\..*\{question: prompt\}"):
        survey(Dataset.from_list([{"id": 1, "question": "q"}]), PromptFormat(TOKENIZER))


def test_text_and_chat_prompts_together_are_refused():
    with pytest.raises(DataError, match=r"text prompts \(row 7\) and chat prompts \(row 6\)"):
        PromptFormat(TOKENIZER).encode([{"prompt": [USER]}, {"prompt": "a"}], [6, 7])


def test_a_template_that_refuses_the_messages_is_reported_with_the_row():
    tokenizer = tokenizer_with("$A", "{{ raise_exception('no system role') }}")
    with pytest.raises(DataError, match=r"Row 0: .*my/model.*no system role"):
        ids([USER], tokenizer)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        ([], "no messages"),
        (5, "got int"),
        (None, "got NoneType"),
        (["hello"], "a message must look like"),
        ([{"role": "user"}], "content of a message must be text"),
        ([{"content": "a"}], "role of a message must be text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content of a message must be text"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt, words):
    with pytest.raises(DataError, match=f"Row 3: .*{words}"):
        read_prompt({"prompt": prompt}, 3)
