"""What one step costs on this machine, and what its parts cost alone: python benchmarks/floors.py MODEL_DIR.

Prints medians and minima of repeated runs: the GEMM peak, the model's packed linears alone at several numbers
of rows, a whole-prompt prefill, a decode step at several batch sizes, and drawing tokens from the logits. What a
greedy step takes beyond its linears is attention, norms and Python.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from pdserve.core.ids import BlockId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.engine import Engine
from pdserve.engine.kv_pool import KVPool, buffer_bytes
from pdserve.engine.linear import Linear
from pdserve.engine.sampler import draw
from pdserve.engine.step import Row, SampleSpec, StepPlan
from pdserve.kernels.draw import load_draw

LINEAR_ROWS = (1, 4, 16, 64, 512)
DECODE_ROWS = (1, 4, 8, 16)
DRAWS = {
    "greedy": SamplingParams(),
    "greedy, the top 5": SamplingParams(logprobs=5),
    "temperature 1": SamplingParams(temperature=1.0, seed=1),
    "temperature 0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9, seed=1),
    "temperature 0.7, top-k 50": SamplingParams(temperature=0.7, top_k=50, seed=1),
}
BLOCK_SIZE = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=512, help="tokens of the prompt and of every decode row")
    parser.add_argument("--seconds", type=float, default=2.0, help="time spent on each line")
    options = parser.parse_args()

    started = time.perf_counter()
    engine = Engine.load(options.model, dtype=options.dtype, num_threads=options.threads)
    taken = time.perf_counter() - started
    print(f"{options.model.name}, {engine.dtype}, {options.threads} threads; loaded in {taken:.2f} s")
    print(f"{'':36} {'median':>10} {'minimum':>10}")
    with torch.inference_mode():
        gemm_peak(getattr(torch, engine.dtype), options.seconds)
        for num_rows in LINEAR_ROWS:
            all_linears(engine, num_rows, options.seconds)
    attach_pool(engine, max(DECODE_ROWS), options.context)
    prefill(engine, options.context, options.seconds)
    for num_rows in DECODE_ROWS:
        decode(engine, num_rows, options.context, options.seconds)
    for name, sampling in DRAWS.items():
        for num_rows in (1, 16):
            drawing(engine.config.vocab_size, num_rows, name, sampling, options.seconds)


def report(name: str, run: Callable[[], object], seconds: float) -> float:
    """Repeat `run` for about `seconds` (three times at least), print one line, return the median in seconds."""
    run()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < deadline:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    print(f"{name:36} {median(times) * 1e3:7.2f} ms {min(times) * 1e3:7.2f} ms", flush=True)
    return median(times)


def gemm_peak(dtype: torch.dtype, seconds: float) -> None:
    size = 1536
    x = torch.randn(size, size).to(dtype)
    linear = Linear(torch.randn(size, size).to(dtype))
    taken = report(f"GEMM {size} x {size} x {size}", lambda: linear(x), seconds)
    print(f"{'':36} {2 * size**3 / taken / 1e9:7.0f} GFLOP/s")


def all_linears(engine: Engine, num_rows: int, seconds: float) -> None:
    """Every linear of a step once, the head on at most 16 rows as when few sequences sample."""
    config, dtype = engine.config, getattr(torch, engine.dtype)
    hidden = torch.randn(num_rows, config.hidden_size).to(dtype)
    heads = torch.randn(num_rows, config.num_heads * config.head_dim).to(dtype)
    inner = torch.randn(num_rows, config.intermediate_size).to(dtype)
    model = engine.model

    def run() -> None:
        for layer in model.layers:
            layer.qkv(hidden)
            layer.out(heads)
            layer.gated(hidden)
            layer.down(inner)
        model.head.logits(hidden[:16])

    report(f"all linears, {num_rows} rows", run, seconds)


def attach_pool(engine: Engine, num_rows: int, context: int) -> None:
    spec = engine.kv_spec(BLOCK_SIZE)
    num_blocks = num_rows * spec.num_blocks_for(context)
    pool = KVPool(spec, num_blocks, bytearray(buffer_bytes(spec, num_blocks)))
    pool.data.normal_()
    engine.attach(pool)


def make_row(key: int, num_tokens: int, context: int) -> Row:
    """The last `num_tokens` of a context, in blocks of its own, in reverse order."""
    num_blocks = -(-context // BLOCK_SIZE)
    blocks = tuple(BlockId(key * num_blocks + (index * 7) % num_blocks) for index in range(num_blocks))
    ids = tuple(range(100, 100 + num_tokens))
    return Row(key, ids, context - num_tokens, blocks, 0, (SampleSpec(SamplingParams(), 0),))


def prefill(engine: Engine, context: int, seconds: float) -> None:
    plan = StepPlan(0, (make_row(0, context, context),))
    report(f"prefill, {context} tokens", lambda: engine.step(plan), 2 * seconds)


def decode(engine: Engine, num_rows: int, context: int, seconds: float) -> None:
    plan = StepPlan(0, tuple(make_row(key, 1, context) for key in range(num_rows)))
    report(f"decode step, {num_rows} x {context} tokens", lambda: engine.step(plan), seconds)


def drawing(vocab_size: int, num_rows: int, name: str, sampling: SamplingParams, seconds: float) -> None:
    """Logits spread as those of a language model are, by about 3."""
    logits = torch.randn(num_rows, vocab_size) * 3
    samples = [(SampleSpec(sampling, 0),) for _ in range(num_rows)]
    report(f"draw {num_rows}, {name}", lambda: draw(logits, samples, load_draw()), seconds / 4)


if __name__ == "__main__":
    main()
