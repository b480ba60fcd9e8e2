"""When the next token of a stream is due, by what it was promised from its first token on."""

import pytest

from pdserve.decode_node.pace import MAX_BEHIND, Pace


def test_each_token_is_due_one_promise_after_the_one_before():
    pace = Pace(since=10.0, num_outputs=1)
    assert pace.left_s(1, 0.06, now=10.0) == pytest.approx(0.06)
    assert pace.left_s(4, 0.06, now=10.1) == pytest.approx(0.14)


def test_what_a_stream_waited_for_is_made_up_for_by_the_steps_after_it():
    """Its first step ended 90 ms after its first token, each further one takes 25 ms."""
    pace = Pace(since=0.0, num_outputs=1)
    left = [pace.left_s(2 + step, 0.06, now=0.09 + 0.025 * step) for step in range(3)]
    assert left == [pytest.approx(0.03), pytest.approx(0.065), pytest.approx(0.1)]


def test_a_stream_that_is_late_has_nothing_left():
    assert Pace(since=0.0, num_outputs=1).left_s(1, 0.06, now=0.1) < 0


def test_a_stream_that_is_far_behind_begins_anew():
    pace = Pace(since=0.0, num_outputs=1)
    late = 0.06 * (MAX_BEHIND + 1) + 0.001
    assert pace.left_s(1, 0.06, now=late) == pytest.approx(0.06)
    assert pace.left_s(2, 0.06, now=late + 0.06) == pytest.approx(0.06)
