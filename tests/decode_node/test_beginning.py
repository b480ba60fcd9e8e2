"""What a decode node says of the time between a request's first token and its second."""

import pytest

from pdserve.core.ids import RequestId
from pdserve.decode_node.beginning import Beginning

REQUEST = RequestId(bytes(16))


def end(beginning: Beginning, now: float):
    return beginning.begun(REQUEST, 1, now)


def test_copies_count_from_the_end_of_the_prompt_on():
    beginning = Beginning(1.0, 1.0)
    # Three of these four tenths of a second were before.
    beginning.copied(copy_s=0.3, verify_s=0.1, reserved_at=0.2, now=1.1)
    beginning.ready(reserved_at=0.2, now=1.5)
    beginning.ran(1.75)
    begun = end(beginning, 2.0)
    assert (begun.copy_s, begun.verify_s) == (pytest.approx(0.075), pytest.approx(0.025))
    assert begun.fetch_s == pytest.approx(0.4)
    assert (begun.wait_for_blocks_s, begun.queue_s, begun.step_s) == (0.0, 0.25, 0.25)


def test_copies_into_blocks_that_were_taken_back_are_part_of_the_wait_for_others():
    beginning = Beginning(1.0, 1.0)
    beginning.copied(copy_s=0.25, verify_s=0.0, reserved_at=1.0, now=1.25)
    beginning.copied(copy_s=0.25, verify_s=0.0, reserved_at=1.5, now=2.0)
    beginning.ready(reserved_at=1.5, now=2.0)
    beginning.ran(2.0)
    begun = end(beginning, 2.5)
    assert (begun.wait_for_blocks_s, begun.copy_s, begun.fetch_s) == (0.5, 0.25, 0.25)


def test_the_first_step_lasts_until_the_token_however_many_steps_that_takes():
    beginning = Beginning(1.0, 1.0, ready_at=1.0)
    beginning.ran(1.5)
    beginning.ran(2.5)
    begun = end(beginning, 3.0)
    assert (begun.queue_s, begun.step_s) == (0.5, 1.5)


def test_the_stages_follow_each_other_without_a_gap():
    beginning = Beginning(1.0, 1.0)
    for now in (1.3, 1.35, 1.9):
        beginning.copied(copy_s=0.2, verify_s=0.1, reserved_at=1.2, now=now)
    beginning.ready(reserved_at=1.2, now=2.0)
    beginning.ran(2.5)
    begun = end(beginning, 3.0)
    stages = (begun.wait_for_blocks_s, begun.fetch_s, begun.copy_s, begun.verify_s, begun.queue_s, begun.step_s)
    assert sum(stages) == pytest.approx(2.0)
    assert min(stages) > 0.0
