from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pdserve.router.detokenizer import Detokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MIXED_TEXT = "삼겹살 世界 👩‍👩‍👧 ď é"


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Words that begin with a space, everything else byte by byte, as in Llama 2."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world", "a", "b"]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece()


def make_detokenizer(tokenizer: Tokenizer, context: Sequence[int] = ()) -> Detokenizer:
    hidden = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return Detokenizer(tokenizer, hidden, context)


def pieces(tokenizer: Tokenizer, token_ids: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, context)
    return [*map(detokenizer.push, token_ids), detokenizer.finish()]


def sentencepiece_ids(text: str) -> list[int]:
    known = {word: SENTENCEPIECE.token_to_id(word) for word in ("▁hello", "▁world", "▁", "a", "b")}
    token_ids, rest = [], text.replace(" ", "▁")
    while rest:
        word = next((word for word in known if rest.startswith(word)), None)
        if word is None:
            token_ids += [SENTENCEPIECE.token_to_id(f"<0x{byte:02X}>") for byte in rest[0].encode()]
            rest = rest[1:]
        else:
            token_ids.append(known[word])
            rest = rest[len(word) :]
    return token_ids


def test_no_character_is_split_when_every_byte_is_a_token():
    shown = pieces(BYTE_LEVEL, BYTE_LEVEL.encode(MIXED_TEXT).ids)
    assert "".join(shown) == MIXED_TEXT
    assert not any("\ufffd" in piece for piece in shown)


def test_a_character_appears_with_its_last_byte_and_not_later():
    assert pieces(BYTE_LEVEL, BYTE_LEVEL.encode("살a").ids) == ["", "", "살", "a", ""]


def test_a_character_cut_by_the_end_is_flushed_as_one_replacement_character():
    token_ids = BYTE_LEVEL.encode("a👧").ids[:-1]
    assert pieces(BYTE_LEVEL, token_ids) == ["a", "", "", "", "\ufffd"]


def test_special_tokens_do_not_show_even_inside_a_character():
    first, *rest = BYTE_LEVEL.encode("é!").ids
    end = BYTE_LEVEL.token_to_id("</s>")
    assert "".join(pieces(BYTE_LEVEL, [first, end, *rest, end])) == "é!"


def test_endless_invalid_bytes_are_shown_as_they_come_and_kept_short():
    invalid = ALPHABET.index("ÿ")
    detokenizer = make_detokenizer(BYTE_LEVEL)
    shown = [detokenizer.push(invalid) for _ in range(2000)]
    assert max(map(len, shown)) <= 3
    assert "".join(shown) + detokenizer.finish() == "\ufffd" * 2000
    assert len(detokenizer._window) < 32


@given(st.lists(st.integers(0, 257), max_size=60))
def test_any_byte_level_tokens_decode_as_they_do_all_at_once(token_ids):
    assert "".join(pieces(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(token_ids, skip_special_tokens=True)


@given(st.lists(st.sampled_from([" hello", " world", "a", "b", " ", "한", "€", "👩‍👩‍👧", "é"]), max_size=12))
def test_any_text_of_a_sentencepiece_tokenizer_decodes_as_it_does_all_at_once(words):
    token_ids = sentencepiece_ids("".join(words))
    assert "".join(pieces(SENTENCEPIECE, token_ids)) == SENTENCEPIECE.decode(token_ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, 263), max_size=60))
def test_any_sentencepiece_tokens_decode_without_an_error(token_ids):
    assert isinstance("".join(pieces(SENTENCEPIECE, token_ids)), str)


def test_characters_already_shown_survive_an_invalid_byte_after_them():
    token_ids = [*sentencepiece_ids("€"), SENTENCEPIECE.token_to_id("<0xFF>"), *sentencepiece_ids(" hello")]
    assert "".join(pieces(SENTENCEPIECE, token_ids)) == "€\ufffd hello"


def test_a_first_space_is_kept_where_the_answer_continues_the_prompt():
    token_ids = sentencepiece_ids(" world")
    assert "".join(pieces(SENTENCEPIECE, token_ids)) == "world"
    assert "".join(pieces(SENTENCEPIECE, token_ids, context=sentencepiece_ids(" hello"))) == " world"


@pytest.mark.parametrize("context", [[], BYTE_LEVEL.encode("👧").ids[:2]])
def test_a_prompt_that_ends_inside_a_character_does_not_change_the_answer(context):
    assert "".join(pieces(BYTE_LEVEL, BYTE_LEVEL.encode("ok").ids, context=context)) == "ok"
