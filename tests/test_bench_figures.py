"""What the benchmarks of growth and of the router say about their measurements, and what mock nodes send."""

import numpy as np
import pytest

from benchmarks.growth import line
from benchmarks.mock_nodes import IDLE, MockNode, StepDue
from benchmarks.router import Clock, Reader, Run, describe
from pdserve.cluster.events import Received
from pdserve.cluster.messages import Begun, Cancel, Decode, Finish, Held, Live, Tokens
from pdserve.cluster.node_life import ROUTER
from pdserve.core.block_hash import pack_token_ids
from pdserve.core.ids import new_request_id
from pdserve.core.sampling import SamplingParams


def test_growth_names_the_largest_factor_of_a_doubling():
    assert line("rows", (1, 2, 4), [0.010, 0.015, 0.030]) == "| rows | 1 to 4 | 10.0 ms, 15.0 ms, 30.0 ms | 2.00 |"


def test_medians_of_runs_are_told():
    runs = [
        Run(np.full(1000, late_s), np.full(1000, 0.001), router_s, 10.0)
        for late_s, router_s in ((0.001, 0.02), (0.002, 0.03), (0.009, 0.50))
    ]
    told = describe("2 streams", runs)
    assert told.startswith("2 streams, 100 tokens/s: 30.0 us")
    assert "2.00 ms (p50) and 2.00 ms (p99" in told
    assert "sent 1.00 ms (p99) after" in told


def test_lateness_is_of_tokens_sent_while_it_was_measured():
    clock = Clock()
    clock.due[7], clock.sent[7] = [0.9, 1.9, 2.9], [1.0, 2.0, 3.0]
    clock.came[7] = [1.5, 2.25]
    late_s, node_late_s = clock.lateness(2.0, 4.0)
    assert late_s.tolist() == [0.25]
    assert node_late_s.tolist() == pytest.approx([0.1])


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_reader_counts_characters_however_the_stream_is_cut(size: int):
    came: list[float] = []
    reader = Reader(b"", came)
    data = b"".join(b'2a\r\ndata: {"choices":[{"index":0,"text":"%b"}]}\n\n\r\n' % text for text in (b"a", b"aaa", b""))
    for start in range(0, len(data), size):
        reader.data_received(data[start : start + size])
    assert len(came) == 4
    assert came == sorted(came)
    reader.connection_lost(None)
    assert reader.ended.done()


def decode(number: int, num_tokens: int) -> Decode:
    prompt = pack_token_ids([number] * 16)
    return Decode(new_request_id(), 1, prompt, (), (), SamplingParams(max_tokens=num_tokens), None)


def messages(node: MockNode, event) -> list:
    return [action.message for action in node.handle(event, 0.0)]


def test_a_mock_node_sends_one_token_of_each_stream_a_step_up_to_the_last():
    sent: list[tuple[int, int, float]] = []
    node = MockNode(5, lambda *token: sent.append(token))
    first, second = decode(0, 2), decode(1, 3)
    assert [messages(node, Received(ROUTER, each)) for each in (first, second)] == [[], []]
    *begun, tokens = messages(node, StepDue(0.5))
    assert [message.request for message in begun if isinstance(message, Begun)] == [first.request, second.request]
    assert [(run.first_index, run.token_ids, run.finish) for run in tokens.runs] == [(0, (5,), None)] * 2
    (tokens,) = messages(node, StepDue(0.6))
    assert [run.finish for run in tokens.runs] == [Finish.LENGTH, None]
    (held,) = messages(node, Received(ROUTER, Live(3, ())))
    assert isinstance(held, Held)
    assert [(entry.request, entry.next_index) for entry in held.entries] == [(second.request, 2)]
    messages(node, Received(ROUTER, Cancel(second.request, 1)))
    assert messages(node, StepDue(0.7)) == []
    assert sent == [(0, 0, 0.5), (1, 0, 0.5), (0, 1, 0.6), (1, 1, 0.6)]


def test_an_idle_stream_begins_and_stays():
    node = MockNode(5, lambda *token: None)
    messages(node, Received(ROUTER, decode(IDLE, 9)))
    assert isinstance(messages(node, StepDue(0.0))[-1], Tokens)
    assert messages(node, StepDue(0.1)) == []
    assert len(node.streams) == 1
