"""Whether a run may be believed: the client must have been punctual enough. Pure; called by summary.py.

Each client process is judged by itself, as is each run of several: one that is late spoils what it measured, however
punctual the others are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.loadtest.client.exchange import sender_of
from pdserve.loadtest.measures.distribution import Distribution, describe
from pdserve.loadtest.measures.record import Record

# A run is believed while the client's p99 lag is not above the larger of these.
MAX_LAG_S = 0.005
MAX_LAG_SHARE_OF_TTFT = 0.05

CLIENT_LAG, LOOP_LAG = "client_lag", "loop_lag"


@dataclass(frozen=True, slots=True)
class Validity:
    """The client's p99 lag against what is allowed."""

    lag_p99_s: float
    max_lag_s: float

    @property
    def is_valid(self) -> bool:
        return self.lag_p99_s <= self.max_lag_s


def describe_lags(records: Sequence[Record], loop_lags_s: Sequence[Iterable[float]]) -> dict[str, Distribution | None]:
    """The lags of a run's sends and of its loops, each of the least punctual process.

    loop_lags_s  of each client process
    """
    num_processes = max(1, len(loop_lags_s))
    sends: list[list[float]] = [[] for _ in range(num_processes)]
    for record in records:
        sends[sender_of(record.index, num_processes)].append(record.lag_s)
    return {CLIENT_LAG: worst(map(describe, sends)), LOOP_LAG: worst(map(describe, loop_lags_s))}


def worst(lags: Iterable[Distribution | None]) -> Distribution | None:
    """The one with the highest p99."""
    return max((lag for lag in lags if lag is not None), key=lambda lag: lag.p99, default=None)


def judge_lags(lags: Iterable[Distribution | None], service_ttft: Distribution | None) -> Validity:
    """Compare the worst of the client's lags with the times it measured.

    service_ttft  from the actual send: the wait for a place under --max-concurrency or for a late client is no time of
                  the server's, and would excuse any lag
    """
    late = worst(lags)
    return Validity(
        lag_p99_s=0.0 if late is None else late.p99,
        max_lag_s=max(MAX_LAG_S, MAX_LAG_SHARE_OF_TTFT * service_ttft.p50 if service_ttft is not None else 0.0),
    )
