"""One step as tensors: what a StepPlan becomes before the layers run, built once and read by all of them.

Dims, the same everywhere:

    num_tokens    query tokens of the step, all rows flattened
    num_rows      tokens plus padding; in a group, its rows
    num_sampled   rows of the plan that draw tokens
    num_scored    tokens whose successor's log-probability is wanted
    num_heads     query heads                  num_kv_heads  heads of K and V
    head_dim      size of one head             hidden        size of the residual stream
    num_blocks    blocks of the pool           block_size    token slots of a block
    context       tokens a row attends to, its own included

Order of the tokens: decode rows (one query token), longest context first and, where they need padding, cut into
groups of like length; then chunks; then padding. Called by Engine on its thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from pdserve.core.errors import LayoutError
from pdserve.core.kv_spec import KVSpec
from pdserve.engine.step import BlockMove, Row, Scored

# A row joins a group of longer rows when padding it costs at most this many blocks, or this share of the
# longest row. A further group costs some 35 us a layer, about what it takes to copy eight blocks of
# 3 x 64 heads (November 2026).
PADDING_BLOCKS = 8
PADDING_SHARE = 8

# KV bytes that one group may copy per layer: a bound on memory, and the copy stays in the last-level cache.
GROUP_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one query token each, padded to the same number of blocks; see kernels.reference.decode_attention.

    first, num_rows  the group's tokens in the flattened batch
    length           slots of a row that are attended to: the context of a single row, else whole blocks
    """

    first: int
    num_rows: int
    length: int
    contexts: Tensor  # [num_rows] int64
    block_ids: Tensor  # [num_rows * blocks_per_row] int64
    tail: Tensor | None  # [num_unused] int64
    mask: Tensor | None  # [num_kv_heads * num_rows, 1, length] serving dtype


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """A row of several query tokens, or the end of one.

    context    tokens up to and with the last query token
    is_whole   whether the tokens of this batch are the whole context
    """

    first: int
    num_tokens: int
    context: int
    block_ids: Tensor  # [blocks of the context] int64
    is_whole: bool

    def end(self) -> "ChunkRow":
        """The chunk's last query token alone."""
        return ChunkRow(self.first + self.num_tokens - 1, 1, self.context, self.block_ids, self.is_whole)


@dataclass(frozen=True, slots=True)
class Writes:
    """Which tokens write their KV, and where. Tokens below a row's write_from do not."""

    tokens: Tensor | None  # [num_written] int64, None when every row of the batch writes
    block_ids: Tensor  # [num_written] int64
    slots: Tensor  # [num_written] int64


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Tensor  # [num_rows] int64, padding last
    positions: Tensor  # [num_rows] int64
    num_padding: int
    writes: Writes
    decode_groups: tuple[DecodeGroup, ...]
    chunks: tuple[ChunkRow, ...]
    chunk_ends: tuple[ChunkRow, ...]  # of the chunks that draw tokens, their last token
    sampled: Tensor  # [num_sampled, or min_rows if that is more] int64, rows whose logits are wanted
    sampled_rows: tuple[Row, ...]  # the plan's rows in the order of `sampled`
    scored: Tensor  # [num_scored] int64, one row's tokens after another's
    scored_rows: tuple[Row, ...]  # the plan's rows in the order of `scored`
    scored_chunks: tuple[ChunkRow, ...]  # those of them that are chunks

    @property
    def num_sampled(self) -> int:
        return len(self.sampled_rows)


def check_rows(rows: Sequence[Row], spec: KVSpec, num_blocks: int, vocab_size: int) -> None:
    """Raise LayoutError for a row that does not fit its block table, the pool, the vocabulary or its own tokens."""
    for row in rows:
        needed = spec.num_blocks_for(row.start + len(row.token_ids))
        if not row.token_ids or row.start < 0 or len(row.block_ids) < needed:
            raise LayoutError(
                f"row {row.key}: {len(row.token_ids)} tokens from position {row.start} need {needed} blocks, "
                f"its table has {len(row.block_ids)}"
            )
        if not 0 <= min(row.token_ids) <= max(row.token_ids) < vocab_size:
            raise LayoutError(f"row {row.key} holds a token id outside the vocabulary of {vocab_size}")
        if not 0 <= min(row.block_ids) <= max(row.block_ids) < num_blocks:
            raise LayoutError(f"row {row.key} names a block outside the pool of {num_blocks}")
        if row.scored is not None:
            _check_scored(row, row.scored, vocab_size)


def check_moves(moves: Sequence[BlockMove], num_blocks: int) -> None:
    """Raise LayoutError for a move that names a block outside the pool."""
    for move in moves:
        if not 0 <= min(move.source, move.target) <= max(move.source, move.target) < num_blocks:
            raise LayoutError(f"a move from block {move.source} to {move.target} leaves the pool of {num_blocks}")


def _check_scored(row: Row, scored: Scored, vocab_size: int) -> None:
    if len(scored.token_ids) > len(row.token_ids) or scored.num_top < 0:
        raise LayoutError(
            f"row {row.key} of {len(row.token_ids)} tokens: cannot score {len(scored.token_ids)} with "
            f"{scored.num_top} likeliest ids each"
        )
    if not all(0 <= token < vocab_size for token in scored.token_ids):
        raise LayoutError(f"row {row.key} scores a token id outside the vocabulary of {vocab_size}")


class Decoding(StrEnum):
    """How rows of one query token are attended.

    PADDED     in groups, padded to a like length (kernels/reference.py)
    IN_PLACE   in one group, each read to its own length
    AS_CHUNKS  as chunks of one token: the arithmetic is the same whichever step a token comes in
    """

    PADDED = "padded"
    IN_PLACE = "in place"
    AS_CHUNKS = "as chunks"


def build_batch(
    rows: Sequence[Row],
    spec: KVSpec,
    device: torch.device,
    min_rows: int = 1,
    decoding: Decoding = Decoding.PADDED,
) -> Batch:
    """Flatten the rows of a plan.

    rows      at least one, each checked by check_rows
    min_rows  the batch and the sampled rows are padded to it
    """
    shortest_chunk = 1 if decoding is Decoding.AS_CHUNKS else 2
    decodes = sorted((row for row in rows if len(row.token_ids) < shortest_chunk), key=lambda row: -row.start)
    chunks = [row for row in rows if len(row.token_ids) >= shortest_chunk]
    token_ids: list[int] = []
    positions: list[int] = []
    firsts: list[int] = []
    for row in decodes + chunks:
        firsts.append(len(token_ids))
        token_ids += row.token_ids
        positions += range(row.start, row.start + len(row.token_ids))
    num_padding = max(min_rows - len(token_ids), 0)
    placed = list(zip(firsts, decodes + chunks, strict=True))
    sampled = [(first + len(row.token_ids) - 1, row) for first, row in placed if row.samples]
    scored = [(first, row, row.scored.token_ids) for first, row in placed if row.scored is not None]
    chunk_rows = [(_chunk_row(first, row, spec.block_size, device), row) for first, row in placed[len(decodes) :]]
    last_tokens = [last for last, _ in sampled]
    return Batch(
        token_ids=_indices(token_ids + [0] * num_padding, device),
        positions=_indices(positions + [0] * num_padding, device),
        num_padding=num_padding,
        writes=_writes(decodes + chunks, spec.block_size, num_padding, device),
        decode_groups=tuple((_unpadded if decoding is Decoding.IN_PLACE else _decode_groups)(decodes, spec, device)),
        chunks=tuple(chunk for chunk, _ in chunk_rows),
        chunk_ends=tuple(chunk.end() for chunk, row in chunk_rows if row.samples),
        sampled=_indices(last_tokens + last_tokens[:1] * (min_rows - len(sampled)), device),
        sampled_rows=tuple(row for _, row in sampled),
        scored=_indices([first + index for first, _, ids in scored for index in range(len(ids))], device),
        scored_rows=tuple(row for _, row, _ in scored),
        scored_chunks=tuple(chunk for chunk, row in chunk_rows if row.scored is not None),
    )


def _indices(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _writes(rows: list[Row], block_size: int, num_padding: int, device: torch.device) -> Writes:
    tokens: list[int] = []
    block_ids: list[int] = []
    slots: list[int] = []
    first = 0
    for row in rows:
        end = row.start + len(row.token_ids)
        written = range(max(row.start, row.write_from), end)
        tokens += [first + position - row.start for position in written]
        block_ids += [row.block_ids[position // block_size] for position in written]
        slots += [position % block_size for position in written]
        first += len(row.token_ids)
    all_written = len(tokens) == first and num_padding == 0
    return Writes(
        tokens=None if all_written else _indices(tokens, device),
        block_ids=_indices(block_ids, device),
        slots=_indices(slots, device),
    )


def _unpadded(rows: list[Row], spec: KVSpec, device: torch.device) -> list[DecodeGroup]:
    """All rows, longest context first, as one group."""
    if not rows:
        return []
    most = spec.num_blocks_for(rows[0].start + 1)
    tables = [row.block_ids[: spec.num_blocks_for(row.start + 1)] for row in rows]
    block_ids = [block for table in tables for block in table + table[:1] * (most - len(table))]
    contexts = _indices([row.start + 1 for row in rows], device)
    return [DecodeGroup(0, len(rows), most * spec.block_size, contexts, _indices(block_ids, device), None, None)]


def _decode_groups(rows: list[Row], spec: KVSpec, device: torch.device) -> list[DecodeGroup]:
    """Cut rows, longest context first, where padding would cost more than a group of its own."""
    block_bytes = spec.payload_bytes // spec.num_layers
    groups: list[DecodeGroup] = []
    first = 0
    while first < len(rows):
        most = spec.num_blocks_for(rows[first].start + 1)
        fewest = most - max(PADDING_BLOCKS, most // PADDING_SHARE)
        limit = first + max(GROUP_BYTES // (most * block_bytes), 1)
        last = first + 1
        while last < min(len(rows), limit) and spec.num_blocks_for(rows[last].start + 1) >= fewest:
            last += 1
        groups.append(_decode_group(first, rows[first:last], most, spec, device))
        first = last
    return groups


def _decode_group(first: int, rows: list[Row], most: int, spec: KVSpec, device: torch.device) -> DecodeGroup:
    width = most * spec.block_size
    block_ids: list[int] = []
    tail: list[int] = []
    for index, row in enumerate(rows):
        table = row.block_ids[: spec.num_blocks_for(row.start + 1)]
        block_ids += table + table[:1] * (most - len(table))
        tail += range(index * width + row.start + 1, (index + 1) * width)
    contexts = _indices([row.start + 1 for row in rows], device)
    if len(rows) == 1:
        return DecodeGroup(first, 1, rows[0].start + 1, contexts, _indices(block_ids, device), None, None)
    unused = mask = None
    if tail:
        unused = _indices(tail, device)
        mask = torch.zeros(len(rows) * width, dtype=getattr(torch, spec.dtype), device=device)
        mask = mask.index_fill_(0, unused, float("-inf")).view(len(rows), 1, width).repeat(spec.num_kv_heads, 1, 1)
    return DecodeGroup(first, len(rows), width, contexts, _indices(block_ids, device), unused, mask)


def _chunk_row(first: int, row: Row, block_size: int, device: torch.device) -> ChunkRow:
    num_tokens = len(row.token_ids)
    context = row.start + num_tokens
    table = list(row.block_ids[: -(-context // block_size)])
    return ChunkRow(first, num_tokens, context, _indices(table, device), row.start == 0)
