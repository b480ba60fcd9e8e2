"""One stream of log lines from several processes, each line behind the name of its process.

Used by the supervisor: it feeds the bytes of each child's output, this class cuts them into lines.
"""

import os
from typing import TextIO

# A line longer than this is shown in pieces, so that a child cannot fill our memory.
MAX_LINE_BYTES = 1 << 16
COLOURS = (36, 33, 35, 32, 34, 31)


class LogStream:
    """Writes whole lines to `output`; colours only on a terminal and unless NO_COLOR is set."""

    def __init__(self, names: list[str], output: TextIO):
        self._output = output
        self._pending: dict[str, bytes] = {}
        width = max(len(name) for name in names) + 2
        is_coloured = output.isatty() and not os.environ.get("NO_COLOR")
        self._prefixes = {
            name: f"\x1b[{COLOURS[index % len(COLOURS)]}m{f'[{name}]':<{width}}\x1b[0m "
            if is_coloured
            else f"{f'[{name}]':<{width}} "
            for index, name in enumerate(names)
        }

    def feed(self, name: str, data: bytes) -> None:
        """Show the lines that `data` completes; the rest waits. Raises BrokenPipeError when nobody reads."""
        *lines, rest = (self._pending.get(name, b"") + data).split(b"\n")
        while len(rest) >= MAX_LINE_BYTES:
            lines.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._pending[name] = rest
        self._write(name, lines)

    def end(self, name: str) -> None:
        """The process is gone: show what it left without an end of line."""
        rest = self._pending.pop(name, b"")
        if rest:
            self._write(name, [rest])

    def say(self, line: str) -> None:
        """A line of the supervisor's own, without a prefix."""
        self._output.write(line + "\n")
        self._output.flush()

    def abandon(self) -> None:
        """Nobody reads any more: all that is written from now on, a last flush at exit included, goes nowhere."""
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, self._output.fileno())
        os.close(sink)

    def _write(self, name: str, lines: list[bytes]) -> None:
        prefix = self._prefixes[name]
        # A progress bar redraws its line with carriage returns: only its last state is kept.
        texts = [line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace") for line in lines]
        if texts:
            self._output.write("".join(f"{prefix}{text}\n" for text in texts))
            self._output.flush()
