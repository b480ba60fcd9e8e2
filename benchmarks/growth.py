"""How steps grow with batch and context: python benchmarks/growth.py MODEL_DIR. Prints a Markdown table.

For each doubling the factor by which a step takes longer. Weights are read once for a batch and attention grows with
the context, so no factor may be above 2, which is linear growth.
"""

import argparse
from itertools import pairwise
from pathlib import Path

import torch
from floors import attach_pool, decode, make_row, report

from pdserve.engine.engine import Engine
from pdserve.engine.step import StepPlan

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
CHUNK_CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
CHUNK = 256
CONTEXT = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each line")
    options = parser.parse_args()
    engine = Engine.load(options.model)
    attach_pool(engine, max(max(BATCHES) * CONTEXT, max(CONTEXTS)))
    with torch.inference_mode():
        rows = [decode(engine, size, CONTEXT, options.seconds) for size in BATCHES]
        contexts = [decode(engine, 1, length, options.seconds) for length in CONTEXTS]
        chunks = [chunk(engine, length, options.seconds) for length in CHUNK_CONTEXTS]
    print("\n| grows with | sizes | a step | largest factor of a doubling |\n|---|---|---|---|")
    print(line(f"sequences of {CONTEXT} tokens in a step", BATCHES, rows))
    print(line("context of one sequence", CONTEXTS, contexts))
    print(line(f"context of a chunk of {CHUNK} tokens", CHUNK_CONTEXTS, chunks))


def chunk(engine: Engine, context: int, seconds: float) -> float:
    plan = StepPlan(0, (make_row(0, CHUNK, context),))
    return report(f"the last {CHUNK} of {context} tokens", lambda: engine.step(plan), seconds)


def line(what: str, sizes: tuple[int, ...], seconds: list[float]) -> str:
    factors = [later / earlier for earlier, later in pairwise(seconds)]
    told = ", ".join(f"{taken * 1e3:.1f} ms" for taken in seconds)
    return f"| {what} | {sizes[0]} to {sizes[-1]} | {told} | {max(factors):.2f} |"


if __name__ == "__main__":
    main()
