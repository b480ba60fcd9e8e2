import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.stop import StopMatcher


def run(strings, pieces, keep_match=False):
    matcher = StopMatcher(strings, keep_match)
    return "".join(map(matcher.push, pieces)) + matcher.flush(), matcher.matched


def first_match(strings, text):
    """By definition: the shortest prefix of the text that ends with a stop string, the longest such string."""
    for end in range(1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            return end, max(found, key=len)
    return None


def test_a_stop_string_that_spans_pieces_ends_the_text_before_it():
    assert run(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "JK", "L"]) == ("ABC", "DEFGHIJ")


def test_a_stop_string_in_the_middle_of_a_piece_is_found():
    assert run(["DE"], ["ABC", "DEF"]) == ("ABC", "DE")


def test_the_match_that_ends_first_wins_and_of_equal_ends_the_longest():
    assert run(["F", "DEF"], ["ABCDEF"]) == ("ABC", "DEF")
    assert run(["DEF", "DE"], ["ABCDEF"]) == ("ABC", "DE")


def test_the_matched_string_is_kept_on_request_and_nothing_after_it():
    assert run(["DE"], ["ABCDEF"], keep_match=True) == ("ABCDE", "DE")


def test_text_that_never_becomes_a_stop_string_is_flushed():
    assert run(["DEFGHIJ"], ["ABC", "DEFG"]) == ("ABCDEFG", None)


def test_only_what_may_become_a_stop_string_is_held_back():
    matcher = StopMatcher(["DEFGHIJ"])
    assert [matcher.push(piece) for piece in ("AB", "CD", "E", "X", "YD")] == ["AB", "C", "", "DEX", "Y"]


def test_a_stop_string_that_overlaps_its_own_false_start_is_found():
    assert run(["aab"], list("aaab")) == ("a", "aab")


@pytest.mark.parametrize("strings", [[], ["zzz"]])
def test_text_without_a_match_passes_unchanged(strings):
    assert run(strings, ["some ", "text"]) == ("some text", None)


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.booleans(),
)
def test_the_result_does_not_depend_on_how_the_text_is_cut(strings, pieces, keep_match):
    text = "".join(pieces)
    match = first_match(strings, text)
    if match is None:
        expected = (text, None)
    else:
        end, string = match
        expected = (text[: end if keep_match else end - len(string)], string)
    assert run(strings, pieces, keep_match) == expected
