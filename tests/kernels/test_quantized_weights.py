"""Products with weights of 4 and 8 bits against float64 products of the numbers that those stand for."""

import pytest
import torch
from torch import Tensor

from pdserve.engine.linear import QuantizedLinear
from pdserve.kernels.huge_pages import HugePages
from pdserve.kernels.packed_linear import PackedGatedLinear, PackedLinear
from pdserve.kernels.quantized_weights import Format, Quantized, quantize_groups, quantize_outputs, rounded_rows
from tests.cpu import BUILDS, multiplying_library

FORMATS = [Format.INT4, Format.INT8, Format.BYTES]
ROWS = [1, 2, 3, 4, 7, 12, 13, 15, 16, 17, 31, 33, 40]
# Around the sixteen lanes of a vector, the thirty-two of a panel and of a group, and the sixty-four bytes of a tile.
OUT_FEATURES = [1, 15, 33, 96]
IN_FEATURES = [2, 30, 32, 34, 62, 64, 66, 70, 576]
NAN = float("nan")


@pytest.fixture(params=BUILDS)
def library(request):
    torch.manual_seed(1)
    return multiplying_library(request.param)


def make(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape)).bfloat16()


def assert_product(actual: Tensor, x: Tensor, weight: Tensor, form: Format, bias: Tensor | None = None) -> None:
    """actual: float32, of a bf16 weight"""
    numbers = Quantized.of(weight, form).weight().double()
    rows = x.double()
    expected = rows @ numbers.T + (0 if bias is None else bias.double())
    size = rows.abs() @ numbers.abs().T
    if form == Format.INT4:
        # Few rows: sums of up to 16 times the numbers. Many rows: each weight is rounded to bf16.
        allowed = (2.0**-8 if len(x) > 1 else 2.0**-18) * rows.abs() @ (numbers.abs() + 1).T
    else:
        steps = rows.abs().amax(1, keepdim=True) / (127 if form == Format.BYTES else 32767)
        allowed = 0.5 * steps * numbers.abs().sum(1) + 2.0**-20 * size
    excess = (actual.double() - expected).abs() - 1.01 * allowed - 1e-6
    assert (excess <= 0).all(), f"off by {excess.max():g} more than allowed"


# ---- rounding ----------------------------------------------------------------------------------------


def test_four_bits_reach_from_the_least_to_the_largest_of_a_group_and_miss_by_half_a_step():
    weight = make(9, 70)
    integers, scales, _ = quantize_groups(weight)
    assert integers.shape == (9, 3, 32)
    assert integers.amin(2).eq(0).all()
    assert (integers.amax(2) >= 14).all()
    error = (Quantized.of(weight, Format.INT4).weight() - weight.float()).abs()
    assert (error <= 0.6 * scales.float().repeat_interleave(32, 1)[:, :70]).all()


def test_eight_bits_miss_by_half_a_step_of_their_output():
    weight = make(9, 70)
    integers, scales = quantize_outputs(weight)
    assert integers.abs().amax(1).eq(127).all()
    error = (Quantized.of(weight, Format.INT8).weight() - weight.float()).abs()
    assert (error <= 0.501 * scales[:, None]).all()


@pytest.mark.parametrize("form", FORMATS)
def test_weights_of_nothing_stay_nothing(form: Format):
    assert Quantized.of(torch.zeros(3, 70).bfloat16(), form).weight().eq(0).all()
    assert rounded_rows(torch.zeros(3, 70).bfloat16(), form).eq(0).all()


# ---- products ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("in_features", IN_FEATURES)
def test_what_was_packed_comes_back_input_by_input(library, form: Format, in_features: int):
    """Each row asks for the weights of one input."""
    weight = make(45, in_features)
    layer = PackedLinear(library, HugePages(), weight, None, form)
    asking = torch.eye(in_features).bfloat16()
    expected = Quantized.of(weight, form).weight().T
    one_by_one = torch.cat([layer.logits(row)[0] for row in asking.split(1)])
    torch.testing.assert_close(one_by_one, expected, rtol=2e-5, atol=2e-5)
    # Of many rows the weights of 4 bits are rounded to bf16.
    rtol = 2.0**-8 if form == Format.INT4 else 2e-5
    torch.testing.assert_close(layer.logits(asking)[0], expected, rtol=rtol, atol=2e-5)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("out_features", OUT_FEATURES)
def test_a_product_is_that_of_the_rounded_weights(
    library, form: Format, num_rows: int, out_features: int, has_bias: bool
):
    for in_features in IN_FEATURES:
        x, weight = make(num_rows, in_features), make(out_features, in_features)
        bias = make(out_features) if has_bias else None
        assert_product(PackedLinear(library, HugePages(), weight, bias, form).logits(x)[0], x, weight, form, bias)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_all_kinds_of_products_agree_with_the_layers_of_torch(library, form: Format, num_rows: int):
    x, gate, up = make(num_rows, 96), make(45, 96, scale=0.1), make(45, 96, scale=0.1)
    bias, hidden = make(45), make(num_rows, 45)
    ours = PackedLinear(library, HugePages(), gate, bias, form)
    torchs, others = QuantizedLinear(gate, bias, form), QuantizedLinear(up, None, form)
    close = {"rtol": 2e-2, "atol": 4e-2}
    torch.testing.assert_close(ours(x), torchs(x), **close)
    torch.testing.assert_close(ours.add_to(hidden.clone(), x), torchs.add_to(hidden.clone(), x), **close)
    gated = PackedGatedLinear(library, HugePages(), gate, up, bias, None, form)
    torch.testing.assert_close(gated(x), torchs.silu(x) * others(x), **close)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 13, 40])
def test_rows_may_be_part_of_a_wider_matrix(library, form: Format, num_rows: int):
    wide = torch.full((num_rows, 200), NAN, dtype=torch.bfloat16)
    wide[:, 50:120] = make(num_rows, 70)
    x = wide[:, 50:120]
    layer = PackedLinear(library, HugePages(), make(33, 70), None, form)
    assert torch.equal(layer.logits(x)[0], layer.logits(x.contiguous())[0])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 13, 40])
def test_nothing_is_read_beyond_the_rows(library, form: Format, num_rows: int):
    """What follows the last row is no number, and would be seen."""
    buffer = torch.full((num_rows * 70 + 128,), NAN, dtype=torch.bfloat16)
    x = buffer[: num_rows * 70].view(num_rows, 70)
    x.copy_(make(num_rows, 70))
    assert PackedLinear(library, HugePages(), make(33, 70), None, form).logits(x)[0].isfinite().all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_rows", [3, 15, 40])
def test_what_is_no_number_stays_in_its_row(library, form: Format, num_rows: int):
    x, layer = make(num_rows, 70), PackedLinear(library, HugePages(), make(33, 70), None, form)
    clean, row = layer.logits(x)[0], num_rows // 2
    x[row, 69] = NAN
    y = layer.logits(x)[0]
    others = [index for index in range(num_rows) if index != row]
    assert torch.equal(y[others], clean[others])
    assert y[row].isnan().all()


@pytest.mark.parametrize("form", [Format.INT8, Format.BYTES])
def test_rows_of_integers_come_out_the_same_bit_by_bit_alone_and_among_others(library, form: Format):
    x, layer = make(46, 576), PackedLinear(library, HugePages(), make(97, 576), None, form)
    together = layer.logits(x)[0]
    for first, count in [*((row, 1) for row in range(46)), (0, 2), (7, 13), (20, 20), (1, 45)]:
        assert torch.equal(layer.logits(x[first : first + count])[0], together[first : first + count])
    assert layer.has_independent_rows


def test_large_weights_are_packed_as_in_one_piece(library):
    weight, x = make(32 * 130, 64), make(1, 64)
    whole = PackedLinear(library, HugePages(), weight, None, Format.INT4).logits(x)[0]
    parts = [PackedLinear(library, HugePages(), part, None, Format.INT4).logits(x)[0] for part in weight.split(32)]
    assert torch.equal(whole, torch.cat(parts, dim=1))
