"""The event loop of a process: uvloop where it is installed, asyncio's own elsewhere. Called by each role's process."""

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

from pdserve.cluster.turns import take_short_turns

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` to its end and close the loop.

    What was loaded before, some 100,000 objects, is no garbage: looking through it would stop the loop for long. The
    loop and the threads that it starts take short turns; an engine's thread, which has been started before, does not.
    """
    take_short_turns()
    gc.collect()
    gc.freeze()
    try:
        return _run(main)
    finally:
        gc.unfreeze()


def _run(main: Coroutine[Any, Any, Result]) -> Result:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
