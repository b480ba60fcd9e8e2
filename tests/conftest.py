"""After each test nothing of it may be left: tasks, threads, processes, sockets, files, shared memory.

Cheap, because it runs around every test: it reads a few entries of /proc and looks closer only when
something is new. ZeroMQ sockets and event loops show up as [eventfd] and [eventpoll] descriptors,
pools as memfd. Longer-lived fixtures exist before the check starts, so what they hold is no leak.
Hypothesis has one profile for all tests. `tiny_model` and `oracle` are what tests of whole streams share.
"""

import asyncio
import functools
import gc
import inspect
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.tiny import GreedyOracle

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


ROUNDS = 20
ROUND_S = 0.05


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Not at the top: the leak check is tested with this file alone.
    from tests.checkpoints import make_llama_checkpoint

    return make_llama_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> "GreedyOracle":
    """What transformers says on the tiny model."""
    from tests.tiny import GreedyOracle

    return GreedyOracle(tiny_model)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves something behind, naming it."""
    before = _held()
    yield
    left = _held() - before
    # What was closed may take the kernel, a thread or the garbage collector a moment more.
    for _ in range(ROUNDS):
        if not left:
            return
        gc.collect()
        threading.Event().wait(ROUND_S)
        left = _held() - before
    if left:
        pytest.fail("left behind: " + ", ".join(sorted(left)), pytrace=False)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Async tests are checked for tasks while their loop still runs: closing it would hide them."""
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = _checked(item.obj)


def _checked(test):
    @functools.wraps(test)
    async def run(*args, **kwargs):
        before = asyncio.all_tasks()
        await test(*args, **kwargs)
        # A cancelled task needs a turn of the loop or two to end.
        for _ in range(5):
            left = asyncio.all_tasks() - before
            if not left:
                return
            await asyncio.sleep(0)
        pytest.fail("tasks left running: " + ", ".join(sorted(map(repr, left))), pytrace=False)

    return run


def _held() -> set[str]:
    """What this process holds now, each thing as a line that a reader of the failure understands."""
    return _descriptors() | _threads() | _children() | _shared_memory()


def _descriptors() -> set[str]:
    held = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own descriptor
            continue
        # A device stays open for the process's life (random numbers, the null device of a library).
        if not target.startswith("/dev/"):
            held.add(f"file descriptor {name} -> {target}")
    return held


def _threads() -> set[str]:
    return {f"thread {thread.name!r} ({thread.ident})" for thread in threading.enumerate() if not thread.daemon}


def _children() -> set[str]:
    held = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                held |= {f"process {pid}" for pid in file.read().split()}
        except OSError:  # a thread that just ended
            continue
    return held


def _shared_memory() -> set[str]:
    """Entries of /dev/shm that name this project or this process; other processes have theirs there too."""
    own = str(os.getpid())
    return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith("pdserve") or own in name}
