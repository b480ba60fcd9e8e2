"""The copy that sums is a copy, and its sum is what xxhash computes, wherever the two lie."""

import shutil

import numpy as np
import pytest
import xxhash

from pdserve.kernels.library import load_library
from pdserve.kernels.summed_copy import STRIPE_BYTES, SummedCopy, can_sum

# Around the 1,024 bytes after which xxh3 stirs its sums.
SIZES = [256, 320, 960, 1024, 1088, 1984, 2048, 2112, 65536, 737280]
EDGE = 128


@pytest.fixture(scope="module")
def copy() -> SummedCopy:
    if shutil.which("g++") is None or not load_library().copies_summed():
        pytest.skip("needs g++ and AVX-512")
    return SummedCopy(load_library())


def aligned(num_bytes: int, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of 7 with a part in their middle that begins `offset` behind a whole stripe; all of them, and the part."""
    buffer = np.full(num_bytes + 2 * EDGE + STRIPE_BYTES, 7, np.uint8)
    first = EDGE + offset + -(buffer.ctypes.data + EDGE) % STRIPE_BYTES
    return buffer, buffer[first : first + num_bytes]


def random_bytes(num_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


@pytest.mark.parametrize("offset", [0, 1, 8, 63])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_what_is_written_is_what_was_read_and_nothing_beside_it(copy: SummedCopy, num_bytes: int, offset: int):
    source, (buffer, target) = random_bytes(num_bytes), aligned(num_bytes, offset)
    copy(source, target, 0)
    assert np.array_equal(target, source)
    first = target.ctypes.data - buffer.ctypes.data
    assert (buffer[:first] == 7).all()
    assert (buffer[first + num_bytes :] == 7).all()


@pytest.mark.parametrize("seed", [0, 1, 0x0706050403020100, 2**63, 2**64 - 1])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_the_sum_is_xxh3_with_a_seed(copy: SummedCopy, num_bytes: int, seed: int):
    for offset, data in enumerate((random_bytes(num_bytes), np.zeros(num_bytes, np.uint8))):
        (_, source), (_, target) = aligned(num_bytes, 3 * offset), aligned(num_bytes, offset)
        source[:] = data
        assert copy(source, target, seed) == xxhash.xxh3_64_intdigest(data.tobytes(), seed)


def test_lengths_of_other_formulas_are_not_taken(copy: SummedCopy):
    assert [size for size in range(600) if can_sum(size)] == [256, 320, 384, 448, 512, 576]
    with pytest.raises(AssertionError):
        copy(np.zeros(240, np.uint8), np.zeros(240, np.uint8), 0)
    with pytest.raises(AssertionError):
        copy(np.zeros(320, np.uint8), np.zeros(256, np.uint8), 0)
