"""What this machine's CPU can do, for tests of the kernels that need it."""

import ctypes
import shutil
from functools import cache
from unittest import mock

import pytest

from pdserve.kernels import library
from pdserve.kernels.library import cache_folder, compile_into, load_library
from pdserve.kernels.packed_linear import products
from pdserve.kernels.tiles import take_tiles

# The library as this machine has it, and where that uses tile registers, the one of a CPU without.
BUILDS = ("own", "without tiles")


def skip_unless_it_multiplies_bf16() -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    if not products(load_library()):
        pytest.skip("this CPU does not multiply bf16 itself")


def multiplying_library(build: str) -> ctypes.CDLL:
    """One of BUILDS, or the test is skipped."""
    skip_unless_it_multiplies_bf16()
    if build == "own":
        return load_library()
    if not take_tiles():
        pytest.skip("this machine's own library uses no tile registers")
    return _without_tiles()


@cache
def _without_tiles() -> ctypes.CDLL:
    with mock.patch.object(library, "take_tiles", return_value=False):
        return ctypes.CDLL(str(compile_into(cache_folder())))
