"""The prefill node as a process."""

from pdserve.cluster.config import PrefillConfig
from pdserve.kvtransfer.node_process import run_node
from pdserve.prefill_node.node import serve


def run(config: PrefillConfig) -> int:
    """Serve until a signal; returns the exit code. Raises what the start refuses."""
    # It decodes nothing, so it has no batch of running sequences.
    return run_node(config, 0, serve)
