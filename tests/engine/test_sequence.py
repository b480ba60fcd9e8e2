"""A sequence by itself: progress, blocks, and what of it is named, sealed and found again."""

from dataclasses import dataclass, replace

import pytest

from pdserve.core.block_hash import BlockHasher, pack_token_ids
from pdserve.core.errors import ProtocolError
from pdserve.core.ids import BlockHash, RequestId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Seal

BLOCK = 4
HASHER = BlockHasher(b"f" * 32, BLOCK)


@dataclass(frozen=True)
class Sample:
    index: int
    outputs: bytes


@dataclass(frozen=True)
class Request:
    request: RequestId
    attempt: int
    prompt: bytes
    samples: tuple[Sample, ...]
    hashes: tuple[BlockHash, ...]
    sampling: SamplingParams
    priority: int = 0
    deadline_s: float | None = None


def make_request(num_prompt: int = 10, num_outputs: int = 0, max_tokens: int = 8) -> Request:
    tokens = list(range(num_prompt + num_outputs))
    prompt, outputs = (pack_token_ids(ids) for ids in (tokens[:num_prompt], tokens[num_prompt:]))
    hashes = tuple(HASHER.hashes(tokens))
    return Request(
        RequestId(b"r" * 16), 1, prompt, (Sample(0, outputs),), hashes, SamplingParams(max_tokens=max_tokens)
    )


def make_sequence(num_prompt: int = 10, num_outputs: int = 0) -> Sequence:
    return Sequence.of(1, make_request(num_prompt, num_outputs), BLOCK, 0.0)


def run(sequence: Sequence, pool: BlockPool, num_tokens: int) -> list[Seal]:
    """One step of `num_tokens` tokens, as a scheduler does it."""
    sequence.take_blocks(pool, sequence.num_computed + num_tokens)
    seals = sequence.seals(num_tokens)
    sequence.num_computed += num_tokens
    sequence.commit_full(pool, {seal.block_id: 7 for seal in seals})
    return seals


def claimed(sequence: Sequence, pool: BlockPool) -> Sequence:
    hits = pool.match(sequence.hashes)
    sequence.claim(pool, hits, sequence.num_blocks - len(hits))
    return sequence


def test_prompt_and_outputs_are_one_run_of_tokens_with_the_tail_named_apart():
    sequence = make_sequence(num_prompt=6, num_outputs=3)
    assert (sequence.num_tokens, sequence.num_prompt, sequence.num_outputs, sequence.num_blocks) == (9, 6, 3, 3)
    assert [*sequence.hashes, sequence.tail_hash] == HASHER.hashes(list(range(9)))


def test_full_blocks_have_no_tail():
    assert make_sequence(num_prompt=8).tail_hash is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"samples": ()}, "one or more samples"),
        ({"samples": (Sample(3, b""), Sample(3, b""))}, "each named once"),
        ({"prompt": b"", "hashes": ()}, "at least one token"),
        ({"hashes": ()}, "10 tokens fill 3 blocks, not 0"),
        ({"hashes": make_request(num_prompt=13).hashes}, "3 blocks, not 4"),
        ({"sampling": SamplingParams(max_tokens=0)}, "0 of 0 tokens"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(change: dict, reason: str):
    with pytest.raises(ProtocolError, match=reason):
        Sequence.of(1, replace(make_request(), **change), BLOCK, 0.0)


def test_a_row_samples_only_when_it_holds_the_last_token():
    sequence, pool = make_sequence(), BlockPool(4)
    claimed(sequence, pool).take_blocks(pool, 10)
    assert sequence.row(9).samples == ()
    assert sequence.row(10).samples[0].output_index == 0


def test_a_block_is_sealed_in_the_step_that_fills_it_and_the_tail_in_the_last():
    sequence, pool = make_sequence(), BlockPool(4)
    claimed(sequence, pool)
    sealed = [[(seal.block_hash, seal.num_tokens) for seal in run(sequence, pool, n)] for n in (3, 2, 5)]
    first, second, tail = HASHER.hashes(list(range(10)))
    assert sealed == [[], [(first, 4)], [(second, 4), (tail, 2)]]
    assert pool.match(sequence.hashes) == sequence.block_ids[:2]


def test_a_prompt_that_is_wholly_cached_runs_its_last_token_and_writes_nothing():
    pool = BlockPool(4)
    first = claimed(make_sequence(num_prompt=8), pool)
    run(first, pool, 8)
    first.give_back(pool)
    again = claimed(make_sequence(num_prompt=8), pool)
    assert (again.num_missing, again.num_reserved) == (1, 0)
    assert again.seals(1) == []
    row = again.row(1)
    assert row.write_from > row.start


def test_what_was_given_back_is_found_again_as_far_as_it_was_full():
    sequence, pool = make_sequence(), BlockPool(4)
    claimed(sequence, pool)
    run(sequence, pool, 10)
    sequence.give_back(pool)
    assert (pool.num_held, pool.num_reserved, sequence.num_missing) == (0, 0, 10)
    claimed(sequence, pool)
    assert (sequence.num_computed, sequence.num_found) == (8, 8)


def test_blocks_that_outputs_fill_get_the_names_that_a_whole_prompt_would_have():
    sequence, pool = make_sequence(num_prompt=3), BlockPool(4)
    claimed(sequence, pool)
    run(sequence, pool, 3)
    sequence.tokens += [3, 4, 5, 6, 7]
    pool.reserve(1)
    sequence.num_reserved = 1
    sequence.take_blocks(pool, 8)
    sequence.num_computed = 8
    sequence.name_full_blocks(HASHER, sequence.num_computed)
    assert sequence.hashes == HASHER.hashes(list(range(8)))
