"""What the load test itself gets wrong, measured against a server on this machine that tells its own times. Pure.

Made by selftest.py, quoted in each report.
"""

from dataclasses import dataclass

from pdserve.loadtest.measures.distribution import Distribution

# At p99, from the requirements of this load test.
MAX_STAMP_ERROR_S = 0.0005
MAX_SEND_ERROR_S = 0.0015


@dataclass(frozen=True, slots=True)
class HarnessError:
    """One self-test; all distributions in seconds.

    num_streams      in flight at a time, about
    num_processes    client processes among which they were dealt out
    tokens_per_s     of each stream
    num_failed       requests that were not answered in full; the rest says little when there are any
    stamps           the client's read of a token - the server's write of it
    sends            arrival of the whole request at the server - the intended send
    lags             the client's timer - the intended send: its own part of `sends`; of the least punctual process
    loop_lag         of a timer that runs beside them, likewise; None for a test too short
    lag_is_valid     whether a run with these lags would be believed
    """

    num_streams: int
    num_processes: int
    tokens_per_s: float
    num_failed: int
    stamps: Distribution
    sends: Distribution
    lags: Distribution
    loop_lag: Distribution | None
    lag_is_valid: bool

    @property
    def faults(self) -> tuple[str, ...]:
        """What is above its limit, in words; nothing for a harness that is as exact as it must be."""
        limits = (("stamp", self.stamps.p99, MAX_STAMP_ERROR_S), ("send", self.sends.p99, MAX_SEND_ERROR_S))
        faults = [f"{name} p99 above {1000 * limit_s:g} ms" for name, p99, limit_s in limits if p99 > limit_s]
        if not self.lag_is_valid:
            faults.append("INVALID by its lag")
        if self.num_failed:
            faults.append(f"{self.num_failed} requests failed")
        return tuple(faults)

    @property
    def is_within_bars(self) -> bool:
        return not self.faults
