"""Drawing tokens on a CPU: the formulas of engine/sampler.py and engine/likelihood.py in C++ (cpp/draw.cpp and
cpp/likelihood.cpp). The same ids for the same seeds; log-probabilities may differ from torch's in the last bits.
"""

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from pdserve.kernels.library import LibraryError, bind, load_library

_P, _I = ctypes.c_void_p, ctypes.c_int64
# Anything below 0.
TO_BE_FOUND = -1


class DrawKernels:
    """The library's functions over rows of logits, each [vocab_size] float32, dense."""

    def __init__(self, library: ctypes.CDLL):
        self._draw_rows = bind(library, "draw_rows", [_P, _I, _I, *[_P] * 7])
        self._log_probabilities = bind(library, "log_probabilities", [_P, _I, _I, _P, _I, _P, _P])

    def draw_rows(
        self,
        rows: Sequence[Tensor],
        words: Sequence[tuple[int, int, int, int]],
        temperatures: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        likeliest: Sequence[int | None],
    ) -> list[int]:
        """One token id a row; NaN counts as minus infinity, plus infinity as the largest float.

        rows          several draws may name the same memory, and neighbours that do, with the same limits, share the
                      work of finding them
        words         output index, sample, low and high half of the seed: u32
        temperatures  0 for greedy
        top_k         0 without; top_p 1 and min_p 0 without
        likeliest     the first id of the row's largest logits, None where it is to be found
        """
        tokens = array("q", bytes(8 * len(rows)))
        arrays = (
            array("I", [word for draw in words for word in draw]),
            array("d", temperatures),
            array("q", top_k),
            array("d", top_p),
            array("d", min_p),
            array("q", [TO_BE_FOUND if token is None else token for token in likeliest]),
            tokens,
        )
        pointers = _pointers(rows)
        self._draw_rows(_address(pointers), len(rows), rows[0].shape[0], *map(_address, arrays))
        return tokens.tolist()

    def log_probabilities(self, rows: Sequence[Tensor], tokens: Sequence[int], num_top: int) -> tuple[Tensor, Tensor]:
        """Ids, int32, and log-probabilities, float32, both [num_rows, 1 + num_top]: the token, then the likeliest.

        rows     without NaN and plus infinity
        num_top  at most vocab_size
        """
        ids = torch.empty(len(rows), 1 + num_top, dtype=torch.int32)
        values = torch.empty(ids.shape, dtype=torch.float32)
        pointers, wanted = _pointers(rows), array("q", tokens)
        self._log_probabilities(
            _address(pointers),
            len(rows),
            rows[0].shape[0],
            _address(wanted),
            num_top,
            ids.data_ptr(),
            values.data_ptr(),
        )
        return ids, values


@cache
def load_draw() -> DrawKernels | None:
    """The compiled functions, or None on a machine that cannot compile them."""
    try:
        return DrawKernels(load_library())
    except LibraryError:
        # Said already by whoever loaded the kernels of the model.
        return None


def _pointers(rows: Sequence[Tensor]) -> array:
    return array("Q", [row.data_ptr() for row in rows])


def _address(values: array) -> int:
    return values.buffer_info()[0]
