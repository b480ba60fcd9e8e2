"""The offers of a prefill node: what a Want is answered, what is kept, and for how long."""

from pdserve.cluster.messages import Blocks, Drawn, End, Fetch, Gone, Have, HaveEntry, Send, Want
from pdserve.core.ids import BlockHash, BlockId, NodeId, RequestId
from pdserve.kvtransfer.offer import MAX_PARKED_WANTS, OfferBook, SendBlocks

REQUEST = RequestId(b"r" * 16)
BLOCK_BYTES = 1000
D0 = NodeId("D0")
A, B = (HaveEntry(BlockHash(name * 16), BlockId(name[0]), 1, 9) for name in (b"a", b"b"))
END = End(REQUEST, 1, 8, (Drawn(0, 0, 5),))


def want(*entries: HaveEntry, seq: int = 1, attempt: int = 1) -> Want:
    return Want(REQUEST, attempt, seq, tuple(entry.hash for entry in entries))


def have(*entries: HaveEntry, seq: int = 1) -> Send:
    return Send(D0, Have(REQUEST, 1, seq, entries))


def make_book(attempt: int = 1) -> OfferBook:
    book = OfferBook(BLOCK_BYTES)
    book.open(REQUEST, attempt, 0.0)
    return book


def test_nothing_is_said_before_somebody_asks():
    book = make_book()
    assert book.seal(REQUEST, 1, [A]) == []
    assert book.finish(REQUEST, 1, END) == []
    assert book.want(D0, want(A, B), 0.1) == [have(A), Send(D0, END)]


def test_a_want_is_a_standing_order():
    book = make_book()
    assert book.want(D0, want(A, B), 0.1) == []
    assert book.seal(REQUEST, 1, [A]) == [have(A)]
    assert book.seal(REQUEST, 1, [B]) == [have(B)]
    assert book.finish(REQUEST, 1, END) == [Send(D0, END)]


def test_only_what_was_asked_for_is_announced():
    book = make_book()
    book.want(D0, want(B), 0.1)
    assert book.seal(REQUEST, 1, [A, B]) == [have(B)]


def test_a_repeated_want_is_answered_again_and_an_overtaken_one_is_not():
    book = make_book()
    book.seal(REQUEST, 1, [A])
    assert book.want(D0, want(A, seq=2), 0.1) == [have(A, seq=2)]
    assert book.want(D0, want(A, seq=2), 0.2) == [have(A, seq=2)]
    assert book.want(D0, want(A, seq=1), 0.3) == []


def test_a_want_that_comes_before_its_request_is_answered_when_that_is_here():
    book = OfferBook(BLOCK_BYTES)
    assert book.want(D0, want(A), 0.0) == []
    book.open(REQUEST, 1, 1.0)
    assert book.seal(REQUEST, 1, [A]) == [have(A)]


def test_a_want_for_what_never_comes_is_given_up_one_lease_after_it_was_first_heard():
    book = OfferBook(BLOCK_BYTES)
    book.want(D0, want(A), 0.0)
    book.want(D0, want(A, seq=2), 4.9)
    assert book.lapse(4.9) == []
    assert book.lapse(5.0) == [Send(D0, Gone(REQUEST, 1))]
    assert book.lapse(6.0) == []


def test_wants_for_unknown_requests_are_bounded():
    book = OfferBook(BLOCK_BYTES)
    for i in range(MAX_PARKED_WANTS):
        assert book.want(D0, Want(RequestId(i.to_bytes(16, "big")), 1, 1, ()), 0.0) == []
    assert book.want(D0, want(A), 0.0) == [Send(D0, Gone(RequestId(bytes(16)), 1))]


def test_an_older_attempt_is_gone_and_a_newer_one_is_waited_for():
    book = make_book(attempt=2)
    assert book.want(D0, want(A, attempt=1), 0.1) == [Send(D0, Gone(REQUEST, 1))]
    assert book.want(D0, want(A, attempt=3), 0.2) == []
    book.open(REQUEST, 3, 0.3)
    assert book.find(REQUEST, 3).puller == D0


def test_closing_before_the_end_tells_the_puller_once():
    book = make_book()
    book.want(D0, want(A), 0.1)
    assert book.close(REQUEST, 1) == [Send(D0, Gone(REQUEST, 1))]
    assert book.close(REQUEST, 1) == []


def test_an_offer_lives_one_lease_from_its_last_renewal():
    book = make_book()
    book.renew(REQUEST, 1, 3.0)
    book.renew(REQUEST, 2, 7.0)
    assert book.expired(7.9) == []
    assert book.expired(8.0) == [(REQUEST, 1)]


def test_after_a_pause_everything_gets_the_time_of_one_more_beat():
    book = make_book()
    book.want(D0, Want(RequestId(b"s" * 16), 1, 1, ()), 0.0)
    book.grant_beat(60.0, 1.0)
    assert (book.expired(60.5), book.lapse(60.5)) == ([], [])
    assert book.expired(61.0) == [(REQUEST, 1)]
    assert len(book.lapse(61.0)) == 1


# ---- blocks in frames ------------------------------------------------------------------------------

C = HaveEntry(BlockHash(b"c" * 16), BlockId(99), 1, 9)


def credited(*entries: HaveEntry, credit: int, seq: int = 2) -> Want:
    return Want(REQUEST, 1, seq, tuple(entry.hash for entry in entries), credit)


def blocks(entry: HaveEntry, seq: int = 2) -> SendBlocks:
    return SendBlocks(D0, Blocks(REQUEST, 1, seq, (entry,)))


def test_what_a_credit_allows_is_sent_in_order_and_the_rest_when_there_is_more():
    book = make_book()
    book.seal(REQUEST, 1, [A, B, C])
    assert book.want(D0, credited(A, B, C, credit=2 * BLOCK_BYTES), 0.0) == [blocks(A), blocks(B)]
    assert book.fetch(D0, Fetch(REQUEST, 1, 2, 2 * BLOCK_BYTES)) == []
    assert book.fetch(D0, Fetch(REQUEST, 1, 2, 3 * BLOCK_BYTES)) == [blocks(C)]
    assert book.fetch(D0, Fetch(REQUEST, 1, 2, 3 * BLOCK_BYTES)) == []


def test_a_credit_is_a_standing_order_for_what_is_sealed_later():
    book = make_book()
    assert book.want(D0, credited(A, B, credit=9 * BLOCK_BYTES), 0.0) == []
    assert book.seal(REQUEST, 1, [A, C]) == [blocks(A)]
    assert book.seal(REQUEST, 1, [B]) == [blocks(B)]


def test_a_block_larger_than_the_credit_is_sent_alone():
    book = make_book()
    book.seal(REQUEST, 1, [A, B])
    assert book.want(D0, credited(A, B, credit=1), 0.0) == [blocks(A)]


def test_the_same_want_twice_sends_its_blocks_once_and_a_new_one_again():
    book = make_book()
    book.seal(REQUEST, 1, [A])
    book.finish(REQUEST, 1, END)
    want_a = credited(A, credit=BLOCK_BYTES)
    assert book.want(D0, want_a, 0.0) == [blocks(A), Send(D0, END)]
    assert book.want(D0, want_a, 0.0) == [Send(D0, END)]
    again = credited(A, credit=BLOCK_BYTES, seq=3)
    assert book.want(D0, again, 0.0) == [blocks(A, seq=3), Send(D0, END)]


def test_credit_for_an_earlier_want_or_from_somebody_else_is_not_given():
    book = make_book()
    book.seal(REQUEST, 1, [A, B])
    book.want(D0, credited(A, B, credit=BLOCK_BYTES), 0.0)
    assert book.fetch(D0, Fetch(REQUEST, 1, 1, 9 * BLOCK_BYTES)) == []
    assert book.fetch(NodeId("D1"), Fetch(REQUEST, 1, 2, 9 * BLOCK_BYTES)) == []


def test_credit_for_what_has_ended_is_answered_with_gone():
    book = make_book()
    book.close(REQUEST, 1)
    assert book.fetch(D0, Fetch(REQUEST, 1, 2, BLOCK_BYTES)) == [Send(D0, Gone(REQUEST, 1))]
