"""The tables of docs/cache.md are what their commands print: they need no model and no clock."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def printed(script: str, *words: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", ["hit_rates.py", "kv_waste.py"])
def test_the_documented_table_is_what_the_command_prints(script: str):
    assert printed(script) in (ROOT / "docs" / "cache.md").read_text(encoding="utf-8")


def test_a_line_of_the_documented_hit_rates_is_what_the_command_prints():
    *_, row = printed("hit_rates.py", "--blocks", "1000").splitlines()
    assert f"\n{row}\n" in (ROOT / "docs" / "cache.md").read_text(encoding="utf-8")


def test_too_few_requests_are_refused_by_name():
    command = [sys.executable, str(ROOT / "benchmarks" / "kv_waste.py"), "--num-requests", "10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "more requests are needed, or fewer slots" in done.stderr
