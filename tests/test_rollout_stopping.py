"""Where a completion ends: the stop set, the mask, and stop strings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import EOS, tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quintain.rollout import completion_mask, resolve_stop_token_ids
from quintain.rollout.stopping import StopStrings

# A, B, C, D: raw completions for stop ids 2 and 8, where 2 is the pad as well.
RAW = torch.tensor([[5, 7, 2, 2, 2], [5, 7, 9, 4, 6], [5, 8, 2, 2, 2], [5, 7, 9, 4, 2]])


def test_the_mask_ends_with_the_first_stop_token():
    """T02."""
    mask, stopped = completion_mask(RAW, (2, 8))
    assert mask.long().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert mask.sum(dim=1).tolist() == [3, 5, 2, 5]
    assert stopped.tolist() == [True, False, True, True]
    assert float((~stopped).float().mean()) == 0.25
    assert float(mask.sum(dim=1)[stopped].float().mean()) == pytest.approx(3.333333, abs=1e-6)


@given(st.lists(st.integers(0, 9), min_size=9, max_size=9))
def test_ids_after_the_first_stop_do_not_matter(noise):
    """T02."""
    mask, stopped = completion_mask(RAW, (2, 8))
    scrambled = RAW.clone()
    scrambled[~mask] = torch.tensor(noise[: int((~mask).sum())])
    again = completion_mask(scrambled, (2, 8))
    assert torch.equal(again[0], mask) and torch.equal(again[1], stopped)


def test_padding_beyond_a_row_is_not_a_stop():
    """Rows of 2, 4 and 3 tokens padded with the stop id 2; only the last row stopped by itself."""
    ids = torch.tensor([[5, 7, 2, 2], [5, 7, 9, 4], [5, 7, 2, 2]])
    mask, stopped = completion_mask(ids, (2,), lengths=torch.tensor([2, 4, 3]))
    assert mask.sum(dim=1).tolist() == [2, 4, 3]
    assert stopped.tolist() == [False, False, True]


def test_an_empty_stop_set_stops_nothing():
    mask, stopped = completion_mask(RAW, ())
    assert bool(mask.all()) and not bool(stopped.any())


def test_the_stop_set_joins_tokenizer_generation_config_and_extra_ids():
    model = tiny_model()
    tokenizer = tiny_tokenizer()
    assert resolve_stop_token_ids(tokenizer, model) == (EOS,)
    model.generation_config.eos_token_id = [7, EOS, 9]
    assert resolve_stop_token_ids(tokenizer, model, extra=[8, 7]) == (EOS, 7, 9, 8)
    assert resolve_stop_token_ids(SimpleNamespace(eos_token_id=None), torch.nn.Linear(1, 1)) == ()


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, ids 0 to 255 in the order of the byte alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def ends_at(tokenizer: PreTrainedTokenizerFast, text: str, *strings: str) -> list[int]:
    """Numbers of tokens after which a stop string is complete."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stops = StopStrings(strings, tokenizer)
    return [count for count in range(1, len(ids) + 1) if stops.completed(ids[:count])]


def test_a_stop_string_is_complete_with_its_last_token_only():
    tokenizer = byte_level_tokenizer()
    assert ends_at(tokenizer, "say END, then END.", "END") == [7, 17]
    assert ends_at(tokenizer, "aaaa", "aa") == [2, 3, 4]
    assert ends_at(tokenizer, "one\n\ntwo", "\n\n", "wo") == [5, 8]
    assert ends_at(tokenizer, "nothing here", "END") == []


def test_a_stop_string_of_several_bytes_a_character_is_complete_with_its_last_byte():
    """ "é" is two bytes, so two tokens; "日" is three."""
    tokenizer = byte_level_tokenizer()
    assert ends_at(tokenizer, "été", "é") == [2, 5]
    assert ends_at(tokenizer, "x日本日", "日", "本日") == [4, 10]


@given(st.text(alphabet="ab日 ", min_size=1, max_size=30), st.text(alphabet="ab日 ", min_size=1, max_size=4))
def test_a_stop_string_is_found_exactly_where_the_text_has_it(text, string):
    tokenizer = byte_level_tokenizer()
    ends = [len(text[:end].encode()) for end in range(1, len(text) + 1) if text[:end].endswith(string)]
    assert ends_at(tokenizer, text, string) == ends


def test_a_special_token_can_be_a_stop_string():
    tokenizer = tiny_tokenizer()
    ids = [5, 6, EOS]
    stops = StopStrings(("<eos>",), tokenizer)
    assert [stops.completed(ids[:count]) for count in (1, 2, 3)] == [False, False, True]
