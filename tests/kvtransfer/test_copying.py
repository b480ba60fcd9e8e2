"""Blocks written into our own pool and verified there: those that came in frames, and those of several slices."""

import pytest

from pdserve.core.errors import LayoutError
from pdserve.core.ids import BlockId
from pdserve.engine import checksum
from pdserve.kvtransfer.copying import SLICE_BYTES, copy_and_verify, take_and_verify
from pdserve.kvtransfer.pull import Verdict
from tests.kvtransfer.pools import GENERATION, LARGE_SPEC, SPEC, content, empty_pool, make_copy, make_pool


@pytest.fixture(params=["one pass", "two passes"], autouse=True)
def passes(request, monkeypatch):
    """As on this machine, and as on one without AVX-512."""
    if request.param == "two passes":
        monkeypatch.setattr(checksum, "load_summed_copy", lambda: None)


def payload(block_id: int, spec=SPEC) -> memoryview:
    return memoryview(content(spec, block_id))


def test_a_block_is_written_to_its_place_and_nowhere_else():
    target = empty_pool(LARGE_SPEC)
    judged = take_and_verify(target, [make_copy(3, 5, LARGE_SPEC, payload=payload(3, LARGE_SPEC))])
    assert judged.verdicts == (Verdict.OK,)
    assert judged.copy_s > 0
    for block_id in range(target.num_blocks):
        written = bytes(target.view.block(BlockId(block_id)))
        assert written == (content(LARGE_SPEC, 3) if block_id == 5 else bytes(LARGE_SPEC.payload_bytes))


@pytest.mark.parametrize("position", [0, SPEC.payload_bytes // 2, SPEC.payload_bytes - 1])
def test_a_flipped_byte_is_found(position: int):
    spoilt = bytearray(content(SPEC, 2))
    spoilt[position] ^= 1
    assert take_and_verify(empty_pool(), [make_copy(2, 0, payload=memoryview(spoilt))]).verdicts == (Verdict.CORRUPT,)


@pytest.mark.parametrize("size", [0, 1, SPEC.payload_bytes - 1, SPEC.payload_bytes + 1])
def test_a_frame_of_another_size_is_no_block(size: int):
    data = memoryview(content(SPEC, 2) + b"x")[:size]
    assert take_and_verify(empty_pool(), [make_copy(2, 0, payload=data)]).verdicts == (Verdict.CORRUPT,)


def test_another_requests_block_is_found_by_its_name():
    assert take_and_verify(empty_pool(), [make_copy(2, 0, payload=payload(3))]).verdicts == (Verdict.CORRUPT,)


def test_each_block_has_its_own_verdict():
    copies = [make_copy(1, 0, payload=payload(1)), make_copy(2, 1, payload=payload(1)), make_copy(3, 2)]
    assert take_and_verify(empty_pool(), copies).verdicts == (Verdict.OK, Verdict.CORRUPT, Verdict.CORRUPT)


def test_a_target_outside_the_pool_is_our_own_mistake():
    with pytest.raises(LayoutError, match="target block 8"):
        take_and_verify(empty_pool(), [make_copy(2, 8, payload=payload(2))])


# ---- slices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, SLICE_BYTES - 1, SLICE_BYTES, 3 * SLICE_BYTES, LARGE_SPEC.payload_bytes - 1])
def test_a_flipped_byte_is_found_in_every_slice(position: int):
    assert LARGE_SPEC.payload_bytes > 4 * SLICE_BYTES
    source = make_pool(LARGE_SPEC, num_blocks=2)
    source.view.block(BlockId(1))[position] ^= 1
    target = empty_pool(LARGE_SPEC, num_blocks=2)
    assert copy_and_verify(source.view, target, [make_copy(1, 0, LARGE_SPEC)]).verdicts == (Verdict.CORRUPT,)


def test_a_block_with_a_slice_of_another_is_torn_though_its_generation_never_moved():
    source = make_pool(LARGE_SPEC, num_blocks=2)
    source.view.block(BlockId(1))[SLICE_BYTES : 2 * SLICE_BYTES] = source.view.block(BlockId(0))[
        SLICE_BYTES : 2 * SLICE_BYTES
    ]
    target = empty_pool(LARGE_SPEC, num_blocks=2)
    assert int(source.view.generations[1]) == GENERATION + 1
    assert copy_and_verify(source.view, target, [make_copy(1, 0, LARGE_SPEC)]).verdicts == (Verdict.CORRUPT,)


def test_slices_in_another_order_are_no_block():
    data = bytearray(content(LARGE_SPEC, 1))
    data[:SLICE_BYTES], data[SLICE_BYTES : 2 * SLICE_BYTES] = data[SLICE_BYTES : 2 * SLICE_BYTES], data[:SLICE_BYTES]
    copy = make_copy(1, 0, LARGE_SPEC, payload=memoryview(data))
    assert take_and_verify(empty_pool(LARGE_SPEC, num_blocks=2), [copy]).verdicts == (Verdict.CORRUPT,)
