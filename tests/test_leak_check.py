"""The leak check itself: whatever a test leaves behind fails that test and is named."""

import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).with_name("conftest.py")
# Each test leaves one thing; the module's fixture ends what would outlive the run.
LEAKY_TESTS = """
import asyncio, os, socket, subprocess, sys, threading
import pytest, zmq

@pytest.fixture(autouse=True, scope="module")
def kept():
    kept = {"released": threading.Event()}
    yield kept
    kept["released"].set()
    kept["process"].kill()
    kept["process"].wait()
    kept["process"].stdin.close()
    kept["socket"].close()
    kept["context"].term()

async def test_task(kept):
    kept["task"] = asyncio.create_task(asyncio.Event().wait())

def test_thread(kept):
    threading.Thread(target=kept["released"].wait, name="leaky").start()

def test_process(kept):
    kept["process"] = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

def test_pipe():
    os.pipe()

def test_memfd():
    os.memfd_create("pool")

def test_zmq(kept):
    kept["context"] = zmq.Context()
    kept["socket"] = kept["context"].socket(zmq.DEALER)

async def test_clean():
    await asyncio.create_task(asyncio.sleep(0))
    with zmq.Context() as context, context.socket(zmq.DEALER):
        subprocess.run(["true"])
"""
EXPECTED = {
    "test_task": "tasks left running: <Task",
    "test_thread": "left behind: thread 'leaky'",
    "test_process": "process ",
    "test_pipe": "-> pipe:",
    "test_memfd": "-> /memfd:pool",
    "test_zmq": "-> anon_inode:[eventfd]",
}


def test_what_a_test_leaves_behind_fails_it_and_is_named(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text().replace("ROUNDS = 20", "ROUNDS = 1"))
    (tmp_path / "test_leaky.py").write_text(LEAKY_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-o", "asyncio_mode=auto", "test_leaky.py"]
    environ = {"COLUMNS": "1000", "PATH": "/usr/bin:/bin"}
    run = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    failures = dict(
        line.split("test_leaky.py::", 1)[1].split(" - ", 1)
        for line in run.stdout.splitlines()
        if line.startswith(("FAILED", "ERROR "))
    )
    assert failures.keys() == EXPECTED.keys(), run.stdout
    for test, message in EXPECTED.items():
        assert message in failures[test]
