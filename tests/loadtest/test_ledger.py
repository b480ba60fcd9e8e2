"""A server's account of each request against what the client saw."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.loadtest.measures.ledger import (
    ARRIVAL_WAIT,
    CLIENT_LAG,
    UNEXPLAINED,
    Kind,
    first_token,
    reconcile,
    second_token,
    time_line,
)
from tests.loadtest.samples import make_record

FIRST = {
    "read_s": 0.01,
    "route_s": 0.02,
    "queue_s": 0.05,
    "earlier_attempts_s": 0.0,
    "prefill_queue_s": 0.1,
    "chunks_s": 0.5,
    "chunk_wait_s": 0.2,
    "step_end_s": 0.05,
    "cpu_wait_s": 0.0,
    "link_s": 0.03,
    "delivery_s": 0.02,
}
SECOND = {
    "fetch_s": 0.1,
    "copy_s": 0.05,
    "decode_queue_s": 0.1,
    "first_step_s": 0.2,
    "link_s": 0.02,
    "delivery_s": 0.03,
}
CHUNKS = [[16, 0.1, 0.25], [16, 0.55, 0.3]]
FIRST_S, SECOND_S = 0.95, 1.41


def make_metrics(**others) -> dict:
    return {"plan": "split", "chunks": CHUNKS, "first_token": FIRST, "second_token": SECOND, **others}


def make(metrics=None, missing_s: float = 0.0, intended_s: float = 5.0, lag_s: float = 0.25, **others):
    """A request whose account lacks missing_s and the link of both tokens."""
    start = intended_s + lag_s
    times = (start + FIRST_S + 0.03 + missing_s, start + SECOND_S + 0.05 + missing_s, start + 3.0)
    return make_record(
        intended_s=intended_s,
        sent_s=start,
        token_times_s=times,
        server_metrics=make_metrics() if metrics is None else metrics,
        **others,
    )


def test_what_the_server_and_the_client_were_busy_with_is_explained_and_the_link_is_not():
    account = first_token(make())
    assert account.total_s == pytest.approx(1.23)
    assert account.explained_s == pytest.approx(0.25 + FIRST_S)
    assert account.unexplained_s == pytest.approx(0.03)
    assert account.stages[0].name == CLIENT_LAG
    assert "link_s" not in [stage.name for stage in account.stages]


def test_the_second_token_has_the_stages_of_the_first_but_its_delivery():
    account = second_token(make())
    assert account.explained_s == pytest.approx(0.25 + FIRST_S - 0.02 + 0.48)
    assert account.unexplained_s == pytest.approx(account.total_s - 1.66)
    assert [stage.name for stage in account.stages].count("delivery_s") == 1


def test_what_stages_were_cut_by_to_fit_is_unexplained():
    metrics = make_metrics(first_token={**FIRST, "excess_s": 0.125}, second_token={**SECOND, "excess_s": 0.25})
    assert first_token(make(metrics)).unexplained_s == pytest.approx(0.03 - 0.125)
    assert second_token(make(metrics)).unexplained_s == pytest.approx(second_token(make()).unexplained_s - 0.375)


@pytest.mark.parametrize(("told_s", "wait_s"), [(0.0, 0.0), (0.02, 0.02), (5.0, 0.03), ("much", 0.0), (-1.0, 0.0)])
def test_a_wait_before_the_servers_handler_is_at_most_what_is_left(told_s, wait_s):
    record = make(make_metrics(arrival_wait_s=told_s))
    for account in (first_token(record), second_token(record)):
        assert account.stages[1].name == ARRIVAL_WAIT
        assert account.stages[1].seconds == pytest.approx(wait_s)


@pytest.mark.parametrize(
    ("ttft_s", "unexplained_s", "is_explained"),
    [(0.02, 0.0019, True), (0.02, 0.0021, False), (1.0, 0.049, True), (1.0, 0.051, False), (1.0, -0.051, False)],
)
def test_the_larger_of_2_ms_and_5_percent_may_be_unexplained(ttft_s, unexplained_s, is_explained):
    metrics = {"first_token": {"chunks_s": ttft_s - unexplained_s}}
    record = make_record(token_times_s=(ttft_s,), server_metrics=metrics)
    assert first_token(record).is_explained is is_explained


def test_a_run_adds_up_while_99_of_100_requests_do():
    records = [make(missing_s=-0.03) for _ in range(99)]
    assert reconcile([*records, make(missing_s=0.5)], first_token).adds_up
    run = reconcile([*records, make(missing_s=0.5), make(missing_s=0.5)], first_token)
    assert not run.adds_up
    assert run.num_requests == 101
    assert run.share_explained == pytest.approx(99 / 101)
    assert run.unexplained.max == pytest.approx(0.53)


def test_stages_are_summed_up_in_order_with_their_share_of_the_time():
    run = reconcile([make(), make()], first_token)
    names = [stage.name for stage in run.stages]
    assert names == [
        CLIENT_LAG,
        "read_s",
        "route_s",
        "queue_s",
        "prefill_queue_s",
        "chunks_s",
        "chunk_wait_s",
        "step_end_s",
        "delivery_s",
        UNEXPLAINED,
    ]
    chunks = run.stages[names.index("chunks_s")]
    assert (chunks.mean_s, chunks.p50_s, chunks.p99_s, chunks.kind) == (0.5, 0.5, 0.5, Kind.PREFILL)
    assert sum(stage.share for stage in run.stages) == pytest.approx(1.0)


def test_a_stage_of_both_tokens_counts_twice_in_the_second():
    metrics = make_metrics(second_token={**SECOND, "cpu_wait_s": 0.25}, first_token={**FIRST, "cpu_wait_s": 0.5})
    run = reconcile([make(metrics)], second_token)
    assert next(stage for stage in run.stages if stage.name == "cpu_wait_s").mean_s == 0.75


def test_failed_requests_and_other_servers_have_no_account():
    assert (
        reconcile([make(error="timeout"), make_record(), make_record(server_metrics={"ttft_s": 1.0})], first_token)
        is None
    )
    assert time_line(make_record()) is None


def test_a_request_of_one_token_has_no_second():
    record = make_record(token_times_s=(1.0,), server_metrics=make_metrics(second_token=None))
    assert first_token(record) is not None
    assert second_token(record) is None


def test_a_time_line_follows_the_chunks_and_the_waits_between_them():
    record = make()
    spans = time_line(record)
    assert [(span.kind, span.name) for span in spans] == [
        (Kind.OTHER, CLIENT_LAG),
        (Kind.OTHER, "read_s"),
        (Kind.OTHER, "route_s"),
        (Kind.QUEUE, "queue_s"),
        (Kind.QUEUE, "prefill_queue_s"),
        (Kind.PREFILL, "chunks_s"),
        (Kind.QUEUE, "chunk_wait_s"),
        (Kind.PREFILL, "chunks_s"),
        (Kind.OTHER, UNEXPLAINED),
        (Kind.TRANSFER, "fetch_s"),
        (Kind.TRANSFER, "copy_s"),
        (Kind.QUEUE, "decode_queue_s"),
        (Kind.DECODE, "first_step_s"),
        (Kind.DECODE, "decode"),
    ]
    assert (spans[0].start_s, spans[-1].end_s) == (record.intended_s, record.token_times_s[-1])
    assert all(earlier.end_s == pytest.approx(later.start_s) for earlier, later in itertools.pairwise(spans))


@pytest.mark.parametrize(
    "chunks", [[], [[16, 0.5, 0.1], [16, 0.1, 0.1]], [[16, 0.1, 9.0]], [[16, -1.0, 0.1]], "no", [[1]]]
)
def test_chunks_that_make_no_sense_are_drawn_as_one(chunks):
    names = [span.name for span in time_line(make(make_metrics(chunks=chunks)))]
    assert names.count("chunks_s") == 1
    assert names[names.index("chunks_s") + 1 :][:2] == ["chunk_wait_s", "step_end_s"]


@pytest.mark.parametrize("value", [None, "1.0", True, [], {}, -1.0, 1e300, 10**400, math.inf, math.nan])
def test_a_stage_that_is_no_duration_explains_nothing(value):
    account = first_token(make(make_metrics(first_token={**FIRST, "chunks_s": value})))
    assert account.unexplained_s == pytest.approx(0.53)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*FIRST, *SECOND, "chunks"]) | st.text(max_size=3), inner, max_size=6)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(
    metrics=st.dictionaries(st.sampled_from(["first_token", "second_token", "chunks", "plan"]), json_values, max_size=4)
)
def test_whatever_a_server_says_raises_nothing(metrics):
    record = make(metrics)
    reconcile([record], first_token)
    reconcile([record], second_token)
    spans = time_line(record)
    assert spans is None or all(span.end_s > span.start_s for span in spans)
    json.dumps([span.name for span in spans or ()])
