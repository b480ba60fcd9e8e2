"""The chunks of a prompt as its ledger tells them."""

import pytest

from pdserve.core.chunk import Chunk
from pdserve.engine.chunk_log import MAX_CHUNKS, ChunkLog


def test_what_a_step_took_beyond_the_model_is_its_end():
    log = ChunkLog()
    log.add(16, 0.5, 0.25, forward_s=0.2)
    log.add(8, 0.75, 0.125, forward_s=0.1)
    assert log.chunks == [Chunk(16, 0.5, 0.25), Chunk(8, 0.75, 0.125)]
    assert log.step_end_s == pytest.approx(0.075)


def test_a_model_that_was_busy_for_longer_than_its_step_leaves_nothing():
    log = ChunkLog()
    log.add(16, 0.0, 0.25, forward_s=0.26)
    assert log.step_end_s == 0.0


def test_of_many_chunks_the_later_ones_count_as_one():
    log = ChunkLog()
    for index in range(MAX_CHUNKS + 10):
        log.add(2, float(index), 0.5, forward_s=0.5)
    assert len(log.chunks) == MAX_CHUNKS
    assert log.chunks[-1] == Chunk(22, float(MAX_CHUNKS - 1), 5.5)
    assert sum(chunk.num_tokens for chunk in log.chunks) == 2 * (MAX_CHUNKS + 10)
