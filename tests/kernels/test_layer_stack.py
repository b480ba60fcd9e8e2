"""All layers in one call compute, bit by bit, what they compute one by one."""

import random
from pathlib import Path

import pytest
import torch

from pdserve.engine.engine import Engine
from pdserve.engine.step import Row, StepPlan
from tests.checkpoints import VOCAB_SIZE, make_llama_checkpoint
from tests.cpu import skip_unless_it_multiplies_bf16
from tests.engine.steps import make_engine, make_row, table

CONFIGS = {
    "grouped": {"head_dim": 32},
    "biases": {"head_dim": 32, "attention_bias": True, "mlp_bias": True},
    "uneven": {"head_dim": 64, "hidden_size": 80, "intermediate_size": 56, "num_attention_heads": 10},
    "ungrouped": {"head_dim": 32, "num_key_value_heads": 4, "num_hidden_layers": 2},
}


def tokens(num_tokens: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, VOCAB_SIZE) for _ in range(num_tokens)]


def steps() -> list[tuple[Row, ...]]:
    """Prompts whole and in chunks, then rows that decode beside a chunk, at contexts on both sides of a block's end."""
    lengths = (3, 16, 17, 40)
    blocks = [table(4 * index, 4) for index in range(len(lengths) + 1)]
    prompts = [make_row(tokens(length, length), key=key, blocks=blocks[key]) for key, length in enumerate(lengths)]
    decodes = [make_row(tokens(1, 9), length, key=key, blocks=blocks[key]) for key, length in enumerate(lengths)]
    chunks = [make_row(tokens(20, 1), start, key=4, blocks=blocks[4]) for start in (0, 20)]
    return [tuple(prompts), (decodes[0], chunks[0], *decodes[1:]), (chunks[1],), (decodes[2],)]


@pytest.fixture(params=CONFIGS)
def model_dir(tmp_path, request) -> Path:
    skip_unless_it_multiplies_bf16()
    return make_llama_checkpoint(tmp_path / "model", dtype="bfloat16", **CONFIGS[request.param])


def test_the_same_bits_come_out_as_layer_by_layer(model_dir):
    at_once, one_by_one = make_engine(model_dir, "bfloat16"), make_engine(model_dir, "bfloat16")
    assert at_once.model.stack is not None
    one_by_one.model.stack = None
    for step, rows in enumerate(steps()):
        plan = StepPlan(step, rows)
        assert at_once.step(plan).draws == one_by_one.step(plan).draws
        assert torch.equal(bits(at_once), bits(one_by_one))


def bits(engine: Engine) -> torch.Tensor:
    """The KV of the whole pool; slots that nobody has written are NaN."""
    assert engine._pool is not None
    return engine._pool.data.contiguous().view(torch.int16)
