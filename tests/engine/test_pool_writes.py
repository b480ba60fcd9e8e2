"""A step writes the slots of its own tokens and nothing else, to the first and the last block of a full pool."""

import hashlib
import random
from pathlib import Path

import pytest
import torch

from pdserve.core.errors import LayoutError
from pdserve.core.ids import BlockId
from pdserve.engine.engine import Engine
from pdserve.engine.step import BlockMove, Seal, StepPlan
from tests.checkpoints import make_llama_checkpoint
from tests.engine.steps import BLOCK_SIZE, generate, make_engine, make_row, table, tokens_of
from tests.engine.test_engine_parity import make_prompt

DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_llama_checkpoint(tmp_path_factory.mktemp("writes") / "model")


def digests(engine: Engine) -> list[bytes]:
    """Of each block's bytes."""
    pool = engine._pool
    return [hashlib.blake2b(pool.view.block(BlockId(block))).digest() for block in range(pool.num_blocks)]


def changed_blocks(before: list[bytes], after: list[bytes]) -> set[int]:
    return {block for block, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", range(1, 9))
def test_a_step_changes_only_the_blocks_of_its_own_positions_in_a_pool_without_a_free_block(model_dir, num_rows, dtype):
    """Rows that are padded in a batch have no slot; blocks 0 and the last belong to live rows."""
    engine = make_engine(model_dir, dtype, num_blocks=3 * num_rows)
    blocks = [0, 3 * num_rows - 1, *range(1, 3 * num_rows - 1)]
    # Row 0 writes block 0 first and the last row ends up writing the last block.
    blocks = [blocks[0], *blocks[2:], blocks[1]]
    tables = [tuple(map(BlockId, blocks[3 * row : 3 * row + 3])) for row in range(num_rows)]
    prompts = [make_prompt(2 * BLOCK_SIZE - 3 + row % 3, seed=row) for row in range(num_rows)]
    other = make_engine(model_dir, dtype)
    expected = [generate(other, prompt, 7) for prompt in prompts]

    before, outputs = digests(engine), []
    for step in range(7):
        if step == 0:
            rows = [make_row(prompt, key=key, blocks=tables[key]) for key, prompt in enumerate(prompts)]
        else:
            rows = [
                make_row([outputs[-1][key]], len(prompt) + step - 1, key=key, blocks=tables[key], output_index=step)
                for key, prompt in enumerate(prompts)
            ]
        outputs.append(tokens_of(engine.step(StepPlan(step, tuple(rows)))))
        written = {
            block
            for row in rows
            for block in row.block_ids[row.start // BLOCK_SIZE : (row.start + len(row.token_ids) - 1) // BLOCK_SIZE + 1]
        }
        after = digests(engine)
        assert changed_blocks(before, after) == written
        before = after
    assert {0, 3 * num_rows - 1} <= {block for row in tables for block in row}
    # In bf16 a neighbour may change a last bit, and so a token; what was written where does not depend on that.
    if dtype == "float32":
        assert [[step[key] for step in outputs] for key in range(num_rows)] == expected


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_a_step_of_few_tokens_reads_no_block_that_is_not_its_own(model_dir, num_tokens):
    """Every other block is NaN, the first and the last too."""
    engine, prompt = make_engine(model_dir), make_prompt(40 + num_tokens)
    blocks = table(10, 4)
    engine.step(StepPlan(0, (make_row(prompt[:40], blocks=blocks, params=None),)))
    last = tokens_of(engine.step(StepPlan(1, (make_row(prompt[40:], 40, blocks=blocks),))))[0]
    assert last == generate(make_engine(model_dir), prompt, 1)[0]
    others = [block for block in range(len(engine._pool.data)) if block not in blocks]
    assert engine._pool.data[others].isnan().all()


@pytest.fixture
def padded_dir(tmp_path) -> Path:
    """A model whose blocks do not fill their pages."""
    return make_llama_checkpoint(tmp_path / "model", num_hidden_layers=3, head_dim=24, num_key_value_heads=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_moved_block_is_whole_and_as_it_was_before_any_row_wrote(padded_dir, dtype):
    engine, prompt = make_engine(padded_dir, dtype), make_prompt(41)
    spec, data = engine._pool.spec, engine._pool.data
    assert spec.block_bytes > spec.payload_bytes
    ours, theirs = (BlockId(5), BlockId(0), BlockId(9)), (BlockId(5), BlockId(0), BlockId(47))
    engine.step(StepPlan(0, (make_row(prompt[:40], blocks=ours, params=None),)))
    before = data.clone()
    # Both go on in the same block: one where it is, the other in its copy.
    plan = StepPlan(
        1,
        (make_row([prompt[40]], 40, key=0, blocks=ours), make_row([200], 40, key=1, blocks=theirs)),
        moves=(BlockMove(ours[2], theirs[2]),),
    )
    drawn = tokens_of(engine.step(plan))
    filled = 40 % BLOCK_SIZE
    for block in (9, 47):
        assert torch.equal(data[block, :, :, :, :filled], before[9, :, :, :, :filled])
        assert not data[block, :, :, :, filled].isnan().any()
        assert data[block, :, :, :, filled + 1 :].isnan().all()
    assert not torch.equal(data[9, :, :, :, filled], data[47, :, :, :, filled])
    others = [block for block in range(len(data)) if block not in (9, 47)]
    assert torch.equal(data[others].nan_to_num(7.0), before[others].nan_to_num(7.0))
    for key, last in ((0, prompt[40]), (1, 200)):
        alone = make_engine(padded_dir, dtype)
        alone.step(StepPlan(0, (make_row(prompt[:40], params=None),)))
        if dtype == "float32":
            assert tokens_of(alone.step(StepPlan(1, (make_row([last], 40),))))[0] == drawn[key]


def test_moves_alone_are_a_step_and_their_seals_see_the_copies(model_dir):
    engine = make_engine(model_dir)
    engine.step(StepPlan(0, (make_row(make_prompt(16), blocks=table(3, 1), params=None),)))
    name = bytes(16)
    moves = (BlockMove(BlockId(3), BlockId(0)), BlockMove(BlockId(3), BlockId(47)))
    result = engine.step(StepPlan(1, (), tuple(Seal(BlockId(block), name, 16) for block in (3, 0, 47)), moves))
    assert len(set(result.checksums.values())) == 1
    assert torch.equal(engine._pool.data[0], engine._pool.data[3])


@pytest.mark.parametrize(("source", "target"), [(48, 0), (0, 48), (-1, 0), (0, -1)])
def test_a_move_that_leaves_the_pool_is_refused_before_anything_is_written(model_dir, source, target):
    engine = make_engine(model_dir)
    moves = (BlockMove(BlockId(1), BlockId(2)), BlockMove(BlockId(source), BlockId(target)))
    before = digests(engine)
    with pytest.raises(LayoutError, match="leaves the pool of 48"):
        engine.step(StepPlan(0, (make_row(make_prompt(5)),), moves=moves))
    assert digests(engine) == before


def test_many_moves_in_one_step_each_copy_their_own_block(model_dir):
    engine = make_engine(model_dir)
    engine._pool.data.copy_(torch.randn(engine._pool.data.shape))
    before = engine._pool.data.clone()
    blocks = random.Random(4).sample(range(48), 40)
    moves = tuple(BlockMove(BlockId(a), BlockId(b)) for a, b in zip(blocks[:20], blocks[20:], strict=True))
    engine.step(StepPlan(0, (), moves=moves))
    for move in moves:
        assert torch.equal(engine._pool.data[move.target], before[move.source])
    rest = [block for block in range(48) if block not in blocks[20:]]
    assert torch.equal(engine._pool.data[rest], before[rest])
