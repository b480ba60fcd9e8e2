"""The canary of the client's own event loop: a timer that should fire every 10 ms, and how late it was.

A client that is late itself cannot judge a server, so a run whose lag is large is marked invalid.
"""

import asyncio
import time
from array import array

PERIOD_S = 0.01


class LagCanary:
    """Collects one lag a period while `watch` runs, in seconds.

    A timer that fires late hides those that should have fired meanwhile: they count with the lags they would have had,
    so that a stall weighs by how long it lasts.
    """

    def __init__(self) -> None:
        self.lags_s = array("d")

    async def watch(self) -> None:
        """Runs until cancelled."""
        while True:
            due = time.monotonic() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            lag_s = time.monotonic() - due
            self.lags_s.append(lag_s)
            while (lag_s := lag_s - PERIOD_S) > 0:
                self.lags_s.append(lag_s)
