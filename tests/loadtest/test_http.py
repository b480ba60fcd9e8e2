"""HTTP is read after the run out of whatever bytes came: cut anywhere, ended anyhow, hostile or not."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.loadtest.client.exchange import Exchange, Failure
from pdserve.loadtest.measures.http import read_response
from pdserve.loadtest.measures.sse import Chunk

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n7\r\n, world\r\n0\r\n\r\n"
COUNTED = b"HTTP/1.1 404 Not Found\r\nContent-Length: 12\r\n\r\nhello, world"
UNTIL_CLOSED = b"HTTP/1.0 200 OK\r\n\r\nhello, world"


def read(*reads, failure=None):
    """Read number i came at second i, the end at second 99."""
    chunks = tuple(Chunk(float(i), data) for i, data in enumerate(reads))
    return read_response(Exchange(0, 0.0, 0.0, 99.0, chunks, failure))


def body(response):
    return b"".join(chunk.data for chunk in response.chunks)


@pytest.mark.parametrize(("raw", "status"), [(CHUNKED, 200), (COUNTED, 404), (UNTIL_CLOSED, 200)])
def test_every_way_to_end_a_body_is_understood(raw, status):
    response = read(raw)
    assert (response.status, body(response), response.failure) == (status, b"hello, world", None)


@given(st.sampled_from([CHUNKED, COUNTED, UNTIL_CLOSED]), st.lists(st.integers(0, 90), max_size=8))
def test_where_reads_are_cut_does_not_change_the_body(raw, cuts):
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    response = read(*(raw[start:end] for start, end in pairwise(edges)))
    assert (body(response), response.failure) == (b"hello, world", None)


def test_each_piece_of_the_body_has_the_time_of_the_read_that_brought_it():
    place = CHUNKED.index(b"hello") + 3
    response = read(CHUNKED[:place], CHUNKED[place:])
    assert response.chunks == (Chunk(0.0, b"hel"), Chunk(1.0, b"lo"), Chunk(1.0, b", world"))


def test_an_interim_response_is_passed_over():
    response = read(b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED)
    assert (response.status, body(response), response.failure) == (200, b"hello, world", None)


def test_what_follows_a_whole_response_is_nobodys():
    response = read(CHUNKED + b"\x00garbage")
    assert (body(response), response.failure) == (b"hello, world", None)


@pytest.mark.parametrize("raw", [b"", CHUNKED[:20], CHUNKED[:-5], COUNTED[:-1]])
def test_a_connection_closed_before_the_end_is_a_failure_that_keeps_what_came(raw):
    response = read(raw)
    assert response.failure.kind == "connection"
    assert body(response) == b"hello, world"[: len(body(response))]


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000,
    ],
)
def test_what_is_no_http_is_a_failure_of_its_own(raw):
    response = read(raw)
    assert response.failure.kind == "bad_http"
    assert response.failure.detail


def test_a_failure_of_the_wire_stands_where_the_response_is_not_whole():
    timeout = Failure("timeout", "no end")
    assert read(CHUNKED[:-5], failure=timeout).failure == timeout
    assert read(failure=timeout).failure == timeout


def test_a_response_that_is_whole_has_not_failed_whatever_became_of_its_connection():
    assert read(CHUNKED, failure=Failure("connection", "reset")).failure is None


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=30),
            st.sampled_from(
                [CHUNKED, COUNTED, b"HTTP/1.1 ", b"200", b"\r\n", b"\r\n\r\n", b"0", b"transfer-encoding: "]
            ),
        ),
        max_size=12,
    )
)
def test_hostile_bytes_are_a_failure_and_never_an_exception(reads):
    response = read(*reads)
    if response.failure is None:
        assert response.status is not None
