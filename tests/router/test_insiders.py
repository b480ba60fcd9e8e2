"""What a node says that makes no sense: at worst it costs the request an attempt, never the router."""

import pytest

from pdserve.cluster.events import Received
from pdserve.cluster.messages import Capacity, Drawn, FirstToken, Prefill, Returned, Role
from pdserve.core.ids import Epoch, NodeId, new_request_id
from pdserve.core.logprobs import Logprobs, TokenLogprob
from pdserve.core.sampling import SamplingParams
from pdserve.router.events import Deliver, NodeJoined, Submit
from pdserve.router.ledger import Times
from pdserve.router.record import Record
from tests.router.test_dispatcher import HASHER, make_dispatcher, sent, submit


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_what_comes_back_from_a_node_that_it_was_not_given_to_goes_on(max_tokens: int):
    dispatcher = make_dispatcher("P0", decodes=("D0", "D1"))
    request, _ = submit(dispatcher, max_tokens=max_tokens)
    for name in ("P0", "D1"):
        assert dispatcher.handle(Received(NodeId(name), Returned(request, 1, 1)), 1.0) == []
    record = dispatcher.find(request)
    assert record is not None
    assert (record.attempt, record.num_yields) == (1, 0)
    dispatcher.check()


def test_what_has_yielded_is_never_taken_to_have_yielded_less_often():
    dispatcher = make_dispatcher("P0")
    request, _ = submit(dispatcher)
    record = dispatcher.find(request)
    assert record is not None
    for num_yields in (3, 1):
        dispatcher.handle(Received(NodeId("D0"), Returned(request, record.attempt, num_yields)), 1.0)
    assert record.num_yields == 3


def test_a_first_token_further_on_than_the_stream_is_delivered_to_nobody():
    dispatcher = make_dispatcher("P0")
    request, _ = submit(dispatcher)
    message = FirstToken(request, 1, (Drawn(0, 3, 77),), 0, 0.0, 0.1)
    actions = dispatcher.handle(Received(NodeId("P0"), message), 1.0)
    assert not [action for action in actions if isinstance(action, Deliver)]


def scored(num_tokens: int) -> Logprobs:
    return Logprobs.pack(0, [[TokenLogprob(token, -1.0)] for token in range(num_tokens)])


@pytest.mark.parametrize("num_scored", [0, 8, 10])
def test_log_probabilities_of_more_or_fewer_tokens_than_the_prompt_has_cost_an_attempt(num_scored: int):
    dispatcher = make_dispatcher("P0")
    params = SamplingParams(max_tokens=8, prompt_logprobs=0)
    record = Record(new_request_id(), "r", list(range(10)), params, Times(0.0))
    dispatcher.handle(Submit(record), 0.0)

    def tell(attempt: int, num_scored: int) -> list:
        drawn, logprobs = (Drawn(0, 0, 5),), scored(num_scored)
        message = FirstToken(record.request, attempt, drawn, 0, 0.0, 0.1, prompt_logprobs=logprobs)
        return dispatcher.handle(Received(NodeId("P0"), message), 1.0)

    actions = tell(1, num_scored)
    assert [message.attempt for _, message in sent(actions, Prefill)] == [2]
    assert record.num_outputs == 0
    tell(2, 9)
    assert (record.num_outputs, len(record.prompt_logprobs)) == (1, 9)


def size_of(capacity: Capacity | None) -> tuple[int, int, int]:
    assert capacity is not None
    return capacity.num_blocks, capacity.max_running, capacity.block_size


def test_samples_are_refused_only_where_no_decode_node_can_begin_them():
    dispatcher = make_dispatcher("P0", decodes=())
    for name, num_blocks, max_running in (("D0", 100, 4), ("D1", 40, 16)):
        capacity = Capacity(num_blocks, 4, 4096, max_running, 64)
        dispatcher.handle(NodeJoined(NodeId(name), Role.DECODE, Epoch(1, 1), capacity, f"mem://{name}", HASHER), 0.0)
    assert size_of(dispatcher.nodes.widest(num_prompt=20, num_samples=16)) == (40, 16, 4)
    assert size_of(dispatcher.nodes.widest(num_prompt=200, num_samples=4)) == (100, 4, 4)
    assert size_of(dispatcher.nodes.widest(num_prompt=200, num_samples=16)) == (100, 4, 4)
