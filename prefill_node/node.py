"""A prefill node at work: the scheduler on the event loop, the engine in its thread, the pool on offer.

Executes what PrefillScheduler returns. Owns the server that hands the pool's descriptor to decode nodes
on this host. Created by the process entry.
"""

import asyncio
import logging

from pdserve.cluster.config import PrefillConfig
from pdserve.cluster.faults import Faults
from pdserve.cluster.keys import read_keys
from pdserve.cluster.messages import Hello, Role
from pdserve.cluster.node_life import ROUTER, Ending, NodeLife
from pdserve.core.ids import Epoch, NodeId
from pdserve.core.turns import Policy
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.chunking import ChunkedPrefill, chunking
from pdserve.engine.planner import Planner
from pdserve.engine.step import RunStep, StepDone, StepResult
from pdserve.kvtransfer.copying import CheckBlocks, check_own
from pdserve.kvtransfer.node_parts import NodeParts
from pdserve.kvtransfer.offer import SendBlocks
from pdserve.kvtransfer.sender import BlockSender
from pdserve.kvtransfer.shm import PoolServer
from pdserve.prefill_node.scheduler import PrefillScheduler

log = logging.getLogger(__name__)


async def serve(config: PrefillConfig, parts: NodeParts, ending: Ending) -> None:
    """Run a prefill node until it is told to end; everything it opened is closed on return."""
    epoch = Epoch.new()
    planner = Planner(
        Policy(config.steps.prefill_policy),
        config.steps.max_step_tokens,
        parts.cost,
        chunking(ChunkedPrefill(config.baseline.chunked_prefill)),
    )
    scheduler = PrefillScheduler(
        ROUTER,
        BlockPool(parts.pool.num_blocks, parts.pool.view.generations),
        parts.pool.spec.block_size,
        planner,
        parts.cost,
        parts.pool.spec.payload_bytes,
    )
    hello = Hello(NodeId(config.name), Role.PREFILL, parts.facts, parts.capacity)
    faults = Faults(config.trials, parts.pool.view.block)
    post = asyncio.get_running_loop().call_soon_threadsafe
    async with PoolServer(parts.memory, epoch, parts.pool.num_blocks, parts.pool.spec.block_bytes) as server:

        def stepped(result: StepResult) -> None:
            faults.reach("stepped")
            life.feed(StepDone(result))

        def execute(action: RunStep | SendBlocks | CheckBlocks) -> None:
            if isinstance(action, RunStep):
                parts.thread.run(action.plan, post, stepped, life.fail)
                faults.reach("step")
            elif isinstance(action, CheckBlocks):
                # 0.1 ms a block, and seldom; fed later, because the machine is in the middle of an event.
                checked = check_own(parts.pool.view, action.entries)
                log.warning(
                    "a decode node read %d blocks wrong: %d are wrong here, which are offered no more",
                    len(action.entries),
                    len(checked.bad),
                )
                post(life.feed, checked)
            else:
                sender.put(action)

        sender = BlockSender(parts.pool.view, lambda peer, message: life.send(peer, message), lambda e: life.fail(e))
        offer = None if config.network.transport == "zmq" else server.offer
        keys = read_keys(config.network.key_file)
        endpoint = faults.make_endpoint
        life = NodeLife(hello, epoch, scheduler, execute, offer, keys=keys, backlog=sender, make_endpoint=endpoint)
        try:
            await life.run(config.network, ending)
        finally:
            parts.thread.close()
            sender.close()
