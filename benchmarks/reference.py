"""The reference load against several servers on the same machine, in turn: A B C, A B C, ...

    python benchmarks/reference.py --out results/reference \
        --server 'split|http://127.0.0.1:8200|pdserve up --port 8200' \
        --server 'both|http://127.0.0.1:8200|pdserve up --port 8200 --role-mode both'

Each server is started anew for every point, waited for, loaded and stopped, so that no point finds prompts of
another in a prefix cache; all servers take a seed in turn, then comes the next seed. Prompts of 256 to 768
tokens, outputs of 32 to 96, Poisson arrivals, the promise TTFT 2 s and TPOT 60 ms. Writes one JSON a point and
prints a Markdown table at the end; with --table only the table, from the files that are there. Keep the machine
quiet meanwhile.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    url: str
    command: tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", action="append", default=[], help="NAME|URL|COMMAND, may be repeated")
    parser.add_argument("--rates", default="0.6,0.8,1.0")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--num-requests", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("results/reference"))
    parser.add_argument("--table", action="store_true", help="print the table of what --out holds, run nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.table:
        servers = [parse_server(text) for text in options.server]
        for seed in options.seeds.split(","):
            for server in servers:
                for rate in options.rates.split(","):
                    run_point(server, rate, seed, options.num_requests, options.out)
    print(table(options.out))
    return 0


def parse_server(text: str) -> Server:
    name, url, command = text.split("|", 2)
    return Server(name, url, tuple(shlex.split(command)))


def run_point(server: Server, rate: str, seed: str, num_requests: int, out: Path) -> None:
    bench = [str(Path(sys.executable).with_name("pdserve")), "bench", "run", "--slo", "ttft=2.0,tpot=0.06"]
    file = out / f"{server.name}-{rate}-{seed}.json"
    point = ["--rate", rate, "--seed", seed, "--num-requests", str(num_requests), "--json", str(file)]
    print(f"{server.name}, {rate}/s, seed {seed}", file=sys.stderr, flush=True)
    with file.with_suffix(".log").open("w") as log, running(server.command, log) as process:
        wait_until_served(server.url, process)
        subprocess.run([*bench, "--url", server.url, *point], check=False, stdout=subprocess.DEVNULL)


@contextmanager
def running(command: Sequence[str], log: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A server for as long as it is looked at; ended with all that it has started."""
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_served(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until one short completion is answered."""
    deadline = time.monotonic() + START_TIMEOUT_S
    model = ""
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
                model = json.load(answer)["data"][0]["id"]
            body = json.dumps({"model": model, "prompt": [1000, 1001, 1002], "max_tokens": 2}).encode()
            request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"no server at {url} within {START_TIMEOUT_S:g} s, exit code {process.poll()}")


def table(out: Path) -> str:
    """Medians over seeds, and the share of all requests of all seeds that kept the promise."""
    points: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for file in sorted(out.glob("*.json")):
        name, rate, _ = file.stem.rsplit("-", 2)
        points.setdefault((name, float(rate)), []).append(json.loads(file.read_text()))
    lines = [
        "| server | rate/s | kept the promise | goodput/s | TTFT p50 / p90 | TPOT p50 / p90 | p99 gap | runs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (name, rate), runs in sorted(points.items()):
        kept = [run["slo_attainment"] for run in runs]

        def over(*path: str, runs: list[dict[str, Any]] = runs) -> float:
            return median(dig(run["summary"]["latencies"], path) for run in runs) * 1e3

        lines.append(
            f"| {name} | {rate:g} | {sum(kept) / len(kept):.1%} ({min(kept):.0%}-{max(kept):.0%}) "
            f"| {median(run['goodput_per_s'] for run in runs):.2f} "
            f"| {over('ttft', 'p50'):.0f} / {over('ttft', 'p90'):.0f} ms "
            f"| {over('tpot', 'p50'):.1f} / {over('tpot', 'p90'):.1f} ms "
            f"| {over('gap', 'p99'):.0f} ms | {len(runs)} |"
        )
    return "\n".join(lines)


def dig(tree: dict[str, Any], path: tuple[str, ...]) -> float:
    value: Any = tree
    for key in path:
        value = value[key]
    return float(value)


if __name__ == "__main__":
    sys.exit(main())
