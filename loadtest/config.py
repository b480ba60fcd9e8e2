"""What one load test is asked to do: the target, the load and the promises."""

from dataclasses import dataclass

from pdserve.loadtest.client.target import Target
from pdserve.loadtest.measures.promise import Promise
from pdserve.loadtest.workload.load import Load


@dataclass(frozen=True, slots=True)
class BenchConfig:
    target: Target
    load: Load
    promises: tuple[Promise, ...] = ()
