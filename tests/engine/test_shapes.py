"""Heads of every size and ratio of query to kv heads: attention equals plain torch, tokens equal transformers'."""

import json
import math
from pathlib import Path

import pytest
import torch

from pdserve.core.errors import ModelError
from pdserve.engine.engine import Engine
from pdserve.engine.step import StepPlan
from tests.checkpoints import make_llama_checkpoint
from tests.engine.steps import BLOCK_SIZE, generate, make_engine, make_row, table
from tests.engine.test_engine_parity import logits_of, make_prompt, reference_model

HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 160, 192, 256)
RATIOS = ((1, 1), (7, 1), (28, 4), (12, 12), (5, 5), (32, 2))
EVERY_SHAPE = [(head_dim, ratio) for head_dim in HEAD_DIMS for ratio in RATIOS]
# Each size and each ratio once: 16 and 1/1, 32 and 7/1, ...
FEW_SHAPES = [(head_dim, RATIOS[index % len(RATIOS)]) for index, head_dim in enumerate(HEAD_DIMS)]
SHAPES = [
    *FEW_SHAPES,
    *(pytest.param(*shape, marks=pytest.mark.slow) for shape in EVERY_SHAPE if shape not in FEW_SHAPES),
]
LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 1000)
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}


def make_model(path: Path, head_dim: int, ratio: tuple[int, int], spread: float) -> Path:
    """spread: of the elements of q, k and v, about"""
    num_heads, num_kv_heads = ratio
    hidden_size = 2 * num_heads * math.ceil(32 / num_heads)  # transformers wants a multiple of the heads
    return make_llama_checkpoint(
        path,
        hidden_size=hidden_size,
        initializer_range=spread * hidden_size**-0.5,
        head_dim=head_dim,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        num_hidden_layers=2,
        max_position_embeddings=1024,
    )


def edges(num_queries: int) -> list[tuple[int, int]]:
    """The first and the last queries of a chunk: plain attention of all would take most of the time."""
    return [(0, min(num_queries, 40)), (max(num_queries - 40, 0), num_queries)]


def attend_plainly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64; q [chunk, heads, head_dim] comes last in k and v [kv_heads, context, head_dim]."""
    chunk, num_heads, head_dim = q.shape
    group, context = num_heads // len(k), k.shape[1]
    k, v = (part.double().repeat_interleave(group, 0) for part in (k, v))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(head_dim)
    hidden = torch.ones(chunk, context, dtype=torch.bool).triu(context - chunk + 1)
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)


@pytest.mark.parametrize(("head_dim", "ratio"), SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_over_blocks_equals_plain_attention(tmp_path, monkeypatch, head_dim, ratio, dtype):
    """What the first layer attends to, with whichever kernel serves the shape: as one chunk, as two, and decoding."""
    engine = make_engine(make_model(tmp_path / "model", head_dim, ratio, 1.0), dtype, num_blocks=64)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    attend = type(engine.model)._attend

    def watch(model, q, k, v, layer_kv, batch, chunks):
        out = attend(model, q, k, v, layer_kv, batch, chunks)
        seen.append((q.clone(), out.clone()))
        return out

    # Layer by layer, so that the first one's attention can be seen.
    engine.model.stack = None
    monkeypatch.setattr(type(engine.model), "_attend", watch)
    for length in LENGTHS:
        prompt, blocks = make_prompt(length, seed=length), table(0, 64)
        for start in sorted({0, length // 3, length - 1}):
            if start:
                engine.step(StepPlan(0, (make_row(prompt[:start], blocks=blocks, params=None),)))
            seen.clear()
            engine.step(StepPlan(1, (make_row(prompt[start:], start, blocks=blocks, params=None),)))
            q, out = (part[: length - start] for part in seen[0])
            kv = engine._layer_kvs[0][list(blocks[: -(-length // BLOCK_SIZE)])]
            k, v = kv.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :length]
            for first, last in edges(length - start):
                expected = attend_plainly(q[first:last], k[:, : start + last], v[:, : start + last])
                difference = (out[first:last].double() - expected).abs().max()
                assert difference <= TOLERANCE[dtype] * max(1.0, float(v.abs().max())), (length, start)


@pytest.mark.parametrize(("head_dim", "ratio"), SHAPES)
def test_greedy_tokens_and_logits_equal_transformers(tmp_path, head_dim, ratio):
    model_dir = make_model(tmp_path / "model", head_dim, ratio, 1.6)
    model, engine = reference_model(model_dir), make_engine(model_dir, num_blocks=64)
    for length in LENGTHS:
        prompt, blocks = make_prompt(length, seed=length), table(0, 64)
        tokens = generate(engine, prompt, 3, chunk=256, blocks=blocks)
        with torch.inference_mode():
            # Of one pass over all of it: each position says what its model draws next.
            expected = model(torch.tensor([prompt + tokens])).logits[0, length - 1 : -1]
        assert tokens == expected.argmax(-1).tolist()
        logits = logits_of(engine, make_row(prompt[length - 1 :], length - 1, blocks=blocks))
        torch.testing.assert_close(logits, expected[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ({"head_dim": 15}, "head_dim is 15, must be even"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, must be a divisor of num_attention_heads"),
    ],
)
def test_a_shape_that_cannot_be_served_is_refused_at_load(tmp_path, shape, complaint):
    model_dir = make_llama_checkpoint(tmp_path / "model")
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | shape))
    with pytest.raises(ModelError, match=complaint):
        Engine.load(model_dir)
