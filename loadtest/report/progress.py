"""One line on a terminal that says how far the run is; redrawn in place."""

from dataclasses import dataclass
from typing import TextIO

_BAR_WIDTH = 24
# Writing to a terminal takes time from the loop that stamps the tokens.
_REDRAW_S = 0.1


@dataclass(slots=True)
class Progress:
    """Counts of a run while it is under way. failed counts what the wire showed; streams are read later."""

    total: int
    sent: int = 0
    ended: int = 0
    failed: int = 0


class ProgressLine:
    """Draws a Progress on a terminal; the caller ends it with `close`."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._width = 0
        self._drawn_at = -_REDRAW_S

    def draw(self, progress: Progress, now: float, title: str = "") -> None:
        """Redraw, unless it was just done; now is monotonic, title stands before the bar."""
        if now - self._drawn_at < _REDRAW_S:
            return
        self._drawn_at = now
        line = title + format_progress(progress)
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def close(self) -> None:
        """Wipe the line, so that the report starts on a clean one."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0


def format_progress(progress: Progress) -> str:
    filled = _BAR_WIDTH * progress.ended // progress.total
    bar = "#" * filled + "." * (_BAR_WIDTH - filled)
    running = progress.sent - progress.ended
    failed = f", {progress.failed} failed" if progress.failed else ""
    return f"[{bar}] {progress.ended} of {progress.total} requests, {running} running{failed}"
