"""The one thread that runs the model: takes a StepPlan from the event loop, gives a StepResult back.

It loads the model too: OpenMP keeps a team of workers for every thread that ever ran a parallel region,
and with two teams on the same cores its barriers sleep instead of spinning (one node on two cores: steps
took three times as long). Nothing else is shared with the loop but cores, on which the loop goes before it.
Owned by the node's parts.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from pdserve.engine.engine import Engine
from pdserve.engine.step import StepPlan, StepResult

T = TypeVar("T")

# A thread that wakes runs at once on a core where one of less weight runs; equals take turns of up to 3 ms. With this
# niceness, a third of the loop's weight, the engine's thread loses next to nothing to the loop, which seldom runs.
NICENESS = 5


class EngineThread:
    """load: makes the engine, called in the new thread; what it raises is raised here."""

    def __init__(self, load: Callable[[], Engine]):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine", initializer=_go_last)
        try:
            self.engine = self._thread.submit(load).result()
        except BaseException:
            self.close()
            raise

    def call(self, what: Callable[[Engine], T]) -> T:
        """Call `what` in the thread and wait for its result; for the start, before there is a loop."""
        return self._thread.submit(what, self.engine).result()

    def run(
        self,
        plan: StepPlan,
        post: Callable[..., Any],
        done: Callable[[StepResult], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Run one step; its blocks are the thread's until `done` or `failed` is called.

        post  runs a call on the event loop (its call_soon_threadsafe); done and failed are called there
        """

        def ended(future: "Future[StepResult]") -> None:
            error = future.exception()
            if error is None:
                done(future.result())
            else:
                failed(error)

        self._thread.submit(self.engine.step, plan).add_done_callback(lambda future: post(ended, future))

    def close(self) -> None:
        """Wait for the step in flight; its result is dropped. Twice is nothing."""
        self._thread.shutdown(wait=True)


def _go_last() -> None:
    """Let the process's other threads have a core before this thread and those that it starts."""
    # Elsewhere niceness is the whole process's.
    if sys.platform == "linux":
        os.nice(NICENESS)
