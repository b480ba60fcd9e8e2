"""Waiting for a core, as the kernel counts it."""

import hashlib
import os
import threading
from pathlib import Path

import pytest

from pdserve.cluster.cpu_wait import COUNTER, CpuWait


@pytest.fixture
def wait():
    wait = CpuWait()
    yield wait
    wait.close()


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def be_busy() -> None:
    """For about 100 ms of a core, without the interpreter's lock."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 120_000)


def share_a_core() -> None:
    """Be busy on one core with three other threads."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    others = [threading.Thread(target=be_busy) for _ in range(3)]
    try:
        for other in others:
            other.start()
        be_busy()
    finally:
        for other in others:
            other.join()
        os.sched_setaffinity(0, cores)


@pytest.mark.skipif(not COUNTER.exists(), reason="the kernel counts no waiting")
def test_who_shares_a_core_before_its_turn_has_waited_and_all_of_the_turn_has_waited_as_long(wait: CpuWait):
    wait.settle()
    share_a_core()
    waited_s = wait.read()
    assert waited_s > 0.001
    share_a_core()
    assert wait.read() == waited_s


@pytest.mark.skipif(not COUNTER.exists(), reason="the kernel counts no waiting")
def test_a_wait_in_the_midst_of_work_is_not_the_next_turns(wait: CpuWait):
    wait.settle()
    wait.read()
    share_a_core()
    wait.settle()
    assert wait.read() < 0.001


def test_what_was_before_the_first_reading_counts_for_nothing(wait: CpuWait):
    share_a_core()
    assert wait.read() < 0.001


@pytest.mark.parametrize("line", ["", "7", "no number"])
def test_a_counter_that_is_none_or_reads_oddly_counts_nothing(line: str, tmp_path: Path):
    (tmp_path / "odd").write_text(line)
    for name in ("odd", "absent"):
        wait = CpuWait(tmp_path / name)
        wait.settle()
        assert wait.read() == 0.0
        wait.close()


def test_its_file_is_closed_once_and_for_all(wait: CpuWait):
    before = num_open()
    wait.settle()
    assert num_open() == before + COUNTER.exists()
    wait.close()
    wait.close()
    wait.settle()
    assert wait.read() == 0.0
    assert num_open() == before
