"""The supervisor with tiny real children. Waits are for lines and for the ends of processes, never for time."""

import asyncio
import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdserve.launch.backoff import Backoff
from pdserve.launch.lifeline import PARENT_VARIABLE
from pdserve.launch.log_stream import LogStream
from pdserve.launch.supervisor import Child, Supervisor

PATIENCE_S = 30.0
# A child as pdserve's own: it holds the lifeline, says who it is, names the signals it gets.
WAITING = """
import os, signal
from pdserve.launch import lifeline
lifeline.hold()
def leave(number, frame):
    print(signal.Signals(number).name, flush=True)
    raise SystemExit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, leave)
print("pid", os.getpid(), flush=True)
while True:
    signal.pause()
"""
STUBBORN = WAITING.replace("    raise SystemExit(0)\n", "")
WRITING = WAITING.replace("    signal.pause()", "    print('more', flush=True)")
# A supervisor in a process of its own, for what signals do to it.
SUPERVISOR = """
import asyncio, json, sys
from pdserve.launch.log_stream import LogStream
from pdserve.launch.supervisor import Child, Supervisor
async def is_ready():
    return True
children = tuple(Child(name, tuple(command)) for name, command in json.loads(sys.argv[1]).items())
log = LogStream([child.name for child in children], sys.stdout)
raise SystemExit(asyncio.run(Supervisor(children, log, is_ready=is_ready, ready_line=lambda: "ready").run()))
"""
# The leader of a session gets the first terminal it opens, as its foreground, as a shell would arrange it.
ON_TERMINAL = "import os; os.close(os.open(os.ttyname(1), os.O_RDWR))\n" + SUPERVISOR


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


async def never() -> bool:
    return False


def make_supervisor(children: dict[str, str], output: io.StringIO, **options) -> Supervisor:
    """A supervisor of Python snippets; without options it is never ready."""
    options = {"is_ready": never, "ready_line": lambda: "ready", "grace_s": PATIENCE_S} | options
    kept = tuple(Child(name, python(code)) for name, code in children.items())
    return Supervisor(kept, LogStream(list(children), output), **options)


async def run_to_end(supervisor: Supervisor) -> int:
    async with asyncio.timeout(PATIENCE_S):
        return await supervisor.run()


@contextlib.contextmanager
def supervising(
    children: dict[str, str], stdout: int = subprocess.PIPE, code: str = SUPERVISOR, **options
) -> Iterator[subprocess.Popen]:
    """A supervisor process; killed, and with it its children, when the block ends."""
    commands = json.dumps({name: python(code) for name, code in children.items()})
    process = subprocess.Popen(
        [sys.executable, "-c", code, commands], stdin=subprocess.DEVNULL, stdout=stdout, text=True, **options
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def child_pids(process: subprocess.Popen, count: int) -> dict[str, int]:
    """Read the supervisor's output until so many children have told their process ids."""
    pids: dict[str, int] = {}
    while len(pids) < count:
        line = process.stdout.readline()
        assert line, "the supervisor ended too early"
        if match := re.match(r"\[(\w+)\] +pid (\d+)", line):
            pids[match[1]] = int(match[2])
    return pids


@contextlib.contextmanager
def watching(pids: dict[str, int]) -> Iterator[list[int]]:
    """Handles of processes, opened while they live."""
    handles = [os.pidfd_open(pid) for pid in pids.values()]
    try:
        yield handles
    finally:
        for handle in handles:
            os.close(handle)


def wait_until_ended(handles: list[int]) -> None:
    for handle in handles:
        ended, _, _ = select.select([handle], [], [], PATIENCE_S)
        assert ended, "a child outlived its supervisor"


async def test_lines_of_all_children_come_whole_behind_aligned_names():
    output = io.StringIO()
    crash = "import sys; print('one'); print('two', file=sys.stderr); sys.stdout.write('no end'); sys.exit(2)"
    assert await run_to_end(make_supervisor({"router": crash}, output)) == 1
    lines = output.getvalue().splitlines()
    assert sorted(lines[:3]) == ["[router] no end", "[router] one", "[router] two"]


def test_the_names_in_a_log_are_aligned_and_lines_cut_only_at_their_ends():
    output = io.StringIO()
    log = LogStream(["router", "P0"], output)
    log.feed("P0", b"first ha")
    log.feed("router", b"up\r\nagain\n")
    log.feed("P0", b"lf\n 10%\r 99%\r100%\n\xff\n")
    log.end("P0")
    assert output.getvalue() == "[router] up\n[router] again\n[P0]     first half\n[P0]     100%\n[P0]     \ufffd\n"


def test_a_line_without_an_end_does_not_grow_without_bound():
    output = io.StringIO()
    log = LogStream(["P0"], output)
    for _ in range(5):
        log.feed("P0", b"x" * 50_000)
    assert [len(line) for line in output.getvalue().splitlines()] == [65536 + 5, 65536 + 5, 65536 + 5]


def test_a_log_has_colours_on_a_terminal_only_and_not_under_no_color(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    coloured, plain = Terminal(), Terminal()
    monkeypatch.delenv("NO_COLOR", raising=False)
    LogStream(["P0"], coloured).feed("P0", b"x\n")
    monkeypatch.setenv("NO_COLOR", "1")
    LogStream(["P0"], plain).feed("P0", b"x\n")
    assert coloured.getvalue() == "\x1b[36m[P0]\x1b[0m x\n"
    assert plain.getvalue() == "[P0] x\n"


async def test_the_ready_line_is_shown_once_when_the_question_is_first_answered_yes():
    output, answers = io.StringIO(), iter([False, False, True])

    async def is_ready() -> bool:
        return next(answers)

    def ready_line() -> str:
        signal.raise_signal(signal.SIGTERM)
        return "ready in 1.0 s"

    assert await run_to_end(make_supervisor({"D0": WAITING}, output, is_ready=is_ready, ready_line=ready_line)) == 0
    assert output.getvalue().splitlines().count("ready in 1.0 s") == 1


async def test_a_dead_child_is_restarted_until_it_is_given_up_and_named():
    output = io.StringIO()
    children = {"P0": WAITING, "D0": "print('hello'); raise SystemExit(3)"}
    supervisor = make_supervisor(children, output, new_backoff=lambda: Backoff(max_restarts=2, first_delay_s=0.01))
    assert await run_to_end(supervisor) == 1
    told = [line for line in output.getvalue().splitlines() if "D0" in line]
    assert told == [
        "[D0] hello",
        "D0 exited with code 3; restart in 0.01 s",
        "[D0] hello",
        "D0 exited with code 3; restart in 0.02 s",
        "[D0] hello",
        "D0 exited with code 3; giving up: 2 restarts within 60 s were not enough, see its lines above",
    ]
    assert "[P0] SIGTERM" in output.getvalue()


async def test_a_child_that_refuses_its_configuration_is_not_restarted():
    output = io.StringIO()
    assert await run_to_end(make_supervisor({"D0": "raise SystemExit(2)"}, output)) == 1
    assert output.getvalue() == (
        "D0 exited with code 2; giving up: it would refuse to start again, see its lines above\n"
    )


async def test_a_child_killed_by_a_signal_is_told_so():
    output = io.StringIO()
    code = "import os; os.kill(os.getpid(), 9)"
    supervisor = make_supervisor({"D0": code}, output, new_backoff=lambda: Backoff(max_restarts=0))
    assert await run_to_end(supervisor) == 1
    assert "D0 was ended by SIGKILL; giving up" in output.getvalue()


async def test_what_a_child_leaves_running_ends_with_it():
    output = io.StringIO()
    leave_one = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("left", child.pid, flush=True)
sys.stdin.read()
raise SystemExit(2)
"""
    assert await run_to_end(make_supervisor({"D0": leave_one}, output)) == 1
    pid = int(re.search(r"left (\d+)", output.getvalue())[1])
    with contextlib.suppress(ProcessLookupError), watching({"left": pid}) as handles:
        wait_until_ended(handles)


def test_ctrl_c_on_the_terminal_reaches_the_supervisor_alone_and_ends_all():
    ours, theirs = pty.openpty()
    children = {"a": WAITING, "b": WAITING}
    with supervising(children, theirs, ON_TERMINAL, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        seen = _read_until(ours, lambda text: text.count("pid ") == 2)
        os.write(ours, b"\x03")
        seen += _read_until(ours, lambda text: False)
        assert process.wait(PATIENCE_S) == 0
    os.close(ours)
    assert seen.count("SIGTERM") == 2
    assert seen.count("SIGINT") == 1
    assert "SIGINT: stopping" in seen


def _read_until(terminal: int, is_enough) -> str:
    """Text from a terminal until enough was read or its other side is closed."""
    text = ""
    while not is_enough(text):
        ready, _, _ = select.select([terminal], [], [], PATIENCE_S)
        assert ready, f"nothing more came after: {text}"
        try:
            data = os.read(terminal, 4096)
        except OSError:  # EIO: the last process on the other side is gone
            return text
        text += data.decode()
    return text


def test_sigterm_ends_all():
    with supervising({"a": WAITING, "b": WAITING}) as process, watching(child_pids(process, 2)) as handles:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        wait_until_ended(handles)


def test_a_second_signal_kills_children_that_do_not_end():
    with supervising({"a": STUBBORN}) as process, watching(child_pids(process, 1)) as handles:
        process.send_signal(signal.SIGTERM)
        while "SIGTERM" not in (line := process.stdout.readline()) or not line.startswith("[a]"):
            assert line
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 1
        wait_until_ended(handles)


async def test_the_same_signal_twice_at_once_is_one_stop_and_kills_nobody():
    output = io.StringIO()

    def ready_line() -> str:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        return ""

    async def is_ready() -> bool:
        return "pid " in output.getvalue()

    supervisor = make_supervisor({"a": STUBBORN}, output, is_ready=is_ready, ready_line=ready_line, grace_s=0.05)
    await run_to_end(supervisor)
    assert "not all ended within 0.05 s" in output.getvalue()


async def test_children_that_do_not_end_within_the_grace_are_killed_and_named():
    output = io.StringIO()

    def ready_line() -> str:
        signal.raise_signal(signal.SIGTERM)
        return ""

    async def is_ready() -> bool:
        return "pid " in output.getvalue()

    supervisor = make_supervisor({"a": STUBBORN}, output, is_ready=is_ready, ready_line=ready_line, grace_s=0.05)
    assert await run_to_end(supervisor) == 1
    assert "not all ended within 0.05 s: killing a" in output.getvalue()


def test_when_the_supervisor_is_killed_no_child_outlives_it():
    with supervising({"a": WAITING, "b": STUBBORN}) as process, watching(child_pids(process, 2)) as handles:
        process.kill()
        wait_until_ended(handles)


def test_when_nobody_reads_the_log_any_more_all_ends():
    with supervising({"a": WRITING}) as process, watching(child_pids(process, 1)) as handles:
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 1
        wait_until_ended(handles)


def test_a_child_whose_supervisor_is_already_gone_does_not_start():
    environ = os.environ | {PARENT_VARIABLE: "1"}
    result = subprocess.run(python(WAITING), env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode == 1
    assert result.stderr == "pdserve: the supervisor (process 1) is gone, not starting\n"


def test_the_lifeline_is_not_handed_on_to_a_childs_own_children():
    code = f"import os; from pdserve.launch import lifeline; lifeline.hold(); print({PARENT_VARIABLE!r} in os.environ)"
    environ = os.environ | {PARENT_VARIABLE: str(os.getpid())}
    result = subprocess.run(python(code), env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.stdout == "False\n"


@pytest.mark.parametrize("code", [0, 1])
async def test_a_child_that_ends_by_itself_is_restarted_whatever_its_code(code):
    output = io.StringIO()
    supervisor = make_supervisor(
        {"D0": f"raise SystemExit({code})"}, output, new_backoff=lambda: Backoff(max_restarts=1, first_delay_s=0.01)
    )
    assert await run_to_end(supervisor) == 1
    assert f"D0 exited with code {code}; restart in 0.01 s" in output.getvalue()
