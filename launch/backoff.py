"""When a process that died may start again. Pure: the caller passes the time in."""

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0
MAX_RESTARTS = 5
WINDOW_S = 60.0


class Backoff:
    """Delays that double with each death within the window; after too many of them, none."""

    def __init__(
        self, max_restarts: int = MAX_RESTARTS, window_s: float = WINDOW_S, first_delay_s: float = FIRST_DELAY_S
    ):
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._first_delay_s = first_delay_s
        self._deaths: list[float] = []

    def delay_s(self, now: float) -> float | None:
        """Note a death at `now`; seconds to wait before the restart, None when it is one too many."""
        self._deaths = [death for death in self._deaths if now - death < self.window_s]
        self._deaths.append(now)
        if len(self._deaths) > self.max_restarts:
            return None
        return min(self._first_delay_s * 2.0 ** (len(self._deaths) - 1), LONGEST_DELAY_S)
