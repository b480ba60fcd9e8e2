"""The device check runs to its end on a CPU, so that it works when a GPU is at hand."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tokens_and_hand_off_are_right_on_the_device(device: str):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", device], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all equal\n")
