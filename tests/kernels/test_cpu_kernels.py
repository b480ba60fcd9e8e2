"""The C++ kernels compute what kernels/reference.py computes, and touch no slot that they should not."""

import math
import shutil

import pytest
import torch

from pdserve.kernels import reference
from pdserve.kernels.cpu import CpuKernels
from pdserve.kernels.library import load_library
from tests.cpu import BUILDS, multiplying_library

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

DTYPES = [torch.float32, torch.bfloat16]
# Of outputs of size 1: the order of fp32 sums, or one rounding to bf16 (2^-9) and those of the reference before it.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
NAN = float("nan")


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture
def kernels(dtype) -> CpuKernels:
    torch.manual_seed(1)
    return CpuKernels(load_library(), dtype)


def make_layer(dtype: torch.dtype, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> torch.Tensor:
    """One layer of a pool of three, every slot NaN."""
    pool = torch.full((num_blocks, num_kv_heads, 3, 2, block_size, head_dim), NAN, dtype=dtype)
    return pool[:, :, 1]


def fill(layer_kv: torch.Tensor, table: list[int], context: int) -> None:
    """Random KV in the first `context` slots of a block table."""
    block_size = layer_kv.shape[3]
    for index, block in enumerate(table):
        owned = max(min(context - index * block_size, block_size), 0)
        layer_kv[block, :, :, :owned] = torch.randn_like(layer_kv[block, :, :, :owned])


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_decode_attention_agrees_at_every_length_around_a_block_edge(kernels, dtype, head_dim, group, block_size):
    contexts = [1, block_size - 1, block_size, block_size + 1, 3 * block_size, 4 * block_size - 1]
    blocks_per_row, num_kv_heads = 4, 2
    layer_kv = make_layer(dtype, len(contexts) * blocks_per_row, num_kv_heads, block_size, head_dim)
    tables = torch.randperm(layer_kv.shape[0]).view(len(contexts), blocks_per_row)
    for table, context in zip(tables.tolist(), contexts, strict=True):
        fill(layer_kv, table, context)
    # Rows of q as the model has them: a part of a wider matrix.
    q = torch.randn(len(contexts), num_kv_heads * (group + 2), head_dim).to(dtype)[:, : num_kv_heads * group]
    out = torch.full_like(q, NAN, memory_format=torch.contiguous_format)
    scale = head_dim**-0.5
    assert kernels.can_decode(layer_kv)
    kernels.decode_attention(q, layer_kv, tables.flatten(), torch.tensor(contexts), scale, out)
    for row, context in enumerate(contexts):
        table = tables[row, : -(-context // block_size)]
        expected = reference.decode_attention(q[row : row + 1], layer_kv, table, context, None, None, scale)
        torch.testing.assert_close(out[row : row + 1], expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_decode_attention_follows_a_maximum_that_grows_and_one_that_falls(kernels, dtype):
    layer_kv = make_layer(dtype, 4, 1, 16, 64)
    fill(layer_kv, [0, 1, 2, 3], 64)
    q = torch.randn(1, 2, 64).to(dtype)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        for block in range(4):
            layer_kv[block, :, 0] = q[0, 0] * float(order[block])
        out = torch.empty_like(q)
        kernels.decode_attention(q, layer_kv, torch.arange(4), torch.tensor([64]), 1.0, out)
        expected = reference.decode_attention(q, layer_kv, torch.arange(4), 64, None, None, 1.0)
        torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("head_dim", "block_size"), [(24, 16), (272, 16), (64, 512)])
def test_a_pool_of_a_shape_that_the_kernel_does_not_know_is_left_to_the_reference(kernels, dtype, head_dim, block_size):
    assert not kernels.can_decode(make_layer(dtype, 1, 1, block_size, head_dim))


@pytest.mark.parametrize("tile", [1, 2, 15, 16, 17, 128])
@pytest.mark.parametrize("before", [0, 1, 15, 16, 200])
def test_causal_softmax_agrees_for_every_tile_and_width(kernels, dtype, tile, before):
    scores = (4 * torch.randn(2, 3 * tile, before + tile)).to(dtype)
    causal = reference.causal_tile(dtype, "cpu")[:tile, :tile]
    expected = reference.causal_softmax(scores.clone(), causal)
    weights = kernels.causal_softmax(scores.clone(), causal)
    assert torch.equal(weights == 0, expected == 0)
    # One unit in the last place of bf16, for a weight that lies between two of them.
    rtol = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(weights, expected, atol=0, rtol=rtol)


def test_the_exponential_is_right_to_the_last_bits_of_a_float(kernels, dtype):
    if dtype == torch.bfloat16:
        return  # which shows fewer bits than this is about
    # With 0 as the largest score, no rounded difference comes before the exponential.
    scores = torch.rand(1, 1, 4096).mul(-80).index_fill_(2, torch.tensor([7]), 0.0)
    weights = kernels.causal_softmax(scores.clone(), torch.zeros(1, 1))
    ratio = weights.double() / torch.softmax(scores.double(), -1)
    # The common factor is the sum's own error.
    assert ((ratio / ratio.median()) - 1).abs().max() < 3e-7


def test_a_score_that_is_no_number_does_not_vanish_in_a_softmax(kernels, dtype):
    scores = torch.zeros(1, 1, 40, dtype=dtype)
    scores[0, 0, 3] = NAN
    assert kernels.causal_softmax(scores, torch.zeros(1, 1)).isnan().any()


@pytest.mark.parametrize("hidden", [16, 32, 48, 576, 1000])
def test_rms_norm_agrees_to_one_unit_in_the_last_place(kernels, dtype, hidden):
    x, weight = (3 * torch.randn(5, hidden)).to(dtype), torch.randn(hidden).to(dtype)
    expected = reference.rms_norm(x, weight, 1e-5)
    # The rounding before the last product may fall to the other side too.
    rtol = {torch.float32: 1e-6, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), expected, atol=0, rtol=rtol)


@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128])
@pytest.mark.parametrize("tokens", [None, [], [2, 0], [1, 3, 4]])
def test_heads_are_rotated_and_exactly_the_chosen_tokens_written(kernels, dtype, head_dim, tokens):
    num_rows, num_heads, num_kv_heads, block_size = 5, 6, 2, 16
    heads = torch.randn(num_rows, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = torch.randn(num_rows, 1, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    cos, signed_sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    chosen = None if tokens is None else torch.tensor(tokens, dtype=torch.int64)
    num_written = num_rows if tokens is None else len(tokens)
    block_ids, slots = torch.arange(num_written) % 3, torch.arange(num_written) * 3
    written, expected_kv = (make_layer(dtype, 3, num_kv_heads, block_size, head_dim) for _ in range(2))
    expected = reference.place_heads(heads.clone(), cos, signed_sin, expected_kv, chosen, block_ids, slots)
    placed = kernels.place_heads(heads.clone(), cos, signed_sin, written, chosen, block_ids, slots)
    atol = {torch.float32: 1e-6, torch.bfloat16: 2**-6}[dtype]
    for ours, theirs in zip(placed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=atol)
    torch.testing.assert_close(written, expected_kv, atol=atol, rtol=atol, equal_nan=True)
    for token, block, slot in zip(tokens or range(num_written), block_ids, slots, strict=True):
        assert torch.equal(written[block, :, 0, slot], placed[1][token])
        assert torch.equal(written[block, :, 1, slot], placed[2][token])
    assert int((~written.isnan()).sum()) == math.prod((num_written, num_kv_heads, 2, head_dim))


@pytest.mark.parametrize("context", [1, 130, 300])
def test_a_chunk_with_the_fused_softmax_agrees_with_the_reference(kernels, dtype, context):
    chunk, num_heads, num_kv_heads, head_dim = min(context, 150), 6, 2, 64
    q = torch.randn(chunk, num_heads, head_dim).to(dtype)
    k, v = torch.randn(2, num_kv_heads, context, head_dim).to(dtype)
    causal = reference.causal_tile(dtype, "cpu")
    out, expected = torch.empty_like(q), torch.empty_like(q)
    kernels.chunk_attention(q, k, v, causal, 0.125, out)
    reference.chunk_attention(q, k, v, causal, 0.125, expected)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.fixture(params=BUILDS)
def multiplying(request) -> CpuKernels:
    torch.manual_seed(1)
    return CpuKernels(multiplying_library(request.param), torch.bfloat16)


def attend_chunk(kernels: CpuKernels, q: torch.Tensor, layer_kv: torch.Tensor, table: list[int], context: int):
    out = torch.full_like(q, NAN, memory_format=torch.contiguous_format)
    kernels.paged_chunk_attention(q, layer_kv, torch.tensor(table), context, q.shape[-1] ** -0.5, out)
    return out


def attend_exactly(q: torch.Tensor, layer_kv: torch.Tensor, table: list[int], context: int) -> torch.Tensor:
    """In float64 from the same bf16 numbers."""
    chunk, num_heads, head_dim = q.shape
    k, v = reference.gather_kv(layer_kv, torch.tensor(table))[:, :, :context].double()
    group = num_heads // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    seen = torch.ones(chunk, context, dtype=torch.bool).tril(context - chunk)
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * head_dim**-0.5
    return (scores.masked_fill(~seen, -math.inf).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("block_size", [8, 32, 48])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (4, 128), (7, 96), (8, 32), (2, 256)])
@pytest.mark.parametrize(
    ("start", "chunk"),
    [(0, 1), (0, 31), (0, 32), (0, 33), (0, 129), (0, 300), (1, 15), (31, 2), (32, 16), (45, 100), (127, 2), (300, 9)],
)
def test_a_chunk_reads_its_blocks_where_they_lie(multiplying, start, chunk, group, head_dim, block_size):
    context, num_kv_heads = start + chunk, 2
    num_blocks = -(-context // block_size)
    layer_kv = make_layer(torch.bfloat16, num_blocks + 1, num_kv_heads, block_size, head_dim)
    table = (torch.randperm(num_blocks) + 1).tolist()
    fill(layer_kv, table, context)
    q = torch.randn(chunk, num_kv_heads * (group + 2), head_dim).bfloat16()[:, : num_kv_heads * group]
    assert multiplying.can_attend_chunks(layer_kv)
    out = attend_chunk(multiplying, q, layer_kv, table, context)
    # The weights are rounded to bf16 once (2^-9), the output again.
    torch.testing.assert_close(
        out.double(), attend_exactly(q, layer_kv, table, context), atol=1e-2, rtol=2**-7, check_dtype=False
    )


def test_a_chunk_follows_scores_that_grow_and_scores_that_fall(multiplying):
    """Over four spans of the context, and within each."""
    blocks = list(range(16))
    layer_kv = make_layer(torch.bfloat16, len(blocks), 1, 32, 64)
    q = torch.randn(512, 2, 64).bfloat16()
    for order in (blocks, blocks[::-1]):
        fill(layer_kv, blocks, 512)
        for block in blocks:
            layer_kv[block, :, 0] = q[5, 0] * float(order[block])
        out = attend_chunk(multiplying, q, layer_kv, blocks, 512)
        expected = attend_exactly(q, layer_kv, blocks, 512)
        torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2**-6, check_dtype=False)


def test_a_query_has_the_same_result_in_every_chunk(multiplying):
    layer_kv = make_layer(torch.bfloat16, 10, 2, 32, 64)
    fill(layer_kv, list(range(10)), 320)
    q = torch.randn(320, 6, 64).bfloat16()
    whole = attend_chunk(multiplying, q, layer_kv, list(range(10)), 320)
    for first, last in ((0, 1), (0, 77), (31, 33), (100, 301), (319, 320)):
        part = attend_chunk(multiplying, q[first:last], layer_kv, list(range(10)), last)
        assert torch.equal(part, whole[first:last])


@pytest.mark.parametrize(("head_dim", "dtype"), [(80, torch.bfloat16), (16, torch.bfloat16), (64, torch.float32)])
def test_a_chunk_over_a_pool_of_another_shape_is_left_to_the_reference(multiplying, head_dim, dtype):
    assert not multiplying.can_attend_chunks(make_layer(dtype, 1, 1, 32, head_dim))
