"""Who of the waiting requests is given to a node next, who may pass, and who is in nobody's way."""

import pytest

from pdserve.core.admission import MAX_PASSES
from pdserve.core.ids import RequestId
from pdserve.core.sampling import SamplingParams
from pdserve.core.turns import MAX_YIELD_S, Policy
from pdserve.router.ledger import Times
from pdserve.router.queue import RequestQueue
from pdserve.router.record import Record


def make_record(
    number: int, num_tokens: int = 10, priority: int = 0, arrived: float = 0.0, read_s: float = 0.0
) -> Record:
    request = RequestId(number.to_bytes(16, "little"))
    return Record(request, str(number), [0] * num_tokens, SamplingParams(), Times(arrived, read_s), priority)


class Queue:
    """Requests are numbers. places: how many of the next ones find a place."""

    def __init__(self, policy: Policy = Policy.SHORTEST):
        self.queue = RequestQueue(policy)
        self.absent: set[int] = set()
        self.tried: list[int] = []
        self._records: dict[int, Record] = {}

    def join(self, number: int, *, deadline: float | None = None, is_resumed: bool = False, **options: float) -> None:
        record = self._records[number] = make_record(number, **options)  # type: ignore[arg-type]
        self.queue.join(record, deadline, is_resumed=is_resumed)

    def leave(self, number: int) -> None:
        self.queue.leave(self._records[number].request)

    def admit(
        self, places: int = 100, unfit: tuple[int, ...] = (), token_s: float = 0.001, now: float = 0.0
    ) -> list[int]:
        """Who finds a place of `places`, those that are unfit and whose node is absent never."""
        placed: list[int] = []
        self.tried = []

        def place(record: Record) -> bool:
            number = int(record.label)
            self.tried.append(number)
            if len(placed) == places or number in unfit or number in self.absent:
                return False
            placed.append(number)
            return True

        self.queue.admit(place, lambda record: int(record.label) not in self.absent, token_s, now, 0)
        return placed


def test_the_higher_priority_goes_first_then_what_goes_on_then_the_shortest_then_who_came_first():
    queue = Queue()
    queue.join(1, num_tokens=30)
    queue.join(2, num_tokens=20)
    queue.join(3, num_tokens=20)
    queue.join(4, num_tokens=90, is_resumed=True)
    queue.join(5, num_tokens=80, is_resumed=True)
    queue.join(6, num_tokens=50, priority=2)
    assert queue.admit() == [6, 4, 5, 2, 3, 1]
    assert len(queue.queue) == 0


def test_time_that_a_client_took_to_send_its_request_is_no_time_in_line():
    queue = Queue()
    queue.join(1, num_tokens=50, read_s=20.0)
    firsts = []
    for number in range(2, 6):
        queue.join(number, num_tokens=10, arrived=20.0)
        firsts += queue.admit(places=1, now=20.5)
    assert firsts == [2, 3, 4, 5]


def test_first_come_first_served_takes_them_in_order_of_arrival():
    queue = Queue(Policy.FCFS)
    for number, length in ((1, 30), (2, 10), (3, 20)):
        queue.join(number, num_tokens=length)
    assert queue.admit() == [1, 2, 3]


@pytest.mark.parametrize("policy", Policy)
def test_with_promises_the_longest_gives_way_when_not_all_can_be_in_time(policy: Policy):
    queue = Queue(policy)
    for number, length in ((1, 600), (2, 310), (3, 300)):
        queue.join(number, num_tokens=length, deadline=1.0)
    assert queue.admit(token_s=0.0015) == [2, 3, 1]


def test_who_finds_no_place_keeps_its_turn():
    queue = Queue()
    for number in (1, 2, 3):
        queue.join(number)
    assert queue.admit(places=1) == [1]
    assert queue.admit(places=1) == [2]


def test_a_request_that_fits_few_nodes_is_passed_only_so_often():
    queue = Queue()
    queue.join(1)
    for number in range(2, 30):
        queue.join(number)
    assert queue.admit(unfit=(1,)) == list(range(2, 2 + MAX_PASSES))
    assert queue.admit(unfit=(1,)) == []
    assert queue.admit()[:2] == [1, 2 + MAX_PASSES]


def test_of_a_long_queue_few_are_tried_in_vain():
    queue = Queue()
    for number in range(1000):
        queue.join(number)
    assert queue.admit(places=0) == []
    assert queue.tried == list(range(MAX_PASSES))


def test_requests_that_wait_for_an_absent_node_hold_up_nobody():
    queue = Queue()
    queue.absent = set(range(20))
    for number in range(25):
        queue.join(number)
    placed = [number for _ in range(4) for number in queue.admit()]
    assert placed == [20, 21, 22, 23, 24]
    assert len(queue.queue) == 20


def test_they_have_their_turn_again_when_the_node_is_back():
    queue = Queue()
    queue.absent = {1}
    queue.join(1)
    assert queue.admit() == []
    queue.join(2)
    queue.absent = set()
    queue.queue.reconsider()
    assert queue.admit() == [1, 2]


def test_how_long_a_request_waits_for_an_absent_node_is_counted_from_when_it_was_first_found_out():
    queue = Queue()
    queue.absent = {1}
    queue.join(1)
    for now in (1.0, 2.0, 3.0):
        queue.queue.reconsider()
        assert queue.admit(now=now) == []
    assert queue.queue.stuck(0.9) == []
    assert [record.label for record in queue.queue.stuck(1.0)] == ["1"]


def test_while_a_node_could_serve_it_a_request_is_not_stuck():
    queue = Queue()
    queue.absent = {1}
    queue.join(1)
    queue.admit(now=1.0)
    queue.absent = set()
    queue.queue.reconsider()
    queue.admit(places=0, now=2.0)
    queue.absent = {1}
    queue.queue.reconsider()
    queue.admit(now=3.0)
    assert queue.queue.stuck(2.9) == []


def test_who_leaves_is_gone_from_wherever_it_stood():
    queue = Queue()
    queue.absent = {1}
    for number in (1, 2, 3):
        queue.join(number)
    queue.admit(places=0)
    for number in (1, 2, 2):
        queue.leave(number)
    queue.queue.reconsider()
    assert [record.label for record in queue.queue] == ["3"]
    assert queue.admit() == [3]


def test_a_long_request_has_its_turn_under_an_endless_stream_of_short_ones():
    queue = Queue()
    queue.join(0, num_tokens=32_000)
    now, placed = MAX_YIELD_S + 0.1, []
    for number in range(1, 5):
        queue.join(number, arrived=now)
        placed += queue.admit(places=1, now=now)
    assert placed == [1, 0, 2, 3]
