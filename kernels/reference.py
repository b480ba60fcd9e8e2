"""The model's kernels in plain torch: the oracle of every faster one, and what runs where there is none.

Dims are those of engine/batch.py. A layer's KV is a strided view of the block-major pool,

    layer_kv  [num_blocks, num_kv_heads, kv(2), block_size, head_dim]

never made contiguous as a whole. Slots that no one has written may hold anything, NaN included, so
they are cut off or overwritten before they meet arithmetic; a product with zero does not hide NaN.
Called by engine/llama.py, on any device; a function returns new tensors unless it says what it writes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Queries of a chunk are taken this many at a time against their own causal prefix: the wasted upper
# triangle shrinks with the tile, the number of calls grows. 64 to 192 measured alike, 32 and 256 slower
# (512 tokens, 9 heads of 64, bf16, one core, November 2026).
QUERY_TILE = 128


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight, normalised in fp32; x [num_tokens, hidden], weight [hidden].

    Two thirds of the time of F.rms_norm, which squares into a tensor of its own.
    """
    wide = x.float()
    squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    return (wide * squares.mul_(1 / x.shape[-1]).add_(eps).rsqrt_()).to(x.dtype).mul_(weight)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """RoPE in the half-split layout, computed in fp32 and returned in x's dtype.

    x           [num_tokens, heads, head_dim]
    cos         [num_tokens, 1, head_dim] float32
    signed_sin  [num_tokens, 1, head_dim] float32, its first half negated: then rotating is one roll by half a head
    """
    wide = x.float()
    turned = wide.roll(x.shape[-1] // 2, -1).mul_(signed_sin)
    return turned.addcmul_(wide, cos).to(x.dtype)


def write_kv(layer_kv: Tensor, k: Tensor, v: Tensor, block_ids: Tensor, slots: Tensor) -> None:
    """Write one token's K and V per row into the pool, in place.

    k, v              [num_written, num_kv_heads, head_dim]
    block_ids, slots  [num_written] int64, the pairs distinct
    """
    by_slot = layer_kv.permute(0, 3, 1, 2, 4)  # [num_blocks, block_size, num_kv_heads, kv, head_dim]
    by_slot.index_put_((block_ids, slots), torch.stack((k, v), dim=2))


def place_heads(
    heads: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    layer_kv: Tensor,
    tokens: Tensor | None,
    block_ids: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate q and k, and write k and v into the pool.

    heads             [num_rows, num_heads + 2 * num_kv_heads, head_dim], q, k and v; a kernel may use its memory
    cos, signed_sin   as rotate takes them
    tokens            [num_written] int64, the rows that are written, or None for all
    block_ids, slots  as write_kv takes them
    Returns q [num_rows, num_heads, head_dim], k and v [num_rows, num_kv_heads, head_dim].
    """
    num_kv_heads = layer_kv.shape[1]
    rotated, v = rotate(heads[:, :-num_kv_heads], cos, signed_sin), heads[:, -num_kv_heads:]
    q, k = rotated[:, :-num_kv_heads], rotated[:, -num_kv_heads:]
    written = (k, v) if tokens is None else (k.index_select(0, tokens), v.index_select(0, tokens))
    write_kv(layer_kv, *written, block_ids, slots)
    return q, k, v


def gather_kv(layer_kv: Tensor, block_ids: Tensor) -> Tensor:
    """Copy blocks, in the order given, to [kv(2), num_kv_heads, len(block_ids) * block_size, head_dim]."""
    by_head = layer_kv.permute(2, 1, 0, 3, 4)  # [kv, num_kv_heads, num_blocks, block_size, head_dim]
    return by_head.index_select(2, block_ids).flatten(2, 3)


def decode_attention(
    q: Tensor,
    layer_kv: Tensor,
    block_ids: Tensor,
    length: int,
    tail: Tensor | None,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Attention of one query token per row over the row's blocks, all rows of a group padded to one length.

    q          [num_rows, num_heads, head_dim]
    block_ids  [num_rows * blocks_per_row] int64; where a row has fewer blocks, any block stands in
    length     slots of each row that take part, at most blocks_per_row * block_size; less only for a single row
    tail       [num_unused] int64, slots to leave out, counted over the group's rows one after the other, or None
    mask       [num_kv_heads * num_rows, 1, blocks_per_row * block_size] -inf at those slots, 0 elsewhere, or None
    Returns [num_rows, num_heads, head_dim].
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = layer_kv.shape[1]
    kv = gather_kv(layer_kv, block_ids)
    if tail is not None:
        kv.index_fill_(2, tail, 0.0)
    k, v = kv.view(2, num_kv_heads * num_rows, -1, head_dim)[:, :, :length]
    grouped = (num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    q = q.reshape(grouped).transpose(0, 1).flatten(0, 1)
    out = torch.bmm(torch.softmax(_scores(q, k, scale, mask), dim=-1), v)
    return out.unflatten(0, (num_kv_heads, num_rows)).transpose(0, 1).reshape(num_rows, num_heads, head_dim)


def causal_softmax(scores: Tensor, causal: Tensor) -> Tensor:
    """Each query's weights over the keys up to its own position; 0 after it. May use the memory of `scores`.

    scores  [num_kv_heads, group * tile, visible], the tile's queries are the last of the visible positions
    causal  [tile, tile] -inf above the diagonal, 0 elsewhere
    """
    tile = causal.shape[-1]
    scores.unflatten(1, (-1, tile))[..., scores.shape[-1] - tile :].add_(causal)
    return torch.softmax(scores, dim=-1)


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: Tensor,
    scale: float,
    out: Tensor,
    softmax: Callable[[Tensor, Tensor], Tensor] = causal_softmax,
) -> None:
    """Causal attention of a chunk: its queries are the last positions of the keys.

    q        [chunk, num_heads, head_dim]
    k, v     [num_kv_heads, context, head_dim], context >= chunk, every slot written
    causal   [QUERY_TILE, QUERY_TILE] -inf above the diagonal, 0 elsewhere
    out      [chunk, num_heads, head_dim], written
    softmax  causal_softmax, or a faster one
    """
    chunk, num_heads, head_dim = q.shape
    num_kv_heads, context, _ = k.shape
    grouped = (chunk, num_kv_heads, num_heads // num_kv_heads, head_dim)
    # Query heads of one kv head are stacked as rows of one matrix: K and V are read once for all of them.
    q_by_head, out_by_head = q.reshape(grouped).permute(1, 2, 0, 3), out.view(grouped).permute(1, 2, 0, 3)
    for first in range(0, chunk, QUERY_TILE):
        last = min(first + QUERY_TILE, chunk)
        tile, visible = last - first, context - chunk + last
        scores = _scores(q_by_head[:, :, first:last].flatten(1, 2), k[:, :visible], scale, None)
        values = torch.bmm(softmax(scores, causal[:tile, :tile]), v[:, :visible])
        out_by_head[:, :, first:last] = values.unflatten(1, (-1, tile))


def causal_tile(dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """The mask that chunk_attention takes."""
    full = torch.full((QUERY_TILE, QUERY_TILE), float("-inf"), dtype=dtype, device=device)
    return full.triu_(1)


def _scores(q: Tensor, k: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """q k^T * scale (+ mask) of batched matrices; the scale acts on the fp32 accumulator, before rounding."""
    if mask is None:
        return torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=scale)
    return torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale)
