"""The block checksum: the agreed function, bound to the block's name."""

import sys
import threading

import pytest
import xxhash

from pdserve.core.ids import BlockHash
from pdserve.engine import checksum
from pdserve.engine.checksum import block_checksum, copy_and_sum, running_checksum

DATA = memoryview(bytes(range(256)) * 16)
HASH = BlockHash(bytes(range(16)))


def test_it_is_xxh3_seeded_by_the_first_eight_bytes_of_the_hash():
    assert block_checksum(DATA, HASH) == xxhash.xxh3_64_intdigest(DATA, 0x0706050403020100)


@pytest.mark.parametrize("piece", [1, 255, 256, 257, 1000, len(DATA), 2 * len(DATA)])
def test_taken_in_pieces_of_any_size_it_is_the_same(piece: int):
    checksum = running_checksum(HASH)
    for start in range(0, len(DATA), piece):
        checksum.update(DATA[start : start + piece])
    assert checksum.intdigest() == block_checksum(DATA, HASH)


def test_taken_while_it_is_copied_it_is_the_same_or_nothing_is_copied(monkeypatch):
    for size in (len(DATA), len(DATA) - 1, 64):
        copied = bytearray(size)
        found = copy_and_sum(DATA[:size], memoryview(copied), HASH)
        assert (found, bytes(copied)) in [(block_checksum(DATA[:size], HASH), bytes(DATA[:size])), (None, bytes(size))]
    monkeypatch.setattr(checksum, "load_summed_copy", lambda: None)
    copied = bytearray(len(DATA))
    assert copy_and_sum(DATA, memoryview(copied), HASH) is None
    assert not any(copied)


def test_every_flipped_bit_shows():
    expected = block_checksum(DATA, HASH)
    for position in (0, 1000, len(DATA) - 1):
        spoilt = bytearray(DATA)
        spoilt[position] ^= 0x10
        assert block_checksum(memoryview(spoilt), HASH) != expected


def test_the_right_bytes_under_another_name_do_not_pass():
    assert block_checksum(DATA, HASH) != block_checksum(DATA, BlockHash(HASH[::-1]))


@pytest.mark.parametrize(
    "take_in", [lambda data: block_checksum(data, HASH), lambda data: running_checksum(HASH).update(data)]
)
def test_other_threads_run_on_while_a_large_block_is_read(take_in):
    data = memoryview(bytes(64 << 20))
    interval, stop, num_turns = sys.getswitchinterval(), threading.Event(), [0]

    def count() -> None:
        while not stop.wait(1e-4):
            num_turns[0] += 1

    thread = threading.Thread(target=count)
    # Without a switch in time the other thread has its turns only where the GIL is let go of.
    sys.setswitchinterval(3600)
    try:
        thread.start()
        for _ in range(200):
            before = num_turns[0]
            take_in(data)
            if num_turns[0] != before:
                return
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    pytest.fail("no other thread had a turn")
