"""Loading, attaching, sealing: what Engine promises besides the numbers of the model."""

from dataclasses import replace

import pytest
import torch
import xxhash

from pdserve.core.errors import ConfigError, LayoutError
from pdserve.core.ids import BlockHash, BlockId
from pdserve.core.kv_spec import KVSpec
from pdserve.core.sampling import SamplingParams
from pdserve.engine import engine as engine_module
from pdserve.engine.engine import Engine, resolve_dtype
from pdserve.engine.kv_pool import KVPool, buffer_bytes
from pdserve.engine.step import SampleSpec, Seal, StepPlan
from tests.checkpoints import make_llama_checkpoint
from tests.engine.steps import BLOCK_SIZE, make_engine, make_row, table

HASH = BlockHash(bytes(range(16)))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_llama_checkpoint(tmp_path_factory.mktemp("engine") / "model")


def test_a_sealed_block_is_zero_where_it_was_not_written_and_its_checksum_covers_it(model_dir):
    engine = make_engine(model_dir)
    block_id = table(0, 12)[1]
    plan = StepPlan(4, (make_row(list(range(10, 30))),), (Seal(block_id, HASH, 4),))
    result = engine.step(plan)
    block = engine._pool.data[block_id]
    assert not block[:, :, :, :4].isnan().any()
    assert block[:, :, :, :4].any()
    assert not block[:, :, :, 4:].any()
    seed = int.from_bytes(HASH[:8], "little")
    expected = xxhash.xxh3_64_intdigest(bytes(engine._pool.view.block(block_id)), seed=seed)
    assert result.checksums == {block_id: expected}
    assert result.step == 4


def test_a_plan_of_seals_alone_runs_no_rows(model_dir):
    engine = make_engine(model_dir)
    result = engine.step(StepPlan(0, (), (Seal(BlockId(3), HASH, 0),)))
    assert result.draws == {}
    assert set(result.checksums) == {3}
    assert not engine._pool.data[3].any()


def test_equal_prompts_seal_to_equal_checksums_wherever_their_blocks_lie(model_dir):
    engine, ids = make_engine(model_dir), list(range(10, 26))
    sums = []
    for blocks in (table(0, 1), table(30, 1)):
        plan = StepPlan(0, (make_row(ids, blocks=blocks),), (Seal(blocks[0], HASH, BLOCK_SIZE),))
        sums += engine.step(plan).checksums.values()
    assert sums[0] == sums[1]


def test_a_pool_of_another_model_is_refused(model_dir):
    engine = Engine.load(model_dir)
    spec = KVSpec(num_layers=3, num_kv_heads=4, head_dim=16, dtype="float32", block_size=BLOCK_SIZE)
    with pytest.raises(LayoutError, match="num_kv_heads=4"):
        engine.attach(KVPool(spec, 1, bytearray(buffer_bytes(spec, 1))))


def test_a_detached_pool_can_be_closed(model_dir):
    engine = make_engine(model_dir)
    engine.detach()
    assert engine._layer_kvs == []


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (make_row([1] * 40, blocks=table(0, 2)), "need 3 blocks, its table has 2"),
        (make_row([5, 260]), "vocabulary of 260"),
        (make_row([-1, 5]), "vocabulary of 260"),
        (make_row([5], blocks=table(48, 1)), "pool of 48"),
        (make_row([]), "0 tokens"),
    ],
)
def test_a_row_that_cannot_be_run_is_refused_before_anything_is_written(model_dir, row, complaint):
    engine = make_engine(model_dir)
    with pytest.raises(LayoutError, match=complaint):
        engine.step(StepPlan(0, (row,)))
    assert engine._pool.data.isnan().all()


def test_the_length_is_the_checkpoints_unless_a_shorter_one_is_asked(model_dir):
    assert Engine.load(model_dir).max_model_len == 512
    assert Engine.load(model_dir, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="--max-model-len 513"):
        Engine.load(model_dir, max_model_len=513)


def test_loading_reports_progress_to_the_end(model_dir):
    shares = []
    Engine.load(model_dir, progress=lambda phase, share: shares.append(share))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_an_unknown_dtype_or_an_absent_device_is_named(model_dir):
    with pytest.raises(ConfigError, match="--dtype int4"):
        Engine.load(model_dir, dtype="int4")
    with pytest.raises(ConfigError, match="--device tpu"):
        Engine.load(model_dir, device="tpu")


def test_auto_takes_the_checkpoints_dtype_only_where_the_device_computes_it(monkeypatch):
    monkeypatch.setattr(engine_module, "is_native_on_cpu", lambda dtype: dtype == torch.bfloat16)
    assert resolve_dtype("auto", "bfloat16", "cpu") == "bfloat16"
    assert resolve_dtype("auto", "float16", "cpu") == "float32"
    assert resolve_dtype("auto", "float16", "cuda") == "float16"
    assert resolve_dtype("auto", "float32", "cpu") == "float32"
    assert resolve_dtype("float16", "bfloat16", "cpu") == "float16"


def test_samples_of_one_row_draw_what_rows_of_their_own_draw(model_dir):
    engine, prompt = make_engine(model_dir), list(range(10, 40))
    params = SamplingParams(temperature=1.5, seed=9, logprobs=3, repetition_penalty=1.3)
    specs = tuple(SampleSpec(params, 0, sample, tuple(prompt), len(prompt)) for sample in range(8))
    row = replace(make_row(prompt), samples=specs)
    together = engine.step(StepPlan(0, (row,))).draws[0]
    alone = [engine.step(StepPlan(1, (replace(row, samples=(spec,)),))).draws[0] for spec in specs]
    assert [(draw,) for draw in together] == alone
    assert len({draw.token for draw in together}) > 2


def test_a_step_gives_log_probabilities_to_the_rows_that_ask_and_in_their_order(model_dir):
    engine = make_engine(model_dir)
    rows = tuple(
        make_row(list(range(10 + key, 30)), key=key, blocks=table(4 * key, 4), params=SamplingParams(logprobs=asked))
        for key, asked in enumerate((2, None, 0, 5))
    )
    together = engine.step(StepPlan(0, rows)).draws
    assert {key: len(draw.logprobs) for key, (draw,) in together.items()} == {0: 1, 1: 0, 2: 1, 3: 1}
    for row in rows:
        (found,) = together[row.key]
        for own, *top in found.logprobs:
            # A greedy token is the likeliest itself.
            assert own.token == found.token
            assert top[:1] in ([own], [])
