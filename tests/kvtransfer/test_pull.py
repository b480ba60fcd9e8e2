"""One pull by itself: what it asks for, what it copies, and when it is over."""

import pytest

from pdserve.cluster.messages import Bad, Drawn, End, Fetch, HaveEntry, Send, Want
from pdserve.core.errors import ProtocolError
from pdserve.core.ids import BlockHash, BlockId, NodeId, RequestId
from pdserve.kvtransfer.pull import (
    CREDIT_BYTES,
    MAX_IN_LINE_S,
    WANT_AGAIN_S,
    BlockCopy,
    CopyDone,
    Pull,
    PullState,
    Traffic,
    Verdict,
)

REQUEST = RequestId(b"r" * 16)
SOURCE = NodeId("P0")
A, B = BlockHash(b"a" * 16), BlockHash(b"b" * 16)
TARGETS = {A: BlockId(70), B: BlockId(71)}
END = End(REQUEST, 1, 8, (Drawn(0, 0, 5),))


def make_pull(*hashes: BlockHash, start: bool = True) -> Pull:
    pull = Pull(REQUEST, 1, SOURCE)
    pull.want(hashes, 0.0)
    if start:
        pull.start({h: TARGETS[h] for h in hashes}, 0.0)
    return pull


def entry(block_hash: BlockHash, generation: int = 1) -> HaveEntry:
    return HaveEntry(block_hash, BlockId(block_hash[0]), generation, 9)


def copied(pull: Pull, verdict: Verdict, now: float = 0.1) -> list[Send]:
    copies = tuple(pull.next_copies())
    return pull.copied(CopyDone(1, copies, (verdict,) * len(copies)), now)


def test_nothing_is_copied_before_blocks_are_reserved():
    pull = make_pull(A, start=False)
    pull.announce([entry(A)], 0.1)
    assert pull.next_copies() == []
    pull.start(TARGETS, 0.0)
    assert pull.next_copies() == [BlockCopy(A, BlockId(A[0]), 1, 9, TARGETS[A])]


def test_a_block_is_copied_once_however_often_it_is_announced():
    pull = make_pull(A)
    pull.announce([entry(A), entry(A)], 0.1)
    assert len(pull.next_copies()) == 1
    pull.announce([entry(A)], 0.2)
    assert pull.next_copies() == []


def test_what_was_never_wanted_is_never_copied():
    pull = make_pull(A)
    pull.announce([entry(B)], 0.1)
    assert pull.next_copies() == []


def test_a_pull_is_complete_when_all_is_verified_and_the_end_is_here():
    pull = make_pull(A)
    pull.announce([entry(A)], 0.1)
    copied(pull, Verdict.OK)
    assert not pull.complete()
    pull.end = END
    assert pull.complete()
    assert pull.complete()


def test_a_block_whose_generation_moved_is_wanted_again():
    pull = make_pull(A)
    pull.announce([entry(A)], 0.1)
    assert copied(pull, Verdict.MOVED) == [Send(SOURCE, Want(REQUEST, 1, 2, (A,)))]
    assert pull.next_copies() == []
    pull.announce([entry(A, generation=2)], 0.2)
    assert [copy.generation for copy in pull.next_copies()] == [2]


def test_a_corrupt_block_is_reported_and_fails_the_pull_the_second_time():
    pull = make_pull(A)
    for expected in (PullState.COPYING, PullState.FAILED):
        pull.announce([entry(A)], 0.1)
        assert copied(pull, Verdict.CORRUPT)[0] == Send(SOURCE, Bad(REQUEST, 1, (A,)))
        assert pull.state is expected
    pull.end = END
    assert not pull.complete()


def test_a_corrupt_block_is_reported_even_when_the_pull_has_failed_meanwhile():
    pull = make_pull(A, B)
    pull.announce([entry(A)], 0.1)
    copied(pull, Verdict.CORRUPT)
    pull.announce([entry(A), entry(B)], 0.2)
    a, b = pull.next_copies()
    pull.copied(CopyDone(1, (a,), (Verdict.CORRUPT,)), 0.2)
    assert pull.state is PullState.FAILED
    assert pull.copied(CopyDone(1, (b,), (Verdict.CORRUPT,)), 0.3) == [Send(SOURCE, Bad(REQUEST, 1, (B,)))]


def test_silence_repeats_the_want_with_a_higher_number():
    pull = make_pull(A, B)
    assert pull.tick(0.4, Traffic()) == []
    assert pull.tick(0.5, Traffic()) == [Send(SOURCE, Want(REQUEST, 1, 2, (A, B)))]
    assert pull.tick(0.9, Traffic()) == []


def test_nothing_is_asked_again_while_a_copy_is_in_flight():
    pull = make_pull(A, B)
    pull.announce([entry(A)], 0.1)
    pull.next_copies()
    assert pull.tick(9.0, Traffic()) == []


def test_a_failed_pull_still_asks_for_the_end_it_never_heard():
    pull = make_pull(A)
    for _ in range(2):
        pull.announce([entry(A)], 0.1)
        copied(pull, Verdict.MOVED)
    assert pull.tick(2.0, Traffic()) == [Send(SOURCE, Want(REQUEST, 1, 3, ()))]
    pull.end = END
    assert pull.tick(4.0, Traffic()) == []


def test_a_revoked_pull_keeps_what_was_announced_for_its_next_blocks():
    pull = make_pull(A)
    pull.announce([entry(A)], 0.1)
    pull.revoke()
    assert pull.next_copies() == []
    pull.start({A: BlockId(80)}, 0.0)
    assert [copy.target for copy in pull.next_copies()] == [80]


def test_only_a_pull_that_has_begun_to_copy_can_finish_without_its_source():
    pull = make_pull(A, start=False)
    pull.announce([entry(A)], 0.1)
    pull.end = END
    assert not pull.can_finish_alone
    pull.start(TARGETS, 0.0)
    assert pull.can_finish_alone
    copied(pull, Verdict.MOVED)
    assert not pull.can_finish_alone


def test_starting_twice_is_our_own_error():
    with pytest.raises(ProtocolError, match="attempt 1"):
        make_pull(A).start(TARGETS, 0.0)


# ---- blocks in frames ------------------------------------------------------------------------------

BLOCK = memoryview(bytes(1 << 20))


def make_remote(*hashes: BlockHash) -> Pull:
    pull = Pull(REQUEST, 1, SOURCE, is_remote=True)
    pull.want(hashes, 0.0)
    pull.announce([entry(h) for h in hashes], 0.0)
    return pull


def names(count: int) -> list[BlockHash]:
    return [BlockHash(i.to_bytes(16, "little")) for i in range(count)]


def start_all(pull: Pull) -> list[Send]:
    return pull.start({h: BlockId(i) for i, h in enumerate(pull.lacking)}, 0.0)


def test_blocks_are_sent_for_once_they_have_a_place():
    pull = make_remote(A, B)
    assert pull.next_copies() == []
    assert start_all(pull) == [Send(SOURCE, Want(REQUEST, 1, 2, (A, B), CREDIT_BYTES))]
    assert pull.next_copies() == [], "what is announced is not here yet"


def test_a_block_that_came_is_copied_from_its_frame():
    pull = make_remote(A)
    start_all(pull)
    pull.take([entry(A)], (BLOCK,), 0.1)
    (copy,) = pull.next_copies()
    assert (copy.hash, copy.target, copy.payload) == (A, BlockId(0), BLOCK)
    assert pull.next_copies() == []


def test_a_block_nobody_has_a_place_for_is_dropped():
    pull = make_remote(A)
    pull.take([entry(A)], (BLOCK,), 0.1)
    start_all(pull)
    pull.take([entry(B)], (BLOCK,), 0.2)
    assert pull.next_copies() == []


def test_credit_grows_as_blocks_are_taken_in_and_never_by_more_than_the_window():
    hashes = names(40)
    pull = make_remote(*hashes)
    start_all(pull)
    granted, taken = CREDIT_BYTES, 0
    for block_hash in hashes:
        pull.take([entry(block_hash)], (BLOCK,), 0.1)
        taken += len(BLOCK)
        for send in copied(pull, Verdict.OK):
            assert isinstance(send.message, Fetch)
            assert send.message.seq == 2
            assert granted < send.message.credit <= taken + CREDIT_BYTES
            granted = send.message.credit
        assert granted >= min(taken + CREDIT_BYTES // 2, len(hashes) * len(BLOCK)), "the source would stand still"
    assert not pull.lacking


def test_a_block_that_came_broken_is_asked_for_again_with_new_credit():
    pull = make_remote(A, B)
    start_all(pull)
    pull.take([entry(A)], (BLOCK,), 0.1)
    bad, want = copied(pull, Verdict.CORRUPT)
    assert bad == Send(SOURCE, Bad(REQUEST, 1, (A,)))
    assert want == Send(SOURCE, Want(REQUEST, 1, 3, (A, B), CREDIT_BYTES))


def test_a_pull_of_frames_can_finish_without_its_source_only_with_what_has_come():
    pull = make_remote(A, B)
    start_all(pull)
    pull.end = END
    pull.take([entry(A)], (BLOCK,), 0.1)
    assert not pull.can_finish_alone
    pull.take([entry(B)], (BLOCK,), 0.2)
    assert pull.can_finish_alone


def test_what_stands_in_line_behind_the_blocks_of_other_pulls_is_not_asked_for_again_before_its_turn():
    pull = make_remote(A)
    start_all(pull)
    traffic = Traffic(num_blocks=50, moved_at=0.4, num_expected=10)
    assert pull.tick(0.5, traffic) == []
    traffic.num_blocks, traffic.moved_at = 59, 0.9
    assert pull.tick(1.0, traffic) == []
    traffic.num_blocks = 60
    assert pull.tick(1.0, traffic) == [Send(SOURCE, Want(REQUEST, 1, 3, (A,), CREDIT_BYTES))]


@pytest.mark.parametrize(("now", "moved_at"), [(WANT_AGAIN_S, 0.0), (MAX_IN_LINE_S, MAX_IN_LINE_S - 0.1)])
def test_what_stands_in_a_line_that_does_not_move_or_does_not_end_is_asked_for_again(now: float, moved_at: float):
    pull = make_remote(A)
    start_all(pull)
    traffic = Traffic(moved_at=moved_at, num_expected=10)
    assert pull.tick(now, traffic) == [Send(SOURCE, Want(REQUEST, 1, 3, (A,), CREDIT_BYTES))]


def test_an_end_that_was_lost_is_asked_for_at_once_however_many_blocks_are_on_their_way_to_others():
    pull = make_remote(A)
    start_all(pull)
    pull.take([entry(A)], (BLOCK,), 0.1)
    copied(pull, Verdict.OK, now=0.2)
    assert pull.tick(0.8, Traffic(moved_at=0.8, num_expected=10)) == [
        Send(SOURCE, Want(REQUEST, 1, 3, (), CREDIT_BYTES))
    ]


def test_a_block_taken_over_from_another_pull_is_asked_for_at_the_next_tick():
    pull = make_remote(A, B)
    pull.start({A: BlockId(0)}, 0.0)
    assert pull.tick(0.1, Traffic()) == []
    pull.adopt(B, BlockId(1))
    assert pull.tick(0.2, Traffic()) == [Send(SOURCE, Want(REQUEST, 1, 3, (A, B), CREDIT_BYTES))]


def test_revoked_blocks_are_announced_and_not_sent_until_they_have_a_place_again():
    pull = make_remote(A)
    start_all(pull)
    pull.take([entry(A)], (BLOCK,), 0.1)
    pull.revoke()
    assert pull.next_copies() == []
    assert pull.tick(1.0, Traffic()) == [Send(SOURCE, Want(REQUEST, 1, 3, (A,), 0))]


def test_on_a_slow_link_blocks_that_are_on_their_way_are_not_asked_for_twice():
    pull = make_remote(A)
    pull.bytes_per_s = CREDIT_BYTES / 4.0
    start_all(pull)
    assert pull.tick(WANT_AGAIN_S + 7.9, Traffic(num_pulls=1)) == []
    assert pull.tick(WANT_AGAIN_S + 8.1, Traffic(num_pulls=2)) == []
    assert len(pull.tick(WANT_AGAIN_S + 8.1, Traffic(num_pulls=1))) == 1
