"""`pdserve bench ab` as users start it, on a tiny model: servers of both kinds really come and go."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.e2e.servers import COMMAND

LOAD = shlex.split("--rate 20 --num-requests 60 --input-tokens 16-64 --output-tokens 8-16 --vocab 10-250")
PROMISE = "ttft=2.0,tpot=0.2"
TIMEOUT_S = 240


@pytest.mark.slow
def test_an_ab_serves_every_layout_and_ends_with_a_verdict(small_model: Path, tmp_path: Path):
    files = ("--json", "ab.json", "--html", "ab.html", "--markdown", "ab.md")
    served = ("--model", str(small_model), "--cores", "2", "--budget", "1", "--slo", PROMISE)
    words = (*COMMAND, "bench", "ab", *served, *LOAD, *files)
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "ab.json").read_text())
    assert [each["server"]["name"] for each in content["contestants"]] == ["2 both", "1 both, 2 threads", "1P1D"]
    assert {bool(each["runs"]) for each in content["contestants"]} == {True}
    assert f"verdict     {content['verdict'][:30]}" in done.stdout
    assert content["verdict"] in (tmp_path / "ab.md").read_text().replace("\\", "")
    assert (tmp_path / "ab.html").stat().st_size > 1_000_000
