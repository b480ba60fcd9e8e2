import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pdserve.router.tokenizer import TextModel
from pdserve.router.vocabulary import Vocabulary, byte_alphabet
from tests.router.test_detokenizer import BYTE_LEVEL, MIXED_TEXT, SENTENCEPIECE, sentencepiece_ids

BYTES = Vocabulary(BYTE_LEVEL)
WORDS = Vocabulary(SENTENCEPIECE)


def word_id(token: str) -> int:
    return SENTENCEPIECE.token_to_id(token)


def test_the_byte_alphabet_is_the_tokenizers_own():
    alphabet = byte_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for character in map(chr, range(256)):
        [(shown, _)] = level.pre_tokenize_str(character)
        assert bytes(alphabet[letter] for letter in shown) == character.encode()
    assert sorted(alphabet.values()) == list(range(256))


def test_each_token_of_a_byte_level_vocabulary_has_the_bytes_that_it_stands_for():
    token_ids = BYTE_LEVEL.encode(MIXED_TEXT).ids
    assert b"".join(map(BYTES.bytes_of, token_ids)) == MIXED_TEXT.encode()
    assert [len(BYTES.bytes_of(token_id)) for token_id in token_ids] == [1] * len(token_ids)


@pytest.mark.parametrize(
    ("token", "found"),
    [("<0xE2>", b"\xe2"), ("<0x41>", b"A"), ("▁hello", b" hello"), ("▁", b" "), ("a", b"a"), ("<s>", b"<s>")],
)
def test_a_sentencepiece_token_keeps_its_space_and_a_byte_token_is_its_byte(token, found):
    assert WORDS.bytes_of(word_id(token)) == found


def test_an_added_token_is_its_text_even_where_its_letters_stand_for_bytes():
    tokenizer = Tokenizer(models.BPE(vocab={"Ġ": 0}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("ĠĠ", normalized=False)])
    assert [Vocabulary(tokenizer).bytes_of(token_id) for token_id in (0, 1)] == [b" ", "ĠĠ".encode()]


def test_where_nothing_stands_for_bytes_a_token_is_its_text():
    tokenizer = Tokenizer(models.WordLevel({"<0x41>": 0, "Ġé": 1}, unk_token="<0x41>"))
    assert [Vocabulary(tokenizer).bytes_of(token_id) for token_id in (0, 1)] == [b"<0x41>", "Ġé".encode()]


def test_an_id_beyond_the_tokenizers_has_no_bytes():
    assert BYTES.bytes_of(10**6) == b""


def test_a_run_is_spelled_with_where_each_token_begins_and_a_character_where_it_does():
    token_ids = [BYTE_LEVEL.token_to_id("<s>"), *BYTE_LEVEL.encode("aé👧b").ids]
    assert BYTES.spell(token_ids) == ("<s>aé👧b", [0, 3, 4, 4, 5, 5, 5, 5, 6])
    assert WORDS.spell(sentencepiece_ids(" hello world")) == (" hello world", [0, 6])


def test_a_character_that_is_cut_is_spelled_as_one_replacement_character():
    assert BYTES.spell(BYTE_LEVEL.encode("a👧").ids[:-1]) == ("a\ufffd", [0, 1, 1, 1])
    assert BYTES.spell([]) == ("", [])


@given(st.lists(st.integers(0, 257), max_size=40))
def test_any_byte_level_run_is_spelled_as_it_is_decoded(token_ids):
    text, offsets = BYTES.spell(token_ids)
    assert text == BYTE_LEVEL.decode(token_ids, skip_special_tokens=False)
    assert offsets == sorted(offsets)
    assert all(offset <= len(text) for offset in offsets)


@pytest.mark.skipif("PDSERVE_TEST_MODEL" not in os.environ, reason="PDSERVE_TEST_MODEL names no model folder")
def test_every_token_of_the_real_model_has_the_bytes_of_its_decoding():
    path = Path(os.environ["PDSERVE_TEST_MODEL"])
    vocabulary, tokenizer = TextModel.load(path).vocabulary, Tokenizer.from_file(str(path / "tokenizer.json"))
    for token_id in range(tokenizer.get_vocab_size()):
        decoded = tokenizer.decode([token_id], skip_special_tokens=False)
        assert vocabulary.bytes_of(token_id).decode(errors="replace") == decoded
