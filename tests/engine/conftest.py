"""Both ways to draw: in torch, which any device can, and in C++."""

import pytest

from pdserve.kernels.draw import DrawKernels, load_draw


@pytest.fixture(params=["torch", "native"])
def native(request: pytest.FixtureRequest) -> DrawKernels | None:
    if request.param == "torch":
        return None
    loaded = load_draw()
    if loaded is None:
        pytest.skip("no compiler for the C++ kernels")
    return loaded
