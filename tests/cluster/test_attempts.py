"""What a node remembers of requests that ended."""

from pdserve.cluster.attempts import MAX_REMEMBERED, REMEMBER_S, EndedAttempts
from pdserve.core.ids import RequestId

REQUEST = RequestId(bytes(16))


def make_ended(attempt: int = 2, now: float = 0.0) -> EndedAttempts:
    ended = EndedAttempts()
    ended.add(REQUEST, attempt, now)
    return ended


def test_an_attempt_that_ended_and_those_before_it_are_stale_and_the_next_is_not():
    ended = make_ended(attempt=2)
    assert [ended.covers(REQUEST, attempt) for attempt in (1, 2, 3)] == [True, True, False]
    assert ended.num_stale == 2


def test_the_end_of_an_earlier_attempt_that_is_heard_late_uncovers_no_later_one():
    ended = make_ended(attempt=2)
    ended.add(REQUEST, 1, 1.0)
    assert ended.covers(REQUEST, 2)


def test_what_ended_is_remembered_as_long_as_frames_may_be_late_and_not_for_ever():
    ended = make_ended(now=1.0)
    ended.sweep(REMEMBER_S + 0.9)
    assert ended.covers(REQUEST, 2)
    ended.sweep(REMEMBER_S + 1.0)
    assert not ended.covers(REQUEST, 2)


def test_the_oldest_are_forgotten_when_there_are_too_many():
    ended = make_ended()
    for number in range(1, MAX_REMEMBERED + 1):
        ended.add(RequestId(number.to_bytes(16, "little")), 1, 0.0)
    assert not ended.covers(REQUEST, 1)
    assert ended.covers(RequestId((1).to_bytes(16, "little")), 1)
