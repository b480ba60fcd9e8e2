"""What is read off runs of known answers, and the gains that follow."""

from dataclasses import replace

import pytest

from pdserve.loadtest.ablation.readings import (
    FIRST_TOKEN,
    GAP,
    LONG_FIRST_TOKEN,
    SHORT_FIRST_TOKEN,
    TOKENS,
    Contrast,
    Seen,
    busy_span,
    kv_share,
    num_at_once,
    tokens_per_s,
    too_many_failures,
)
from tests.loadtest.samples import make_record


def seen(*token_times_s: tuple[float, ...], num_kv_tokens: int = 0) -> Seen:
    return Seen([make_record(index, token_times_s=times) for index, times in enumerate(token_times_s)], num_kv_tokens)


def test_a_server_is_busy_while_all_but_the_first_and_the_last_tenth_of_the_tokens_come():
    (run,) = (seen(tuple(float(i) for i in range(101))),)
    assert busy_span(run.records) == (10.0, 90.0)
    assert tokens_per_s(run) == 1.0


def test_tokens_that_came_in_one_event_are_all_counted():
    times = tuple(float(i) for i in range(101))
    records = [make_record(0, token_times_s=times, output_tokens=202)]
    assert tokens_per_s(Seen(records)) == 2.0
    # 8 prompt tokens and twice 10 to 90 of the answer.
    assert kv_share(Seen(records, num_kv_tokens=1000)) == pytest.approx((8 + 2 * 49.5) / 1000)


def test_a_slow_start_and_a_slow_end_do_not_count():
    steady = tuple(100 + 0.1 * i for i in range(96))
    assert tokens_per_s(seen((0.0, 50.0, *steady, 200.0, 300.0))) == pytest.approx(10.0)


def test_requests_at_once_are_those_between_their_first_and_last_token():
    run = seen(tuple(float(i) for i in range(101)), tuple(float(i) for i in range(50, 101)))
    span = busy_span(run.records)
    assert span is not None
    start, end = span
    assert num_at_once(run) == pytest.approx(((50 - start) + 2 * (end - 50)) / (end - start))


def test_the_share_of_memory_in_use_counts_prompts_and_what_has_come_so_far():
    # 8 prompt tokens and 10 to 90 of the answer: 58 on average, of which the newest is not computed yet.
    run = seen(tuple(float(i) for i in range(101)), num_kv_tokens=1000)
    assert kv_share(run) == pytest.approx((8 + 49.5) / 1000)
    assert kv_share(replace(run, num_kv_tokens=0)) is None


@pytest.mark.parametrize("read", [tokens_per_s, num_at_once, FIRST_TOKEN.read, GAP.read])
def test_a_run_without_tokens_has_no_value(read):
    assert read(seen(())) is None


def test_first_tokens_count_from_the_actual_send():
    records = [make_record(i, intended_s=0.0, sent_s=float(i), token_times_s=(i + 0.5, i + 1.0)) for i in range(9)]
    assert FIRST_TOKEN.read(Seen(records)) == 0.5


def test_first_tokens_of_short_and_of_long_prompts_are_told_apart():
    records = [
        make_record(i, planned_input_tokens=16 if i < 10 else 1024, sent_s=20.0, token_times_s=(21.0 + i, 60.0 + i))
        for i in range(20)
    ]
    steady = make_record(20, sent_s=0.0, token_times_s=tuple(float(i) for i in range(90)))
    assert SHORT_FIRST_TOKEN.read(Seen([steady, *records[:10]])) == 9.0
    assert LONG_FIRST_TOKEN.read(Seen([steady, *records])) == 15.0
    assert LONG_FIRST_TOKEN.read(Seen([steady, *records[:10]])) is None


def test_first_tokens_of_requests_sent_before_the_server_was_busy_do_not_count():
    early = [make_record(i, sent_s=0.0, token_times_s=(30.0,)) for i in range(10)]
    later = make_record(10, sent_s=40.0, token_times_s=tuple(41.0 + i for i in range(60)))
    assert FIRST_TOKEN.read(Seen([*early, later])) == 1.0


def test_a_run_of_which_more_than_a_twentieth_failed_says_nothing():
    complete = [make_record(index) for index in range(19)]
    failed = [make_record(19, error="timeout", detail="no end"), make_record(20, error="timeout")]
    assert too_many_failures([*complete, failed[0]]) is None
    assert too_many_failures([*complete, *failed]) == "2 of 21 requests failed; the first: request 19, timeout: no end"


# ---- gains ---------------------------------------------------------------------------------------


def test_a_gain_above_1_says_that_the_technique_pays_for_rates_and_latencies_alike():
    assert TOKENS.gain_of([Contrast(now=300.0, before=100.0)]).factor == pytest.approx(3.0)
    assert GAP.gain_of([Contrast(now=0.1, before=0.3)]).factor == pytest.approx(3.0)


def test_a_gain_is_a_geometric_mean_over_pairs_with_its_range():
    gain = TOKENS.gain_of([Contrast(100.0, 50.0), Contrast(100.0, 12.5)])
    assert gain.factor == pytest.approx(4.0)
    assert (gain.low, gain.high) == (2.0, 8.0)
    assert (gain.now, gain.before) == (pytest.approx(100.0), pytest.approx(25.0))


@pytest.mark.parametrize("contrasts", [[], [Contrast(1.0, 0.0)], [Contrast(0.0, 1.0)]])
def test_without_two_values_above_nothing_there_is_no_gain(contrasts):
    assert TOKENS.gain_of(contrasts) is None
