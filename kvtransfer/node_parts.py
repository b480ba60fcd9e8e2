"""What a node of either role is made of before it says hello: engine, pool, and the facts about both.

Loads the model, sizes the pool, hands the pool's memory to the engine, and says on the way what a
person wants to know at start. Owned by the node's process; `close` gives the memory back.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pdserve.cluster.config import Compute, DecodeNumbers, Memory, NodeServing, PrefillNumbers
from pdserve.cluster.machine import available_memory_bytes, current_cores, default_kv_memory
from pdserve.cluster.messages import Capacity, Facts
from pdserve.core.checkpoint import checkpoint_digest, kv_fingerprint, tokenizer_digest
from pdserve.core.errors import ConfigError
from pdserve.core.kv_spec import KVSpec
from pdserve.engine.engine import Engine
from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.kv_pool import KVPool, buffer_bytes
from pdserve.engine.step_cost import StepCost
from pdserve.engine.warm_up import warm_up
from pdserve.kvtransfer.shm import PoolMemory

log = logging.getLogger(__name__)

MIB = 1 << 20

Load = Callable[..., Engine]


@dataclass(slots=True)
class NodeParts:
    """cost: what steps take here, learned by warming up."""

    thread: EngineThread
    memory: PoolMemory
    pool: KVPool
    facts: Facts
    capacity: Capacity
    cost: StepCost

    def close(self) -> None:
        """Wait for the step in flight, then unmap the pool; no copy may be in flight."""
        self.thread.close()
        self.thread.engine.detach()
        self.pool.view.release()
        self.memory.close()


MODEL_NUMBERS = DecodeNumbers()


def load_node_parts(
    name: str,
    serving: NodeServing,
    memory: Memory,
    compute: Compute,
    max_running: int,
    load: Load = Engine.load,
    numbers: PrefillNumbers | DecodeNumbers = MODEL_NUMBERS,
) -> NodeParts:
    """load: makes the engine, with the arguments of Engine.load.

    Raises ModelError for a checkpoint that cannot be served, ConfigError for a pool that makes no sense.
    """
    model_dir = serving.model
    assert model_dir is not None, "the command line resolves the demo model"
    phases = PhaseLog()

    def load_engine() -> Engine:
        return load(
            model_dir,
            device=serving.device,
            dtype=serving.dtype,
            max_model_len=serving.max_model_len,
            num_threads=compute.num_threads or len(compute.cores or current_cores()),
            batch_invariant=compute.batch_invariant == "on",
            numbers=numbers.own,
        )

    thread = EngineThread(load_engine)
    engine = thread.engine
    phases.end("load model")
    spec = engine.kv_spec(memory.block_size)
    num_blocks = _num_blocks(spec, memory)
    pool_memory = PoolMemory.create(f"pdserve-{name}", buffer_bytes(spec, num_blocks))
    pool = KVPool(spec, num_blocks, pool_memory.buffer, serving.device)
    engine.attach(pool)
    phases.end("KV pool")
    facts = _facts(model_dir, engine, spec, numbers.accepted)
    capacity = Capacity(num_blocks, spec.block_size, engine.max_model_len, max_running, spec.token_bytes)
    phases.end("digests")
    cost = thread.call(lambda engine: warm_up(engine, pool))
    phases.end("warm up")
    log.info(
        "pdserve %s, model %s, %s on %s", metadata.version("pdserve"), model_dir.name, engine.dtype, serving.device
    )
    log.info(
        "KV: %d blocks of %d tokens = %d tokens (%d bytes each, %.0f MiB), %.1f requests at the full context of %d",
        num_blocks,
        spec.block_size,
        capacity.num_tokens,
        spec.token_bytes,
        num_blocks * spec.block_bytes / MIB,
        capacity.num_tokens / engine.max_model_len,
        engine.max_model_len,
    )
    log.info("started in %s", phases.summary())
    return NodeParts(thread, pool_memory, pool, facts, capacity, cost)


class PhaseLog:
    """Seconds of each phase of a start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._since = clock()
        self._phases: list[tuple[str, float]] = []

    def end(self, phase: str) -> None:
        now = self._clock()
        self._phases.append((phase, now - self._since))
        self._since = now

    def summary(self) -> str:
        return ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self._phases)


def _num_blocks(spec: KVSpec, memory: Memory) -> int:
    available = available_memory_bytes()
    kv_memory = memory.kv_memory if memory.kv_memory is not None else default_kv_memory(available)
    if kv_memory > available:
        raise ConfigError(f"--kv-memory {kv_memory} bytes is more than the {available} available here")
    num_blocks = spec.num_blocks_within(kv_memory)
    if num_blocks < 2:
        raise ConfigError(f"--kv-memory {kv_memory} bytes holds {num_blocks} KV blocks of {spec.block_bytes}; 2 needed")
    return num_blocks


def _facts(model_dir: Path, engine: Engine, spec: KVSpec, accepted: tuple[str, ...] | None) -> Facts:
    checkpoint = checkpoint_digest(model_dir)
    return Facts(
        checkpoint=checkpoint,
        tokenizer=tokenizer_digest(model_dir),
        kv_spec=spec.digest(),
        kv_fingerprint=kv_fingerprint(checkpoint, engine.config, spec),
        compute=engine.compute,
        accept_compute=tuple(map(engine.compute_with, accepted or ())),
    )
