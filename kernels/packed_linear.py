"""Linear layers over bf16 weights packed for cpp/linear.cpp, for one thread of a CPU.

SmolLM2-135M's linears without the head, one core with AVX-512-BF16 and no tile registers, taking turns with oneDNN's
packed product, in ms (November 2026):

    rows       1     2     4     8    16    32    64   512
    oneDNN  17.4  20.3  15.9  19.2  25.9  41.8  72.2   549
    here     8.6   8.9   9.3  11.9  19.4  36.0  68.1   535

Rows are independent of each other, bit by bit: neither the batch nor the chunk a token comes in changes its
result. Same calls as the layers of engine/linear.py; made by kernels/cpu.py.
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

LANES = 16
PANEL = 2 * LANES

_P, _I = ctypes.c_void_p, ctypes.c_int64
_COMMON = [_P, _I, _P, _P, _P, _I, _I, _I]
SIGNATURES = {"linear_bf16": [*_COMMON, _I], "logits_bf16": [*_COMMON, _P], "gated_linear_bf16": _COMMON}


def products(library: ctypes.CDLL) -> str:
    """What the library multiplies bf16 with: "vectors" or "tiles", whose sums differ in their last bits, or "": the CPU
    does not multiply it."""
    return ("", "vectors", "tiles")[library.bf16_products()]


@cache
def _products(library: ctypes.CDLL) -> dict[str, Callable[..., None]]:
    """Bound once for all layers of a model."""
    return {name: bind(library, name, arguments) for name, arguments in SIGNATURES.items()}


class _Packed:
    """panels: [num_panels, in_features / 2, 2, LANES, 2] bf16; bias: [num_panels * PANEL] float32 or None."""

    def __init__(self, library: ctypes.CDLL, panels: Tensor, bias: Tensor | None, out_features: int):
        self._panels = panels
        self._bias = bias
        self._out_features = out_features
        self._in_features = 2 * panels.shape[1]
        self._calls = _products(library)

    @property
    def weight_pointer(self) -> int:
        return self._panels.data_ptr()

    @property
    def bias_pointer(self) -> int | None:
        return None if self._bias is None else self._bias.data_ptr()

    def _run(self, name: str, x: Tensor, out: Tensor, *more: int) -> Tensor:
        assert x.shape[-1] == self._in_features, f"x is {tuple(x.shape)}, the weight takes {self._in_features}"
        assert x.stride(-1) == 1
        assert out.shape == (x.shape[0], self._out_features)
        assert out.is_contiguous()
        self._calls[name](
            x.data_ptr(),
            x.stride(0),
            self.weight_pointer,
            self.bias_pointer,
            out.data_ptr(),
            x.shape[0],
            self._out_features,
            self._in_features,
            *more,
        )
        return out


class PackedLinear(_Packed):
    """y = x W^T + b.

    weight  [out_features, in_features] bf16, in_features even
    bias    [out_features] bf16 or None
    """

    def __init__(self, library: ctypes.CDLL, memory: HugePages, weight: Tensor, bias: Tensor | None):
        bias = None if bias is None else _padded(bias.float(), PANEL)
        super().__init__(library, _pack(_padded(weight, PANEL), memory), bias, weight.shape[0])

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
    ):
        bias = None
        if gate_bias is not None or up_bias is not None:
            none = gate.new_zeros(gate.shape[0])
            biases = [none if part is None else part for part in (gate_bias, up_bias)]
            bias = _interleaved(*(part.float() for part in biases))
        super().__init__(library, _pack(_interleaved(gate, up), memory), bias, gate.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features]"""
        return self._run("gated_linear_bf16", x, x.new_empty(x.shape[0], self._out_features))


def _padded(rows: Tensor, multiple: int) -> Tensor:
    missing = -rows.shape[0] % multiple
    return F.pad(rows, (0,) * (2 * rows.dim() - 1) + (missing,)) if missing else rows


def _interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """16 rows of one, then the same 16 of the other."""
    halves = [_padded(part, LANES).unflatten(0, (-1, 1, LANES)) for part in (gate, up)]
    return torch.cat(halves, dim=1).flatten(0, 2)


def _pack(weight: Tensor, memory: HugePages) -> Tensor:
    """[num_panels * PANEL, in_features] -> [num_panels, in_features / 2, 2, LANES, 2]"""
    panels = weight.view(-1, 2, LANES, weight.shape[1] // 2, 2).permute(0, 3, 1, 2, 4)
    return memory.empty(tuple(panels.shape), panels.dtype).copy_(panels)
