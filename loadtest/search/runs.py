"""What the search knows of a run: which promises each request of its steady window broke. Pure.

A run may be ended early, and then its slow requests are missing, not its average ones. So only requests count before
the first, in the order of the schedule, that has no record: whether one is among those was settled before it was sent.
An open request that has broken a promise already has a record like one that has ended (kept.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.loadtest.measures.kept import broken_promises
from pdserve.loadtest.measures.promise import Promise
from pdserve.loadtest.measures.record import Record
from pdserve.loadtest.workload.window import Window

# Stands for every promise: a request that was not answered in full kept none.
FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Run:
    """One run at a rate. Two servers' runs of the same rate and seed sent the same requests at the same times.

    broken    [num_requests] in the order of the schedule: the promises each broke, or FAILED alone
    is_valid  whether the client was punctual; otherwise the run decides nothing
    """

    rate_per_s: float
    seed: int
    broken: tuple[tuple[str, ...], ...]
    is_valid: bool = True

    @property
    def num_requests(self) -> int:
        return len(self.broken)

    @property
    def counts(self) -> bool:
        """Whether it says anything of the server."""
        return self.is_valid and self.num_requests > 0

    def kept(self, promise: str | None = None) -> list[bool]:
        """[num_requests] whether a request kept one promise, or all of them for None."""
        if promise is None:
            return [not names for names in self.broken]
        return [promise not in names and FAILED not in names for names in self.broken]


def broken_by(record: Record, promises: Sequence[Promise]) -> tuple[str, ...]:
    return (FAILED,) if record.has_failed else broken_promises(record, promises)


def settled(records: Sequence[Record], first_index: int) -> list[Record]:
    """The steady window's records from the first on, in the order of the schedule, up to the first that is missing.

    first_index is that of the steady window's first request (Load.num_warm_up).
    """
    steady = {record.index: record for record in records if record.window is Window.STEADY}
    found: list[Record] = []
    while (record := steady.get(first_index + len(found))) is not None:
        found.append(record)
    return found


def comparable(records: Sequence[Record], first_index: int) -> tuple[Record, ...]:
    """Of a run that was ended early, the records whose percentiles and shares mean what a whole run's do: the warm-up's
    and the settled. Of those sent later the slow ones are missing. first_index as for `settled`."""
    warm_up = (record for record in records if record.window is Window.WARM_UP)
    return (*warm_up, *settled(records, first_index))


def read_run(
    rate_per_s: float,
    seed: int,
    first_index: int,
    records: Sequence[Record],
    promises: Sequence[Promise],
    is_valid: bool = True,
) -> Run:
    """The run out of its records; first_index as for `settled`."""
    broken = tuple(broken_by(record, promises) for record in settled(records, first_index))
    return Run(rate_per_s, seed, broken, is_valid)
