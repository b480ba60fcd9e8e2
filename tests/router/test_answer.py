"""Which piece of an answer its tokens are told with, and where in the text they stand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.logprobs import Logprobs
from pdserve.router.answer import Answer, Piece
from pdserve.router.detokenizer import Detokenizer
from pdserve.router.generation import Progress
from pdserve.router.stop import StopMatcher
from pdserve.router.vocabulary import Vocabulary
from tests.router.door import scripted_row
from tests.router.test_detokenizer import BYTE_LEVEL

BYTES = {token_id: Vocabulary(BYTE_LEVEL).bytes_of(token_id) for token_id in range(256)}
END = BYTE_LEVEL.token_to_id("</s>")


def ids(text: str) -> list[int]:
    return BYTE_LEVEL.encode(text).ids


def make_answer(*stop: str, min_tokens: int = 0, keep_stop: bool = False, offset: int | None = 0) -> Answer:
    return Answer(Detokenizer(BYTE_LEVEL, {END}), StopMatcher(stop, keep_stop), min_tokens, keep_stop, offset)


def progress(token_ids: list[int], finish: str | None = None) -> Progress:
    return Progress(token_ids, finish, 0, Logprobs.pack(1, [scripted_row(token_id, 1) for token_id in token_ids]))


def pieces(answer: Answer, token_ids: list[int], finish: str = "length", merge: int = 1) -> list[Piece]:
    told = []
    for start in range(0, len(token_ids), merge):
        batch = token_ids[start : start + merge]
        told.append(answer.push(progress(batch, finish if start + merge >= len(token_ids) else None)))
        if told[-1].finish is not None:
            break
    return told


def told(all_pieces: list[Piece]) -> list[tuple[str, list[tuple[int, int]]]]:
    """Text, and each token with its offset."""
    return [(piece.text, [(token.token, token.offset) for token in piece.tokens]) for piece in all_pieces]


def test_a_token_is_told_with_its_text():
    a, b = ids("ab")
    assert told(pieces(make_answer(), [a, b])) == [("a", [(a, 0)]), ("b", [(b, 1)])]


def test_a_token_carries_its_own_row():
    [piece] = pieces(make_answer(), ids("a"))
    assert list(piece.tokens[0].row) == scripted_row(*ids("a"), 1)


def test_tokens_of_one_character_are_told_together_when_it_is_whole():
    token_ids = ids("aéb")
    assert told(pieces(make_answer(offset=7), token_ids)) == [
        ("a", [(token_ids[0], 7)]),
        ("", []),
        ("é", [(token_ids[1], 8), (token_ids[2], 8)]),
        ("b", [(token_ids[3], 9)]),
    ]


def test_tokens_that_may_become_a_stop_string_are_told_when_they_have_not():
    a, s, t, b = ids("aSTb")
    assert told(pieces(make_answer("STOP"), [a, s, t, b])) == [
        ("a", [(a, 0)]),
        ("", []),
        ("", []),
        ("STb", [(s, 1), (t, 2), (b, 3)]),
    ]


@pytest.mark.parametrize("merge", [1, 2, 9])
def test_tokens_of_a_stop_string_are_told_at_the_end_and_those_after_it_never(merge):
    token_ids = ids("abSTOPxyz")
    answer = make_answer("STOP")
    all_pieces = pieces(answer, token_ids, merge=merge)
    assert [token.token for piece in all_pieces for token in piece.tokens] == token_ids[:6]
    assert ("".join(piece.text for piece in all_pieces), all_pieces[-1].finish) == ("ab", "stop")
    assert answer.num_tokens == 6


def test_tokens_without_text_are_told_with_the_next_or_the_last():
    a, b = ids("ab")
    assert told(pieces(make_answer(), [END, a, END, b, END], "stop")) == [
        ("", []),
        ("a", [(END, 0), (a, 0)]),
        ("", []),
        ("b", [(END, 1), (b, 1)]),
        ("", [(END, 2)]),
    ]


def test_a_character_that_the_end_cuts_brings_its_tokens():
    first, second, *_ = ids("👧")
    assert told(pieces(make_answer(), [first, second])) == [("", []), ("\ufffd", [(first, 0), (second, 0)])]


def test_no_token_is_told_where_nobody_asked():
    answer = make_answer(offset=None)
    assert answer.push(Progress(ids("ab"), None)) == Piece("ab", None)
    assert answer.push(Progress(ids("c"), "length")) == Piece("c", "length")


def test_tokens_without_the_numbers_that_were_asked_for_are_no_answer():
    with pytest.raises(ValueError, match="zip"):
        make_answer().push(Progress(ids("ab"), None))


texts = st.text(alphabet="abST é👧", max_size=12)


@given(texts, st.integers(1, 5), st.lists(st.sampled_from(["ST", "ab", "é", "S👧"]), max_size=2), st.integers(0, 3))
def test_every_counted_token_is_told_once_in_order_however_the_tokens_arrive(text, merge, stop, min_tokens):
    token_ids = [*ids(text), END]
    one, other = make_answer(*stop, min_tokens=min_tokens), make_answer(*stop, min_tokens=min_tokens)
    singly, merged = pieces(one, token_ids, "stop"), pieces(other, token_ids, "stop", merge)
    tokens = [token for piece in singly for token in piece.tokens]
    assert [token.token for token in tokens] == token_ids[: one.num_tokens]
    assert tokens == [token for piece in merged for token in piece.tokens]
    assert "".join(piece.text for piece in singly) == "".join(piece.text for piece in merged)


@given(texts)
def test_text_and_tokens_shown_so_far_are_the_same_text(text):
    shown, spelled = "", b""
    for piece in pieces(make_answer("ST"), [*ids(text), END], "stop"):
        shown += piece.text
        spelled += b"".join(BYTES[token.token] for token in piece.tokens if token.token != END)
        if piece.finish is None:
            assert spelled.decode() == shown


@given(texts)
def test_an_offset_is_where_the_tokens_character_stands(text):
    tokens = [token for piece in pieces(make_answer(), [*ids(text), END], "stop") for token in piece.tokens]
    starts = list(itertools.chain(*([index] * len(character.encode()) for index, character in enumerate(text))))
    assert [token.offset for token in tokens] == [*starts, len(text)]
