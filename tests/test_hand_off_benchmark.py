"""The benchmark of the hand-off runs to its end, so that it works when figures are to be taken."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import make_llama_checkpoint

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "hand_off.py"


@pytest.mark.slow
def test_copies_are_timed_and_the_cost_of_verification_is_given(tmp_path: Path):
    model = make_llama_checkpoint(tmp_path / "model")
    words = ["--rounds", "2", "--pool-mib", "1", "--num-requests", "0", "--ttft-ms", "10", "--hand-off-ms", "2"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(model), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "| copy and verify, one pass |" in done.stdout
    assert "% of 12 ms" in done.stdout
