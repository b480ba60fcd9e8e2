"""Both sides of a handshake: who is let in, whose frames count, and what a restart does."""

from dataclasses import dataclass, field, replace

import pytest

from pdserve.cluster.codec import Envelope
from pdserve.cluster.endpoint import LinkId
from pdserve.cluster.membership import Acquaintance, Dialled, Doorway, Liveness, disagreement
from pdserve.cluster.messages import Capacity, Facts, Gone, Hello, Message, Refused, Role, Welcome, WrongEpoch
from pdserve.core.ids import NO_EPOCH, Epoch, NodeId, RequestId

OURS, OLD, NEW = Epoch(5, 5), Epoch(6, 6), Epoch(7, 7)
LINK, OTHER_LINK = LinkId(1), LinkId(2)
FACTS = Facts("model", "tokenizer", "spec", b"kv", "float32", ("float32",))
P0 = NodeId("P0")
HELLO = Hello(P0, Role.PREFILL, FACTS, Capacity(10, 4, 100, 8, 64), "mem://P0")
GONE = Gone(RequestId(b"r" * 16), 1)
WELCOME = Welcome(NodeId("router"))


@dataclass
class Outbox:
    """What was sent: (link, message, addressee)."""

    sent: list[tuple[LinkId, Message, Epoch]] = field(default_factory=list)

    def send(self, link: LinkId, message: Message, addressee: Epoch) -> bool:
        self.sent.append((link, message, addressee))
        return True

    def take(self) -> list[Message]:
        messages = [message for _, message, _ in self.sent]
        self.sent.clear()
        return messages


def judge(hello: Hello) -> Refused | None:
    return disagreement(FACTS, hello.facts)


def make_doorway() -> tuple[Doorway, Outbox]:
    outbox = Outbox()
    return Doorway(OURS, outbox, judge, lambda: WELCOME), outbox


def hello(doorway: Doorway, link: LinkId = LINK, sender: Epoch = OLD, message: Hello = HELLO) -> tuple:
    return doorway.hello(link, Envelope(sender, NO_EPOCH, message), message)


def make_dialled(expected: Epoch | None = None) -> tuple[Dialled, Outbox]:
    outbox = Outbox()
    return Dialled(LINK, outbox, OURS, HELLO, expected), outbox


def accept(dialled: Dialled, message: Message, sender: Epoch = OLD, now: float = 0.0) -> Message | None:
    return dialled.accept(Envelope(sender, OURS, message), now)


# ---- the facts ---------------------------------------------------------------------------------------


def test_the_first_fact_that_differs_is_named():
    refused = disagreement(FACTS, replace(FACTS, kv_spec="other", kv_fingerprint=b"other"))
    assert refused is not None
    assert refused.field == "kv_spec"


@pytest.mark.parametrize(("field", "value"), [("batching", "static"), ("prefix_cache", "off")])
def test_who_goes_by_another_setting_is_refused_by_its_name(field: str, value: str):
    ours = replace(FACTS, batching="continuous", prefix_cache="on")
    assert disagreement(ours, replace(ours, **{field: value})).field == field
    assert disagreement(ours, FACTS) is None


def test_a_fact_that_one_side_does_not_hold_separates_nobody():
    assert disagreement(replace(FACTS, kv_spec="", kv_fingerprint=b""), FACTS) is None


def test_how_they_compute_must_be_accepted_by_both():
    assert disagreement(FACTS, replace(FACTS, compute="bfloat16")).field == "compute"
    assert disagreement(FACTS, replace(FACTS, accept_compute=("bfloat16",))).field == "compute"


BF16, INT4 = "bfloat16", "bfloat16, int4 weights"


@pytest.mark.parametrize(
    ("computes", "accepts"),
    [(BF16, (BF16,)), (BF16, (INT4, BF16)), ("bfloat16, int8 compute", (INT4, BF16, "bfloat16, int8 compute"))],
)
def test_who_takes_kv_of_other_numbers_knowingly_takes_it(computes: str, accepts: tuple[str, ...]):
    prefill = replace(FACTS, compute=computes, accept_compute=())
    decode = replace(FACTS, compute=accepts[0], accept_compute=accepts)
    assert disagreement(prefill, decode) is None
    assert disagreement(decode, prefill) is None


@pytest.mark.parametrize("computes", [BF16, "float32", "bfloat16, int8 compute"])
def test_kv_of_other_numbers_is_refused_with_both_and_the_knob(computes: str):
    prefill = replace(FACTS, compute=computes, accept_compute=())
    decode = replace(FACTS, compute=INT4, accept_compute=(INT4,))
    for refused in (disagreement(prefill, decode), disagreement(decode, prefill)):
        assert refused.field == "compute"
        assert all(word in refused.reason for word in (computes, INT4, "--accept-compute"))


# ---- the accepting side ------------------------------------------------------------------------------


def test_who_said_hello_is_welcome_and_its_frames_count():
    doorway, outbox = make_doorway()
    admitted, before = hello(doorway)
    assert (admitted.node, before) == (P0, None)
    assert outbox.take() == [WELCOME]
    assert doorway.sender(LINK, Envelope(OLD, OURS, GONE)) == P0


def test_a_repeated_hello_is_answered_and_admits_nobody_anew():
    doorway, outbox = make_doorway()
    hello(doorway)
    assert hello(doorway) == (None, None)
    assert outbox.take() == [WELCOME, WELCOME]


def test_a_stranger_is_told_our_epoch_and_is_nobody():
    doorway, outbox = make_doorway()
    assert doorway.sender(LINK, Envelope(OLD, OURS, GONE)) is None
    assert outbox.take() == [WrongEpoch(OURS)]


def test_frames_for_an_incarnation_before_ours_do_not_count():
    doorway, _ = make_doorway()
    hello(doorway)
    assert doorway.sender(LINK, Envelope(OLD, Epoch(1, 1), GONE)) is None
    assert doorway.num_stale == 1


def test_who_does_not_fit_is_refused_by_name_and_not_let_in(caplog):
    doorway, outbox = make_doorway()
    assert hello(doorway, message=replace(HELLO, facts=replace(FACTS, checkpoint="other"))) == (None, None)
    (refused,) = outbox.take()
    assert refused.field == "checkpoint"
    assert "is refused: checkpoint: " in caplog.text
    assert doorway.members == {}


def test_a_new_incarnation_replaces_the_old_one_and_no_old_frame_counts():
    doorway, _ = make_doorway()
    old, _ = hello(doorway)
    new, before = hello(doorway, OTHER_LINK, NEW)
    assert (before, new.epoch) == (old, NEW)
    assert doorway.sender(LINK, Envelope(OLD, OURS, GONE)) is None
    assert doorway.lost(LINK) is None
    assert hello(doorway, LINK, OLD) == (None, None)
    assert doorway.members[P0] == new


def test_one_link_is_one_node():
    doorway, _ = make_doorway()
    hello(doorway)
    for i in range(5):
        assert hello(doorway, message=replace(HELLO, node=NodeId(f"other{i}"))) == (None, None)
    assert list(doorway.members) == [P0]
    assert doorway.lost(LINK) == P0
    assert doorway.members == {}


def test_nothing_is_sent_to_who_is_not_here():
    doorway, outbox = make_doorway()
    assert not doorway.send(P0, GONE)
    hello(doorway)
    outbox.take()
    assert doorway.send(P0, GONE)
    doorway.drop(P0)
    assert not doorway.send(P0, GONE)
    assert outbox.sent == [(LINK, GONE, OLD)]


# ---- the dialling side -------------------------------------------------------------------------------


def test_hello_is_repeated_each_beat_until_the_welcome():
    dialled, outbox = make_dialled()
    for now in (0.0, 0.5):
        dialled.beat(now, 3.0)
    assert outbox.take() == [HELLO, HELLO]
    assert accept(dialled, WELCOME) == WELCOME
    assert accept(dialled, WELCOME) is None
    dialled.beat(1.0, 3.0)
    assert outbox.take() == []


def test_only_the_incarnation_that_was_announced_is_taken():
    dialled, _ = make_dialled(expected=NEW)
    assert accept(dialled, WELCOME, OLD) is None
    assert accept(dialled, WELCOME, NEW) == WELCOME
    assert accept(dialled, GONE, OLD) is None
    assert accept(dialled, GONE, NEW) == GONE


def test_silence_makes_a_peer_unknown_again():
    dialled, outbox = make_dialled()
    accept(dialled, WELCOME, now=1.0)
    assert not dialled.beat(4.0, 3.0)
    assert dialled.beat(4.1, 3.0)
    assert outbox.take() == [HELLO]
    assert not dialled.send(GONE)


def test_a_peer_that_restarted_is_greeted_at_once_and_then_only_at_each_beat():
    """Every answer to a Hello for the wrong incarnation would else be answered by a Hello."""
    dialled, outbox = make_dialled(expected=OLD)
    accept(dialled, WELCOME, OLD)
    for _ in range(3):
        accept(dialled, WrongEpoch(NEW), NEW)
    assert outbox.take() == [HELLO]
    assert dialled.state is Acquaintance.UNKNOWN


def test_who_has_given_us_up_meanwhile_is_greeted_at_once_and_not_after_a_silence():
    dialled, outbox = make_dialled(expected=OLD)
    accept(dialled, WELCOME, OLD)
    for _ in range(3):
        accept(dialled, WrongEpoch(OLD), OLD)
    assert outbox.take() == [HELLO]
    assert accept(dialled, WELCOME, OLD) == WELCOME


def test_a_refusal_is_for_good():
    dialled, outbox = make_dialled()
    accept(dialled, Refused("checkpoint", "another"))
    accept(dialled, WrongEpoch(NEW), NEW)
    dialled.beat(9.0, 3.0)
    assert accept(dialled, WELCOME) is None
    assert outbox.take() == []
    assert dialled.state is Acquaintance.REFUSED


def test_a_broken_connection_is_greeted_again_on_its_new_link():
    dialled, outbox = make_dialled()
    accept(dialled, WELCOME)
    assert dialled.lost()
    assert not dialled.lost()
    dialled.redialled(OTHER_LINK)
    dialled.greet()
    assert outbox.sent == [(OTHER_LINK, HELLO, NO_EPOCH)]


# ---- silence -----------------------------------------------------------------------------------------


def test_who_is_not_heard_for_too_long_is_silent():
    liveness = Liveness(beat_s=0.5, silence_s=3.0)
    liveness.hear(P0, 0.0)
    liveness.hear(NodeId("D0"), 2.0)
    for now in (0.5, 1.5, 2.5, 3.0):
        assert liveness.silent(now) == []
    assert liveness.silent(3.5) == [(P0, 3.5)]
    liveness.forget(P0)
    assert liveness.silent(4.0) == []


def test_nobody_is_silent_because_we_were_held_up_ourselves():
    liveness = Liveness(beat_s=0.5, silence_s=3.0)
    liveness.hear(P0, 0.0)
    assert liveness.silent(0.5) == []
    assert liveness.silent(60.0) == []
    for beat in range(6):
        assert liveness.silent(60.5 + 0.5 * beat) == []
    assert liveness.silent(63.5) == [(P0, 3.5)]


def test_forgetting_who_was_never_heard_is_nothing():
    Liveness(0.5, 3.0).forget(P0)
