"""Blocks on their way to nodes that cannot map the pool: copied into frames by a worker, sent as the link takes them.

    put ──► line of the peer ── worker: copy into frames ──► link ── pipe full ──► kept, sent on when it is writable

Nothing is dropped while the link stands: a line holds blocks only by name, at most AHEAD_BYTES of it are copied
ahead, and the puller's credit bounds the rest. A block that has been reassigned when its turn comes is left out;
whoever still waits for it asks again. Owned by a prefill node; everything but the copying is on its event loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from pdserve.cluster.messages import Blocks, Message
from pdserve.cluster.port import Frame, make_frame
from pdserve.core.ids import NodeId
from pdserve.engine.kv_pool import PoolView
from pdserve.kvtransfer.offer import SendBlocks

# A few blocks: enough to keep a link busy while the worker copies the next ones.
AHEAD_BYTES = 2 << 20

Send = Callable[[NodeId, Message], bool]


@dataclass(slots=True, eq=False)
class Line:
    """What one peer is to be sent. `copied`: messages that are ready to go; is_copying: the worker makes more."""

    waiting: deque[Blocks] = field(default_factory=deque)
    copied: deque[Blocks] = field(default_factory=deque)
    is_copying: bool = False


class BlockSender:
    """send   hands a message to a link; False: the link takes none now, or there is none
    fail   what is to be done with an error of the worker
    """

    def __init__(self, pool: PoolView, send: Send, fail: Callable[[BaseException], None]) -> None:
        self._pool = pool
        self._send = send
        self._fail = fail
        self._lines: dict[NodeId, Line] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="send")
        self._loop = asyncio.get_running_loop()

    def put(self, action: SendBlocks) -> None:
        self._lines.setdefault(action.peer, Line()).waiting.append(action.blocks)
        self.writable(action.peer)

    def writable(self, peer: NodeId) -> None:
        """The link takes messages again."""
        line = self._lines.get(peer)
        if line is None:
            return
        while line.copied and self._send(peer, line.copied[0]):
            line.copied.popleft()
        if line.copied or line.is_copying or not line.waiting:
            return
        line.is_copying = True
        copied = self._worker.submit(self._copy, self._next_slice(line))
        copied.add_done_callback(lambda future: self._loop.call_soon_threadsafe(self._copied, peer, line, future))

    def gone(self, peer: NodeId) -> None:
        """The peer is no longer there, or another incarnation is: nothing of this is for it."""
        self._lines.pop(peer, None)

    def close(self) -> None:
        """Wait for the copy in flight; the pool is not read after that."""
        self._lines.clear()
        self._worker.shutdown(wait=True)

    def _next_slice(self, line: Line) -> list[Blocks]:
        taken = [line.waiting.popleft()]
        num_bytes = self._num_bytes(taken[0])
        while line.waiting and num_bytes + self._num_bytes(line.waiting[0]) <= AHEAD_BYTES:
            taken.append(line.waiting.popleft())
            num_bytes += self._num_bytes(taken[-1])
        return taken

    def _num_bytes(self, blocks: Blocks) -> int:
        return len(blocks.entries) * self._pool.spec.payload_bytes

    def _copy(self, messages: list[Blocks]) -> list[Blocks]:
        """In the worker. Frames are made before the generations are looked at once more: a seqlock."""
        copied = []
        for blocks in messages:
            frames: tuple[Frame, ...] = tuple(make_frame(self._pool.block(entry.block_id)) for entry in blocks.entries)
            if all(int(self._pool.generations[entry.block_id]) == entry.generation for entry in blocks.entries):
                copied.append(replace(blocks, payloads=frames))
        return copied

    def _copied(self, peer: NodeId, line: Line, future: "Future[list[Blocks]]") -> None:
        error = future.exception()
        if error is not None:
            self._fail(error)
            return
        line.is_copying = False
        if self._lines.get(peer) is line:
            line.copied.extend(future.result())
            self.writable(peer)
