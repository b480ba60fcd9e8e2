"""The kernels of kernels/reference.py in C++, for one thread of a CPU.

Same names and arguments where the shapes fit; what does not fit (another dtype, a head size that is no
multiple of a vector) goes to the reference. decode_attention alone takes other arguments: it reads the pool
in place, each row to its own length, so nobody has to pad, copy or mask. Called by engine/llama.py.
"""

import ctypes
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.kernels import reference
from pdserve.kernels.huge_pages import HugePages
from pdserve.kernels.layer_stack import LayerStack, StackLayer, StackShape
from pdserve.kernels.library import LibraryError, bind, load_library
from pdserve.kernels.packed_linear import PackedGatedLinear, PackedLinear, multiplies_bytes, products
from pdserve.kernels.quantized_weights import LANES, PANEL, Format

log = logging.getLogger(__name__)

SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
# Limits of the buffers in cpp/attention.cpp.
MAX_HEAD_DIM = 256
MAX_BLOCK_SIZE = 256

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "decode_attention": [_P, _I, _I, _P, *[_I] * 5, _P, _I, _P, *[_I] * 4, _F, _P],
    "causal_softmax": [_P, _I, _I, _I],
    "rms_norm": [_P, _P, _P, _I, _I, _F],
    "place_heads": [_P, _P, _P, *[_I] * 4, _P, *[_I] * 4, _P, _P, _P, _I],
}
CHUNK_SIGNATURE = [_P, _I, _I, _P, *[_I] * 5, _P, *[_I] * 5, _F, _P]


class CpuKernels:
    """The library's functions for one dtype. Tensors are on the CPU; see load_kernels.

    products      what multiplies the dtype (products of kernels/packed_linear.py), "" if this CPU does not itself
    can_multiply  whether it does, so that there are linear layers and attention of chunks for it, too
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype):
        self._dtype = dtype
        self._calls = {
            name: bind(library, f"{name}_{SUFFIXES[dtype]}", arguments) for name, arguments in SIGNATURES.items()
        }
        self._library = library
        self._memory = HugePages()
        self.products = products(library) if dtype == torch.bfloat16 else ""
        self.can_multiply = bool(self.products)
        if self.can_multiply:
            self._calls["chunk_attention"] = bind(library, "chunk_attention_bf16", CHUNK_SIGNATURE)

    def can_pack(self, form: Format) -> bool:
        """Whether linear layers may be of this format."""
        return self.can_multiply and (form not in (Format.INT8, Format.BYTES) or multiplies_bytes(self._library))

    def linear(self, weight: Tensor, bias: Tensor | None, form: Format) -> PackedLinear:
        return PackedLinear(self._library, self._memory, weight, bias, form)

    def gated_linear(
        self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, form: Format
    ) -> PackedGatedLinear:
        return PackedGatedLinear(self._library, self._memory, gate, up, gate_bias, up_bias, form)

    def layer_stack(self, layers: Sequence[StackLayer], shape: StackShape) -> LayerStack:
        """can_multiply is true"""
        return LayerStack(self._library, layers, shape)

    def can_decode(self, layer_kv: Tensor) -> bool:
        """Whether decode_attention takes this pool; layer_kv as in kernels/reference.py."""
        block_size, head_dim = layer_kv.shape[-2:]
        fits = head_dim % LANES == 0 and head_dim <= MAX_HEAD_DIM and block_size <= MAX_BLOCK_SIZE
        return fits and layer_kv.dtype == self._dtype and layer_kv.stride(-1) == 1

    def decode_attention(
        self, q: Tensor, layer_kv: Tensor, block_ids: Tensor, contexts: Tensor, scale: float, out: Tensor
    ) -> None:
        """Attention of one query token per row over the row's blocks, read where they lie.

        q          [num_rows, num_heads, head_dim], its last dim dense
        layer_kv   [num_blocks, num_kv_heads, kv(2), block_size, head_dim], can_decode of it is true
        block_ids  [num_rows * blocks_per_row] int64, the blocks of a row first, then anything
        contexts   [num_rows] int64, from 1; no slot beyond a row's context is read
        out        [num_rows, num_heads, head_dim], dense, written

        Scores and weights stay in fp32, where the reference rounds them to the serving dtype.
        """
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads, block_size = layer_kv.shape[1], layer_kv.shape[3]
        self._calls["decode_attention"](
            q.data_ptr(),
            *q.stride()[:2],
            layer_kv.data_ptr(),
            *layer_kv.stride()[:4],
            block_size,
            block_ids.data_ptr(),
            block_ids.shape[0] // num_rows,
            contexts.data_ptr(),
            num_rows,
            num_kv_heads,
            num_heads // num_kv_heads,
            head_dim,
            scale,
            out.data_ptr(),
        )

    def can_attend_chunks(self, layer_kv: Tensor) -> bool:
        """Whether paged_chunk_attention takes this pool."""
        return self.can_multiply and layer_kv.shape[-1] % PANEL == 0 and self.can_decode(layer_kv)

    def paged_chunk_attention(
        self, q: Tensor, layer_kv: Tensor, block_ids: Tensor, context: int, scale: float, out: Tensor
    ) -> None:
        """Causal attention of a chunk over its request's blocks, read where they lie.

        q          [chunk, num_heads, head_dim], the last positions of `context`; its last dim dense
        layer_kv   [num_blocks, num_kv_heads, kv(2), block_size, head_dim], can_attend_chunks of it is true
        block_ids  [blocks of the context] int64; no slot from `context` on is read
        out        [chunk, num_heads, head_dim], dense, written

        Scores stay in fp32, where the reference rounds them to bf16.
        """
        num_queries, num_heads, head_dim = q.shape
        num_kv_heads, block_size = layer_kv.shape[1], layer_kv.shape[3]
        self._calls["chunk_attention"](
            q.data_ptr(),
            *q.stride()[:2],
            layer_kv.data_ptr(),
            *layer_kv.stride()[:4],
            block_size,
            block_ids.data_ptr(),
            context,
            num_queries,
            num_kv_heads,
            num_heads // num_kv_heads,
            head_dim,
            scale,
            out.data_ptr(),
        )

    def causal_softmax(self, scores: Tensor, causal: Tensor) -> Tensor:
        """In place; `causal` gives only the size of the tile."""
        if not scores.is_contiguous():
            return reference.causal_softmax(scores, causal)
        width = scores.shape[-1]
        self._calls["causal_softmax"](scores.data_ptr(), scores.numel() // width, causal.shape[-1], width)
        return scores

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        num_rows, hidden = x.shape
        if hidden % LANES or not x.is_contiguous():
            return reference.rms_norm(x, weight, eps)
        out = torch.empty_like(x)
        self._calls["rms_norm"](x.data_ptr(), weight.data_ptr(), out.data_ptr(), num_rows, hidden, eps)
        return out

    def place_heads(
        self,
        heads: Tensor,
        cos: Tensor,
        signed_sin: Tensor,
        layer_kv: Tensor,
        tokens: Tensor | None,
        block_ids: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As the reference's; q, k and v are views of `heads`."""
        if not heads.is_contiguous() or layer_kv.stride(-1) != 1:
            return reference.place_heads(heads, cos, signed_sin, layer_kv, tokens, block_ids, slots)
        num_rows, num_all, head_dim = heads.shape
        num_kv_heads = layer_kv.shape[1]
        num_rotated = num_all - num_kv_heads
        self._calls["place_heads"](
            heads.data_ptr(),
            cos.data_ptr(),
            signed_sin.data_ptr(),
            num_rows,
            num_rotated,
            num_kv_heads,
            head_dim,
            layer_kv.data_ptr(),
            *layer_kv.stride()[:4],
            None if tokens is None else tokens.data_ptr(),
            block_ids.data_ptr(),
            slots.data_ptr(),
            block_ids.shape[0],
        )
        return heads.tensor_split((num_rotated - num_kv_heads, num_rotated), dim=1)

    def chunk_attention(self, q: Tensor, k: Tensor, v: Tensor, causal: Tensor, scale: float, out: Tensor) -> None:
        reference.chunk_attention(q, k, v, causal, scale, out, self.causal_softmax)


def load_kernels(dtype: torch.dtype, device: torch.device) -> CpuKernels | None:
    """The kernels for this dtype and the calling thread, or None when the reference serves.

    With several threads the reference does: its operations are spread over torch's own team, and a second team
    on the same cores would take their time.
    """
    if device.type != "cpu" or dtype not in SUFFIXES or torch.get_num_threads() != 1:
        return None
    try:
        return CpuKernels(load_library(), dtype)
    except LibraryError as error:
        log.warning("no compiled kernels, steps take longer: %s", error)
        return None
