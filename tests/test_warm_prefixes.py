"""Prompts of which a part, all or nothing is cached already, alone and mixed in one batch: every answer is the
one of a cold and empty cluster.
"""

from itertools import permutations
from pathlib import Path

import pytest

from pdserve.core.ids import NodeId
from pdserve.router.record import Record
from tests.in_process import InProcessCluster
from tests.tiny import BLOCK_SIZE, GreedyOracle, make_cluster, make_prompt

SPLITS = pytest.mark.parametrize("num_prefill", [1, 0], ids=["split", "both"])
CHUNKS = pytest.mark.parametrize("chunk", [BLOCK_SIZE, 4096], ids=["chunks", "whole"])


def ask(cluster: InProcessCluster, prompt: list[int], max_tokens: int) -> Record:
    """Submit and wait for the end."""
    request = cluster.submit(prompt, max_tokens)
    cluster.run()
    return cluster.records[request]


@SPLITS
@CHUNKS
def test_hits_and_misses_that_arrive_together_answer_as_alone_in_every_order(
    tiny_model: Path, oracle: GreedyOracle, num_prefill: int, chunk: int
):
    known = make_prompt(3 * BLOCK_SIZE)
    hit_of_all = known + make_prompt(7, seed=2)
    miss = make_prompt(3 * BLOCK_SIZE + 5, seed=3)
    hit_of_one = known[:BLOCK_SIZE] + make_prompt(BLOCK_SIZE + 9, seed=4)
    expected_hits = {len(hit_of_all): 3, len(miss): 0, len(hit_of_one): 1}
    for order in permutations((hit_of_all, miss, hit_of_one)):
        cluster = make_cluster(tiny_model, num_prefill, num_blocks=64, max_step_tokens=chunk)
        ask(cluster, known, 2)
        requests = [cluster.submit(prompt, 8) for prompt in order]
        cluster.run()
        assert cluster.results(*requests) == [oracle(prompt, 8) for prompt in order]
        hits = {len(cluster.records[r].prompt): cluster.records[r].num_cached_tokens // BLOCK_SIZE for r in requests}
        assert hits == expected_hits
        cluster.assert_drained()


@SPLITS
@pytest.mark.parametrize("max_tokens", [1, 20])
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_a_prompt_around_a_block_edge_answers_alike_cold_and_warm_and_its_next_turn_finds_every_block(
    tiny_model: Path, oracle: GreedyOracle, num_prefill: int, max_tokens: int, num_blocks: int
):
    for num_tokens in (num_blocks * BLOCK_SIZE + edge for edge in (-1, 0, 1)):
        cluster = make_cluster(tiny_model, num_prefill, num_blocks=64)
        prompt = make_prompt(num_tokens, seed=num_tokens)
        expected = oracle(prompt, max_tokens)
        runs = [ask(cluster, prompt, max_tokens) for _ in range(3)]
        assert [run.samples[0].outputs for run in runs] == [expected] * 3
        # The last token of a prompt is always run: somebody has to draw after it.
        num_cached = min(num_tokens // BLOCK_SIZE * BLOCK_SIZE, num_tokens - 1)
        assert [run.num_cached_tokens for run in runs] == [0, num_cached, num_cached]
        next_turn = prompt + expected + make_prompt(BLOCK_SIZE, seed=9)
        turn = ask(cluster, next_turn, max_tokens)
        assert turn.samples[0].outputs == oracle(next_turn, max_tokens)
        assert turn.num_cached_tokens >= num_tokens // BLOCK_SIZE * BLOCK_SIZE
        cluster.assert_drained()


def test_a_whole_prompt_that_both_nodes_have_moves_only_its_partial_block(tiny_model: Path):
    for num_tokens, num_moved in ((2 * BLOCK_SIZE, 0), (2 * BLOCK_SIZE + 1, 1)):
        cluster = make_cluster(tiny_model, num_blocks=64)
        prompt = make_prompt(num_tokens)
        block_bytes = cluster.spec.payload_bytes
        moved = [ask(cluster, prompt, 8).bytes_moved // block_bytes for _ in range(2)]
        assert moved == [2 + num_moved, num_moved]
        assert cluster.nodes[NodeId("D0")].machine.pool.num_held == 0
