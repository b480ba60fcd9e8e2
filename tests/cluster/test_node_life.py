"""What the edge of a node adds to the messages of its machine."""

from pdserve.cluster.messages import Begun, Drawn, FirstToken, Ready
from pdserve.cluster.node_life import stamped
from pdserve.core.ids import RequestId

REQUEST = RequestId(bytes(16))


def clock() -> float:
    return 12.5


def test_what_tells_of_a_step_says_how_long_ago_that_was_over():
    first = FirstToken(REQUEST, 1, (Drawn(0, 0, 7),), 0, 0.25, 0.5)
    begun = Begun(REQUEST, 1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5)
    assert stamped(first, 12.0, clock).told_s == stamped(begun, 12.0, clock).told_s == 0.5
    assert (first.told_s, begun.told_s) == (0.0, 0.0)


def test_other_messages_go_out_as_they_are():
    ready = Ready(REQUEST, 1, 1, 100, 0, 0.0, 0.0)
    assert stamped(ready, 12.0, clock) is ready
