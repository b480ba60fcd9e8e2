"""`pdserve status`: the nodes of a running cluster, their pools and links, as their router knows them."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from pdserve.cluster.private_file import read_lines
from pdserve.core.errors import ConfigError
from pdserve.launch.arguments import make_parser

DESCRIPTION = "Print the nodes of a running cluster: roles, states, KV pools, links. Exit code 1: it is not ready."
TIMEOUT_S = 5.0
COLUMNS = ("node", "role", "state", "KV used", "leased", "prefixes", "running", "waiting", "prompt", "links")


def main(line: list[str]) -> int:
    """Ask the router and print. Raises ConfigError when there is no router to ask."""
    parser = make_parser("pdserve status", DESCRIPTION, "pdserve status [--url URL] [--api-key-file FILE]")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the router (default: http://127.0.0.1:8000)")
    parser.add_argument("--api-key-file", metavar="FILE", help="the first key in it is sent to the router")
    given = parser.parse_line(line)
    key = None
    if given.api_key_file is not None:
        _, key = read_lines(Path(given.api_key_file), "--api-key-file")[0]
    found = _ask(given.url.rstrip("/"), key)
    print(table(found))
    return 0 if found["ready"] else 1


def table(found: dict[str, Any]) -> str:
    """What a person reads: a line a node, then whether requests are served."""
    rows = [COLUMNS, *(_row(node) for node in found["nodes"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    queued = f"{found['queued_requests']} requests queued"
    return "\n".join([*lines, "", f"{'ready' if found['ready'] else 'not ready: ' + found['reason']}, {queued}"])


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    kv = node.get("kv")
    if kv is None:
        return (node["node"], node["role"], node["state"], "", "", "", "", "", "", _links(node))
    total = node["kv_blocks"]
    used = total - kv["free"] - kv["cached"]
    return (
        node["node"],
        node["role"],
        node["state"],
        f"{used} of {total} blocks ({100 * used / total:.0f} %)",
        str(kv["leased"]),
        f"{node['prefix_blocks']} blocks",
        str(node["running"]),
        str(node["waiting"]),
        f"{node['prompt_token_ms']:.2f} ms/token",
        _links(node),
    )


def _links(node: dict[str, Any]) -> str:
    return ", ".join(f"{link['node']} {link['transport']} {link['gb_per_s']:.1f} GB/s" for link in node["links"])


def _ask(url: str, key: str | None) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url}: must begin with http:// or https://")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/cluster", headers=headers), timeout=TIMEOUT_S
        ) as got:
            found: dict[str, Any] = json.load(got)
            return found
    except urllib.error.HTTPError as error:
        error.close()
        hint = ": it wants a key, give --api-key-file FILE" if error.code == 401 else ""
        raise ConfigError(f"--url {url}: answered {error.code}{hint}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--url {url}: no router answers there ({getattr(error, 'reason', error)})") from None
