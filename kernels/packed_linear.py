"""Linear layers of bf16 rows over weights packed for cpp/linear.cpp, for one thread of a CPU.

SmolLM2-135M's linears without the head, one core with AVX-512-BF16 and no tile registers, taking turns with oneDNN's
packed product, in ms (November 2026):

    rows       1     2     4     8    16    32    64   512
    oneDNN  17.4  20.3  15.9  19.2  25.9  41.8  72.2   549
    here     8.6   8.9   9.3  11.9  19.4  36.0  68.1   535

Rows are independent of each other, bit by bit: neither the batch nor the chunk a token comes in changes its
result. Not so with INT4: few rows and many are multiplied in different ways. Same calls as the layers of
engine/linear.py; made by kernels/cpu.py.
"""

import ctypes
from array import array
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.huge_pages import HugePages
from pdserve.kernels.library import bind
from pdserve.kernels.quantized_weights import LANES, PANEL, Format, pack

_P, _I = ctypes.c_void_p, ctypes.c_int64
_COMMON = [_P, _P, _I, _P, _I]
SIGNATURES = {"linear_bf16": [*_COMMON, _I], "logits_bf16": [*_COMMON, _P], "gated_linear_bf16": _COMMON}
PANELS_AT_ONCE = 128


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("format", _I),
        *((name, _P) for name in ("panels", "scales", "bias")),
        *((name, _I) for name in ("out_features", "in_features")),
    ]


def products(library: ctypes.CDLL) -> str:
    """What the library multiplies bf16 with: "vectors" or "tiles", whose sums differ in their last bits, or "": the CPU
    does not multiply it."""
    return ("", "vectors", "tiles")[library.bf16_products()]


@cache
def _products(library: ctypes.CDLL) -> dict[str, Callable[..., None]]:
    """Bound once for all layers of a model."""
    return {name: bind(library, name, arguments) for name, arguments in SIGNATURES.items()}


def multiplies_bytes(library: ctypes.CDLL) -> bool:
    """Whether there are products for Format.INT8 and BYTES."""
    return bool(library.multiplies_bytes())


class _Packed:
    """weight: [num_panels * PANEL, in_features] bf16; bias: [num_panels * PANEL] float32 or None."""

    def __init__(
        self,
        library: ctypes.CDLL,
        memory: HugePages,
        weight: Tensor,
        bias: Tensor | None,
        out_features: int,
        form: Format,
    ):
        self._panels, self._scales = _packed(weight, memory, form)
        self._bias = bias
        self._form = form
        self._out_features = out_features
        self._in_features = weight.shape[1]
        pointers = [None if part is None else part.data_ptr() for part in (self._panels, self._scales, self._bias)]
        self._matrix = _Matrix(form, *pointers, out_features, self._in_features)
        self._calls = _products(library)

    @property
    def num_bytes(self) -> int:
        """Of the weights in memory."""
        return sum(part.nbytes for part in (self._panels, self._scales) if part is not None)

    @property
    def has_independent_rows(self) -> bool:
        """See the head of this file."""
        return self._form != Format.INT4

    @property
    def pointer(self) -> int:
        """Of the struct Matrix of cpp/kernels.h, which lives as long as this object."""
        return ctypes.addressof(self._matrix)

    def _run(self, name: str, x: Tensor, out: Tensor, *more: int) -> Tensor:
        assert x.shape[-1] == self._in_features, f"x is {tuple(x.shape)}, the weight takes {self._in_features}"
        assert x.stride(-1) == 1
        assert out.shape == (x.shape[0], self._out_features)
        assert out.is_contiguous()
        self._calls[name](
            self.pointer,
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            x.shape[0],
            *more,
        )
        return out


class PackedLinear(_Packed):
    """y = x W^T + b.

    weight  [out_features, in_features] bf16, in_features even
    bias    [out_features] bf16 or None
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        memory: HugePages,
        weight: Tensor,
        bias: Tensor | None,
        form: Format = Format.BF16,
    ):
        bias = None if bias is None else _padded(bias.float(), PANEL)
        super().__init__(library, memory, _padded(weight, PANEL), bias, weight.shape[0], form)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features]"""
        return self._run("linear_bf16", x, x.new_empty(x.shape[0], self._out_features), 0)

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        """hidden + y, rounded once, in the place of `hidden` [num_rows, out_features]"""
        return self._run("linear_bf16", x, hidden, 1)

    def logits(self, x: Tensor) -> tuple[Tensor, array]:
        """y in float32, and of each row the first of its largest, as DrawKernels.draw_rows counts what is no number"""
        likeliest = array("q", bytes(8 * x.shape[0]))
        out = x.new_empty(x.shape[0], self._out_features, dtype=torch.float32)
        return self._run("logits_bf16", x, out, likeliest.buffer_info()[0]), likeliest


class PackedGatedLinear(_Packed):
    """y = silu(x G^T + b) * (x U^T + c), rounded once; weights and biases as in PackedLinear."""

    def __init__(
        self,
        library: ctypes.CDLL,
        memory: HugePages,
        gate: Tensor,
        up: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        form: Format = Format.BF16,
    ):
        bias = None
        if gate_bias is not None or up_bias is not None:
            none = gate.new_zeros(gate.shape[0])
            biases = [none if part is None else part for part in (gate_bias, up_bias)]
            bias = _interleaved(*(part.float() for part in biases))
        super().__init__(library, memory, _interleaved(gate, up), bias, gate.shape[0], form)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features]"""
        return self._run("gated_linear_bf16", x, x.new_empty(x.shape[0], self._out_features))


def _packed(weight: Tensor, memory: HugePages, form: Format) -> tuple[Tensor, Tensor | None]:
    """Some panels at a time: what rounding needs besides is several times the weight."""
    packed: tuple[Tensor | None, ...] = (None, None)
    num_panels = weight.shape[0] // PANEL
    for first in range(0, num_panels, PANELS_AT_ONCE):
        parts = pack(weight[first * PANEL : (first + PANELS_AT_ONCE) * PANEL], form)
        if packed == (None, None):
            packed = tuple(
                part if part is None else memory.empty((num_panels, *part.shape[1:]), part.dtype) for part in parts
            )
        for part, all_parts in zip(parts, packed, strict=True):
            if part is not None and all_parts is not None:
                all_parts[first : first + len(part)] = part
    panels, scales = packed
    assert panels is not None
    return panels, scales


def _padded(rows: Tensor, multiple: int) -> Tensor:
    missing = -rows.shape[0] % multiple
    return F.pad(rows, (0,) * (2 * rows.dim() - 1) + (missing,)) if missing else rows


def _interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """16 rows of one, then the same 16 of the other."""
    halves = [_padded(part, LANES).unflatten(0, (-1, 1, LANES)) for part in (gate, up)]
    return torch.cat(halves, dim=1).flatten(0, 2)
