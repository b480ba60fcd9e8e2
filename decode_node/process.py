"""The decode node, or the colocated one, as a process."""

from pdserve.cluster.config import DecodeConfig
from pdserve.decode_node.node import serve
from pdserve.kvtransfer.node_process import run_node


def run(config: DecodeConfig) -> int:
    """Serve until a signal; returns the exit code. Raises what the start refuses."""
    return run_node(config, config.steps.max_running, serve)
