"""What this machine's CPU can do, for tests of the kernels that need it."""

import shutil

import pytest

from pdserve.kernels.library import load_library
from pdserve.kernels.packed_linear import can_multiply


def skip_unless_it_multiplies_bf16() -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    if not can_multiply(load_library()):
        pytest.skip("this CPU does not multiply bf16 itself")
