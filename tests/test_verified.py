"""Blocks that are not what they are named are never used, whichever way they came and wherever they broke.

Every test runs on a WatchedCluster, which compares the blocks that the decode node could use with what their names
say after every event.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from pdserve.cluster.messages import Bad, Blocks, End, Have, Message, Want
from pdserve.core.ids import BlockId, NodeId, RequestId
from pdserve.core.turns import Policy
from pdserve.engine.kv_pool import PoolView
from pdserve.kvtransfer.pull import BlockCopy
from tests.in_process import TINY_SPEC, VOCAB, InProcessCluster, Timing, continuation
from tests.sabotage import D0, P0, Sabotage, Sent, WatchedCluster

BLOCK = TINY_SPEC.block_size
NUM_SPOILT_PROMPTS = 20
NUM_PLACES = 3
TRANSPORTS = pytest.mark.parametrize("is_remote", [False, True], ids=["shm", "zmq"])


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def sent_to(cluster: InProcessCluster, message_type: type[Message]) -> list:
    return [message for _, _, message in cluster.trace if isinstance(message, message_type)]


def told_bad(cluster: InProcessCluster) -> int:
    return sum(len(message.hashes) for message in sent_to(cluster, Bad))


def num_attempts(cluster: InProcessCluster, request: RequestId) -> int:
    return max(want.attempt for want in sent_to(cluster, Want) if want.request == request)


def is_computed_by_decode(cluster: InProcessCluster) -> bool:
    """Whether D0 ran more than the one token a step that its streams draw."""
    return any(len(row.token_ids) > 1 for _, what, plan in cluster.trace if what == f"{D0} step" for row in plan.rows)


# ---- the ways a block can break ------------------------------------------------------------------


def flip(data: memoryview, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def flipped_in_pool(block: memoryview, other: bytes, rng: random.Random) -> None:
    flip(block, rng)


def half_written_in_pool(block: memoryview, other: bytes, rng: random.Random) -> None:
    half = len(block) // 2
    block[half:] = bytes(len(block) - half)


def overwritten_in_pool(block: memoryview, other: bytes, rng: random.Random) -> None:
    block[:] = other


def flipped_on_wire(block: Sent, other: Sent, rng: random.Random) -> Sent:
    """A frame is hit, or of an announcement the checksum."""
    if block.payload is None:
        return Sent(replace(block.entry, checksum=block.entry.checksum ^ 1 << rng.randrange(64)))
    data = bytearray(block.payload)
    flip(memoryview(data), rng)
    return Sent(block.entry, bytes(data))


def misplaced_on_wire(block: Sent, other: Sent, rng: random.Random) -> Sent:
    """The bytes of another block, or where they are."""
    place = {"block_id": other.entry.block_id, "generation": other.entry.generation}
    return Sent(replace(block.entry, **place), other.payload)


def renamed_on_wire(block: Sent, other: Sent, rng: random.Random) -> Sent:
    """Another block with its own, right checksum under the name of this one."""
    return Sent(replace(other.entry, hash=block.entry.hash), other.payload)


def resized_on_wire(block: Sent, other: Sent, rng: random.Random) -> Sent:
    """A frame cut short or too long; of an announcement, a block beyond the end of the pool."""
    if block.payload is None:
        return Sent(replace(block.entry, block_id=BlockId(rng.choice([64, 65, 2**31, 2**32 - 1]))))
    data = block.payload + bytes(rng.randrange(1, 64))
    return Sent(block.entry, data[: rng.choice([rng.randrange(len(block.payload)), len(data)])])


class Moving:
    """Generations as a reader sees them whose source reassigns a block right after his first look at it."""

    def __init__(self, generations, moving: BlockId, reassign: Callable[[], None]):
        self._generations, self._moving, self._reassign = generations, moving, [reassign]

    def __getitem__(self, block_id: BlockId) -> int:
        seen = int(self._generations[block_id])
        if block_id == self._moving and self._reassign:
            self._reassign.pop()()
        return seen


def reassigned_before_copy(view: PoolView, copy: BlockCopy, other: bytes) -> Iterator[None]:
    view.generations[copy.source] += 1
    view.block(copy.source)[:] = other
    yield


def reassigned_during_copy(view: PoolView, copy: BlockCopy, other: bytes) -> Iterator[None]:
    """Good generation before, other bytes and another generation after."""
    generations = view.generations

    def reassign() -> None:
        generations[copy.source] += 1
        view.block(copy.source)[:] = other

    view.generations = Moving(generations, copy.source, reassign)  # type: ignore[assignment]
    yield
    view.generations = generations


def torn_during_copy(view: PoolView, copy: BlockCopy, other: bytes) -> Iterator[None]:
    """The same generation before and after, while half of the bytes are another block's; good again later."""
    good, half = bytes(view.block(copy.source)), TINY_SPEC.payload_bytes // 2
    view.block(copy.source)[:half] = other[:half]
    yield
    view.block(copy.source)[:] = good


@dataclass(frozen=True)
class Way:
    """One way for a block to break, and what must come of it.

    both        the block it is mixed up with is spoilt with it
    lasts       every further try finds the same
    is_told     whether the source is told: not of a block it has given away itself
    transports  is_remote, where this can happen
    """

    name: str
    sabotage: dict[str, Callable]
    both: bool = False
    lasts: bool = False
    is_told: bool = True
    transports: tuple[bool, ...] = (False, True)


WAYS = [
    Way("flipped in the pool", {"in_pool": flipped_in_pool}, lasts=True),
    Way("swapped in the pool", {"in_pool": overwritten_in_pool}, both=True, lasts=True),
    Way("half written in the pool", {"in_pool": half_written_in_pool}, lasts=True),
    Way("overwritten in the pool", {"in_pool": overwritten_in_pool}, lasts=True),
    Way("flipped on the wire", {"on_wire": flipped_on_wire}),
    Way("swapped on the wire", {"on_wire": misplaced_on_wire}, both=True),
    Way("cut or beyond the end", {"on_wire": resized_on_wire}),
    Way("another request's block", {"on_wire": renamed_on_wire}),
    Way("two names swapped", {"on_wire": renamed_on_wire}, both=True),
    Way("reassigned before", {"in_copy": reassigned_before_copy}, lasts=True, is_told=False, transports=(False,)),
    Way("reassigned during", {"in_copy": reassigned_during_copy}, lasts=True, is_told=False, transports=(False,)),
    Way("torn", {"in_copy": torn_during_copy}, transports=(False,)),
]
CASES = [(way, is_remote) for way in WAYS for is_remote in way.transports]


class Ordeal:
    """Prompts one after the other; one block of each, or two, is spoilt, while a prompt beside it is not."""

    def __init__(self, way: Way, is_remote: bool, place: int):
        self.way, self.place = way, place
        self.rng = random.Random(f"{way.name} {is_remote} {place}")
        self.sabotage = Sabotage(self.rng, **way.sabotage)
        # The bystander first, whose blocks the other's are mixed up with.
        options = {"max_step_tokens": 64, "policy": Policy.FCFS}
        self.cluster = WatchedCluster(self.sabotage, is_remote=is_remote, **options)
        self.num_planned = 0

    def run_one(self, seed: int) -> None:
        cluster, rng = self.cluster, self.rng
        bystander = make_prompt(rng.randrange(BLOCK, 7 * BLOCK), seed=2 * seed)
        prompt = make_prompt(rng.randrange(3, 7) * BLOCK + rng.randrange(1, BLOCK), seed=2 * seed + 1)
        hashes = cluster.hasher.hashes(prompt)
        victim = hashes[len(hashes) * self.place // 2 if self.place < 2 else -1]
        beside = [h for h in hashes if h != victim] if self.way.both else cluster.hasher.hashes(bystander)
        other = rng.choice(beside)
        victims = {victim: other, other: victim} if self.way.both else {victim: other}
        times = 1 if self.way.lasts else rng.choice([1, 2])
        self.sabotage.plan(victims, times)
        self.num_planned += len(victims) * times
        cluster.trace.clear()
        requests = [cluster.submit(text, max_tokens=5) for text in (bystander, prompt)]
        cluster.run()
        assert cluster.results(*requests) == [continuation(text, 5) for text in (bystander, prompt)]
        assert [num_attempts(cluster, request) for request in requests] == [1, 1]
        fails_twice = self.way.lasts or times == 2
        assert is_computed_by_decode(cluster) == fails_twice
        assert told_bad(cluster) == (len(victims) * (1 + fails_twice) if self.way.is_told else 0)


@pytest.mark.parametrize("place", range(NUM_PLACES), ids=["first", "middle", "partial"])
@pytest.mark.parametrize(
    ("way", "is_remote"), CASES, ids=[f"{way.name}-{'zmq' if is_remote else 'shm'}" for way, is_remote in CASES]
)
def test_a_spoilt_block_is_asked_for_again_and_then_computed_but_never_used(way: Way, is_remote: bool, place: int):
    ordeal = Ordeal(way, is_remote, place)
    for seed in range(NUM_SPOILT_PROMPTS):
        ordeal.run_one(seed)
    assert ordeal.sabotage.num_done == ordeal.num_planned >= NUM_SPOILT_PROMPTS
    assert ordeal.cluster.num_checked > 100 * NUM_SPOILT_PROMPTS
    ordeal.cluster.assert_drained()


def test_over_a_thousand_blocks_are_spoilt():
    assert len(CASES) * NUM_PLACES * NUM_SPOILT_PROMPTS > 1000


# ---- the remedies, in their order ----------------------------------------------------------------


@TRANSPORTS
@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_block_that_fails_is_asked_for_once_more_before_anything_is_computed(is_remote: bool, times: int):
    sabotage = Sabotage(random.Random(times), on_wire=flipped_on_wire)
    cluster = WatchedCluster(sabotage, is_remote=is_remote, max_step_tokens=64)
    prompt = make_prompt(4 * BLOCK + 1)
    victim, other, *_ = cluster.hasher.hashes(prompt)
    sabotage.plan({victim: other}, times)
    request = cluster.submit(prompt, max_tokens=5)
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 5)]
    wants = [want.hashes for want in sent_to(cluster, Want)]
    num_first = 2 if is_remote else 1
    again = [hashes for hashes in wants[num_first:] if victim in hashes]
    assert (told_bad(cluster), len(again)) == (times, min(times, 1))
    assert is_computed_by_decode(cluster) == (times == 2)
    assert num_attempts(cluster, request) == 1


@TRANSPORTS
def test_a_block_that_cannot_be_had_and_a_source_that_dies_are_a_new_attempt(is_remote: bool):
    sabotage = Sabotage(random.Random(0), on_wire=flipped_on_wire)
    cluster = WatchedCluster(sabotage, is_remote=is_remote, num_prefill=2, max_step_tokens=BLOCK)
    prompt = make_prompt(10 * BLOCK + 1)
    victim = cluster.hasher.hashes(prompt)[0]
    sabotage.plan({victim: victim}, 2)
    request = cluster.submit(prompt, max_tokens=5)
    cluster.run(until=lambda: told_bad(cluster) == 2)
    assert not sent_to(cluster, End), "nothing can be computed here before the end is known"
    (source,) = {link.split(">")[1] for _, link, message in cluster.trace if isinstance(message, Want)}
    cluster.kill(NodeId(source))
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 5)]
    assert num_attempts(cluster, request) == 2
    assert not is_computed_by_decode(cluster)
    cluster.assert_drained()


@TRANSPORTS
@pytest.mark.parametrize("position", [0, 3, -1])
def test_a_block_that_broke_in_the_pool_is_offered_to_nobody_again(is_remote: bool, position: int):
    sabotage = Sabotage(random.Random(0), in_pool=flipped_in_pool)
    cluster = WatchedCluster(sabotage, is_remote=is_remote, max_step_tokens=64)
    prompt = make_prompt(6 * BLOCK)
    hashes = cluster.hasher.hashes(prompt)
    sabotage.plan({hashes[position]: hashes[1]}, 1)
    request = cluster.submit(prompt, max_tokens=5)
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 5)]
    assert told_bad(cluster) == 2
    cluster.trace.clear()
    again = cluster.submit([*prompt, 1], max_tokens=5)
    cluster.run()
    assert cluster.results(again) == [continuation([*prompt, 1], 5)]
    assert told_bad(cluster) == 0
    source = cluster.nodes[P0].machine.pool
    for block_hash in hashes:
        block_id = source.find(block_hash)
        assert block_id is not None
        cluster.check_block(P0, block_id, block_hash)


def test_a_block_that_broke_on_the_wire_stays_cached_at_its_source():
    sabotage = Sabotage(random.Random(0), on_wire=flipped_on_wire)
    cluster = WatchedCluster(sabotage, is_remote=True)
    prompt = make_prompt(6 * BLOCK)
    hashes = cluster.hasher.hashes(prompt)
    sabotage.plan({block_hash: hashes[0] for block_hash in hashes}, 1)
    cluster.submit(prompt, max_tokens=5)
    cluster.run()
    assert told_bad(cluster) == len(hashes)
    assert cluster.nodes[P0].machine.pool.match(hashes) != []
    assert cluster.nodes[P0].machine.pool.num_cached == len(hashes)


# ---- messages at the wrong time ------------------------------------------------------------------


def verbatim(old: Have | Blocks, new: Have | Blocks) -> Have | Blocks:
    return old


def as_of_this_request(old: Have | Blocks, new: Have | Blocks) -> Have | Blocks:
    return replace(old, request=new.request, attempt=new.attempt, seq=new.seq)


def as_of_an_earlier_want(old: Have | Blocks, new: Have | Blocks) -> Have | Blocks:
    return replace(old, request=new.request, attempt=new.attempt, seq=max(0, new.seq - 1))


@TRANSPORTS
@pytest.mark.parametrize("disguise", [verbatim, as_of_this_request, as_of_an_earlier_want])
@pytest.mark.parametrize("comes_first", [False, True])
def test_announcements_and_blocks_of_earlier_times_change_no_token(is_remote: bool, disguise, comes_first: bool):
    """The pools hold two prompts of six, each asked for four times, so what the old messages name has moved since."""
    rng = random.Random(0)
    cluster = WatchedCluster(Sabotage(rng), is_remote=is_remote, num_blocks=14, max_step_tokens=2 * BLOCK)
    replays = []

    def with_replay(message: Message) -> list[Message]:
        old = [m for m in cluster.wire.carried if type(m) is type(message)]
        if not isinstance(message, Have | Blocks) or not old:
            return [message]
        replays.append(disguise(rng.choice(old), message))
        return [replays[-1], message] if comes_first else [message, replays[-1]]

    cluster.wire.change = with_replay
    prompts = [make_prompt(5 * BLOCK + i % BLOCK, seed=i) for i in range(6)]
    for turn in range(24):
        if turn == 12:
            cluster.restart(P0)
        prompt = prompts[rng.randrange(6)]
        request = cluster.submit(prompt, max_tokens=5)
        cluster.run()
        assert cluster.results(request) == [continuation(prompt, 5)], f"turn {turn}"
    assert len(replays) >= 24
    assert told_bad(cluster) == 0
    cluster.assert_drained()


@TRANSPORTS
@pytest.mark.parametrize("comes_first", [False, True])
def test_a_spoilt_message_that_comes_twice_spoils_nothing(is_remote: bool, comes_first: bool):
    """The one that answered the first Want comes again with the good one that answers the second."""
    sabotage = Sabotage(random.Random(0), on_wire=flipped_on_wire)
    cluster = WatchedCluster(sabotage, is_remote=is_remote, max_step_tokens=64)
    prompt = make_prompt(5 * BLOCK + 2)
    hashes = cluster.hasher.hashes(prompt)
    sabotage.plan({hashes[2]: hashes[1]}, 1)
    spoilt: list[Message] = []

    def with_replay(message: Message) -> list[Message]:
        carrier = Blocks if is_remote else Have
        if not isinstance(message, carrier) or all(entry.hash != hashes[2] for entry in message.entries):
            return [message]
        spoilt.append(message)
        return [message] if len(spoilt) == 1 else [spoilt[0], message] if comes_first else [message, spoilt[0]]

    cluster.wire.change = with_replay
    request = cluster.submit(prompt, max_tokens=5)
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 5)]
    assert len(spoilt) == 2
    assert told_bad(cluster) in {1, 2}
    assert num_attempts(cluster, request) == 1
    cluster.assert_drained()


@TRANSPORTS
@pytest.mark.parametrize("difference", [-4 * BLOCK, -BLOCK, -1, 1, BLOCK])
def test_an_end_with_another_count_is_a_new_attempt_that_takes_nothing_from_the_old_one(
    is_remote: bool, difference: int
):
    cluster = WatchedCluster(Sabotage(random.Random(0)), is_remote=is_remote, max_step_tokens=2 * BLOCK)

    def with_lie(message: Message) -> list[Message]:
        if isinstance(message, End) and message.attempt == 1:
            return [replace(message, count=message.count + difference)]
        return [*cluster.wire.carried, message] if getattr(message, "attempt", 1) > 1 else [message]

    cluster.wire.change = with_lie
    prompt = make_prompt(4 * BLOCK + 2)
    request = cluster.submit(prompt, max_tokens=5)
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 5)]
    assert num_attempts(cluster, request) == 2
    assert told_bad(cluster) == 0
    cluster.assert_drained()


def test_ten_thousand_clean_blocks_raise_no_alarm():
    cluster = InProcessCluster(max_step_tokens=64 * BLOCK, is_remote=True, num_blocks=600, timing=Timing(block=1e-6))
    for turn in range(20):
        request = cluster.submit(make_prompt(500 * BLOCK, seed=turn), max_tokens=2)
        cluster.run()
        assert cluster.outcomes[request].finish == "length"
        assert told_bad(cluster) == 0
        cluster.trace.clear()
