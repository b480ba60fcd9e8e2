"""The in-memory links: ordered without faults, repeatable with them."""

import pytest

from pdserve.cluster.memory import LATE_S, Faults, MemoryHub
from pdserve.cluster.messages import Cancel, Release
from pdserve.core.errors import CodecError, ConfigError
from pdserve.core.ids import Epoch, NodeId, RequestId

REQUEST = RequestId(bytes(16))
A, B, C = NodeId("A"), NodeId("B"), NodeId("C")


def numbered(count):
    return [Cancel(REQUEST, attempt) for attempt in range(count)]


def send_all(hub, messages, sender=A, peer=B, step_s=0.0):
    for index, message in enumerate(messages):
        hub.send(sender, peer, message, index * step_s)


def arrivals(hub, until=1e9):
    """Attempt numbers of everything that arrives, in order."""
    return [message.attempt for _, _, message in hub.deliver(until)]


def test_a_message_arrives_with_its_receiver_and_sender():
    hub = MemoryHub()
    hub.send(A, B, Cancel(REQUEST, 3), now=1.0)
    assert hub.deliver(1.0) == [(B, A, Cancel(REQUEST, 3))]
    assert hub.deliver(1.0) == []


def test_a_message_takes_the_latency_and_next_time_tells_when_it_is_due():
    hub = MemoryHub(latency_s=0.25)
    assert hub.next_time() is None
    hub.send(A, B, Cancel(REQUEST, 3), now=1.0)
    assert hub.next_time() == 1.25
    assert hub.deliver(1.2) == []
    assert arrivals(hub, 1.25) == [3]
    assert hub.next_time() is None


def test_a_link_keeps_its_order_when_frames_are_delayed():
    hub = MemoryHub(faults=Faults(delay_s=1.0, seed=1))
    send_all(hub, numbered(100), step_s=0.01)
    assert arrivals(hub) == list(range(100))


def test_reordered_frames_all_arrive_in_another_order():
    hub = MemoryHub(faults=Faults(reorder=0.3, delay_s=1.0, seed=1))
    send_all(hub, numbered(100), step_s=0.01)
    order = arrivals(hub)
    assert order != list(range(100))
    assert sorted(order) == list(range(100))


def test_dropped_frames_are_counted_and_the_rest_keeps_its_order():
    hub = MemoryHub(faults=Faults(drop=0.5, seed=1))
    send_all(hub, numbered(100))
    order = arrivals(hub)
    assert order == sorted(order)
    assert 20 < len(order) < 80
    assert (hub.num_sent, hub.num_dropped, hub.num_delivered) == (100, 100 - len(order), len(order))


def test_duplicated_frames_arrive_twice():
    hub = MemoryHub(faults=Faults(duplicate=1.0))
    send_all(hub, numbered(3))
    assert sorted(arrivals(hub)) == [0, 0, 1, 1, 2, 2]


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    def run(seed):
        hub = MemoryHub(faults=Faults(drop=0.2, duplicate=0.2, reorder=0.2, delay_s=0.5, seed=seed))
        send_all(hub, numbered(50), step_s=0.05)
        return arrivals(hub)

    assert run(7) == run(7)
    assert run(7) != run(8)


def test_changing_one_fault_leaves_the_dice_of_another_alone():
    def survivors(**faults):
        hub = MemoryHub(faults=Faults(drop=0.3, seed=5, **faults))
        send_all(hub, numbered(50))
        return sorted(set(arrivals(hub)))

    assert survivors() == survivors(duplicate=0.5, delay_s=2.0)


def test_the_nth_message_of_a_type_can_be_lost():
    hub = MemoryHub()
    hub.drop_next(Cancel, count=2)
    hub.send(A, B, Release(REQUEST, 9), now=0.0)
    send_all(hub, numbered(4))
    assert arrivals(hub) == [9, 0, 2, 3]


def test_the_nth_message_of_a_type_can_arrive_twice():
    hub = MemoryHub()
    hub.repeat_next(Cancel, count=2)
    send_all(hub, numbered(3), step_s=0.1)
    assert arrivals(hub) == [0, 1, 1, 2]


def test_the_nth_message_of_a_type_can_be_overtaken_by_the_next_of_its_link_and_no_other():
    hub = MemoryHub(latency_s=0.01)
    hub.delay_next(Cancel, count=2)
    send_all(hub, numbered(2), step_s=0.1)
    hub.send(A, C, Cancel(REQUEST, 7), now=0.2)
    assert arrivals(hub, 0.3) == [0, 7]
    send_all(hub, [Cancel(REQUEST, 3), Cancel(REQUEST, 4)])
    assert arrivals(hub, 0.3) == [3, 1, 4]


def test_a_late_message_that_nothing_follows_arrives_all_the_same():
    hub = MemoryHub(latency_s=0.01)
    hub.delay_next(Cancel)
    hub.send(A, B, Cancel(REQUEST, 1), now=0.0)
    assert hub.next_time() == LATE_S + 0.01
    assert arrivals(hub) == [1]
    send_all(hub, numbered(1))
    assert arrivals(hub) == [0]


def test_what_is_scripted_is_counted_until_it_has_happened():
    hub = MemoryHub()
    hub.drop_next(Cancel, count=2)
    hub.repeat_next(Release)
    send_all(hub, numbered(2))
    assert hub.num_scripted == 1


def test_a_reset_loses_what_is_on_its_way_on_that_link_in_both_directions():
    hub = MemoryHub(latency_s=1.0)
    for number, (sender, peer) in enumerate([(A, B), (B, A), (A, C)]):
        hub.send(sender, peer, Cancel(REQUEST, number), now=0.0)
    hub.reset(A, B)
    hub.send(A, B, Cancel(REQUEST, 3), now=0.0)
    assert (arrivals(hub), hub.num_dropped) == ([2, 3], 2)


def test_frames_of_a_dead_incarnation_are_not_taken_for_those_of_the_next():
    hub = MemoryHub(latency_s=1.0)
    hub.join(A, Epoch(1, 1))
    hub.send(A, B, Cancel(REQUEST, 1), now=0.0)
    hub.send(B, A, Cancel(REQUEST, 2), now=0.0)
    hub.join(A, Epoch(2, 2))
    hub.send(A, B, Cancel(REQUEST, 3), now=0.0)
    assert (arrivals(hub), hub.num_stale) == ([3], 2)


def test_a_loss_for_one_link_spares_the_others():
    hub = MemoryHub()
    hub.drop_next(Cancel, sender=A, peer=C)
    hub.send(A, B, Cancel(REQUEST, 1), now=0.0)
    hub.send(A, C, Cancel(REQUEST, 2), now=0.0)
    hub.send(A, C, Cancel(REQUEST, 3), now=0.0)
    assert arrivals(hub) == [1, 3]


def test_a_cut_link_loses_frames_in_one_direction_until_it_heals():
    hub = MemoryHub()
    hub.cut(A, B, start=1.0, end=3.0)
    for now in range(5):
        hub.send(A, B, Cancel(REQUEST, now), now=float(now))
    hub.send(B, A, Cancel(REQUEST, 8), now=2.0)
    assert sorted(arrivals(hub)) == [0, 3, 4, 8]


def test_a_frame_that_would_arrive_during_a_cut_is_lost():
    hub = MemoryHub(latency_s=1.0)
    hub.cut(A, B, start=1.0, end=2.0)
    hub.send(A, B, Cancel(REQUEST, 1), now=0.5)
    assert hub.next_time() is None


def test_a_dead_node_gets_nothing_and_what_it_sent_still_arrives():
    hub = MemoryHub(latency_s=1.0)
    hub.send(A, B, Cancel(REQUEST, 1), now=0.0)
    hub.send(B, A, Cancel(REQUEST, 2), now=0.0)
    hub.kill(B)
    hub.send(A, B, Cancel(REQUEST, 3), now=0.5)
    hub.send(B, A, Cancel(REQUEST, 4), now=0.5)
    assert hub.deliver(10.0) == [(A, B, Cancel(REQUEST, 2))]
    hub.join(B)
    hub.send(A, B, Cancel(REQUEST, 5), now=10.0)
    assert arrivals(hub) == [5]


def test_an_illegal_message_fails_at_its_sender():
    with pytest.raises(CodecError, match=r"Cancel\.attempt"):
        MemoryHub().send(A, B, Cancel(REQUEST, -1), now=0.0)


@pytest.mark.parametrize("faults", [{"drop": 1.5}, {"duplicate": -0.1}, {"reorder": 0.5}])
def test_faults_that_make_no_sense_are_refused(faults):
    with pytest.raises(ConfigError):
        Faults(**faults)
