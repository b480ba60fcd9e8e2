"""With batch-invariant arithmetic a token has the same bits alone, in any chunks, and among others."""

import random
from pathlib import Path

import pytest
import torch

from pdserve.core.errors import ConfigError
from pdserve.core.sampling import SamplingParams
from pdserve.engine.engine import Engine
from pdserve.engine.kv_pool import KVPool, buffer_bytes
from pdserve.engine.step import Row, SampleSpec, StepPlan
from tests.checkpoints import VOCAB_SIZE, make_llama_checkpoint
from tests.cpu import skip_unless_it_multiplies_bf16
from tests.engine.steps import BLOCK_SIZE, make_engine, table

NUM_OTHERS = 45
NUM_PROMPT, NUM_OUTPUTS = 70, 12
NUM_BLOCKS = 6
OURS = 7
PARAMS = SamplingParams(max_tokens=64, logprobs=5)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    skip_unless_it_multiplies_bf16()
    folder = tmp_path_factory.mktemp("invariant") / "model"
    return make_llama_checkpoint(folder, dtype="bfloat16", head_dim=32, hidden_size=64)


@pytest.fixture
def engine(model_dir) -> Engine:
    engine = Engine.load(model_dir, dtype="bfloat16", batch_invariant=True)
    spec = engine.kv_spec(BLOCK_SIZE)
    num_blocks = NUM_BLOCKS * (NUM_OTHERS + 1)
    pool = KVPool(spec, num_blocks, bytearray(buffer_bytes(spec, num_blocks)))
    pool.data.fill_(float("nan"))
    engine.attach(pool)
    return engine


def random_tokens(num_tokens: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, VOCAB_SIZE) for _ in range(num_tokens)]


def our_row(tokens: list[int], start: int, is_last: bool) -> Row:
    samples = (SampleSpec(PARAMS, start),) if is_last else ()
    return Row(0, tuple(tokens), start, table(OURS * NUM_BLOCKS, NUM_BLOCKS), samples=samples)


def other_rows(step: int) -> tuple[Row, ...]:
    """Rows of one token and of several, at contexts of many lengths, each in blocks of its own."""
    places = [place for place in range(NUM_OTHERS + 1) if place != OURS]
    rows = []
    for place in places[: 1 + (step * 17 + 44) % NUM_OTHERS]:
        tokens = random_tokens(1 + (place * step) % 9, seed=1000 * step + place)
        rows.append(Row(1 + place, tuple(tokens), 0, table(place * NUM_BLOCKS, NUM_BLOCKS)))
    return tuple(rows)


def run(engine: Engine, tokens: list[int], chunks: list[int], is_alone: bool) -> tuple[list[object], torch.Tensor]:
    """What was drawn after each chunk that ends at or beyond the prompt's end, and the sequence's KV, as integers."""
    drawn: list[object] = []
    start = 0
    for step, num_tokens in enumerate(chunks):
        row = our_row(tokens[start : start + num_tokens], start, start + num_tokens >= NUM_PROMPT)
        others = () if is_alone else other_rows(step)
        half = len(others) // 2
        result = engine.step(StepPlan(step, (*others[:half], row, *others[half:])))
        start += num_tokens
        drawn += result.draws.get(0, ())
    return drawn, kv_of(engine, len(tokens))


def kv_of(engine: Engine, num_tokens: int) -> torch.Tensor:
    """[num_tokens, everything else] int16"""
    blocks = engine._pool.data[list(table(OURS * NUM_BLOCKS, NUM_BLOCKS))].view(torch.int16)
    by_slot = blocks.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)
    return by_slot[:num_tokens].flatten(1).clone()


def decoded(num_prompt_chunks: list[int]) -> list[int]:
    return [*num_prompt_chunks, *[1] * NUM_OUTPUTS]


CHUNKINGS = {
    "one by one": decoded([1] * NUM_PROMPT),
    "in sevens": decoded([7] * 10),
    "unevenly": decoded([33, 1, 36]),
    "recomputed with its outputs": [NUM_PROMPT + NUM_OUTPUTS],
    "recomputed in two": [50, NUM_PROMPT + NUM_OUTPUTS - 50],
}


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "among 45 others"])
@pytest.mark.parametrize("name", CHUNKINGS)
def test_bits_do_not_depend_on_chunks_and_neighbours(engine, name, is_alone):
    tokens = random_tokens(NUM_PROMPT + NUM_OUTPUTS, seed=5)
    drawn, kv = run(engine, tokens, decoded([NUM_PROMPT]), is_alone=True)
    engine._pool.data.fill_(float("nan"))
    again, kv_again = run(engine, tokens, CHUNKINGS[name], is_alone)
    assert torch.equal(kv, kv_again)
    assert again[-1] == drawn[-1]
    assert all(draw in drawn for draw in again)


def test_what_cannot_be_batch_invariant_is_refused(tmp_path):
    engine = Engine.load(make_llama_checkpoint(tmp_path / "model"), dtype="float32", batch_invariant=True)
    spec = engine.kv_spec(BLOCK_SIZE)
    pool = KVPool(spec, 2, bytearray(buffer_bytes(spec, 2)))
    with pytest.raises(ConfigError, match=r"--batch-invariant on: float32 with heads of 16"):
        engine.attach(pool)


def test_nodes_with_and_without_it_say_that_they_compute_differently(model_dir):
    assert make_engine(model_dir, "bfloat16").compute == "bfloat16"
    engine = Engine.load(model_dir, dtype="bfloat16", batch_invariant=True)
    assert engine.compute == f"bfloat16, batch-invariant, {engine.model.native.products}"
    assert engine.model.native.products in ("tiles", "vectors")
