"""The layers of a model as one call into cpp/layers.cpp, for bf16 on one thread of a CPU that multiplies it.

Called one by one, the parts of a layer of few rows leave the CPU waiting for Python between them; here Python is passed
through once a step, and the GIL is free for all of it. Owns the memory that rows need between the layers: it grows to
the largest step and stays. Made and called by engine/llama.py.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pdserve.kernels.library import bind
from pdserve.kernels.packed_linear import PackedGatedLinear, PackedLinear
from pdserve.kernels.quantized_weights import LANES

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_WEIGHTS = ("attention_norm", "mlp_norm", "qkv", "out", "gated", "down")


class _LayerWeights(ctypes.Structure):
    _fields_ = [(name, _P) for name in _WEIGHTS]


class _StackShape(ctypes.Structure):
    _fields_ = [
        *((name, _I) for name in ("hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate")),
        *((name, _F) for name in ("eps", "scale")),
    ]


class _PoolLayout(ctypes.Structure):
    _fields_ = [
        ("kv", _P),
        *((f"{name}_stride", _I) for name in ("layer", "block", "kv_head", "kv", "slot")),
        ("block_size", _I),
    ]


class _DecodeRows(ctypes.Structure):
    _fields_ = [*((name, _I) for name in ("first", "num_rows", "blocks_per_row")), ("tables", _P), ("contexts", _P)]


class _ChunkRows(ctypes.Structure):
    _fields_ = [*((name, _I) for name in ("first", "num_tokens", "context")), ("table", _P)]


class _StackStep(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("hidden", "cos", "signed_sin")),
        *((name, _I) for name in ("num_rows", "num_written")),
        *((name, _P) for name in ("tokens", "block_ids", "slots")),
        *((name, _I) for name in ("num_groups", "num_chunks")),
        *((name, _P) for name in ("groups", "chunks", "normed", "heads", "attended", "inner")),
    ]


@dataclass(frozen=True, slots=True)
class StackLayer:
    """One layer; norms are [hidden] bf16."""

    attention_norm: Tensor
    qkv: PackedLinear
    out: PackedLinear
    mlp_norm: Tensor
    gated: PackedGatedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class StackShape:
    """Sizes as in engine/batch.py; eps of the norms, scale of the scores."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    scale: float

    @property
    def is_whole_vectors(self) -> bool:
        """Whether the kernels take it; the head size is up to the pool (CpuKernels.can_attend_chunks)."""
        return self.hidden % LANES == 0


@dataclass(frozen=True, slots=True)
class StackRows:
    """What the layers need to know of a step's rows, in the terms of engine/batch.py.

    writes  tokens (None: all), block_ids and slots
    groups  of decode rows: first, num_rows, block_ids, contexts
    chunks  first, num_tokens, context, block_ids
    """

    writes: tuple[Tensor | None, Tensor, Tensor]
    groups: Sequence[tuple[int, int, Tensor, Tensor]]
    chunks: Sequence[tuple[int, int, int, Tensor]]


class LayerStack:
    """The first layers of a model; takes no ownership of their weights, which must live as long.

    layers  at least one
    """

    def __init__(self, library: ctypes.CDLL, layers: Sequence[StackLayer], shape: StackShape):
        self._run = bind(library, "run_layers_bf16", [_P, _I, _P, _P, _P])
        self._kept = tuple(layers)
        self._layers = (_LayerWeights * len(layers))(*map(_pointers, layers))
        self._shape = shape
        self._c_shape = _StackShape(
            shape.hidden,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.intermediate,
            shape.eps,
            shape.scale,
        )
        self._work: tuple[Tensor, ...] = ()

    def run(
        self, hidden: Tensor, cos: Tensor, signed_sin: Tensor, layer_kvs: Sequence[Tensor], rows: StackRows
    ) -> None:
        """Take all rows through the layers, in the place of `hidden`; their KV goes into the pool.

        hidden           [num_rows, hidden] bf16, dense; every row is in a group or a chunk
        cos, signed_sin  [num_rows, 1, head_dim] float32, dense
        layer_kvs        as in engine/llama.py, of these layers and at least one more; CpuKernels.can_attend_chunks of
                         each is true
        """
        tokens, block_ids, slots = rows.writes
        groups = (_DecodeRows * len(rows.groups))(
            *(
                (first, num_rows, len(table) // num_rows, table.data_ptr(), contexts.data_ptr())
                for first, num_rows, table, contexts in rows.groups
            )
        )
        chunks = (_ChunkRows * len(rows.chunks))(
            *((first, num_tokens, context, table.data_ptr()) for first, num_tokens, context, table in rows.chunks)
        )
        step = _StackStep(
            hidden.data_ptr(),
            cos.data_ptr(),
            signed_sin.data_ptr(),
            len(hidden),
            len(block_ids),
            None if tokens is None else tokens.data_ptr(),
            block_ids.data_ptr(),
            slots.data_ptr(),
            len(groups),
            len(chunks),
            ctypes.addressof(groups),
            ctypes.addressof(chunks),
            *(part.data_ptr() for part in self._work_for(hidden)),
        )
        pool = _pool_layout(layer_kvs)
        self._run(
            ctypes.addressof(self._layers),
            len(self._layers),
            ctypes.addressof(self._c_shape),
            ctypes.addressof(pool),
            ctypes.addressof(step),
        )

    def _work_for(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """normed, heads, attended and inner with room for the rows of `hidden`."""
        if not self._work or len(self._work[0]) < len(hidden):
            shape = self._shape
            attended = shape.num_heads * shape.head_dim
            sizes = (shape.hidden, attended + 2 * shape.num_kv_heads * shape.head_dim, attended, shape.intermediate)
            self._work = tuple(hidden.new_empty(len(hidden), size) for size in sizes)
        return self._work


def _pointers(layer: StackLayer) -> _LayerWeights:
    norms = (layer.attention_norm.data_ptr(), layer.mlp_norm.data_ptr())
    return _LayerWeights(*norms, *(linear.pointer for linear in (layer.qkv, layer.out, layer.gated, layer.down)))


def _pool_layout(layer_kvs: Sequence[Tensor]) -> _PoolLayout:
    first, second = layer_kvs[0], layer_kvs[1]
    layer_stride = (second.data_ptr() - first.data_ptr()) // first.element_size()
    return _PoolLayout(first.data_ptr(), layer_stride, *first.stride()[:4], first.shape[3])
