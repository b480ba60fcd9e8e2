"""Drawing tokens on a CPU: the formula of engine/sampler.py in C++ (cpp/draw.cpp), the same ids for the same seeds."""

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Protocol

from torch import Tensor

from pdserve.kernels.library import LibraryError, bind, load_library

_P, _I = ctypes.c_void_p, ctypes.c_int64


class DrawRows(Protocol):
    def __call__(
        self,
        rows: Sequence[Tensor],
        words: Sequence[tuple[int, int, int, int]],
        temperatures: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
    ) -> list[int]:
        """One token id a row.

        rows          [vocab_size] float32 each, dense, without NaN; several draws may name the same memory, and
                      neighbours that do, with the same limits, share the work of finding them
        words         output index, sample, low and high half of the seed: u32
        temperatures  0 for greedy
        top_k         0 without; top_p 1 and min_p 0 without
        """
        ...


@cache
def load_draw() -> DrawRows | None:
    """The function that draws rows, or None on a machine that cannot compile it."""
    try:
        call = bind(load_library(), "draw_rows", [_P, _I, _I, *[_P] * 6])
    except LibraryError:
        # Said already by whoever loaded the kernels of the model.
        return None

    def draw_rows(
        rows: Sequence[Tensor],
        words: Sequence[tuple[int, int, int, int]],
        temperatures: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
    ) -> list[int]:
        tokens = array("q", bytes(8 * len(rows)))
        arrays = (
            array("I", [word for draw in words for word in draw]),
            array("d", temperatures),
            array("q", top_k),
            array("d", top_p),
            array("d", min_p),
            tokens,
        )
        pointers = array("Q", [row.data_ptr() for row in rows])
        addresses = [values.buffer_info()[0] for values in arrays]
        call(pointers.buffer_info()[0], len(rows), rows[0].shape[0], *addresses)
        return tokens.tolist()

    return draw_rows
