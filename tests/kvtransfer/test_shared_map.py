"""Shared memory is mapped where huge pages may be, filled at once, and goes with its last view."""

import gc
import os

import pytest

from pdserve.kvtransfer.shared_map import huge_page_bytes, map_readable, map_writable

NAME = "pdserve-map-test"
SMALL, LARGE = 3 * 4096, huge_page_bytes() + 4096


@pytest.fixture(params=[SMALL, LARGE], ids=["small", "large"])
def fd(request):
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    os.ftruncate(fd, request.param)
    yield fd
    os.close(fd)


def size_of(fd: int) -> int:
    return os.fstat(fd).st_size


def maps() -> list[tuple[int, int]]:
    """First and last address of every map of the file."""
    with open("/proc/self/maps") as file:
        spans = [line.split()[0].split("-") for line in file if NAME in line]
    return [(int(first, 16), int(last, 16)) for first, last in spans]


def num_mapped_or_reserved() -> int:
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)


def test_a_reader_sees_what_is_written(fd):
    written, read = map_writable(fd, size_of(fd)), map_readable(fd, size_of(fd))
    assert len(written) == len(read) == size_of(fd)
    written[0], written[-1] = 7, 9
    assert (read[0], read[1], read[-1]) == (7, 0, 9)
    with pytest.raises(TypeError, match="read-only"):
        read[0] = 1


def test_all_of_it_is_in_memory_at_once(fd):
    buffer = map_writable(fd, size_of(fd))
    assert os.fstat(fd).st_blocks * 512 >= len(buffer)


def test_it_begins_where_a_huge_page_may_and_nothing_around_it_stays_reserved(fd):
    num_before = num_mapped_or_reserved()
    buffers = [map_writable(fd, size_of(fd)), map_readable(fd, size_of(fd))]
    assert len(maps()) == len(buffers)
    for first, last in maps():
        assert first % huge_page_bytes() == 0
        assert last - first == size_of(fd)
    assert num_mapped_or_reserved() <= num_before + len(buffers)


def test_it_is_unmapped_with_its_last_view_and_not_before(fd):
    buffer = map_writable(fd, size_of(fd))
    view = buffer[8:16]
    buffer.release()
    gc.collect()
    view[0] = 5
    assert maps()
    view.release()
    del buffer, view
    gc.collect()
    assert not maps()


def test_what_cannot_be_mapped_is_an_error_and_leaves_nothing():
    num_before = num_mapped_or_reserved()
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_writable(-1, LARGE)
    assert num_mapped_or_reserved() == num_before
