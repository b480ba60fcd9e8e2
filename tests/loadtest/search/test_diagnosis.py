"""Why promises broke, from records whose ledgers say where the time went."""

from pdserve.loadtest.measures.promise import Measure, Promise
from pdserve.loadtest.search.diagnosis import Bound, diagnose
from tests.loadtest.samples import make_record

PROMISES = (Promise(Measure.TTFT, 1.0), Promise(Measure.SECOND, 1.2), Promise(Measure.TPOT, 0.1))
KEPT = (0.5, 0.55, 0.6)
LATE_FIRST = (3.0, 3.05, 3.1)
LATE_SECOND = (0.9, 1.4, 1.41)
SLOW = (0.5, 0.7, 0.9)


def ledger(first: dict[str, float] | None = None, second: dict[str, float] | None = None) -> dict[str, object]:
    return {"first_token": first or {"chunks_s": 0.5}, "second_token": second or {"first_step_s": 0.02}}


def test_what_kept_every_promise_needs_no_diagnosis():
    assert diagnose([make_record(token_times_s=KEPT)], PROMISES) is None


def test_late_first_tokens_are_the_prefills_fault_with_the_medians_of_queue_and_chunks():
    metrics = ledger({"queue_s": 2.0, "prefill_queue_s": 0.5, "chunks_s": 0.4})
    found = diagnose([make_record(token_times_s=LATE_FIRST, server_metrics=metrics)], PROMISES)
    assert found.bound is Bound.PREFILL
    assert found.text.endswith("(medians: 2.50 s in queues, 0.40 s computing)")


def test_a_late_second_token_is_the_hand_offs_fault_where_blocks_took_longest():
    metrics = ledger(second={"wait_for_blocks_s": 0.2, "copy_s": 0.2, "decode_queue_s": 0.05, "first_step_s": 0.05})
    found = diagnose([make_record(token_times_s=LATE_SECOND, server_metrics=metrics)], PROMISES)
    assert found.bound is Bound.HAND_OFF
    assert "400 ms for blocks, 100 ms for a step" in found.text


def test_a_late_second_token_is_the_decodes_fault_where_the_step_took_longest():
    metrics = ledger(second={"copy_s": 0.01, "decode_queue_s": 0.45})
    found = diagnose([make_record(token_times_s=LATE_SECOND, server_metrics=metrics)], PROMISES)
    assert found.bound is Bound.DECODE


def test_slow_tokens_are_the_decodes_fault():
    found = diagnose([make_record(token_times_s=SLOW)], PROMISES)
    assert found.bound is Bound.DECODE
    assert "(median TPOT 200 ms)" in found.text


def test_slow_tokens_are_the_hand_offs_fault_where_the_blocks_alone_made_them_so():
    """0.4 s over two tokens is 0.2 s too much; the blocks took 0.25 s of it."""
    metrics = ledger(second={"copy_s": 0.25, "first_step_s": 0.02})
    found = diagnose([make_record(token_times_s=(0.5, 0.8, 0.9), server_metrics=metrics)], PROMISES)
    assert found.bound is Bound.HAND_OFF


def test_a_long_gap_is_the_hand_offs_fault_only_where_it_is_the_first_one():
    promises, metrics = (Promise(Measure.GAP, 0.1),), ledger(second={"copy_s": 0.25, "first_step_s": 0.02})
    first, later = (0.5, 0.8, 0.9), (0.5, 0.6, 0.9)
    found = [diagnose([make_record(token_times_s=t, server_metrics=metrics)], promises).bound for t in (first, later)]
    assert found == [Bound.HAND_OFF, Bound.DECODE]


def test_the_cause_of_most_broken_requests_is_named_with_their_number():
    records = [make_record(token_times_s=times) for times in (LATE_FIRST, SLOW, SLOW, KEPT)]
    found = diagnose(records, PROMISES)
    assert found.num_broken == {Bound.PREFILL: 1, Bound.DECODE: 2}
    assert found.text.startswith("decode-bound: 2 of 3 broken requests")


def test_without_a_ledger_the_promise_says_it():
    assert diagnose([make_record(token_times_s=LATE_FIRST)], PROMISES).bound is Bound.PREFILL


def test_end_to_end_is_the_fault_of_the_larger_part():
    promises = (Promise(Measure.E2E, 1.0),)
    assert diagnose([make_record(token_times_s=(3.0, 3.1))], promises).bound is Bound.PREFILL
    assert diagnose([make_record(token_times_s=(0.5, 3.1))], promises).bound is Bound.DECODE


def test_failed_requests_have_no_diagnosis():
    assert diagnose([make_record(token_times_s=LATE_FIRST, error="timeout")], PROMISES) is None
