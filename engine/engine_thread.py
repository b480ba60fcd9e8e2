"""The one thread that runs the model: takes a StepPlan from the event loop, gives a StepResult back.

Nothing else is shared between the two. Owned by the node; the engine belongs to this thread from the
first step on.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pdserve.engine.engine import Engine
from pdserve.engine.step import StepPlan, StepResult


class EngineThread:
    """post: runs a call on the event loop (its call_soon_threadsafe); done and failed are called there."""

    def __init__(
        self,
        engine: Engine,
        post: Callable[..., Any],
        done: Callable[[StepResult], None],
        failed: Callable[[BaseException], None],
    ):
        self._engine = engine
        self._post = post
        self._done = done
        self._failed = failed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    def run(self, plan: StepPlan) -> None:
        """Run one step; its blocks are the thread's until `done` is called."""
        future = self._thread.submit(self._engine.step, plan)
        future.add_done_callback(lambda ended: self._post(self._ended, ended))

    def close(self) -> None:
        """Wait for the step in flight; its result is dropped."""
        self._thread.shutdown(wait=True)

    def _ended(self, future: "Future[StepResult]") -> None:
        error = future.exception()
        if error is None:
            self._done(future.result())
        else:
            self._failed(error)
