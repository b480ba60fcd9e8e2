"""The cluster in one object, for people: what `pdserve status` prints.

Read from the dispatcher, owns nothing. Called by RouterService for GET /cluster.
"""

from typing import Any

from pdserve.cluster.messages import Link
from pdserve.router.dispatcher import Dispatcher
from pdserve.router.placement import Node


def overview(dispatcher: Dispatcher) -> dict[str, Any]:
    """Every node as the router knows it, at most one beat old."""
    ready, reason = dispatcher.nodes.readiness()
    nodes = [_node(node) for node in sorted(dispatcher.nodes, key=lambda node: (node.role, node.node))]
    return {"ready": ready, "reason": reason, "queued_requests": dispatcher.num_queued, "nodes": nodes}


def _node(node: Node) -> dict[str, Any]:
    gauges = node.gauges
    shown = {
        "node": node.node,
        "role": str(node.role),
        "address": node.peer.address,
        "links": [_link(link) for name, link in sorted(node.links.items()) if name not in node.doubted],
        "kv_blocks": node.capacity.num_blocks,
        "block_size": node.capacity.block_size,
        "prompts": len(node.prompts),
        "streams": len(node.streams),
        "state": "leaving" if node.is_leaving else "joined" if gauges is None else "up",
    }
    if gauges is not None:
        shown["kv"] = {
            "free": gauges.num_free,
            "cached": gauges.num_cached,
            "held": gauges.num_held,
            "leased": gauges.num_leased,
        }
        shown["prefix_blocks"] = len(node.cache)
        shown["running"], shown["waiting"] = gauges.num_running, gauges.num_waiting
        shown["prompt_token_ms"] = round(1e3 * gauges.token_s, 3)
    return shown


def _link(link: Link) -> dict[str, Any]:
    transport = "zmq" if link.is_remote else "shm"
    return {"node": link.node, "transport": transport, "gb_per_s": round(link.bytes_per_s / 1e9, 2)}
