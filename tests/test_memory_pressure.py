"""A pool that holds half of the streams: they take turns, and nothing of any of them changes.

Each is compared with its run in a cluster that has nothing else to do and room for all of it.
"""

from pathlib import Path
from typing import Any

import pytest

from pdserve.core.ids import NodeId
from pdserve.decode_node.job import MAX_YIELDS
from pdserve.decode_node.preemption import Mode
from pdserve.decode_node.scheduler import DecodeScheduler
from tests.in_process import InProcessCluster
from tests.tiny import BLOCK_SIZE, assert_close, logprobs_of, make_cluster, make_prompt

NUM_PROMPT = 40
MAX_TOKENS = 200
NUM_BLOCKS = 3 * -(-(NUM_PROMPT + MAX_TOKENS) // BLOCK_SIZE)
# The token that a stream draws here ends it; wherever it would come much earlier, it must not be drawn.
STOPS_AT = MAX_TOKENS - 10
MIN_TOKENS = STOPS_AT - 5

SEEDED = {"temperature": 0.9, "top_p": 0.95, "top_k": 60}
PENALISED = {"temperature": 0.7, "min_p": 0.02, "repetition_penalty": 1.2, "frequency_penalty": 0.4}
# How six streams draw, and whether they run to a stop token.
STREAMS: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({}, True),
    (SEEDED, False),
    (SEEDED, True),
    (PENALISED, False),
    (PENALISED, True),
]


class Stream:
    """One stream, and what it is alone."""

    def __init__(self, cluster: InProcessCluster, number: int, draws: dict[str, Any], stops: bool):
        self.prompt = make_prompt(NUM_PROMPT, seed=number)
        self.params = draws | {"seed": number, "logprobs": 1}
        request = self.submit(cluster)
        cluster.run()
        if stops:
            self.params |= {"stop_ids": (cluster.outcomes[request].tokens[STOPS_AT],), "min_tokens": MIN_TOKENS}
            request = self.submit(cluster)
            cluster.run()
        self.tokens, self.finish = cluster.outcomes[request].tokens, cluster.outcomes[request].finish
        self.logprobs = logprobs_of(cluster, request)

    def submit(self, cluster: InProcessCluster):
        return cluster.submit(self.prompt, MAX_TOKENS, **self.params)


@pytest.fixture(scope="module")
def streams(tiny_model: Path) -> list[Stream]:
    undisturbed = make_cluster(tiny_model, num_blocks=64)
    return [Stream(undisturbed, number, draws, stops) for number, (draws, stops) in enumerate(STREAMS)]


@pytest.mark.parametrize(
    ("num_prefill", "mode"),
    [(1, Mode.SWAP), (1, Mode.RECOMPUTE), (1, Mode.RETURN), (0, Mode.SWAP), (0, Mode.RECOMPUTE)],
)
def test_streams_that_take_turns_lose_repeat_and_change_nothing(
    tiny_model: Path, streams: list[Stream], num_prefill: int, mode: Mode
):
    options = {"num_blocks": NUM_BLOCKS, "num_swap_blocks": NUM_BLOCKS, "max_step_tokens": 64}
    cluster = make_cluster(tiny_model, num_prefill, mode=mode, **options)
    requests = [stream.submit(cluster) for stream in streams]
    cluster.run()
    decode = cluster.nodes[NodeId("D0")].machine
    assert isinstance(decode, DecodeScheduler)
    assert 0 < decode.reservations.num_preemptions <= MAX_YIELDS * len(streams)
    assert decode.reservations.num_yielded[mode] > 0
    for request, stream in zip(requests, streams, strict=True):
        assert cluster.outcomes[request].tokens == stream.tokens
        assert cluster.outcomes[request].finish == stream.finish
        assert_close(logprobs_of(cluster, request), stream.logprobs)
    cluster.assert_drained()


def test_the_streams_to_a_stop_token_do_stop_and_never_before_their_least_tokens(streams: list[Stream]):
    """What the test above rests on."""
    stopped = [stream for stream in streams if stream.finish == "stop"]
    assert stopped
    assert all(len(stream.tokens) > MIN_TOKENS for stream in streams)
    assert all(stream.tokens[-1] in stream.params["stop_ids"] for stream in stopped)
