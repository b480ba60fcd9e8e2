"""Runs an Engine over a small pool the way a node would, for tests: rows, block tables, chunk by chunk."""

from pathlib import Path

from pdserve.core.ids import BlockId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.engine import Engine
from pdserve.engine.kv_pool import KVPool, buffer_bytes
from pdserve.engine.step import Row, SampleSpec, StepPlan, StepResult

BLOCK_SIZE = 16
NUM_BLOCKS = 48

GREEDY = SamplingParams(max_tokens=64)


def make_engine(model_dir: Path, dtype: str = "float32", num_blocks: int = NUM_BLOCKS) -> Engine:
    """An engine on a pool whose every slot is NaN until it is written."""
    engine = Engine.load(model_dir, dtype=dtype)
    spec = engine.kv_spec(BLOCK_SIZE)
    pool = KVPool(spec, num_blocks, bytearray(buffer_bytes(spec, num_blocks)))
    pool.data.fill_(float("nan"))
    engine.attach(pool)
    return engine


def table(first: int, count: int) -> tuple[BlockId, ...]:
    """A block table in descending order, so that no one gets away with neighbours."""
    return tuple(BlockId(first + count - 1 - index) for index in range(count))


def make_row(
    token_ids: list[int],
    start: int = 0,
    *,
    key: int = 0,
    blocks: tuple[BlockId, ...] = table(0, 12),
    params: SamplingParams | None = GREEDY,
    output_index: int = 0,
    write_from: int = 0,
) -> Row:
    samples = (SampleSpec(params, output_index),) if params is not None else ()
    return Row(key, tuple(token_ids), start, blocks, write_from, samples)


def tokens_of(result: StepResult) -> dict[int, int]:
    """By row key, of a step whose rows have one sample each."""
    return {key: draw.token for key, (draw,) in result.draws.items()}


def generate(
    engine: Engine,
    prompt: list[int],
    num_tokens: int,
    *,
    chunk: int | None = None,
    blocks: tuple[BlockId, ...] = table(0, 12),
    params: SamplingParams = GREEDY,
) -> list[int]:
    """Prefill the prompt in chunks, then decode, one sequence alone."""
    chunk = chunk or len(prompt)
    for start in range(0, len(prompt), chunk):
        ids = prompt[start : start + chunk]
        is_last = start + chunk >= len(prompt)
        row = make_row(ids, start, blocks=blocks, params=params if is_last else None)
        tokens = tokens_of(engine.step(StepPlan(0, (row,))))
    outputs = [tokens[0]]
    while len(outputs) < num_tokens:
        position = len(prompt) + len(outputs) - 1
        row = make_row([outputs[-1]], position, blocks=blocks, params=params, output_index=len(outputs))
        outputs.append(tokens_of(engine.step(StepPlan(0, (row,))))[0])
    return outputs
