"""Where the last chunk of a prompt is cut, and where it is not worth a step more."""

import pytest

from pdserve.cluster.messages import Sample, Want
from pdserve.core.block_hash import pack_token_ids
from pdserve.core.ids import BlockHash, RequestId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.sequence import Sequence
from pdserve.engine.step_cost import StepCost, StepWork
from pdserve.prefill_node.tail_chunk import MIN_TAIL_TOKENS, TAIL_S, cut_tail
from tests.in_process import TINY_SPEC, InProcessCluster, Timing, continuation

SIZE = 32


class Request:
    request, attempt, samples, deadline_s, priority = RequestId(b"r" * 16), 1, (Sample(0),), None, 0
    sampling = SamplingParams()

    def __init__(self, num_tokens: int):
        self.prompt = pack_token_ids(list(range(num_tokens)))
        self.hashes = tuple(BlockHash(i.to_bytes(16, "little")) for i in range(-(-num_tokens // SIZE)))


def make_sequence(num_tokens: int, num_computed: int = 0) -> Sequence:
    sequence = Sequence.of(1, Request(num_tokens), SIZE, 0.0)
    sequence.num_computed = num_computed
    return sequence


def make_cost(fixed_s: float = 0.010, token_s: float = 0.001) -> StepCost:
    cost = StepCost()
    for _ in range(200):
        for num_tokens in (1, 64, 256):
            cost.learn(StepWork(num_tokens), fixed_s + token_s * num_tokens)
    return cost


def test_on_a_slow_link_the_last_chunk_is_as_short_as_may_be():
    assert cut_tail(make_sequence(256), 256, 200e-6, make_cost()) == 256 - MIN_TAIL_TOKENS


def test_the_tail_is_what_travels_in_time_and_begins_with_a_block():
    link_token_s = TAIL_S / 100
    cut = cut_tail(make_sequence(250), 250, link_token_s, make_cost(fixed_s=0.0005))
    assert cut % SIZE == 0
    assert 250 - 100 <= cut < 250 - 100 + SIZE


@pytest.mark.parametrize("link_token_s", [0.0, 2e-6, 30e-6])
def test_on_a_fast_or_unknown_link_a_step_more_would_cost_more_than_it_hides(link_token_s: float):
    assert cut_tail(make_sequence(256), 256, link_token_s, make_cost(fixed_s=0.010)) == 256


def test_a_chunk_that_is_not_the_last_one_is_left_alone():
    assert cut_tail(make_sequence(600), 256, 200e-6, make_cost()) == 256


def test_a_last_chunk_that_is_short_already_is_left_alone():
    assert cut_tail(make_sequence(256 + 20, num_computed=256), 20, 200e-6, make_cost()) == 20


@pytest.mark.parametrize("num_tokens", [63, 64, 65, 100])
def test_a_prompt_whose_tail_was_cut_gives_the_same_tokens(num_tokens: int):
    way = {"is_remote": True, "bytes_per_s": TINY_SPEC.token_bytes / 0.001}
    cluster = InProcessCluster(max_step_tokens=64, timing=Timing(step=0.0, token=0.001), **way)
    cluster.submit([1, 2, 3], max_tokens=2)
    cluster.run()  # P0 knows the link from now on
    prompt = list(range(num_tokens))
    request = cluster.submit(prompt, max_tokens=4)
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 4)]
    assert all(m.link_token_s == 0.001 for _, what, m in cluster.trace if what == "D0>P0" and isinstance(m, Want))
    *_, last = [plan for _, what, plan in cluster.trace if what == "P0 step"]
    assert len(last.rows[0].token_ids) <= MIN_TAIL_TOKENS
    cluster.assert_drained()
