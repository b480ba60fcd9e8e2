"""What one load test is asked to do: the target, the load, the promises, and who sends it."""

from dataclasses import dataclass

from pdserve.loadtest.client.target import Target
from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.measures.promise import Promise
from pdserve.loadtest.options import check_count
from pdserve.loadtest.workload.load import Load

MAX_PROCESSES = 64


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """num_processes: client processes among which the requests are dealt out."""

    target: Target
    load: Load
    promises: tuple[Promise, ...] = ()
    num_processes: int = 1

    def __post_init__(self) -> None:
        check_count("--processes", self.num_processes, 1, MAX_PROCESSES)
        limit = self.target.max_concurrency
        if limit is not None and limit < self.num_processes:
            raise OptionError(
                f"--max-concurrency {limit}: is divided among --processes {self.num_processes}, so it must be at least "
                "as large"
            )
