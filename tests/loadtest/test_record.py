import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.loadtest.client.exchange import Failure
from pdserve.loadtest.measures.record import read_exchange
from pdserve.loadtest.measures.sse import Chunk
from tests.loadtest.samples import (
    DONE,
    delta_event,
    event,
    make_exchange,
    make_planned,
    make_record,
    text_event,
    usage_event,
)

START = 100.0
REGULAR = [
    Chunk(101.0, text_event()),
    Chunk(101.5, text_event()),
    Chunk(103.0, text_event(finish_reason="length")),
    Chunk(103.5, usage_event(3) + DONE),
]


def read(chunks, output_tokens=3, at_s=0.0, **exchange):
    return read_exchange(make_planned(output_tokens, at_s), make_exchange(chunks, **exchange), START)


def test_latencies_count_from_the_intended_send_time_and_service_latencies_from_the_actual_one():
    record = read(REGULAR, at_s=0.125)
    assert record.is_complete
    assert record.ttft_s == 1.0 - 0.125
    assert record.service_ttft_s == 1.0 - 0.5
    assert record.second_token_s == 1.5 - 0.125
    assert record.lag_s == 0.25 - 0.125
    assert record.e2e_s == 9.0 - 0.125
    assert record.service_e2e_s == 9.0 - 0.5


def test_gaps_and_time_per_output_token_lie_between_the_tokens():
    record = read(REGULAR)
    assert record.gaps_s == (0.5, 1.5)
    assert record.tpot_s == 1.0


def test_the_servers_counts_and_ledger_are_kept():
    record = read([*REGULAR[:3], Chunk(103.5, usage_event(3, metrics={"queue_s": 0.25}) + DONE)])
    assert (record.output_tokens, record.prompt_tokens) == (3, 2)
    assert record.server_metrics == {"queue_s": 0.25}


def test_a_ledger_nested_too_deeply_to_be_written_is_left_out():
    deep = json.loads('{"queue_s":' * 500 + "1" + "}" * 500)
    record = read([*REGULAR[:3], Chunk(103.5, usage_event(3, metrics=deep) + DONE)])
    assert record.is_complete
    assert record.server_metrics is None


def test_half_a_character_in_a_finish_reason_is_no_part_of_it():
    record = read([*REGULAR[:2], Chunk(103.0, text_event(finish_reason="len\ud800")), REGULAR[3]])
    assert record.is_complete
    assert record.finish_reason == "len"


def test_a_ledger_beside_the_usage_is_kept_too():
    final = event({"choices": [], "usage": {"completion_tokens": 3}, "metrics": {"queue_s": 0.25}})
    assert read([*REGULAR[:3], Chunk(103.5, final + DONE)]).server_metrics == {"queue_s": 0.25}


def test_tokens_that_share_an_event_are_counted_by_the_usage_and_have_gaps_of_zero():
    chunks = [
        Chunk(101.0, text_event()),
        Chunk(103.0, text_event(" three more words")),
        Chunk(103.0, text_event(" last", "length") + usage_event(5) + DONE),
    ]
    record = read(chunks, output_tokens=5)
    assert record.is_complete
    assert record.merged_tokens == 2
    assert sorted(record.gaps_s) == [0.0, 0.0, 0.0, 2.0]
    assert record.tpot_s == 0.5


def test_an_event_without_text_is_a_token():
    chunks = [Chunk(101.0, text_event("")), Chunk(102.0, text_event()), *REGULAR[2:]]
    assert read(chunks).token_times_s == (1.0, 2.0, 3.0)


def test_a_closing_event_without_text_is_no_token_when_all_were_seen():
    chunks = [*REGULAR[:2], Chunk(102.0, text_event()), Chunk(103.0, text_event("", "length") + usage_event(3) + DONE)]
    assert read(chunks).token_times_s == (1.0, 1.5, 2.0)


def test_a_closing_event_without_text_is_the_last_token_when_the_usage_counts_it():
    chunks = [*REGULAR[:2], Chunk(103.0, text_event("", "length") + usage_event(3) + DONE)]
    assert read(chunks).token_times_s == (1.0, 1.5, 3.0)


def test_a_closing_event_without_text_is_no_token_when_merged_events_explain_the_usage():
    chunks = [*REGULAR[:2], Chunk(103.0, text_event("", "length") + usage_event(6) + DONE)]
    record = read(chunks, output_tokens=6)
    assert record.token_times_s == (1.0, 1.5)
    assert record.merged_tokens == 4


def test_a_closing_event_that_is_all_there_is_carries_the_tokens():
    record = read([Chunk(103.0, text_event("", "length") + usage_event(3) + DONE)])
    assert record.is_complete
    assert record.token_times_s == (3.0,)


def test_a_chat_role_is_no_token():
    chunks = [
        Chunk(100.75, delta_event({"role": "assistant", "content": ""})),
        Chunk(101.0, delta_event({"content": "a"})),
        Chunk(102.0, delta_event({"reasoning_content": "b"})),
        Chunk(103.0, delta_event({"content": "c"})),
        Chunk(103.5, delta_event({}, "length") + usage_event(3) + DONE),
    ]
    record = read(chunks)
    assert record.is_complete
    assert record.token_times_s == (1.0, 2.0, 3.0)


def test_without_usage_tokens_are_counted_by_events():
    record = read([*REGULAR[:3], Chunk(103.5, DONE)])
    assert record.is_complete
    assert record.output_tokens == 3
    assert not record.usage_is_given


def test_one_token_has_no_second_and_no_time_per_output_token():
    record = read([Chunk(101.0, text_event(finish_reason="length") + usage_event(1) + DONE)], output_tokens=1)
    assert record.is_complete
    assert (record.second_token_s, record.tpot_s, record.gaps_s) == (None, None, ())


@pytest.mark.parametrize(
    ("error", "chunks"),
    [
        ("missing_finish", []),
        ("missing_finish", [Chunk(101.0, b'{"object": "text_completion"}')]),
        ("missing_finish", [*REGULAR[:2], Chunk(102.0, text_event()), REGULAR[3]]),
        ("missing_done", REGULAR[:3]),
        ("short_output", [*REGULAR[:1], Chunk(102.0, text_event(finish_reason="stop") + usage_event(2) + DONE)]),
        ("short_output", [*REGULAR[:1], Chunk(102.0, text_event(finish_reason="stop") + DONE)]),
        ("long_output", [*REGULAR[:3], Chunk(103.5, usage_event(4) + DONE)]),
        ("stream_error", [REGULAR[0], Chunk(102.0, event({"error": {"message": "lost"}}))]),
        ("bad_event", [REGULAR[0], Chunk(102.0, b"data: {\n\n")]),
        ("bad_event", [REGULAR[0], Chunk(102.0, b"data: [1]\n\n")]),
        ("bad_event", [REGULAR[0], Chunk(102.0, b'data: {"metrics": {"queue_s": NaN}}\n\n')]),
        ("bad_event", [REGULAR[0], Chunk(102.0, b'data: {"metrics": {"queue_s": 1e999}}\n\n')]),
        ("bad_event", [REGULAR[0], Chunk(102.0, b"data: " + b"[" * 100_000 + b"\n\n")]),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error_of_its_class(error, chunks):
    record = read(chunks)
    assert record.error == error
    assert record.detail


def test_an_http_error_carries_the_servers_message():
    record = read([Chunk(101.0, b'{"error": {"message": "too\\nlong"}}')], status=400)
    assert record.error == "http_400"
    assert record.detail == "too long"


def test_a_broken_connection_keeps_the_tokens_that_came():
    record = read(REGULAR[:2], failure=Failure("connection", "reset"))
    assert record.error == "connection"
    assert record.token_times_s == (1.0, 1.5)


def test_a_usage_that_is_no_count_is_ignored():
    for value in (-1, 1.5, True, "3", None, 10**15, [3]):
        record = read([*REGULAR[:3], Chunk(103.5, usage_event(value) + DONE)])
        assert record.is_complete
        assert not record.usage_is_given


def test_a_detail_is_one_printable_line():
    record = read([Chunk(101.0, event({"error": "\x1b[31m\ud800\n" + "x" * 1000}))])
    assert record.detail.isprintable()
    assert len(record.detail) <= 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "usage", "metrics", "delta", "text", "finish_reason", "error", "completion_tokens"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=5), st.binary(max_size=20))
def test_whatever_a_server_sends_becomes_a_record(payloads, noise):
    raw = b"".join(event(payload) for payload in payloads) + noise
    record = read([Chunk(101.0, raw)])
    assert record.error is not None or record.output_tokens == 3


def test_a_record_without_tokens_has_no_token_measures():
    record = make_record(token_times_s=(), output_tokens=0, error="timeout")
    assert (record.ttft_s, record.second_token_s, record.tpot_s, record.gaps_s) == (None, None, None, ())
