"""How tight the paged cache is under the lengths of a published trace, and that each slot is counted once."""

import itertools
from collections.abc import Callable
from dataclasses import astuple

import pytest
from kv_waste import NUM_SLOTS, Contiguous, Memory, Paged, Split, fill, memories, num_final
from traces import Lengths, azure_conversation


class Audited:
    """A memory, looked at in each step, and what has become of each request."""

    def __init__(self, memory: Memory, num_slots: int, look: Callable[[], None]):
        self.memory = memory
        self.started: list[int] = []
        self.yielded: list[int] = []
        self.ended: list[int] = []
        self._num_slots = num_slots
        self._look = look

    @property
    def num_running(self) -> int:
        return self.memory.num_running

    def start(self, key: int, lengths: Lengths) -> bool:
        has_started = self.memory.start(key, lengths)
        self.started += [key] * has_started
        return has_started

    def step(self) -> tuple[list[int], list[int]]:
        yielded, last = self.memory.step()
        self.yielded += yielded
        self._look()
        return yielded, last

    def end(self, key: int) -> None:
        self.ended.append(key)
        self.memory.end(key)

    def split(self) -> Split:
        split = self.memory.split()
        assert min(astuple(split)) >= 0
        assert split.total == self._num_slots
        return split


def assert_all_were_served(memory: Audited, num_requests: int) -> None:
    """Whoever started has ended, yielded or still runs, and nobody was left out."""
    assert set(memory.started) == set(range(num_requests))
    assert len(memory.ended) == len(set(memory.ended))
    assert len(memory.started) == len(memory.ended) + len(memory.yielded) + memory.num_running


def test_less_than_four_percent_of_what_is_allocated_is_empty():
    run = fill(Paged(NUM_SLOTS // 2, block_size=32), azure_conversation()[:1_500])
    assert run.split.waste < 0.04
    assert run.num_steps > 1_000


def test_paging_runs_more_requests_at_once_than_any_contiguous_memory():
    requests = azure_conversation()[:800]
    at_once = {}
    for name, memory in memories(NUM_SLOTS // 4, [32], requests):
        run = fill(memory, requests)
        at_once[name] = run.num_running / run.num_steps
    paged, longest, power_of_two, known = at_once.values()
    assert paged > known > power_of_two > longest
    assert longest == NUM_SLOTS // 4 // max(map(num_final, requests))


@pytest.mark.parametrize("block_size", [16, 128])
def test_every_slot_of_the_pool_is_of_one_kind_and_who_yields_goes_on(block_size: int):
    num_slots, requests = 1 << 14, azure_conversation()[:150]
    paged = Paged(num_slots, block_size)
    memory = Audited(paged, num_slots, lambda: paged.pool.check([s.block_ids for s in paged.running.values()]))
    fill(memory, requests)
    assert_all_were_served(memory, len(requests))
    assert bool(memory.yielded) == (block_size == 16)


def test_regions_lie_apart_and_every_slot_is_of_one_kind():
    num_slots, requests = 1 << 14, azure_conversation()[:150]
    contiguous = Contiguous(num_slots, num_final)

    def look() -> None:
        regions = sorted(contiguous.regions.values(), key=lambda region: region.start)
        assert all(a.start + a.size <= b.start for a, b in itertools.pairwise(regions))
        assert regions[-1].start + regions[-1].size <= num_slots

    memory = Audited(contiguous, num_slots, look)
    fill(memory, requests)
    assert_all_were_served(memory, len(requests))


def test_the_kinds_of_one_request_are_told_apart():
    """40 tokens of prompt, 6 of answer: 45 slots in the end, of which 41 hold a token in its first step."""
    lengths = Lengths(40, 6)
    paged, contiguous = Paged(128, block_size=16), Contiguous(128, lambda _: 100)
    for memory in (paged, contiguous):
        assert memory.start(0, lengths)
        assert memory.step() == ([], [])
    assert paged.split() == Split(used=41, reservation=4, internal=3, growth=16, external=64)
    assert contiguous.split() == Split(used=41, reservation=4, internal=55, growth=0, external=28)
    for memory in (paged, contiguous):
        assert [memory.step() for _ in range(4)] == [([], [])] * 3 + [([], [0])]
        memory.end(0)
        assert memory.split() == Split(0, 0, 0, 0, 128)


def test_what_can_never_be_counted_is_refused():
    with pytest.raises(ValueError, match="does not fit into the empty memory"):
        fill(Paged(64, block_size=16), [Lengths(100, 10)])
    with pytest.raises(ValueError, match="more requests are needed"):
        fill(Paged(64, block_size=16), [Lengths(20, 10)] * 3)
