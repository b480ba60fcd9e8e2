"""Threads that have asked for short turns have them, and so have those that they start."""

import ctypes
import platform
import threading

import pytest

from pdserve.cluster.turns import SHORT_TURN_NS, _Attributes, take_short_turns

# sched_getattr
READ_NUMBERS = {"x86_64": 315, "aarch64": 275}


def turn_ns() -> int:
    """What the calling thread has asked for, 0: nothing."""
    attributes = _Attributes()
    number, size = READ_NUMBERS[platform.machine()], ctypes.sizeof(_Attributes)
    assert ctypes.CDLL(None).syscall(number, 0, ctypes.byref(attributes), size, 0) == 0
    return attributes.runtime


def in_thread(*steps) -> list:
    """The results of the steps, one after the other in a thread of its own: this one's turns stay as they are."""
    results: list = []
    thread = threading.Thread(target=lambda: results.extend(step() for step in steps))
    thread.start()
    thread.join()
    return results


def test_a_thread_and_what_it_starts_have_short_turns():
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    if platform.machine() not in READ_NUMBERS or release < (6, 12):
        pytest.skip("needs Linux 6.12 on x86-64 or ARM64")
    own, started = in_thread(take_short_turns, turn_ns, lambda: in_thread(turn_ns)[0])[1:]
    assert own == started == SHORT_TURN_NS
    assert turn_ns() != SHORT_TURN_NS
