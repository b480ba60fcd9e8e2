from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.loadtest.measures.sse import Chunk, Event, split_events


def test_events_of_one_chunk_share_its_time():
    assert split_events([Chunk(1.0, b"data: a\n\ndata: b\n\n")]) == [Event(1.0, "a"), Event(1.0, "b")]


def test_an_event_over_several_chunks_has_the_time_of_the_last():
    chunks = [Chunk(1.0, b"da"), Chunk(2.0, b"ta: a"), Chunk(3.0, b"b\n"), Chunk(4.0, b"\ndata: c\n\n")]
    assert split_events(chunks) == [Event(4.0, "ab"), Event(4.0, "c")]


@pytest.mark.parametrize("raw", [b"data: a\r\n\r\n", b"data:a\n\n", b": ping\n\nevent: x\nid: 1\ndata: a\n\n"])
def test_line_ends_comments_and_other_fields_do_not_matter(raw):
    assert split_events([Chunk(1.0, raw)]) == [Event(1.0, "a")]


def test_several_data_lines_are_one_event():
    assert split_events([Chunk(1.0, b"data: a\ndata: b\n\n")]) == [Event(1.0, "a\nb")]


def test_an_unfinished_event_is_dropped():
    assert split_events([Chunk(1.0, b"data: a\n\ndata: b\n")]) == [Event(1.0, "a")]


def test_a_character_split_between_chunks_is_whole():
    raw = "data: é\n\n".encode()
    assert split_events([Chunk(1.0, raw[:7]), Chunk(2.0, raw[7:])]) == [Event(2.0, "é")]


@given(st.binary(), st.lists(st.integers(0, 200)))
def test_where_the_stream_is_cut_into_chunks_does_not_change_its_events(noise, cuts):
    raw = b"data: a\n\n" + noise + b"\n\ndata: b\ndata: c\n\n"
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    chunks = [Chunk(0.0, raw[start:end]) for start, end in pairwise(edges)]
    assert split_events(chunks) == split_events([Chunk(0.0, raw)])
