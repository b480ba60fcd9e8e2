"""The processes of a soak: a router and nodes with pools that are too small, or one node with room for everything."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.checkpoints import make_llama_checkpoint
from tests.e2e.cluster import Cluster
from tests.e2e.servers import Server, command_line
from tests.soak.catalogue import BLOCK_SIZE, CONTEXT

# With 4 heads in 3 layers a token takes 1.5 KiB: the smallest pool, of 1 MiB, is little more than the longest request.
NUM_KV_HEADS = 4
# The product keeps compiled matrix products for up to 1024 shapes, twice over, 0.4 MB each and many minutes until all
# have been seen. So few are full at once, and what grows after that is ours.
FEW_SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
# Room for one long sequence, or some short ones.
SWAPS = ("--preemption-mode", "swap", "--swap-memory", "384KiB")
ROOMY = ("--kv-memory", "128MiB")


class Fleet:
    """Servers by name: router, P0, D0, D1."""

    def __init__(self, servers: dict[str, Server]):
        self.servers = servers
        self._pids = {name: server.pid for name, server in servers.items()}
        self.url = servers["router"].url

    def resident_bytes(self) -> dict[str, int]:
        """Memory of each process that is its own; the pools, which are shared and fixed, are not counted."""
        return {name: _anonymous_bytes(pid) for name, pid in self._pids.items()}

    def troubles(self) -> list[str]:
        """Processes that ended, and bugs in their logs."""
        ended = [f"{name} has ended" for name, pid in self._pids.items() if not command_line(pid)]
        return ended + [f"{name}: {bug}" for name, server in self.servers.items() for bug in server.bugs]


@contextmanager
def make_model() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield make_llama_checkpoint(
            Path(folder) / "tiny", max_position_embeddings=CONTEXT, num_key_value_heads=NUM_KV_HEADS
        )


@contextmanager
def small_fleet(model: Path) -> Iterator[Fleet]:
    """One prefill node and two decode nodes: one swaps and where it cannot recomputes, the other gives requests back.

    The other one gets its blocks in frames.
    """
    with _starting(model) as cluster:
        servers = {"router": cluster.router()}
        size = ("--block-size", BLOCK_SIZE, "--dtype", "float32", "--max-step-tokens", 64)
        servers["P0"] = cluster.node("prefill", *size)
        servers["D0"] = cluster.node("decode", *size, *SWAPS)
        servers["D1"] = cluster.node("decode", *size, "--preemption-mode", "return", "--transport", "zmq", name="D1")
        yield Fleet(servers)


@contextmanager
def roomy_fleet(model: Path) -> Iterator[Fleet]:
    """One node that does everything itself: nothing is moved, and nothing yields."""
    with _starting(model) as cluster:
        servers = {"router": cluster.router()}
        flags = ("--role", "both", "--block-size", BLOCK_SIZE, "--dtype", "float32", *ROOMY)
        servers["D0"] = cluster.node("decode", *flags)
        yield Fleet(servers)


@contextmanager
def _starting(model: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:

        def start(*words: object, through: tuple[str, ...] = (), **environ: str) -> Server:
            server = Server(*words, through=through, **FEW_SHAPES, **environ)
            stack.callback(server.end)
            return server

        yield Cluster(start, model)


def _anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"the kernel does not tell what process {pid} holds")
