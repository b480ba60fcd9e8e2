"""A model whose layers multiply with other numbers than its own: close to it, and the same with and without kernels."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.engine import llama
from pdserve.engine.batch import Decoding, build_batch
from pdserve.engine.engine import FORMATS, MODEL_NUMBERS, Engine
from pdserve.engine.kv_pool import KVPool, buffer_bytes
from pdserve.engine.step import Row, StepPlan
from tests.checkpoints import make_llama_checkpoint
from tests.cpu import skip_unless_it_multiplies_bf16
from tests.engine.steps import BLOCK_SIZE, make_row, table

# Of logits that spread by some units.
CLOSE = {"int4 weights": 0.5, "int8 weights": 0.1, "int8 compute": 0.15}
PROMPT = [(7 * index) % 200 + 5 for index in range(37)]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model_dir(tmp_path_factory, request) -> Path:
    skip_unless_it_multiplies_bf16()
    fields = {"head_dim": 32, "initializer_range": 0.1, "tie_word_embeddings": request.param}
    return make_llama_checkpoint(tmp_path_factory.mktemp("numbers") / "model", dtype="bfloat16", **fields)


def make_pool(engine: Engine) -> KVPool:
    spec = engine.kv_spec(BLOCK_SIZE)
    return KVPool(spec, 12, bytearray(buffer_bytes(spec, 12)))


def logits(engine: Engine, row: Row) -> Tensor:
    """Of what follows the row's last token."""
    with torch.inference_mode():
        decoding = Decoding.IN_PLACE if engine.model.native else Decoding.PADDED
        batch = build_batch((row,), engine.kv_spec(BLOCK_SIZE), torch.device("cpu"), engine.model.min_rows, decoding)
        return engine.model.forward(batch, engine._layer_kvs).logits[0]


def prompt_and_step(prefill: Engine, decode: Engine) -> tuple[Tensor, Tensor]:
    """Logits after a prompt that the one computes, and after one more token that the other does on the same KV."""
    pool = make_pool(prefill)
    for engine in (prefill, decode):
        engine.attach(pool)
    return logits(prefill, make_row(PROMPT)), logits(decode, make_row([17], len(PROMPT), blocks=table(0, 12)))


def off(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The root mean square of the differences, in standard deviations of what is expected."""
    return max(float((a - b).square().mean().sqrt() / b.std()) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("numbers", CLOSE)
def test_logits_are_close_to_the_models_own(model_dir, numbers: str):
    own, other = Engine.load(model_dir, dtype="bfloat16"), Engine.load(model_dir, dtype="bfloat16", numbers=numbers)
    assert other.model.stack is not None
    assert 0 < off(prompt_and_step(other, other), prompt_and_step(own, own)) < CLOSE[numbers]


@pytest.mark.parametrize(("prefill", "decode"), [("int8 compute", "int4 weights"), (MODEL_NUMBERS, "int8 weights")])
def test_a_stream_goes_on_with_kv_of_other_numbers(model_dir, prefill: str, decode: str):
    own = Engine.load(model_dir, dtype="bfloat16")
    pair = (Engine.load(model_dir, dtype="bfloat16", numbers=numbers) for numbers in (prefill, decode))
    assert off(prompt_and_step(*pair), prompt_and_step(own, own)) < 0.5


@pytest.mark.parametrize("numbers", CLOSE)
def test_without_kernels_torch_computes_the_same_and_says_so(model_dir, numbers: str, caplog):
    native = Engine.load(model_dir, dtype="bfloat16", numbers=numbers)
    with mock.patch.object(llama, "load_kernels", return_value=None):
        plain = Engine.load(model_dir, dtype="bfloat16", numbers=numbers)
    assert "steps take several times as long" in caplog.text
    assert plain.compute == native.compute == f"bfloat16, {numbers}"
    assert off(prompt_and_step(plain, plain), prompt_and_step(native, native)) < 0.1


@pytest.mark.parametrize("numbers", FORMATS)
def test_batch_invariance_is_refused_where_few_rows_are_multiplied_otherwise_than_many(model_dir, numbers: str):
    engine = Engine.load(model_dir, dtype="bfloat16", batch_invariant=True, numbers=numbers)
    if numbers == "int4 weights":
        with pytest.raises(ConfigError, match="no --weights int4"):
            engine.attach(make_pool(engine))
    else:
        engine.attach(make_pool(engine))
        assert engine.step(StepPlan(0, (make_row(PROMPT),))).draws


def test_weights_of_4_bits_take_the_memory_of_4_bits(model_dir):
    sizes = {}
    for numbers in FORMATS:
        layer = Engine.load(model_dir, dtype="bfloat16", numbers=numbers).model.layers[0].gated
        sizes[numbers] = layer.num_bytes
    assert sizes["int4 weights"] <= 0.32 * sizes[MODEL_NUMBERS]
    assert sizes["int8 weights"] == sizes["int8 compute"] <= 0.55 * sizes[MODEL_NUMBERS]
