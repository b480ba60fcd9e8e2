"""Products with packed weights against float64 products of the same bf16 numbers, within what rounding may do."""

import ctypes
import mmap
from array import array

import pytest
import torch
from torch import Tensor

from pdserve.kernels.huge_pages import HugePages
from pdserve.kernels.packed_linear import PackedGatedLinear, PackedLinear
from tests.cpu import BUILDS, multiplying_library

# Around the fourteen rows of a block in vector registers and the sixteen and thirty-two of one in tile registers.
ROWS = [1, 2, 13, 14, 15, 16, 17, 28, 29, 32, 33, 300]
# Around the sixteen lanes of a vector and the thirty-two of a panel.
OUT_FEATURES = [1, 15, 16, 17, 31, 32, 33, 96]
# The largest error of one rounding, relative to the result: half a unit in the last place.
BF16, FP32 = 2.0**-8, 2.0**-24
NAN, INFINITY, LARGEST = float("nan"), float("inf"), torch.finfo(torch.float32).max


@pytest.fixture(params=BUILDS)
def library(request):
    torch.manual_seed(1)
    return multiplying_library(request.param)


def make(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape)).bfloat16()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x W^T + b in float64, and how far fp32 sums in any order may be from it."""
    x, weight = x.double(), weight.double()
    y, size = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    return y, (x.shape[1] + 2) * FP32 * size


def assert_within(actual: Tensor, expected: Tensor, slack: Tensor, rounding: float = BF16) -> None:
    """Equal but for `slack` and one rounding after it."""
    assert actual.shape == expected.shape
    allowed = slack + 1.01 * rounding * (expected.abs() + slack)
    excess = (actual.double() - expected).abs() - allowed
    assert (excess <= 0).all(), f"off by {excess.max():g} more than allowed"


def guarded(num_rows: int, num_columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor of NaN with a dense part of the given shape in its middle, and that part."""
    edge = 64
    buffer = torch.full((num_rows * num_columns + 2 * edge,), NAN, dtype=dtype)
    return buffer, buffer[edge:-edge].view(num_rows, num_columns)


def assert_nothing_beyond(buffer: Tensor, part: Tensor) -> None:
    assert not part.isnan().any()
    assert int(buffer.isnan().sum()) == buffer.numel() - part.numel()


@pytest.mark.parametrize("out_features", OUT_FEATURES)
@pytest.mark.parametrize("num_rows", [1, 14, 15, 33])
def test_nothing_is_written_beyond_the_result(library, num_rows: int, out_features: int):
    x, weight, up = make(num_rows, 70), make(out_features, 70), make(out_features, 70)
    linear, gated = (
        PackedLinear(library, HugePages(), weight, None),
        PackedGatedLinear(library, HugePages(), weight, up, None, None),
    )
    buffer, hidden = guarded(num_rows, out_features, torch.bfloat16)
    hidden.zero_()
    linear.add_to(hidden, x)
    assert_nothing_beyond(buffer, hidden)
    likeliest = array("q", bytes(8 * num_rows))
    # The others make their result themselves; it is the same call.
    for layer, name, dtype, more in [
        (linear, "linear_bf16", torch.bfloat16, (0,)),
        (linear, "logits_bf16", torch.float32, (likeliest.buffer_info()[0],)),
        (gated, "gated_linear_bf16", torch.bfloat16, ()),
    ]:
        buffer, out = guarded(num_rows, out_features, dtype)
        layer._run(name, x, out, *more)
        assert_nothing_beyond(buffer, out)


@pytest.mark.parametrize("num_rows", [1, 13, 15])
def test_nothing_is_read_beyond_the_rows(library, num_rows: int):
    """They end where memory does that nobody may read."""
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    num_values = num_rows * 70
    before = 3 * mmap.PAGESIZE - 2 * num_values
    x = torch.frombuffer(memory, dtype=torch.bfloat16, count=num_values, offset=before).view(num_rows, 70)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(x.data_ptr() + 2 * num_values), mmap.PAGESIZE, 0) == 0
    x.copy_(make(num_rows, 70))
    weight = make(33, 70)
    assert_within(PackedLinear(library, HugePages(), weight, None)(x), *product(x, weight))
    assert PackedGatedLinear(library, HugePages(), weight, weight, None, None)(x).isfinite().all()


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("out_features", OUT_FEATURES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_product_is_right_but_for_one_rounding(library, num_rows: int, out_features: int, has_bias: bool):
    x, weight = make(num_rows, 70), make(out_features, 70)
    bias = make(out_features) if has_bias else None
    linear = PackedLinear(library, HugePages(), weight, bias)
    expected, slack = product(x, weight, bias)
    y, logits = linear(x), linear.logits(x)[0]
    assert (y.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    assert_within(y, expected, slack)
    assert_within(logits, expected, slack, rounding=0.0)


@pytest.mark.parametrize("in_features", [2, 4, 30, 32, 34, 62, 64, 576, 1536])
def test_every_even_number_of_inputs_is_summed_to_the_end(library, in_features: int):
    x, weight, bias = make(15, in_features), make(33, in_features), make(33)
    assert_within(
        PackedLinear(library, HugePages(), weight, bias).logits(x)[0], *product(x, weight, bias), rounding=0.0
    )


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("out_features", OUT_FEATURES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_adding_in_place_rounds_once(library, num_rows: int, out_features: int, has_bias: bool):
    """The product nearly cancels what is there: a product rounded on its own would be far off the sum."""
    x, weight = make(num_rows, 70), make(out_features, 70)
    bias = make(out_features) if has_bias else None
    y, slack = product(x, weight, bias)
    hidden = (-y * (1 + 0.01 * torch.randn(y.shape))).bfloat16()
    expected = hidden.double() + y
    result = PackedLinear(library, HugePages(), weight, bias).add_to(hidden, x)
    assert result.data_ptr() == hidden.data_ptr()
    assert_within(hidden, expected, slack)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("out_features", OUT_FEATURES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_gated_product_is_right_but_for_one_rounding(library, num_rows: int, out_features: int, has_bias: bool):
    x, gate, up = make(num_rows, 70), make(out_features, 70, scale=0.3), make(out_features, 70)
    gate_bias, up_bias = (make(out_features), make(out_features)) if has_bias else (None, None)
    gated = PackedGatedLinear(library, HugePages(), gate, up, gate_bias, up_bias)(x)
    (g, g_slack), (u, u_slack) = product(x, gate, gate_bias), product(x, up, up_bias)
    expected = torch.nn.functional.silu(g) * u
    # Silu is nowhere steeper than 1.1, and its exponential is within 2e-7.
    slack = 1.1 * g_slack * (u.abs() + u_slack) + torch.nn.functional.silu(g).abs() * u_slack + 1e-6 * expected.abs()
    assert_within(gated, expected, slack)


@pytest.mark.parametrize("size", [20.0, 86.0, 87.0, 88.0, 89.0, 104.0, 1e4, 3e38])
def test_silu_of_large_numbers_is_the_number_or_nothing(library, size: float):
    """One input goes through the gate as it is, the other multiplies it by one."""
    x = torch.tensor([[size, 1.0], [-size, 1.0]]).bfloat16()
    gate, up = torch.tensor([[1.0, 0.0]]).bfloat16(), torch.tensor([[0.0, 1.0]]).bfloat16()
    above, below = PackedGatedLinear(library, HugePages(), gate, up, None, None)(x).flatten().tolist()
    assert above == pytest.approx(size, rel=BF16)
    assert below == pytest.approx(-float(x[0, 0]) * torch.tensor(-size).double().exp().item(), rel=0.2, abs=1e-35)


def test_silu_follows_its_curve_from_one_end_to_the_other(library):
    gates = torch.linspace(-100, 100, 2001).bfloat16()
    x = torch.stack((gates, torch.ones_like(gates)), dim=1)
    gate, up = torch.tensor([[1.0, 0.0]]).bfloat16(), torch.tensor([[0.0, 1.0]]).bfloat16()
    y = PackedGatedLinear(library, HugePages(), gate, up, None, None)(x).flatten()
    expected = torch.nn.functional.silu(gates.double())
    # Below -87 it becomes nothing.
    assert_within(y, expected, 1e-6 * expected.abs() + 1e-35)


@pytest.mark.parametrize("num_rows", [1, 15, 33])
def test_rows_may_be_part_of_a_wider_matrix(library, num_rows: int):
    wide = torch.full((num_rows, 200), NAN, dtype=torch.bfloat16)
    wide[:, 50:120] = make(num_rows, 70)
    x = wide[:, 50:120]
    weight, up = make(33, 70), make(33, 70)
    dense = x.contiguous()
    linear, gated = (
        PackedLinear(library, HugePages(), weight, None),
        PackedGatedLinear(library, HugePages(), weight, up, None, None),
    )
    hidden = make(num_rows, 33)
    assert torch.equal(linear(x), linear(dense))
    assert torch.equal(linear.logits(x)[0], linear.logits(dense)[0])
    assert torch.equal(linear.add_to(hidden.clone(), x), linear.add_to(hidden.clone(), dense))
    assert torch.equal(gated(x), gated(dense))
    assert not linear(x).isnan().any()


def test_weights_may_be_part_of_a_wider_matrix(library):
    x, wide, bias = make(5, 70), make(130, 100), make(130)
    for rows in (slice(0, 64), slice(3, 20)):
        weight = wide[rows, 10:80]
        assert_within(PackedLinear(library, HugePages(), weight, bias[rows])(x), *product(x, weight, bias[rows]))
    gate, up = wide[:64, 10:80], wide[64:128, 10:80]
    gated = PackedGatedLinear(library, HugePages(), gate, up, None, None)
    assert torch.equal(
        gated(x), PackedGatedLinear(library, HugePages(), gate.contiguous(), up.contiguous(), None, None)(x)
    )


def test_a_row_comes_out_the_same_bit_by_bit_alone_and_among_45_others(library):
    x, weight, up, bias = make(46, 576), make(97, 576), make(97, 576), make(97)
    linear, gated = (
        PackedLinear(library, HugePages(), weight, bias),
        PackedGatedLinear(library, HugePages(), weight, up, bias, bias),
    )
    hidden = make(46, 97)
    calls = [
        lambda rows: linear(x[rows]),
        lambda rows: linear.logits(x[rows])[0],
        lambda rows: linear.add_to(hidden[rows].clone(), x[rows]),
        lambda rows: gated(x[rows]),
    ]
    for call in calls:
        together = call(slice(0, 46))
        for first, count in [*((row, 1) for row in range(46)), (0, 2), (7, 13), (20, 14), (5, 15), (1, 45)]:
            assert torch.equal(call(slice(first, first + count)), together[first : first + count])


@pytest.mark.parametrize("num_rows", [3, 14, 33])
def test_what_is_no_number_stays_in_its_row(library, num_rows: int):
    x, weight, up = make(num_rows, 70), make(33, 70), make(33, 70)
    clean, row = x.clone(), num_rows // 2
    x[row, 69] = NAN
    linear, gated = (
        PackedLinear(library, HugePages(), weight, None),
        PackedGatedLinear(library, HugePages(), weight, up, None, None),
    )
    hidden = make(num_rows, 33)
    calls = [linear, lambda x: linear.logits(x)[0], lambda x: linear.add_to(hidden.clone(), x), gated]
    others = [index for index in range(num_rows) if index != row]
    for call in calls:
        y = call(x)
        assert torch.equal(y[others], call(clean)[others])
        assert y[row].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_rows_are_no_work(library, dtype: torch.dtype):
    linear = PackedLinear(library, HugePages(), make(33, 70), None)
    y = linear(make(0, 70)) if dtype == torch.bfloat16 else linear.logits(make(0, 70))[0]
    assert y.shape == (0, 33)
    assert y.dtype == dtype


def test_inputs_of_another_size_are_refused(library):
    linear = PackedLinear(library, HugePages(), make(33, 70), None)
    with pytest.raises(AssertionError, match="the weight takes 70"):
        linear(make(2, 72))
    with pytest.raises(AssertionError):
        linear.add_to(make(3, 33), make(2, 70))
    with pytest.raises(AssertionError):
        linear.add_to(make(2, 66)[:, ::2], make(2, 70))


@pytest.mark.parametrize("out_features", OUT_FEATURES)
@pytest.mark.parametrize("num_rows", [1, 14, 33])
def test_the_likeliest_id_is_the_first_of_the_largest_logits(library, num_rows: int, out_features: int):
    """Of distinct logits, and where pairs of ids are equal."""
    x, weight = make(num_rows, 70), make(out_features, 70)
    for rows in (weight, weight[torch.arange(out_features) // 2], weight[:1].expand(out_features, 70)):
        logits, likeliest = PackedLinear(library, HugePages(), rows.contiguous(), None).logits(x)
        assert likeliest.tolist() == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize(
    ("biases", "expected"),
    [
        ({3: NAN, 40: 1e30}, 40),
        ({3: NAN, 40: 1e30, 90: INFINITY}, 90),
        ({20: INFINITY, 90: INFINITY}, 20),
        ({20: LARGEST, 36: INFINITY}, 20),
        (dict.fromkeys(range(97), NAN), 0),
        (dict.fromkeys(range(97), -INFINITY), 0),
        (dict.fromkeys(range(96), -INFINITY), 96),
    ],
)
def test_the_likeliest_id_is_no_logit_that_is_no_number(library, biases: dict[int, float], expected: int):
    bias = torch.zeros(97).index_copy_(0, torch.tensor(list(biases)), torch.tensor(list(biases.values())))
    _, likeliest = PackedLinear(library, HugePages(), make(97, 70), bias).logits(make(5, 70))
    assert likeliest.tolist() == [expected] * 5
