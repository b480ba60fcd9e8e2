"""Drawing tokens on a CPU: the formula of engine/sampler.py in C++ (cpp/draw.cpp), the same ids for the same seeds."""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from pdserve.kernels.library import LibraryError, bind, load_library

DrawRows = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_P, _I = ctypes.c_void_p, ctypes.c_int64


@cache
def load_draw() -> DrawRows | None:
    """The function that draws rows, or None on a machine that cannot compile it.

    logits        [num_rows, vocab_size] float32, dense
    words         [num_rows, 4] uint32: output index, sample, low and high half of the seed
    temperatures  [num_rows] float64, above 0
    top_k         [num_rows] int64, 0 without; top_p, min_p: [num_rows] float64, 1 and 0 without
    Returns [num_rows] int64.
    """
    try:
        call = bind(load_library(), "draw_rows", [_P, _I, _I, *[_P] * 6])
    except LibraryError:
        # Said already by whoever loaded the kernels of the model.
        return None

    def draw_rows(
        logits: Tensor, words: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> Tensor:
        num_rows, vocab_size = logits.shape
        tokens = torch.empty(num_rows, dtype=torch.int64)
        pointers = [tensor.data_ptr() for tensor in (words, temperatures, top_k, top_p, min_p, tokens)]
        call(logits.data_ptr(), num_rows, vocab_size, *pointers)
        return tokens

    return draw_rows
