"""What one step costs on this machine, and what its parts cost alone: python benchmarks/floors.py MODEL_DIR.

Prints medians and minima of repeated runs: the GEMM peak and the speed of reading memory; whole-prompt prefills and
decode steps at several batch sizes beside their floors; what a step does besides the model; and drawing tokens from
the logits. The floor of a step is its packed linears alone, and

    of a prefill      the operations of causal attention at half the GEMM peak
    of a decode step  the bytes of its KV at the speed of reading memory
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from pdserve.core.ids import BlockId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.batch import Batch
from pdserve.engine.engine import Engine
from pdserve.engine.kv_pool import KVPool, buffer_bytes
from pdserve.engine.linear import Linear
from pdserve.engine.llama import Outputs
from pdserve.engine.sampler import draw
from pdserve.engine.step import Row, SampleSpec, StepPlan
from pdserve.kernels.draw import load_draw
from pdserve.kvtransfer.shm import PoolMemory

PREFILL_TOKENS = (512, 2048)
DECODE_ROWS = (1, 4, 8, 16)
# What can be reached, as multiples of the floor.
PREFILL_BAR, DECODE_BAR = 1.10, 1.15
READ_BYTES = 512 << 20
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
    parser.add_argument("--context", type=int, default=512, help="tokens of every decode row")
    parser.add_argument("--seconds", type=float, default=2.0, help="time spent on each line")
    options = parser.parse_args()

    started = time.perf_counter()
    engine = Engine.load(options.model, dtype=options.dtype, num_threads=options.threads)
    taken = time.perf_counter() - started
    print(f"{options.model.name}, {engine.dtype}, {options.threads} threads; loaded in {taken:.2f} s")
    print(f"{'':36} {'median':>10} {'minimum':>10}")
    with torch.inference_mode():
        peak = gemm_peak(getattr(torch, engine.dtype), options.seconds)
        bandwidth = read_bandwidth(options.seconds)
        attach_pool(engine, max(max(PREFILL_TOKENS), max(DECODE_ROWS) * options.context))
        for num_tokens in PREFILL_TOKENS:
            floor_s = all_linears(engine, num_tokens, 2 * options.seconds)
            floor_s += attention_operations(engine, num_tokens) / (peak / 2)
            tell_ratio(prefill(engine, num_tokens, 2 * options.seconds), floor_s, PREFILL_BAR)
        for num_rows in DECODE_ROWS:
            floor_s = all_linears(engine, num_rows, options.seconds)
            floor_s += num_rows * options.context * engine.kv_spec(BLOCK_SIZE).token_bytes / bandwidth
            tell_ratio(decode(engine, num_rows, options.context, options.seconds), floor_s, DECODE_BAR)
        for num_rows in DECODE_ROWS:
            beside_the_model(engine, num_rows, options.context, options.seconds)
    for name, sampling in DRAWS.items():
        for num_rows in (1, 16):
            drawing(engine.config.vocab_size, num_rows, name, sampling, options.seconds)


def report(name: str, run: Callable[[], object], seconds: float) -> float:
    """Time `run` again and again, for about `seconds`; as report_times."""

    def timed() -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    return report_times(name, timed, seconds)


def report_times(name: str, timed: Callable[[], float], seconds: float) -> float:
    """Repeat `timed`, which says what it took, for about `seconds` (three times at least); print one line.

    Returns the median in seconds; the first time is left out.
    """
    timed()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < deadline:
        times.append(timed())
    print(f"{name:36} {median(times) * 1e3:7.2f} ms {min(times) * 1e3:7.2f} ms", flush=True)
    return median(times)


def tell_ratio(taken_s: float, floor_s: float, bar: float) -> None:
    verdict = "within" if taken_s <= bar * floor_s else "above"
    print(f"{'':36} {taken_s / floor_s:7.2f} of its floor, {floor_s * 1e3:.2f} ms: {verdict} {bar:.2f}", flush=True)


def gemm_peak(dtype: torch.dtype, seconds: float) -> float:
    """Operations a second"""
    size = 1536
    x = torch.randn(size, size).to(dtype)
    linear = Linear(torch.randn(size, size).to(dtype))
    taken = report(f"GEMM {size} x {size} x {size}", lambda: linear(x), seconds)
    print(f"{'':36} {2 * size**3 / taken / 1e9:7.0f} GFLOP/s")
    return 2 * size**3 / taken


def read_bandwidth(seconds: float) -> float:
    """Bytes a second that one thread adds up, of more than any cache holds."""
    numbers = torch.ones(READ_BYTES // 4)
    taken = report(f"read {READ_BYTES >> 20} MiB", lambda: numbers.sum(), seconds)
    print(f"{'':36} {READ_BYTES / taken / 1e9:7.1f} GB/s")
    return READ_BYTES / taken


def attention_operations(engine: Engine, num_tokens: int) -> float:
    """Multiplications and additions of causal attention: two products over all pairs of a token and one before it."""
    config = engine.config
    pairs = num_tokens * (num_tokens + 1) / 2
    return 4.0 * config.num_layers * config.num_heads * config.head_dim * pairs


def all_linears(engine: Engine, num_rows: int, seconds: float) -> float:
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

    return report(f"all linears, {num_rows} rows", run, seconds)


def attach_pool(engine: Engine, num_tokens: int) -> None:
    spec = engine.kv_spec(BLOCK_SIZE)
    num_blocks = spec.num_blocks_for(num_tokens)
    # The memory that is served from.
    memory = PoolMemory.create("pdserve-bench", buffer_bytes(spec, num_blocks))
    pool = KVPool(spec, num_blocks, memory.buffer)
    memory.close()
    pool.data.normal_()
    engine.attach(pool)


def make_row(key: int, num_tokens: int, context: int) -> Row:
    """The last `num_tokens` of a context, in blocks of its own, in reverse order."""
    num_blocks = -(-context // BLOCK_SIZE)
    blocks = tuple(BlockId(key * num_blocks + (index * 7) % num_blocks) for index in range(num_blocks))
    ids = tuple(100 + index % 1000 for index in range(num_tokens))
    return Row(key, ids, context - num_tokens, blocks, 0, (SampleSpec(SamplingParams(), 0),))


def prefill(engine: Engine, num_tokens: int, seconds: float) -> float:
    plan = StepPlan(0, (make_row(0, num_tokens, num_tokens),))
    return report(f"prefill, {num_tokens} tokens", lambda: engine.step(plan), seconds)


def decode(engine: Engine, num_rows: int, context: int, seconds: float) -> float:
    plan = StepPlan(0, tuple(make_row(key, 1, context) for key in range(num_rows)))
    return report(f"decode step, {num_rows} x {context} tokens", lambda: engine.step(plan), seconds)


def beside_the_model(engine: Engine, num_rows: int, context: int, seconds: float) -> None:
    """A greedy step without its forward pass: checking the plan, building the batch, drawing."""
    plan = StepPlan(0, tuple(make_row(key, 1, context) for key in range(num_rows)))
    forward, model_s = engine.model.forward, 0.0

    def timed_forward(batch: Batch, layer_kvs: list[torch.Tensor]) -> Outputs:
        nonlocal model_s
        started = time.perf_counter()
        outputs = forward(batch, layer_kvs)
        model_s = time.perf_counter() - started
        return outputs

    def timed() -> float:
        started = time.perf_counter()
        engine.step(plan)
        return time.perf_counter() - started - model_s

    engine.model.forward = timed_forward  # type: ignore[method-assign]
    try:
        report_times(f"beside the model, {num_rows} greedy", timed, seconds)
    finally:
        engine.model.forward = forward  # type: ignore[method-assign]


def drawing(vocab_size: int, num_rows: int, name: str, sampling: SamplingParams, seconds: float) -> None:
    """Logits spread as those of a language model are, by about 3."""
    logits = torch.randn(num_rows, vocab_size) * 3
    samples = [(SampleSpec(sampling, 0),) for _ in range(num_rows)]
    report(f"draw {num_rows}, {name}", lambda: draw(logits, samples, load_draw()), seconds / 4)


if __name__ == "__main__":
    main()
