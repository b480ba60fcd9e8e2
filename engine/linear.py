"""Linear layers for inference: packed weights where they pay, plain ones elsewhere.

Where kernels/packed_linear.py can multiply, its layers are used. Else oneDNN packs: it reorders the weight once
into the layout of its matmul kernel. Measured on the linears of SmolLM2-135M (bf16, one core with AVX-512-bf16,
November 2026), packed against F.linear, in ms:

    rows       1     2     4     8    16    64   512
    plain   36.0  35.4  36.4  41.7  51.5   110   548
    packed  17.8  21.1  16.8  21.4  30.1    89   518

oneDNN's layout came out the same for every number of rows given to the reorder, so one pack serves decode
and chunks. Its steps of fewer rows than MIN_ROWS are padded to it by engine/batch.py: four rows cost less than
one. float32 gains as much; float16 is packed only where the CPU multiplies it natively.
"""

import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.cpu import CpuKernels
from pdserve.kernels.packed_linear import PackedGatedLinear, PackedLinear
from pdserve.kernels.quantized_weights import Format, Quantized, rounded_rows

log = logging.getLogger(__name__)

MIN_ROWS = 4


class Linear:
    """y = x W^T + b. Takes over `weight` and `bias`; the plain weight is dropped once it is packed.

    weight  [out_features, in_features]
    bias    [out_features] or None
    """

    __slots__ = ("bias", "is_packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.is_packed = can_pack(weight.dtype, weight.device)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.is_packed else weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features]"""
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        """hidden + y in the place of `hidden` [num_rows, out_features]"""
        return hidden.add_(self(x))

    def logits(self, x: Tensor) -> tuple[Tensor, None]:
        """y in float32; which of a row is the largest is left to find"""
        return self(x).float(), None

    def silu(self, x: Tensor) -> Tensor:
        """silu(x W^T + b); a packed product applies it while its result is still in registers."""
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "swish", [], "")
        return F.silu(F.linear(x, self.weight, self.bias))


class GatedLinear:
    """y = silu(gate(x)) * up(x). The two stay apart, because silu in the gate's own epilogue saves a chunk more."""

    __slots__ = ("gate", "up")

    def __init__(self, gate: Linear, up: Linear):
        self.gate = gate
        self.up = up

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features]"""
        return self.gate.silu(x).mul_(self.up(x))


class QuantizedLinear(Linear):
    """The same of quantized weights, spread out anew for each product: right where there is no kernel, not fast."""

    __slots__ = ("_form", "_quantized")

    def __init__(self, weight: Tensor, bias: Tensor | None, form: Format):
        self._form = form
        self._quantized = Quantized.of(weight, form)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        weight = self._quantized.weight().to(x.dtype)
        return F.linear(rounded_rows(x, self._form), weight, self.bias)

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(self(x))


@dataclass(frozen=True, slots=True)
class LinearMaker:
    """Makes the layers of one model.

    native  the compiled kernels, if they multiply in its dtype
    form    of the layers' weights
    """

    native: CpuKernels | None
    form: Format

    @classmethod
    def of(cls, native: CpuKernels | None, form: Format, *in_features: int) -> "LinearMaker":
        """For a model whose layers have these input sizes; all of its layers are of one kind."""
        packs = native is not None and native.can_pack(form) and all(size % 2 == 0 for size in in_features)
        if not packs and form != Format.BF16:
            log.warning("no kernel multiplies %s weights here: steps take several times as long", form.name)
        return cls(native if packs else None, form)

    @property
    def head(self) -> "LinearMaker":
        """Of the vocabulary's matrix: with 4 bits to a weight it has 8, and it always multiplies rows as they are."""
        kept = {Format.INT4: Format.INT8, Format.BYTES: Format.BF16}
        return LinearMaker(self.native, kept.get(self.form, self.form))

    @property
    def min_rows(self) -> int:
        """Fewer rows than this cost no less."""
        return MIN_ROWS if self.native is None else 1

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear | PackedLinear:
        if self.native is not None:
            return self.native.linear(weight, bias, self.form)
        return Linear(weight, bias) if self.form == Format.BF16 else QuantizedLinear(weight, bias, self.form)

    def gated(
        self, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
    ) -> GatedLinear | PackedGatedLinear:
        if self.native is not None:
            return self.native.gated_linear(gate, up, gate_bias, up_bias, self.form)
        parts = [self.linear(gate, gate_bias), self.linear(up, up_bias)]
        return GatedLinear(*(part for part in parts if isinstance(part, Linear)))


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build and this CPU have a packed matmul for `dtype`."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return True
    return is_native_on_cpu(dtype)


def is_native_on_cpu(dtype: torch.dtype) -> bool:
    """Whether the CPU multiplies this 16-bit dtype itself rather than through float32 conversions."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()
