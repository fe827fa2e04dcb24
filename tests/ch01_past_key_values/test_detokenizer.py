"""Text increments: no broken character, no part of a stop string, nothing lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.detokenizer import Detokenizer

TEXTS = [
    "plain words",
    "emoji 🙂👍🏽 family 👨‍👩‍👧‍👦 flag 🇫🇷",
    "combining e\u0301 a\u030a",
    "漢字とかな, 한국어, العربية, ไทย",
    " leading and trailing spaces  ",
    "a real \ufffd in the text \ufffd",
    "ends in one \ufffd",
    "",
]


def pieces(tokenizer, token_ids, stop=()):
    """Every increment, the flush last; ends early where the detokenizer says stopped."""
    detokenizer = Detokenizer(tokenizer, stop)
    result = []
    for token_id in token_ids:
        result.append(detokenizer.add(token_id))
        if detokenizer.stopped:
            break
    return [*result, detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_break_no_character(tiny, text):
    _, tokenizer = tiny
    result = pieces(tokenizer, tokenizer(text).input_ids)
    assert "".join(result) == text
    assert sum(piece.count("\ufffd") for piece in result) == text.count("\ufffd")


@given(token_ids=st.lists(st.integers(0, 256), max_size=60))
def test_any_bytes_join_to_the_full_decode(tiny, token_ids):
    """Also bytes that are no text, and special tokens in between."""
    _, tokenizer = tiny
    expected = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces(tokenizer, token_ids)) == expected


@pytest.mark.real_model
@pytest.mark.parametrize("text", TEXTS)
def test_the_real_tokenizer_breaks_no_character_either(real, text):
    _, tokenizer = real
    result = pieces(tokenizer, tokenizer(text).input_ids)
    assert "".join(result) == text
    assert sum(piece.count("\ufffd") for piece in result) == text.count("\ufffd")


@pytest.mark.real_model
@given(token_ids=st.lists(st.integers(0, 49151), max_size=40))
def test_any_tokens_of_the_real_tokenizer_join_to_the_full_decode(real, token_ids):
    _, tokenizer = real
    expected = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces(tokenizer, token_ids)) == expected


def test_an_output_that_starts_in_mid_character_repeats_nothing_of_the_prompt(tiny):
    _, tokenizer = tiny
    smile = tokenizer("🙂").input_ids
    output = [*smile[2:], *tokenizer(" ok").input_ids]  # the prompt ended with smile[:2]
    text = "".join(pieces(tokenizer, output))
    assert text == tokenizer.decode(output)
    assert text.endswith(" ok")
    assert "🙂" not in text


def test_text_is_sent_as_soon_as_it_is_certain(tiny):
    _, tokenizer = tiny
    assert pieces(tokenizer, tokenizer("ab🙂c").input_ids) == ["a", "b", "", "", "", "🙂", "c", ""]


def test_a_stop_string_over_several_tokens_never_leaks(tiny):
    _, tokenizer = tiny
    result = pieces(tokenizer, tokenizer("one STOP two").input_ids, stop=("STOP",))
    assert "".join(result) == "one "
    assert result[:4] == ["o", "n", "e", " "]
    assert all("S" not in piece for piece in result)


def test_a_false_start_is_released(tiny):
    _, tokenizer = tiny
    result = pieces(tokenizer, tokenizer("STO, STOP").input_ids, stop=("STOP",))
    assert "".join(result) == "STO, "
    assert result[3] == "STO,"


def test_an_unfinished_stop_string_is_text_when_the_output_ends(tiny):
    _, tokenizer = tiny
    assert "".join(pieces(tokenizer, tokenizer("one STO").input_ids, stop=("STOP",))) == "one STO"


def test_a_stop_inside_a_token_truncates(word_tokens):
    tokenizer, token_ids = word_tokens
    assert "".join(pieces(tokenizer, token_ids, stop=("orl",))) == "hello w"


@pytest.fixture
def word_tokens():
    """A tokenizer whose tokens are whole words, so that a stop string ends inside one."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"hello ": 0, "world ": 1, "again": 2}, unk_token="again"))
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words), [0, 1, 2]


def test_the_stop_string_that_ends_first_wins(tiny):
    _, tokenizer = tiny
    token_ids = tokenizer("xabcd").input_ids
    assert "".join(pieces(tokenizer, token_ids, stop=("abcd", "bc"))) == "xa"
    assert "".join(pieces(tokenizer, token_ids, stop=("bc", "abcd"))) == "xa"


def test_a_stop_string_found_in_the_last_bytes_still_cuts(tiny):
    """The last token leaves half a character behind a stop string that is one token late."""
    _, tokenizer = tiny
    token_ids = [*tokenizer("ab").input_ids, tokenizer("🙂").input_ids[0]]
    detokenizer = Detokenizer(tokenizer, ("\ufffd",))
    text = "".join(detokenizer.add(t) for t in token_ids) + detokenizer.flush()
    assert text == "ab"
    assert detokenizer.stopped


@given(
    text=st.text(alphabet="ab🙂é", max_size=30),
    stop=st.lists(st.text(alphabet="ab🙂é", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_the_text_ends_where_the_first_stop_string_completes(tiny, text, stop):
    _, tokenizer = tiny
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    expected = text[: min(ends)[1]] if ends else text
    assert "".join(pieces(tokenizer, tokenizer(text).input_ids, stop=tuple(stop))) == expected
