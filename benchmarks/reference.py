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
import asyncio
import json
import shlex
import sys
from pathlib import Path
from statistics import median
from typing import Any

from pdserve.loadtest.deployment.server import Server, running

BENCH = (sys.executable, "-m", "pdserve.launch.cli", "bench", "run", "--slo", "ttft=2.0,tpot=0.06")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", action="append", default=[], help="NAME|URL|COMMAND, may be repeated")
    parser.add_argument("--rates", default="0.6,0.8,1.0")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--num-requests", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("results/reference"))
    parser.add_argument("--table", action="store_true", help="print the table of what --out holds, run nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.table:
        servers = [parse_server(text) for text in options.server]
        for seed in options.seeds.split(","):
            for rate in options.rates.split(","):
                for server in servers:
                    asyncio.run(run_point(server, rate, seed, options.num_requests, options.out))
    print(table(options.out))
    return 0


def parse_server(text: str) -> Server:
    name, url, command = text.split("|", 2)
    return Server(name, url, tuple(shlex.split(command)))


async def run_point(server: Server, rate: str, seed: str, num_requests: int, out: Path) -> None:
    file = out / f"{server.name}-{rate}-{seed}.json"
    point = ["--rate", rate, "--seed", seed, "--num-requests", str(num_requests), "--json", str(file)]
    print(f"{server.name}, {rate}/s, seed {seed}", file=sys.stderr, flush=True)
    async with running(server, file.with_suffix(".log")):
        bench = await asyncio.create_subprocess_exec(
            *BENCH, "--url", server.url, *point, stdout=asyncio.subprocess.DEVNULL
        )
        await bench.wait()


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
