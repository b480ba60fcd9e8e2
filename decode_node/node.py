"""A decode node at work: the scheduler on the event loop, the engine in its thread, copies in a worker.

Executes what DecodeScheduler returns. Owns the copy worker and the read-only maps of the prefill nodes'
pools. Created by the process entry.
"""

import asyncio
import logging
import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from pdserve.cluster.config import DecodeConfig, Preemption
from pdserve.cluster.faults import Faults
from pdserve.cluster.keys import read_keys
from pdserve.cluster.messages import Capacity, Hello, PoolOffer, Role
from pdserve.cluster.node_life import ROUTER, Ending, NodeLife
from pdserve.core.batching import Batching
from pdserve.core.block_hash import BlockHasher, PrefixCache, root_of
from pdserve.core.errors import ConfigError, LayoutError
from pdserve.core.ids import Epoch, NodeId
from pdserve.core.turns import Policy
from pdserve.decode_node.chunk_budget import chunk_budget
from pdserve.decode_node.preemption import Mode
from pdserve.decode_node.scheduler import DecodeScheduler, Limits
from pdserve.decode_node.swap import SwapIn, SwapOut, SwappedIn, SwappedOut
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.checksum import load_copy
from pdserve.engine.chunking import ChunkedPrefill
from pdserve.engine.kv_pool import KVPool, PoolView, buffer_bytes
from pdserve.engine.step import RunStep, StepDone, StepResult
from pdserve.kvtransfer.copying import Judged, copy_and_verify, copy_out, read_speed, take_and_verify
from pdserve.kvtransfer.node_parts import NodeParts
from pdserve.kvtransfer.pull import CopyBlocks, CopyDone, Verdict
from pdserve.kvtransfer.shm import MappedPool, fetch_pool, host_id

log = logging.getLogger(__name__)

T = TypeVar("T")

# Of the KV pool: so much may wait in the host pool, unless --swap-memory says otherwise.
SWAP_SHARE = 4


@dataclass(slots=True, eq=False)
class MappedPeer:
    """One peer's pool. num_copies: copies that read it now; is_leaving: the peer is gone.

    bytes_per_s: how fast it can be read, measured when it was mapped
    """

    mapped: MappedPool
    view: PoolView
    bytes_per_s: float = 0.0
    num_copies: int = 0
    is_leaving: bool = False

    def unmap_if_idle(self) -> None:
        if self.is_leaving and not self.num_copies:
            self.view.release()
            self.mapped.close()


class MappedPeers:
    """The pools of the prefill nodes, mapped read-only; a map outlives its owner until the last copy ends."""

    def __init__(self, pool: KVPool, transport: str):
        load_copy()
        self._pool = pool
        self._transport = transport
        self._peers: dict[NodeId, MappedPeer] = {}

    def can_map(self, offer: PoolOffer | None) -> bool:
        is_here = offer is not None and offer.host == host_id()
        if self._transport == "shm" and not is_here:
            why = "it offers no pool" if offer is None else "it is on another host"
            raise LayoutError(f"{why}, and --transport shm allows no other way: use auto or zmq")
        return self._transport != "zmq" and is_here

    def fetch(self, offer: PoolOffer, epoch: Epoch) -> MappedPeer:
        """Raises LayoutError when the pool cannot be mapped or is not what was offered."""
        mapped = fetch_pool(offer, epoch)
        peer = MappedPeer(mapped, PoolView(self._pool.spec, offer.num_blocks, mapped.buffer))
        try:
            peer.view.check_header()
            peer.bytes_per_s = read_speed(peer.view)
        except LayoutError:
            self.discard(peer)
            raise
        return peer

    def opened(self, node: NodeId, pool: MappedPeer) -> None:
        self._peers[node] = pool

    def closed(self, node: NodeId) -> None:
        peer = self._peers.pop(node, None)
        if peer is not None:
            self.discard(peer)

    def discard(self, pool: MappedPeer) -> None:
        pool.is_leaving = True
        pool.unmap_if_idle()

    def begin(self, node: NodeId) -> MappedPeer | None:
        """The pool to copy from, kept mapped until `end`; None when the peer is gone."""
        peer = self._peers.get(node)
        if peer is not None:
            peer.num_copies += 1
        return peer

    def end(self, peer: MappedPeer) -> None:
        peer.num_copies -= 1
        peer.unmap_if_idle()

    def close(self) -> None:
        for node in list(self._peers):
            self.closed(node)


class HostPool:
    """Memory for the blocks of sequences that have yielded: num_blocks of them, touched only when used."""

    def __init__(self, pool: KVPool, num_blocks: int):
        self.num_blocks = num_blocks
        self._memory = mmap.mmap(-1, buffer_bytes(pool.spec, num_blocks))
        self.view = PoolView(pool.spec, num_blocks, self._memory)

    @classmethod
    def of(cls, pool: KVPool, config: Preemption) -> "HostPool":
        """Nothing where sequences yield in other ways alone."""
        wanted = config.swap_memory
        if wanted is None:
            wanted = pool.num_blocks * pool.spec.block_bytes // SWAP_SHARE
        is_used = config.preemption_mode in (Mode.AUTO, Mode.SWAP)
        return cls(pool, pool.spec.num_blocks_within(wanted) if is_used else 0)

    def close(self) -> None:
        self.view.release()
        self._memory.close()


def least_tokens(kv_allocation: str, capacity: Capacity) -> int:
    """Tokens that each sequence is given blocks for at once. Raises ConfigError when not even one can be."""
    if kv_allocation == "paged":
        return 0
    if capacity.max_model_len > capacity.num_tokens:
        raise ConfigError(
            f"--kv-allocation {kv_allocation}: a sequence takes blocks for {capacity.max_model_len} tokens "
            f"(--max-model-len), the pool holds {capacity.num_tokens}: lower that or raise --kv-memory"
        )
    return capacity.max_model_len


class DecodeNode:
    def __init__(self, config: DecodeConfig, parts: NodeParts):
        pool, epoch, baseline = parts.pool, Epoch.new(), config.baseline
        capacity = replace(parts.capacity, least_tokens=least_tokens(baseline.kv_allocation, parts.capacity))
        self._pool = pool
        self._host = HostPool.of(pool, config.preemption)
        self._peers = MappedPeers(pool, config.network.transport)
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="copy")
        root = root_of(PrefixCache(baseline.prefix_cache))
        facts = replace(parts.facts, batching=baseline.batching, prefix_cache=baseline.prefix_cache)
        scheduler = DecodeScheduler(
            ROUTER,
            BlockPool(pool.num_blocks, pool.view.generations),
            BlockHasher(parts.facts.kv_fingerprint, pool.spec.block_size, root=root),
            chunk_budget(ChunkedPrefill(baseline.chunked_prefill), config.steps.max_step_tokens, parts.cost),
            Limits(
                config.steps.max_running,
                self._host.num_blocks,
                Mode(config.preemption.preemption_mode),
                Batching(baseline.batching),
                capacity.least_tokens,
            ),
            pool.spec.payload_bytes,
            Policy(config.steps.prefill_policy),
        )
        hello = Hello(NodeId(config.name), Role(config.role), facts, capacity)
        keys = read_keys(config.network.key_file)
        self._faults = Faults(config.trials, pool.view.block)
        endpoint = self._faults.make_endpoint
        self._life = NodeLife(
            hello, epoch, scheduler, self._execute, peer_pools=self._peers, keys=keys, make_endpoint=endpoint
        )
        self._thread = parts.thread
        self._post = asyncio.get_running_loop().call_soon_threadsafe

    async def run(self, config: DecodeConfig, ending: Ending) -> None:
        try:
            await self._life.run(config.network, ending)
        finally:
            self._thread.close()
            self._copier.shutdown(wait=True)
            self._peers.close()
            self._host.close()

    def _execute(self, action: RunStep | CopyBlocks | SwapOut | SwapIn) -> None:
        if isinstance(action, RunStep):
            self._thread.run(action.plan, self._post, self._stepped, self._life.fail)
            self._faults.reach("step")
        elif isinstance(action, CopyBlocks):
            self._copy(action)
            self._faults.reach("copy")
        elif isinstance(action, SwapOut):

            def swapped_out(result: tuple[list[int], float]) -> None:
                self._life.feed(SwappedOut(action.key, tuple(result[0]), result[1]))

            self._in_copier(swapped_out, copy_out, self._pool, self._host.view, action.block_ids, action.slots)
        else:

            def swapped_in(result: Judged) -> None:
                self._life.feed(SwappedIn(action.key, self._told(result, "the host pool"), result.busy_s))

            self._in_copier(swapped_in, copy_and_verify, self._host.view, self._pool, action.copies)

    def _stepped(self, result: StepResult) -> None:
        self._faults.reach("stepped")
        self._life.feed(StepDone(result))

    def _copy(self, action: CopyBlocks) -> None:
        def copied(result: Judged) -> None:
            self._faults.reach("copied")
            verdicts = self._told(result, action.peer)
            self._life.feed(CopyDone(action.key, action.copies, verdicts, result.copy_s, result.verify_s))

        if any(copy.payload is not None for copy in action.copies):
            self._in_copier(copied, take_and_verify, self._pool, action.copies)
            return
        source = self._peers.begin(action.peer)
        if source is None:
            gone = CopyDone(action.key, action.copies, (Verdict.MOVED,) * len(action.copies))
            self._post(self._life.feed, gone)
            return
        future = self._in_copier(copied, copy_and_verify, source.view, self._pool, action.copies)
        future.add_done_callback(lambda _: self._post(self._peers.end, source))

    def _told(self, result: Judged, source: str) -> tuple[Verdict, ...]:
        num_corrupt = result.verdicts.count(Verdict.CORRUPT)
        if num_corrupt:
            log.warning("%d of %d blocks from %s are corrupt, not used", num_corrupt, len(result.verdicts), source)
        return result.verdicts

    def _in_copier(self, done: Callable[[T], None], work: Callable[..., T], *args: object) -> "Future[T]":
        """Run `work` in the copy worker, then `done` with what it returns on the event loop."""

        def ended(future: "Future[T]") -> None:
            error = future.exception()
            if error is not None:
                self._life.fail(error)
            else:
                done(future.result())

        future = self._copier.submit(work, *args)
        future.add_done_callback(lambda future: self._post(ended, future))
        return future


async def serve(config: DecodeConfig, parts: NodeParts, ending: Ending) -> None:
    """Run a decode node until it is told to end; everything it opened is closed on return."""
    await DecodeNode(config, parts).run(config, ending)
