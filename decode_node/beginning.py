"""Where a request's time goes on a decode node between its first token and its second, on this node's clock.

    told ── blocks reserved ── fetched, copied, summed ── ready ── first step begins ── token drawn: Begun
    a prompt that was computed here is ready when its first token is told

What goes on before the first token is hidden behind the prompt and not counted. Belongs to a job until its Begun;
HandOffs and the batch write it.
"""

from dataclasses import dataclass

from pdserve.cluster.messages import Begun
from pdserve.core.ids import RequestId


@dataclass(slots=True)
class Beginning:
    """told_at: the hand-off's End came, or the first token was drawn here. seen_at: copies before count for nothing.

    waited_s: what the End may have waited for a core before that
    """

    told_at: float
    seen_at: float
    wait_s: float = 0.0
    copy_s: float = 0.0
    verify_s: float = 0.0
    ready_at: float | None = None
    started_at: float | None = None
    waited_s: float = 0.0

    def copied(self, copy_s: float, verify_s: float, reserved_at: float, now: float) -> None:
        """A copy into blocks that were reserved then is over. Copies run one after another, so none counts twice."""
        if reserved_at > self.seen_at:
            # What was copied before was given back; it is part of the wait for these blocks.
            self.copy_s, self.verify_s, self.seen_at = 0.0, 0.0, reserved_at
        busy_s = copy_s + verify_s
        if busy_s > 0:
            share = min(1.0, (now - self.seen_at) / busy_s)
            self.copy_s += share * copy_s
            self.verify_s += share * verify_s
        self.seen_at = now

    def ready(self, reserved_at: float, now: float) -> None:
        """Nothing is lacking but a step."""
        self.wait_s = max(0.0, min(reserved_at, now) - self.told_at)
        self.ready_at = now

    def ran(self, step_at: float) -> None:
        """A step that began then has run some of it."""
        if self.ready_at is not None and self.started_at is None:
            self.started_at = step_at

    def begun(self, request: RequestId, attempt: int, now: float) -> Begun:
        """Its token is drawn, in a step that `ran` was told of."""
        assert self.ready_at is not None, "a token before the blocks are here"
        assert self.started_at is not None, "a token without a step"
        spent_s = self.wait_s + self.copy_s + self.verify_s
        return Begun(
            request,
            attempt,
            wait_for_blocks_s=self.wait_s,
            fetch_s=max(0.0, self.ready_at - self.told_at - spent_s),
            copy_s=self.copy_s,
            verify_s=self.verify_s,
            queue_s=self.started_at - self.ready_at,
            step_s=now - self.started_at,
            waited_s=self.waited_s,
        )
