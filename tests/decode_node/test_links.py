"""What a decode node tells the router when a prefill node comes or goes."""

from pdserve.cluster.events import LinkLost, LinkUp, Received
from pdserve.cluster.messages import NO_BEAT, Decode, Failed, Held, Link, Peer, Sample, Send, Want
from pdserve.core.block_hash import BlockHasher, pack_token_ids
from pdserve.core.ids import Epoch, NodeId, new_request_id
from pdserve.core.sampling import SamplingParams
from pdserve.decode_node.chunk_budget import ChunkBudget
from pdserve.decode_node.scheduler import DecodeScheduler, Limits
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.step_cost import StepCost

ROUTER, P0, P1 = NodeId("router"), NodeId("P0"), NodeId("P1")
HASHER = BlockHasher(b"fingerprint", 32)


def make_scheduler() -> DecodeScheduler:
    return DecodeScheduler(
        ROUTER, BlockPool(8), HASHER, budget=ChunkBudget(64, StepCost()), limits=Limits(8), block_bytes=4096
    )


def make_decode(source: NodeId) -> Decode:
    tokens = list(range(40))
    return Decode(
        new_request_id(),
        1,
        pack_token_ids(tokens),
        (Sample(0),),
        tuple(HASHER.hashes(tokens)),
        SamplingParams(max_tokens=4),
        source=Peer(source, Epoch.new(), "ipc:///nowhere"),
    )


def told_links(action: object) -> tuple[NodeId, ...]:
    """The links that an action tells the router of, outside any beat."""
    assert isinstance(action, Send)
    assert isinstance(action.message, Held)
    assert (action.peer, action.message.beat, action.message.entries) == (ROUTER, NO_BEAT, ())
    return tuple(link.node for link in action.message.links)


def test_the_router_hears_of_each_link_at_once():
    scheduler = make_scheduler()
    assert [told_links(action) for action in scheduler.handle(LinkUp(Link(P1)), 0.0)] == [(P1,)]
    assert [told_links(action) for action in scheduler.handle(LinkUp(Link(P0)), 0.0)] == [(P1, P0)]
    assert [told_links(action) for action in scheduler.handle(LinkLost(P1), 0.1)] == [(P0,)]


def test_the_router_hears_of_a_lost_link_before_it_hears_of_what_failed_with_it():
    scheduler = make_scheduler()
    scheduler.handle(LinkUp(Link(P0)), 0.0)
    decode = make_decode(P0)
    sent = scheduler.handle(Received(ROUTER, decode), 0.0)
    assert [type(action.message) for action in sent] == [Want]
    lost = scheduler.handle(LinkLost(P0), 0.1)
    assert told_links(lost[0]) == ()
    failed = [action.message for action in lost[1:] if isinstance(action.message, Failed)]
    assert [(message.request, message.attempt) for message in failed] == [(decode.request, 1)]
