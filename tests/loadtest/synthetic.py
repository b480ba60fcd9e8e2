"""Servers whose attainment at each rate is known, to see whether a search finds it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pdserve.loadtest.search.goodput import Ask, GoodputConfig, GoodputSearch
from pdserve.loadtest.search.runs import Run


@dataclass(frozen=True)
class SyntheticServer:
    """Keeps its promises for a share of requests that falls with the rate: 90 % at `capacity`.

    steepness   how fast: the logit of the share falls by so much while the rate doubles
    noise       drawn requests, or for None exactly the share of them, the broken ones evenly spread
    """

    capacity: float
    steepness: float = 12.0
    noise: int | None = None

    def share(self, rate: float) -> float:
        return 1 / (1 + math.exp(-math.log(9) + self.steepness * math.log2(rate / self.capacity)))

    def rate_of(self, share: float) -> float:
        return self.capacity * 2 ** ((math.log(9) - math.log(share / (1 - share))) / self.steepness)

    def run(self, ask: Ask) -> Run:
        return run_with(ask, self.kept(ask))

    def kept(self, ask: Ask) -> np.ndarray:
        if self.noise is None:
            steps = np.arange(1, ask.num_requests + 1) * self.share(ask.rate_per_s)
            return np.floor(steps + 1e-9) > np.floor(steps - self.share(ask.rate_per_s) + 1e-9)
        # One draw for each request of a schedule, whichever server is asked: what is hard for one is so for all.
        rng = np.random.default_rng([self.noise, ask.seed])
        return rng.random(ask.num_requests) < self.share(ask.rate_per_s)


def run_with(ask: Ask, kept: np.ndarray) -> Run:
    return Run(ask.rate_per_s, ask.seed, tuple(() if is_kept else ("ttft",) for is_kept in kept))


def search_through(run: Callable[[Ask], Run], config: GoodputConfig, most_runs: int | None = None) -> GoodputSearch:
    """The search after every run that it asked for, or after so many."""
    search = GoodputSearch(config)
    while (ask := search.next()) is not None and (most_runs is None or len(search.runs) < most_runs):
        search.add(run(ask))
    return search


def run_at(rate_per_s: float, kept: int, broken: int, seed: int = 0, name: str = "ttft") -> Run:
    return Run(rate_per_s, seed, ((),) * kept + ((name,),) * broken)
