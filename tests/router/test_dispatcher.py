"""The dispatcher by itself: which node gets what, and that every index is delivered once."""

from dataclasses import replace

import pytest

from pdserve.cluster.events import Received, Tick
from pdserve.cluster.messages import (
    Cancel,
    Capacity,
    Decode,
    Drawn,
    Failed,
    Finish,
    FirstToken,
    Gauges,
    Held,
    HeldEntry,
    Link,
    Live,
    Peers,
    Prefill,
    Ready,
    Resume,
    Role,
    Send,
    Stage,
    TokenRun,
    Tokens,
)
from pdserve.core.batching import Batching
from pdserve.core.block_hash import BlockHasher, unpack_token_ids
from pdserve.core.cache_delta import BEGINNING, CacheDelta, CachePosition
from pdserve.core.chunk import Chunk
from pdserve.core.ids import Epoch, NodeId, RequestId, new_request_id
from pdserve.core.sampling import SamplingParams
from pdserve.core.turns import Policy
from pdserve.router import attempts as attempts_module
from pdserve.router.dispatcher import Dispatcher
from pdserve.router.events import ClientGone, Deliver, GiveUp, NodeJoined, NodeLost, Submit
from pdserve.router.ledger import Times
from pdserve.router.placement import Limits
from pdserve.router.record import Plan, Record
from pdserve.router.rules import Rules

HASHER = BlockHasher(b"f" * 32, 4)
GAUGES = Gauges(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0)
WITH_ROOM = replace(GAUGES, num_free=100)


def join(
    dispatcher: Dispatcher, name: str, role: Role, num_blocks: int = 100, epoch: int = 1, least_tokens: int = 0
) -> list:
    capacity = Capacity(num_blocks, 4, 4096, 16, 64, least_tokens)
    event = NodeJoined(NodeId(name), role, Epoch(epoch, epoch), capacity, f"mem://{name}", HASHER)
    return dispatcher.handle(event, 0.0)


def make_dispatcher(*prefills: str, decodes: tuple[str, ...] = ("D0",), **options: object) -> Dispatcher:
    dispatcher = Dispatcher(Rules(**{"cooperative": False, **options}))  # type: ignore[arg-type]
    for name in prefills:
        join(dispatcher, name, Role.PREFILL)
    for name in decodes:
        join(dispatcher, name, Role.DECODE)
        beat(dispatcher, name, GAUGES, *prefills)
    return dispatcher


def beat(
    dispatcher: Dispatcher,
    name: str,
    gauges: Gauges,
    *links: str,
    entries: tuple[HeldEntry, ...] = (),
    cache: CacheDelta | None = None,
) -> list:
    held = Held(0, entries, gauges, tuple(Link(NodeId(link)) for link in links), cache=cache)
    return dispatcher.handle(Received(NodeId(name), held), 0.0)


def submit(
    dispatcher: Dispatcher, num_tokens: int = 10, max_tokens: int = 8, priority: int = 0
) -> tuple[RequestId, list]:
    params = SamplingParams(max_tokens=max_tokens)
    record = Record(new_request_id(), "r", list(range(num_tokens)), params, Times(0.0), priority)
    return record.request, dispatcher.handle(Submit(record), 0.0)


def sent(actions: list, kind: type) -> list:
    return [(a.peer, a.message) for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def first_token(request: RequestId, token: int = 5, finish: Finish | None = None, attempt: int = 1) -> Received:
    return Received(NodeId("P0"), FirstToken(request, attempt, (Drawn(0, 0, token, finish),), 0, 0.0, 0.1))


def tokens(request: RequestId, first: int, *ids: int, finish: Finish | None = None, attempt: int = 1) -> Received:
    return Received(NodeId("D0"), Tokens((TokenRun(request, attempt, 0, first, ids, finish),)))


def test_prefill_and_decode_go_out_at_the_same_moment():
    dispatcher = make_dispatcher("P0")
    request, actions = submit(dispatcher)
    ((prefill_node, prefill),) = sent(actions, Prefill)
    ((decode_node, decode),) = sent(actions, Decode)
    assert (prefill_node, decode_node) == ("P0", "D0")
    assert prefill.hashes == decode.hashes == tuple(HASHER.hashes(list(range(10))))
    assert decode.source.node == "P0"
    assert dispatcher.find(request).plan is Plan.SPLIT


def test_the_prefill_node_with_fewer_queued_tokens_is_chosen():
    dispatcher = make_dispatcher("P0", "P1")
    submit(dispatcher, num_tokens=50)
    _, actions = submit(dispatcher)
    assert [peer for peer, _ in sent(actions, Prefill)] == ["P1"]


def test_a_prefill_node_is_given_eight_prompts_and_the_rest_waits_in_order():
    dispatcher = make_dispatcher("P0")
    requests = [submit(dispatcher)[0] for _ in range(10)]
    assert dispatcher.num_queued == 2
    actions = dispatcher.handle(first_token(requests[0]), 1.0)
    assert [message.request for _, message in sent(actions, Prefill)] == [requests[8]]


def busy(token_s: float = 0.001) -> Gauges:
    return replace(GAUGES, token_s=token_s)


def given(actions: list) -> list[RequestId]:
    return [message.request for _, message in sent(actions, Prefill)]


def test_a_node_is_given_prompts_until_they_are_a_second_of_work():
    dispatcher = make_dispatcher("P0")
    beat(dispatcher, "P0", busy())
    requests = [submit(dispatcher, num_tokens=380)[0] for _ in range(5)]
    assert dispatcher.num_queued == 2
    assert given(dispatcher.handle(first_token(requests[0]), 1.0)) == [requests[3]]


def test_an_idle_node_is_given_a_prompt_however_long_it_takes():
    dispatcher = make_dispatcher("P0", policy=Policy.FCFS)
    beat(dispatcher, "P0", busy(token_s=1.0))
    request, actions = submit(dispatcher, num_tokens=300)
    assert given(actions) == [request]
    assert given(submit(dispatcher)[1]) == []


@pytest.mark.parametrize(
    ("options", "goes"),
    [({}, True), ({"policy": Policy.FCFS}, False), ({"policy": Policy.FCFS, "ttft_slo_s": 2.0}, True)],
)
def test_a_node_that_computes_short_prompts_first_is_given_them_beside_a_long_one(options: dict, goes: bool):
    dispatcher = make_dispatcher("P0", **options)
    beat(dispatcher, "P0", busy(token_s=0.02))
    submit(dispatcher, num_tokens=300)
    short, actions = submit(dispatcher, num_tokens=20)
    assert given(actions) == ([short] if goes else [])
    assert given(submit(dispatcher, num_tokens=301)[1]) == []


def test_a_request_waits_for_the_node_where_it_is_soonest_and_those_behind_it_go_where_they_are():
    """The prefill node takes 0.3 s for each such prompt, the decode node as long as for six and a half of them."""
    dispatcher = make_dispatcher("P0", cooperative=True)
    beat(dispatcher, "P0", busy(token_s=0.01))
    beat(dispatcher, "D0", busy(token_s=0.065), "P0")
    first = [submit(dispatcher, num_tokens=30, max_tokens=2)[0] for _ in range(3)]
    assert {dispatcher.find(request).plan for request in first} == {Plan.SPLIT}
    plans = [dispatcher.find(submit(dispatcher, num_tokens=30, max_tokens=2)[0]).plan for _ in range(4)]
    assert plans == [Plan.SPLIT, None, None, Plan.LOCAL]


def test_beside_static_batches_no_decode_node_computes_prompts_for_others():
    dispatcher = Dispatcher(Rules(cooperative=True).under(Batching.STATIC))
    join(dispatcher, "P0", Role.PREFILL)
    join(dispatcher, "D0", Role.DECODE)
    beat(dispatcher, "P0", busy(token_s=0.01))
    beat(dispatcher, "D0", busy(token_s=0.011), "P0")
    plans = {dispatcher.find(submit(dispatcher, num_tokens=30, max_tokens=2)[0]).plan for _ in range(7)}
    assert plans == {Plan.SPLIT}


def test_a_request_of_higher_priority_is_given_to_a_node_before_those_that_wait():
    dispatcher = make_dispatcher("P0", limits=Limits(max_prompts=1))
    first, _ = submit(dispatcher)
    waits, _ = submit(dispatcher)
    urgent, _ = submit(dispatcher, num_tokens=90, priority=3)
    dispatcher.handle(first_token(first), 1.0)
    assert dispatcher.find(urgent).stage is Stage.PREFILL
    assert dispatcher.find(waits).stage is None


def test_the_promise_orders_the_queue_as_well():
    """The first in line would make one of the two behind it late."""
    dispatcher = make_dispatcher("P0", limits=Limits(max_prompts=1), ttft_slo_s=1.0)
    beat(dispatcher, "P0", busy(token_s=0.002))
    running, _ = submit(dispatcher, num_tokens=1)
    long, short, shorter = [submit(dispatcher, num_tokens=n)[0] for n in (300, 155, 150)]
    order = []
    for request in (running, short, shorter):
        order += given(dispatcher.handle(first_token(request), 0.2))
    assert order == [short, shorter, long]


def test_a_request_that_failed_goes_on_before_all_that_wait():
    dispatcher = make_dispatcher("P0", limits=Limits(max_prompts=1))
    failed, _ = submit(dispatcher, num_tokens=90)
    submit(dispatcher)
    assert given(dispatcher.handle(Received(NodeId("P0"), Failed(failed, 1, Stage.PREFILL, "broken")), 1.0)) == [failed]


def test_tokens_of_streams_make_nobody_look_for_places(monkeypatch: pytest.MonkeyPatch):
    dispatcher = make_dispatcher("P0")
    requests = [submit(dispatcher)[0] for _ in range(9)]
    dispatcher.handle(first_token(requests[0]), 1.0)
    submit(dispatcher)
    looked = []
    monkeypatch.setattr(attempts_module, "pick", lambda *args: looked.append(args))
    dispatcher.handle(tokens(requests[0], 1, 6), 1.1)
    assert looked == []
    dispatcher.handle(tokens(requests[0], 2, 6, finish=Finish.STOP), 1.2)
    assert looked != []


def test_every_index_is_delivered_once_whoever_sends_it():
    dispatcher = make_dispatcher("P0")
    request, _ = submit(dispatcher)
    actions = dispatcher.handle(first_token(request, 5), 1.0)
    actions += dispatcher.handle(tokens(request, 0, 5, 6), 1.1)
    actions += dispatcher.handle(first_token(request, 5), 1.2)
    actions += dispatcher.handle(tokens(request, 1, 6, 7), 1.3)
    assert [a.token_ids for a in actions if isinstance(a, Deliver)] == [(5,), (6,), (7,)]


def test_a_gap_asks_for_what_is_missing_and_delivers_nothing():
    dispatcher = make_dispatcher("P0")
    request, _ = submit(dispatcher)
    dispatcher.handle(first_token(request), 1.0)
    actions = dispatcher.handle(tokens(request, 3, 9), 1.1)
    assert actions == [Send(NodeId("D0"), Resume(request, 1, 0, 1))]


def test_a_finish_frees_both_nodes_and_forgets_the_request():
    dispatcher = make_dispatcher("P0")
    request, _ = submit(dispatcher)
    actions = dispatcher.handle(first_token(request, 5, Finish.STOP), 1.0)
    assert actions[0] == Deliver(request, 0, (5,), Finish.STOP, is_last=True)
    assert [peer for peer, _ in sent(actions, Cancel)] == ["P0", "D0"]
    assert dispatcher.num_records == 0


def test_one_token_never_involves_the_decode_node():
    dispatcher = make_dispatcher("P0")
    request, actions = submit(dispatcher, max_tokens=1)
    assert sent(actions, Decode) == []
    assert dispatcher.find(request).plan is Plan.PREFILL_ONLY


def test_a_lost_decode_node_costs_an_attempt_that_carries_what_was_streamed():
    dispatcher = make_dispatcher("P0", decodes=("D0", "D1"))
    request, actions = submit(dispatcher)
    dispatcher.handle(first_token(request, 5), 1.0)
    dispatcher.handle(tokens(request, 0, 5, 6), 1.1)
    actions = dispatcher.handle(NodeLost(NodeId("D0"), "gone"), 2.0)
    ((_, prefill),) = sent(actions, Prefill)
    ((decode_node, _),) = sent(actions, Decode)
    assert (decode_node, prefill.attempt) == ("D1", 2)
    assert unpack_token_ids(prefill.samples[0].outputs) == [5, 6]
    assert unpack_token_ids(prefill.prompt) == list(range(10))


def test_tokens_of_an_old_attempt_are_dropped_and_counted():
    dispatcher = make_dispatcher("P0", decodes=("D0", "D1"))
    request, _ = submit(dispatcher)
    dispatcher.handle(first_token(request), 1.0)
    dispatcher.handle(NodeLost(NodeId("D0"), "gone"), 2.0)
    join(dispatcher, "D0", Role.DECODE)
    assert dispatcher.handle(tokens(request, 1, 8), 2.1) == []
    assert dispatcher.num_stale == 1


def test_a_lost_prefill_node_matters_only_before_its_token():
    dispatcher = make_dispatcher("P0", "P1")
    request, _ = submit(dispatcher)
    dispatcher.handle(first_token(request), 1.0)
    dispatcher.handle(NodeLost(NodeId("P0"), "gone"), 2.0)
    assert dispatcher.find(request).attempt == 1


def test_after_the_last_attempt_the_request_is_given_up_naming_the_stage():
    dispatcher = make_dispatcher("P0", max_attempts=2)
    request, _ = submit(dispatcher)
    dispatcher.handle(Received(NodeId("P0"), Failed(request, 1, Stage.PREFILL, "broken")), 1.0)
    actions = dispatcher.handle(Received(NodeId("P0"), Failed(request, 2, Stage.PREFILL, "broken")), 2.0)
    (given_up,) = [a for a in actions if isinstance(a, GiveUp)]
    assert "prefill failed in 2 attempts: P0: broken" in given_up.reason
    assert dispatcher.num_records == 0


def test_what_a_node_holds_for_nobody_is_cancelled_without_waiting_for_its_lease():
    dispatcher = make_dispatcher("P0")
    request, _ = submit(dispatcher)
    stranger = new_request_id()
    older, current = HeldEntry(request, 0, Stage.PREFILL, 0), HeldEntry(request, 1, Stage.PREFILL, 0)
    held = Held(1, (HeldEntry(stranger, 7, Stage.DONE, 3), older, current), GAUGES, ())
    actions = dispatcher.handle(Received(NodeId("P0"), held), 0.5)
    assert sent(actions, Cancel) == [("P0", Cancel(stranger, 7)), ("P0", Cancel(request, 0))]


def test_a_prompt_whose_release_was_lost_is_cancelled_once_it_decodes():
    dispatcher = make_dispatcher("P0")
    request, _ = submit(dispatcher)
    dispatcher.handle(first_token(request), 0.1)
    held = Received(NodeId("P0"), Held(1, (HeldEntry(request, 1, Stage.HANDOFF, 0),), GAUGES, ()))
    assert sent(dispatcher.handle(held, 0.5), Cancel) == []
    dispatcher.handle(Received(NodeId("D0"), Ready(request, 1, 3, 300, 0, 0.0, 0.0)), 0.6)
    assert sent(dispatcher.handle(held, 1.0), Cancel) == [("P0", Cancel(request, 1))]
    decoding = Held(2, (HeldEntry(request, 1, Stage.DECODE, 1),), GAUGES, ())
    assert sent(dispatcher.handle(Received(NodeId("D0"), decoding), 1.0), Cancel) == []


def test_missing_in_two_beats_is_an_attempt_more_but_an_older_answer_is_not():
    dispatcher = make_dispatcher("P0")
    dispatcher.handle(Tick(), 0.5)
    request, _ = submit(dispatcher)
    empty = [Held(beat, (), GAUGES, ()) for beat in range(4)]
    dispatcher.handle(Received(NodeId("P0"), empty[1]), 0.6)
    dispatcher.handle(Received(NodeId("P0"), empty[1]), 0.7)
    assert dispatcher.find(request).attempt == 1
    dispatcher.handle(Received(NodeId("P0"), empty[2]), 1.1)
    assert dispatcher.find(request).attempt == 1
    dispatcher.handle(Received(NodeId("P0"), empty[3]), 1.6)
    assert dispatcher.find(request).failures == ["P0 does not know the request"]


def test_a_finished_request_whose_last_tokens_were_lost_is_resumed():
    dispatcher = make_dispatcher("P0")
    request, _ = submit(dispatcher)
    dispatcher.handle(first_token(request), 1.0)
    held = Held(1, (HeldEntry(request, 1, Stage.DONE, 8),), GAUGES, (Link(NodeId("P0")),))
    actions = dispatcher.handle(Received(NodeId("D0"), held), 2.0)
    assert actions == [Send(NodeId("D0"), Resume(request, 1, 0, 1))]


def test_live_names_the_prefill_node_only_until_everything_is_verified():
    dispatcher = make_dispatcher("P0")
    request, _ = submit(dispatcher)
    dispatcher.handle(first_token(request), 1.0)
    stages = {peer: [e.stage for e in live.entries] for peer, live in sent(dispatcher.handle(Tick(), 1.5), Live)}
    assert stages == {"P0": [Stage.HANDOFF], "D0": [Stage.HANDOFF]}
    dispatcher.handle(Received(NodeId("D0"), Ready(request, 1, 3, 300, 0, 0.0, 0.0)), 1.6)
    stages = {peer: [e.stage for e in live.entries] for peer, live in sent(dispatcher.handle(Tick(), 2.0), Live)}
    assert stages == {"P0": [], "D0": [Stage.DECODE]}


def test_a_cancelled_queued_request_never_starts():
    dispatcher = make_dispatcher("P0")
    requests = [submit(dispatcher)[0] for _ in range(9)]
    assert dispatcher.handle(ClientGone(requests[8]), 1.0) == []
    actions = dispatcher.handle(first_token(requests[0]), 1.1)
    assert sent(actions, Prefill) == []


def test_cancelling_twice_or_an_unknown_request_is_nothing():
    dispatcher = make_dispatcher("P0")
    request, _ = submit(dispatcher)
    assert len(sent(dispatcher.handle(ClientGone(request), 1.0), Cancel)) == 2
    assert dispatcher.handle(ClientGone(request), 1.1) == []
    assert dispatcher.handle(ClientGone(new_request_id()), 1.2) == []


def test_colocated_nodes_take_whole_requests():
    dispatcher = Dispatcher(Rules())
    join(dispatcher, "D0", Role.BOTH)
    assert dispatcher.nodes.readiness()[0]
    request, actions = submit(dispatcher)
    ((_, decode),) = sent(actions, Decode)
    assert decode.source is None
    assert dispatcher.find(request).plan is Plan.LOCAL


def test_readiness_names_what_is_missing():
    dispatcher = Dispatcher(Rules())
    assert dispatcher.nodes.readiness() == (False, "no node has joined")
    join(dispatcher, "P0", Role.PREFILL)
    assert dispatcher.nodes.readiness() == (False, "no decode node has joined")
    join(dispatcher, "D0", Role.DECODE)
    assert dispatcher.nodes.readiness() == (False, "no decode node is linked to a prefill node yet")
    dispatcher.handle(Received(NodeId("D0"), Held(0, (), GAUGES, (Link(NodeId("P0")),))), 0.0)
    assert dispatcher.nodes.readiness() == (True, "ready")


def test_requests_wait_for_an_absent_node_only_so_long():
    dispatcher = make_dispatcher("P0", recovery_grace_s=10.0)
    dispatcher.handle(NodeLost(NodeId("D0"), "gone"), 1.0)
    request, _ = submit(dispatcher)
    assert not [a for a in dispatcher.handle(Tick(), 2.0) if isinstance(a, GiveUp)]
    (given_up,) = [a for a in dispatcher.handle(Tick(), 12.0) if isinstance(a, GiveUp)]
    assert given_up == GiveUp(request, "no decode node has joined, after waiting 10 s (recovery_grace_s)")


def test_a_restarted_node_replaces_the_incarnation_that_died():
    dispatcher = make_dispatcher("P0")
    request, _ = submit(dispatcher)
    join(dispatcher, "P0", Role.PREFILL, epoch=2)
    assert dispatcher.find(request).failures == ["lost P0: another incarnation joined"]
    dispatcher.check()


def test_a_continued_stream_that_no_prefill_node_can_hold_any_more_is_computed_where_it_decodes():
    dispatcher = Dispatcher(Rules())
    join(dispatcher, "P0", Role.PREFILL, num_blocks=3)
    for name in ("D0", "D1"):
        join(dispatcher, name, Role.DECODE)
        dispatcher.handle(Received(NodeId(name), Held(0, (), GAUGES, (Link(NodeId("P0")),))), 0.0)
    request, _ = submit(dispatcher, num_tokens=12)
    dispatcher.handle(first_token(request), 1.0)
    actions = dispatcher.handle(NodeLost(NodeId("D0"), "gone"), 2.0)
    ((decode_node, decode),) = sent(actions, Decode)
    assert (decode_node, decode.source) == ("D1", None)


def test_a_request_that_waits_for_a_busy_node_is_never_given_up():
    dispatcher = make_dispatcher("P0", recovery_grace_s=10.0)
    for _ in range(9):
        submit(dispatcher)
    dispatcher.handle(NodeLost(NodeId("P0"), "gone"), 1.0)
    assert dispatcher.num_queued == 1
    for now in (2.0, 60.0):
        assert not [a for a in dispatcher.handle(Tick(), now) if isinstance(a, GiveUp)]


def test_a_pair_that_failed_is_tried_again_when_its_link_is_confirmed():
    dispatcher = make_dispatcher("P0", max_attempts=2)
    request, _ = submit(dispatcher)
    failed = Failed(request, 1, Stage.HANDOFF, "no link to P0")
    assert sent(dispatcher.handle(Received(NodeId("D0"), failed), 1.0), Decode) == []
    held = Held(0, (), GAUGES, (Link(NodeId("P0")),))
    ((_, decode),) = sent(dispatcher.handle(Received(NodeId("D0"), held), 1.5), Decode)
    assert decode.attempt == 2


def test_a_prefill_node_that_came_back_is_used_when_a_decode_node_has_linked_to_it():
    dispatcher = make_dispatcher("P0")
    dispatcher.handle(NodeLost(NodeId("P0"), "silent"), 1.0)
    join(dispatcher, "P0", Role.PREFILL)
    assert sent(submit(dispatcher)[1], Decode) == []


def test_a_decode_node_that_lacks_a_link_is_told_of_the_prefill_nodes_again():
    dispatcher = make_dispatcher("P0")
    linked, alone = (Held(1, (), GAUGES, links) for links in ((Link(NodeId("P0")),), ()))
    assert dispatcher.handle(Received(NodeId("D0"), linked), 1.0) == []
    ((node, peers),) = sent(dispatcher.handle(Received(NodeId("D0"), alone), 1.5), Peers)
    assert (node, [peer.node for peer in peers.prefill]) == ("D0", ["P0"])


def test_ready_counts_its_bytes_once_an_attempt_and_its_time_once():
    dispatcher = make_dispatcher("P0", decodes=("D0", "D1"))
    request, _ = submit(dispatcher)
    dispatcher.handle(first_token(request), 1.0)
    for now in (1.5, 1.6):
        dispatcher.handle(Received(NodeId("D0"), Ready(request, 1, 3, 300, 8, 0.1, 0.2)), now)
    dispatcher.handle(NodeLost(NodeId("D0"), "gone"), 9.0)
    dispatcher.handle(Received(NodeId("D1"), Ready(request, 2, 1, 100, 12, 0.0, 0.0)), 10.0)
    record = dispatcher.find(request)
    assert record.bytes_moved == 400
    assert record.exposed_transfer_s == 0.5
    assert (record.reserve_s, record.copy_s) == (0.1, 0.2)


@pytest.mark.parametrize("token_comes_first", [False, True])
def test_the_prefill_node_is_heard_when_the_decode_node_was_faster(token_comes_first: bool):
    dispatcher = make_dispatcher("P0")
    request, _ = submit(dispatcher)
    dispatcher.handle(Received(NodeId("D0"), Ready(request, 1, 3, 300, 0, 0.0, 0.0)), 1.0)
    if token_comes_first:
        dispatcher.handle(tokens(request, 0, 5, 6), 1.0)
    chunks = (Chunk(10, 0.25, 0.5),)
    word = FirstToken(request, 1, (Drawn(0, 0, 5),), 8, queue_s=0.25, prefill_s=0.5, chunks=chunks)
    dispatcher.handle(Received(NodeId("P0"), word), 1.5)
    record = dispatcher.find(request)
    assert record.stage is Stage.DECODE
    ledger = record.ledger()
    assert (ledger["prefill_queue_s"], ledger["chunks"], ledger["cached_tokens"]) == (0.25, [[10, 0.25, 0.5]], 8)
    assert (ledger["first_token"]["prefill_queue_s"], ledger["first_token"]["chunks_s"]) == (0.25, 0.5)


def test_the_ledger_keeps_the_times_of_the_token_that_was_the_first():
    dispatcher = make_dispatcher("P0", decodes=("D0", "D1"))
    request, _ = submit(dispatcher)
    dispatcher.handle(first_token(request), 1.0)
    dispatcher.handle(NodeLost(NodeId("D0"), "gone"), 2.0)
    again = FirstToken(request, 2, (Drawn(0, 1, 6),), 11, 5.0, 7.0)
    dispatcher.handle(Received(NodeId("P0"), again), 3.0)
    record = dispatcher.find(request)
    assert (record.prefill_queue_s, record.prefill_s) == (0.0, 0.1)
    assert record.num_cached_tokens <= len(record.prompt)


def test_the_promise_travels_as_what_is_left_of_it_until_the_first_token():
    dispatcher = make_dispatcher("P0", decodes=("D0", "D1"), ttft_slo_s=2.0)
    record = Record(new_request_id(), "r", list(range(10)), SamplingParams(max_tokens=8), Times(5.0))
    actions = dispatcher.handle(Submit(record), 5.5)
    assert [message.deadline_s for _, message in sent(actions, Prefill) + sent(actions, Decode)] == [1.5, 1.5]
    dispatcher.handle(first_token(record.request), 6.0)
    actions = dispatcher.handle(NodeLost(NodeId("D0"), "gone"), 6.5)
    assert [message.deadline_s for _, message in sent(actions, Prefill)] == [None]


def overdue(actions: list) -> dict[NodeId, list[bool]]:
    return {peer: [entry.is_overdue for entry in live.entries] for peer, live in sent(actions, Live)}


def test_a_hand_off_that_is_late_goes_on_at_another_decode_node_with_room_from_the_same_source():
    dispatcher = make_dispatcher("P0", "P1", decodes=("D0", "D1"))
    beat(dispatcher, "D1", WITH_ROOM, "P0", "P1")
    request, _ = submit(dispatcher)
    dispatcher.handle(first_token(request), 1.0)
    assert sent(dispatcher.handle(Tick(), 2.9), Decode) == []
    actions = dispatcher.handle(Tick(), 3.0)
    ((prefill_node, prefill),) = sent(actions, Prefill)
    ((decode_node, decode),) = sent(actions, Decode)
    assert (prefill_node, decode_node, decode.source.node) == ("P0", "D1", "P0")
    assert (prefill.attempt, unpack_token_ids(prefill.samples[0].outputs)) == (2, [5])
    # The next attempt ends this one on the prefill node, whose blocks it finds again.
    assert sent(actions, Cancel) == [("D0", Cancel(request, 1))]
    dispatcher.check()


def test_a_late_hand_off_goes_to_no_node_twice_and_costs_none_of_the_attempts_for_failures():
    dispatcher = make_dispatcher("P0", decodes=("D0", "D1"), max_attempts=2)
    for name in ("D0", "D1"):
        beat(dispatcher, name, WITH_ROOM, "P0")
    request, _ = submit(dispatcher)
    dispatcher.handle(first_token(request), 1.0)
    dispatcher.handle(Tick(), 3.0)
    dispatcher.handle(Received(NodeId("P0"), FirstToken(request, 2, (Drawn(0, 1, 6),), 0, 0.0, 0.1)), 3.1)
    actions = dispatcher.handle(Tick(), 5.2)
    assert sent(actions, Decode) == []
    assert overdue(actions)["D1"] == [True]
    actions = dispatcher.handle(NodeLost(NodeId("D1"), "gone"), 5.3)
    assert [peer for peer, _ in sent(actions, Decode)] == ["D0"]
    assert [a for a in actions if isinstance(a, GiveUp)] == []


def test_where_no_other_decode_node_has_room_each_beat_says_that_the_request_is_overdue_until_it_has_its_blocks():
    dispatcher = make_dispatcher("P0", decodes=("D0", "D1"))
    request, _ = submit(dispatcher)
    dispatcher.handle(first_token(request), 1.0)
    seen = [overdue(dispatcher.handle(Tick(), now))["D0"] for now in (2.5, 3.0, 3.5)]
    dispatcher.handle(Received(NodeId("D0"), Ready(request, 1, 3, 300, 0, 0.0, 0.0)), 3.6)
    assert [*seen, overdue(dispatcher.handle(Tick(), 4.0))["D0"]] == [[False], [True], [True], [False]]


def test_room_that_is_promised_to_requests_on_their_way_is_not_promised_twice():
    dispatcher = make_dispatcher("P0", decodes=("D0", "D1"))
    requests = [submit(dispatcher)[0] for _ in range(4)]
    room = (11 + 4) + 2 * 11  # tokens so far and a block to grow into, beside the two that D1 was given
    beat(dispatcher, "D1", replace(GAUGES, num_free=-(-room // 4)), "P0")
    for request in requests:
        dispatcher.handle(first_token(request), 1.0)
    moved = sent(dispatcher.handle(Tick(), 3.0), Decode)
    assert [(peer, decode.request) for peer, decode in moved] == [("D1", requests[0])]


def test_room_is_promised_to_as_many_tokens_as_a_node_gives_blocks_for_at_once():
    dispatcher = make_dispatcher("P0", decodes=("D0",))
    requests = [submit(dispatcher)[0] for _ in range(2)]
    join(dispatcher, "D1", Role.DECODE, least_tokens=64)
    beat(dispatcher, "D1", replace(GAUGES, num_free=100 // 4), "P0")
    for request in requests:
        dispatcher.handle(first_token(request), 1.0)
    moved = sent(dispatcher.handle(Tick(), 3.0), Decode)
    assert [(peer, decode.request) for peer, decode in moved] == [("D1", requests[0])]


def test_a_late_hand_off_whose_source_is_gone_is_computed_by_any_other():
    dispatcher = make_dispatcher("P0", "P1", decodes=("D0", "D1"))
    beat(dispatcher, "D1", WITH_ROOM, "P0", "P1")
    request, _ = submit(dispatcher)
    dispatcher.handle(first_token(request), 1.0)
    dispatcher.handle(NodeLost(NodeId("P0"), "gone"), 1.5)
    beat(dispatcher, "D1", WITH_ROOM, "P1")
    ((_, decode),) = sent(dispatcher.handle(Tick(), 3.0), Decode)
    assert decode.source.node == "P1"


def test_a_late_hand_off_with_one_token_left_is_ended_by_the_node_that_has_its_blocks():
    dispatcher = make_dispatcher("P0")
    request, _ = submit(dispatcher, max_tokens=2)
    dispatcher.handle(first_token(request), 1.0)
    actions = dispatcher.handle(Tick(), 3.0)
    assert [peer for peer, _ in sent(actions, Prefill)] == ["P0"]
    assert [peer for peer, _ in sent(actions, Cancel)] == ["D0"]


def test_a_decode_node_that_says_it_decodes_has_its_blocks_though_its_ready_was_lost():
    dispatcher = make_dispatcher("P0", decodes=("D0", "D1"))
    beat(dispatcher, "D1", WITH_ROOM, "P0")
    request, _ = submit(dispatcher)
    dispatcher.handle(first_token(request), 1.0)
    beat(dispatcher, "D0", GAUGES, "P0", entries=(HeldEntry(request, 1, Stage.DECODE, 1),))
    assert sent(dispatcher.handle(Tick(), 9.0), Decode) == []


# ---- what nodes have cached --------------------------------------------------------------------------


def positions(actions: list) -> dict[NodeId, CachePosition]:
    return {peer: live.cache for peer, live in sent(actions, Live)}


def test_each_beat_tells_a_node_how_far_its_index_has_been_followed():
    dispatcher = make_dispatcher("P0")
    assert positions(dispatcher.handle(Tick(), 0.5)) == {"P0": BEGINNING, "D0": BEGINNING}
    beat(dispatcher, "P0", GAUGES, cache=CacheDelta(0, 0, 7, tuple(HASHER.hashes([1, 2, 3, 4])), ()))
    beat(dispatcher, "P0", GAUGES)
    assert positions(dispatcher.handle(Tick(), 1.0)) == {"P0": CachePosition(0, 7), "D0": BEGINNING}


def test_what_a_node_had_cached_is_forgotten_with_its_incarnation():
    dispatcher = make_dispatcher("P0")
    beat(dispatcher, "P0", GAUGES, cache=CacheDelta(0, 0, 7, tuple(HASHER.hashes([1, 2, 3, 4])), ()))
    join(dispatcher, "P0", Role.PREFILL, epoch=2)
    assert positions(dispatcher.handle(Tick(), 1.0))["P0"] == BEGINNING
    assert len(dispatcher.nodes[NodeId("P0")].cache) == 0


def test_in_a_nodes_line_a_prompt_counts_by_what_the_node_has_not_cached():
    dispatcher = make_dispatcher("P0")
    cached = tuple(HASHER.hashes(list(range(8))))
    beat(dispatcher, "P0", GAUGES, cache=CacheDelta(0, 0, 2, cached, ()))
    submit(dispatcher, num_tokens=10)
    assert dispatcher.nodes[NodeId("P0")].num_prompt_tokens == 2


def test_an_attempt_is_placed_by_where_its_outputs_are_cached_too():
    dispatcher = make_dispatcher("P0", "P1", decodes=("D0", "D1"))
    request, _ = submit(dispatcher, num_tokens=10)
    dispatcher.handle(first_token(request, 5), 1.0)
    dispatcher.handle(tokens(request, 1, 6), 1.1)
    cached = tuple(HASHER.hashes([*range(10), 5, 6]))
    beat(dispatcher, "P1", replace(GAUGES, token_s=0.001), cache=CacheDelta(0, 0, 3, cached, ()))
    beat(dispatcher, "P0", replace(GAUGES, token_s=0.001))
    actions = dispatcher.handle(NodeLost(NodeId("D0"), "killed"), 2.0)
    ((peer, message),) = sent(actions, Prefill)
    assert (peer, message.hashes) == ("P1", cached)
