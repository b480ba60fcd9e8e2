"""The engine's thread, and those that it starts, leave a core to the process's other threads."""

import os
import sys
import threading

import pytest

from pdserve.engine.engine_thread import NICENESS, EngineThread

LEAST_URGENT = 19


def niceness() -> int:
    """Of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def niceness_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(niceness()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is the whole process's")
def test_the_engines_threads_leave_a_core_to_the_others():
    before = niceness()
    thread = EngineThread(lambda: None)
    try:
        assert (
            thread.call(lambda _: (niceness(), niceness_of_a_new_thread()))
            == (min(before + NICENESS, LEAST_URGENT),) * 2
        )
        assert niceness() == before
    finally:
        thread.close()
