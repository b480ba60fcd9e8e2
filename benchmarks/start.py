"""What a deployment takes before anybody uses it: python benchmarks/start.py MODEL_DIR. Prints Markdown tables.

How long after `pdserve up` the first token is there, and the memory of each role, its KV pool and the peers' apart (it
is shared memory), beside the weights that it holds and a process that has only imported torch.
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from pdserve.core.kv_spec import DTYPE_BYTES
from pdserve.core.model_config import load_model_config
from pdserve.loadtest.deployment.server import free_port

MEMORY_BAR = 1.25
START_BAR_S = 10.0
POLL_S = 0.02
TORCH = "import torch; print(open('/proc/self/status').read())"
ROLES = ("router", "prefill", "decode")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    starts = []
    for _ in range(options.rounds):
        started = time.monotonic()
        with up(options.model) as (process, url):
            first_token(url)
            starts.append(time.monotonic() - started)
            memory = {role_of(pid): own_bytes(Path(f"/proc/{pid}/status").read_text()) for pid in children(process.pid)}
    told = ", ".join(f"{taken:.1f}" for taken in sorted(starts))
    print(f"first token {median(starts):.1f} s after the start (median of {told} s; at most {START_BAR_S:.0f} s)\n")
    torch_bytes = own_bytes(subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True).stdout)
    print(memory_table(memory, weight_bytes(options.model), torch_bytes))


@contextmanager
def up(model: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    words = [sys.executable, "-m", "pdserve.launch.cli", "up", "--model", str(model), "--port", str(port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def first_token(url: str) -> None:
    """Ask until the server answers."""
    while True:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
                model = json.load(answer)["data"][0]["id"]
            body = {"model": model, "prompt": "A", "max_tokens": 1}
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=60):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(POLL_S)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def role_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return next((word for word in words if word in ROLES), words[0])


def own_bytes(status: str) -> int:
    """Resident memory of a process but for shared memory."""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))


def weight_bytes(model: Path) -> int:
    """Parameters in the serving dtype, and the vocabulary once more: a head that is packed apart from the embedding."""
    config = load_model_config(model)
    heads = config.num_heads + 2 * config.num_kv_heads
    layer = config.hidden_size * config.head_dim * (heads + config.num_heads)
    layer += 3 * config.hidden_size * config.intermediate_size
    return DTYPE_BYTES[config.dtype] * (config.num_layers * layer + 2 * config.vocab_size * config.hidden_size)


def memory_table(memory: dict[str, int], weights: int, torch_bytes: int) -> str:
    lines = ["| role | resident | weights | torch alone | (resident - torch) / weights |", "|---|---|---|---|---|"]
    for role, taken in memory.items():
        held = 0 if role == "router" else weights
        share = f"{(taken - torch_bytes) / held:.2f}" if held else "-"
        lines.append(f"| {role} | {taken >> 20} MiB | {held >> 20} MiB | {torch_bytes >> 20} MiB | {share} |")
    lines += ["", f"At most {MEMORY_BAR}."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
