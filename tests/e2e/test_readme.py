"""Every command of the README does what it says: requests against a real server, the rest as make would run it."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import console
from tests.e2e.conftest import Start
from tests.e2e.console import ROOT
from tests.e2e.servers import Server

ADDRESS = "http://127.0.0.1:8000"
# Run by .ci/run itself.
CHECKS = {"make test", "make lint"}


def commands() -> list[str]:
    return console.commands(ROOT / "README.md")


def run(command: str) -> str:
    words = ["bash", "-euc", command]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def make_line(target: str) -> str:
    """What `make` would run for this target once everything is installed, also where these tests run in make."""
    shown = run(f"env -u MAKEFLAGS -u MAKELEVEL make -n -o .venv/.installed --no-print-directory {target}")
    return shown.splitlines()[-1]


def test_the_readme_holds_the_commands_that_are_tried_here():
    kinds = {command.split()[0] for command in commands()}
    assert kinds == {"make", "curl", ".venv/bin/pdserve"}


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("curl ")])
def test_a_request_of_the_readme_is_answered(real_up: Server, command: str):
    assert ADDRESS in command
    answer = run(command.replace(ADDRESS, str(real_up.url)).replace("curl ", "curl -sS --fail ", 1))
    assert '"usage":{"prompt_tokens"' in answer
    assert answer.rstrip().endswith("data: [DONE]") == ('"stream": true' in command)


def test_make_serve_starts_the_server_that_these_tests_start():
    assert make_line("serve").split() == ["exec", ".venv/bin/pdserve", "up"]


def test_a_model_of_ones_own_is_started_as_the_readme_says(start: Start, small_model: Path):
    (command,) = [c for c in commands() if c.startswith(".venv/bin/pdserve ")]
    words = command.replace("DIR", str(small_model)).split()[1:]
    server = start(*words, "--port", "0", "--kv-memory", "1MiB")
    server.wait_ready()


def test_make_bench_measures_a_running_server(real_up: Server):
    (command,) = [c for c in commands() if c.startswith("make load")]
    line = make_line(command.removeprefix("make "))
    assert line.startswith(".venv/bin/pdserve bench run --rate 0.6")
    words = shlex.split(line)[1:]
    words[words.index("--rate") + 1], words[words.index("--num-requests") + 1] = "inf", "2"
    own = f"{sys.executable} -m pdserve.launch.cli"
    shown = run(f"{own} {shlex.join(words)} --url {real_up.url} --input-tokens 8-16 --output-tokens 4-8")
    assert "complete    2 of 2" in shown


def test_make_ab_compares_layouts_as_the_tests_of_it_do():
    (command,) = [c for c in commands() if c.startswith("make ab")]
    line = make_line(command.removeprefix("make "))
    assert line.startswith(".venv/bin/pdserve bench ab --budget 20 --slo ttft=2.0,tpot=0.06")


def test_the_checks_of_the_readme_are_what_ci_runs():
    assert {c for c in commands() if c.startswith("make ")} - {"make serve"} >= CHECKS
    ci = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"for target in test test-slow lint;", ci)
