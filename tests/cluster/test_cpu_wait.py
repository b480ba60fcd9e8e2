"""Waiting for a core, as the kernel counts it."""

import hashlib
import os
import threading
from pathlib import Path

import pytest

from pdserve.cluster.cpu_wait import BURST_S, CpuWait


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


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel counts no waiting")
def test_who_shares_a_core_has_waited_and_what_comes_in_one_burst_has_waited_together(wait: CpuWait):
    wait.read(1.0)
    share_a_core()
    waited_s = wait.read(2.0)
    assert waited_s > 0.001
    assert wait.read(2.0 + BURST_S / 2) == waited_s
    assert 0.0 <= wait.read(3.0) < waited_s


def test_files_are_closed_once(wait: CpuWait):
    before = num_open()
    wait.read(1.0)
    wait.close()
    wait.close()
    assert num_open() == before


def test_what_was_before_the_first_reading_counts_for_nothing(wait: CpuWait):
    share_a_core()
    assert wait.read(1.0) < 0.001
