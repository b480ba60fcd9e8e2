"""The offers of a prefill node: what a Want is answered, what is kept, and for how long."""

from pdserve.cluster.messages import End, Gone, Have, HaveEntry, Send, Want
from pdserve.core.ids import BlockHash, BlockId, NodeId, RequestId
from pdserve.kvtransfer.offer import MAX_PARKED_WANTS, OfferBook

REQUEST = RequestId(b"r" * 16)
D0 = NodeId("D0")
A, B = (HaveEntry(BlockHash(name * 16), BlockId(name[0]), 1, 9) for name in (b"a", b"b"))
END = End(REQUEST, 1, 8, 0, 5)


def want(*entries: HaveEntry, seq: int = 1, attempt: int = 1) -> Want:
    return Want(REQUEST, attempt, seq, tuple(entry.hash for entry in entries))


def have(*entries: HaveEntry, seq: int = 1) -> Send:
    return Send(D0, Have(REQUEST, 1, seq, entries))


def make_book(attempt: int = 1) -> OfferBook:
    book = OfferBook()
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
    book = OfferBook()
    assert book.want(D0, want(A), 0.0) == []
    book.open(REQUEST, 1, 1.0)
    assert book.seal(REQUEST, 1, [A]) == [have(A)]


def test_a_want_for_what_never_comes_is_given_up_one_lease_after_it_was_first_heard():
    book = OfferBook()
    book.want(D0, want(A), 0.0)
    book.want(D0, want(A, seq=2), 4.9)
    assert book.lapse(4.9) == []
    assert book.lapse(5.0) == [Send(D0, Gone(REQUEST, 1))]
    assert book.lapse(6.0) == []


def test_wants_for_unknown_requests_are_bounded():
    book = OfferBook()
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
