"""Which kind of linear layer a model gets, and that the kinds agree."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.linear import MIN_ROWS, GatedLinear, Linear, LinearMaker, can_pack
from pdserve.kernels.cpu import CpuKernels
from pdserve.kernels.library import load_library
from pdserve.kernels.packed_linear import PackedGatedLinear, PackedLinear
from pdserve.kernels.quantized_weights import Format

IN, OUT = 64, 48
# Roundings of products to bf16, each by up to 2^-8 of numbers of size 1, and a few before the last.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5}
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def native() -> CpuKernels:
    kernels = CpuKernels(load_library(), torch.bfloat16)
    if not kernels.can_multiply:
        pytest.skip("this CPU does not multiply bf16")
    return kernels


def make(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return (scale * torch.randn(shape, generator=generator)).to(dtype)


def make_weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Of a size that makes products of size 1."""
    return make(*shape, dtype=dtype, scale=shape[-1] ** -0.5)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


# ---- which kind --------------------------------------------------------------------------------------


def test_without_compiled_kernels_the_layers_are_those_of_torch():
    maker = LinearMaker.of(None, Format.BF16, IN)
    assert isinstance(maker.linear(make_weight(OUT, IN)), Linear)
    assert isinstance(maker.gated(make_weight(OUT, IN), make_weight(OUT, IN)), GatedLinear)
    assert maker.min_rows == MIN_ROWS > 1


@needs_compiler
def test_kernels_that_multiply_make_the_layers_and_need_no_more_rows_than_there_are(native: CpuKernels):
    maker = LinearMaker.of(native, Format.BF16, IN, 2)
    assert isinstance(maker.linear(make_weight(OUT, IN)), PackedLinear)
    assert isinstance(maker.gated(make_weight(OUT, IN), make_weight(OUT, IN)), PackedGatedLinear)
    assert maker.min_rows == 1


@needs_compiler
def test_one_odd_input_size_leaves_all_layers_of_a_model_to_torch(native: CpuKernels):
    maker = LinearMaker.of(native, Format.BF16, IN, 63)
    assert maker == LinearMaker.of(None, Format.BF16)
    assert isinstance(maker.linear(make_weight(OUT, IN)), Linear)


@needs_compiler
def test_kernels_for_float32_make_no_layers():
    assert LinearMaker.of(CpuKernels(load_library(), torch.float32), Format.BF16, IN) == LinearMaker.of(
        None, Format.BF16
    )


def test_weights_on_another_device_stay_plain():
    assert not can_pack(torch.bfloat16, torch.device("meta"))
    weight = torch.empty(OUT, IN, dtype=torch.bfloat16, device="meta")
    assert Linear(weight).weight is weight


# ---- what they compute -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num_rows", [1, MIN_ROWS, 33])
def test_a_layer_of_torchs_computes_its_formula(dtype: torch.dtype, has_bias: bool, num_rows: int):
    x, weight, up = (
        make(num_rows, IN, dtype=dtype),
        make_weight(OUT, IN, dtype=dtype),
        make_weight(OUT, IN, dtype=dtype),
    )
    bias = make(OUT, dtype=dtype) if has_bias else None
    hidden = make(num_rows, OUT, dtype=dtype)
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    maker = LinearMaker.of(None, Format.BF16, IN)
    linear, gated = maker.linear(weight.clone(), bias), maker.gated(weight.clone(), up.clone(), bias, bias)
    assert linear.is_packed == can_pack(dtype, CPU)
    assert_close(linear(x), expected, dtype)
    assert_close(linear.silu(x), F.silu(expected), dtype)
    assert_close(linear.logits(x)[0], expected, dtype)
    assert linear.logits(x)[0].dtype == torch.float32
    up_expected = F.linear(x.float(), up.float(), None if bias is None else bias.float())
    assert_close(gated(x), F.silu(expected) * up_expected, dtype)
    added = linear.add_to(hidden.clone(), x)
    assert_close(added, hidden.float() + expected, dtype)


@needs_compiler
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num_rows", [1, 14, 33])
def test_both_kinds_of_layers_agree(native: CpuKernels, has_bias: bool, num_rows: int):
    x, weight = make(num_rows, IN), make_weight(OUT, IN)
    bias = make(OUT) if has_bias else None
    ours, torchs = (
        maker.linear(weight.clone(), bias)
        for maker in (LinearMaker.of(native, Format.BF16, IN), LinearMaker.of(None, Format.BF16))
    )
    assert_close(ours(x), torchs(x))
    assert_close(ours.logits(x)[0], torchs.logits(x)[0])
    assert ours.logits(x)[0].dtype == torchs.logits(x)[0].dtype == torch.float32
    hidden = [make(num_rows, OUT) for _ in range(2)]
    results = [layer.add_to(where, x) for layer, where in zip((ours, torchs), hidden, strict=True)]
    assert_close(*results)
    assert [result.data_ptr() for result in results] == [where.data_ptr() for where in hidden]


@needs_compiler
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num_rows", [1, 14, 33])
def test_both_kinds_of_gated_layers_agree(native: CpuKernels, has_bias: bool, num_rows: int):
    x, gate, up = make(num_rows, IN), make_weight(OUT, IN), make_weight(OUT, IN).flip(0)
    biases = (make(OUT), make(OUT).flip(0)) if has_bias else (None, None)
    ours, torchs = (
        maker.gated(gate.clone(), up.clone(), *biases)
        for maker in (LinearMaker.of(native, Format.BF16, IN), LinearMaker.of(None, Format.BF16))
    )
    assert_close(ours(x), torchs(x))
