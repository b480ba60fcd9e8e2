"""Arrival times drawn from a process, scaled to an exact mean rate. Called by the schedule.

Each process is drawn once, at whatever rate, and its times are then scaled, so that another rate changes nothing else.
"""

import math

import numpy as np

from pdserve.loadtest.workload.arrivals import Arrivals, Constant, Gamma, Poisson, Replay, Steps


def draw_times(rng: np.random.Generator, arrivals: Arrivals, rate_per_s: float, num_requests: int) -> np.ndarray:
    """Ascending times from 0, [num_requests] float64; all 0 at an infinite rate.

    Except for steps the last time is (num_requests - 1) / rate_per_s, so the offered rate is the one asked for,
    whatever the seed.
    """
    if math.isinf(rate_per_s) or num_requests == 1:
        return np.zeros(num_requests)
    match arrivals:
        case Poisson():
            times = _from_gaps(rng.standard_exponential(num_requests))
        case Constant():
            times = _from_gaps(np.ones(num_requests))
        case Gamma(cv):
            # Mean 1 and variance cv^2: shape 1 / cv^2.
            # So small a shape has gaps that vanish: of only such the sum must not.
            times = _from_gaps(rng.standard_gamma(1 / cv**2, num_requests) + np.finfo(np.float64).tiny)
        case Replay():
            times = _jittered(rng, arrivals, num_requests)
        case Steps():
            # Unit rate in the steps' own operational time; there the process is Poisson (Cinlar 1975, chapter 4.7).
            units = _to_span(_from_gaps(rng.standard_exponential(num_requests)), num_requests - 1)
            return _stretched(arrivals, units) * (arrivals.own_rate_per_s / rate_per_s)
    return _to_span(times, (num_requests - 1) / rate_per_s)


def _from_gaps(gaps: np.ndarray) -> np.ndarray:
    """Times whose first is 0; the gap before it is dropped."""
    gaps[0] = 0.0
    return np.cumsum(gaps)


def _to_span(times: np.ndarray, span_s: float) -> np.ndarray:
    """Times from 0 to span_s.

    For exponential gaps these are the spacings of a Poisson process with that many arrivals in that time
    (Devroye 1986, chapter V.2). Times that are all equal stay so.
    """
    times = times - times[0]
    return times / times[-1] * span_s if times[-1] > 0 else times


def _stretched(arrivals: Steps, units: np.ndarray) -> np.ndarray:
    """The times at which the steps have let `units` requests through, on average."""
    ends_s = np.cumsum([0.0, *(step.duration_s for step in arrivals.steps)])
    ends = np.cumsum([0.0, *(step.rate_per_s * step.duration_s for step in arrivals.steps)])
    passes, rest = np.divmod(units, arrivals.mean_requests)
    return passes * arrivals.duration_s + np.interp(rest, ends, ends_s)


def _jittered(rng: np.random.Generator, arrivals: Replay, num_requests: int) -> np.ndarray:
    times = np.array(arrivals.times_s[:num_requests])
    # Sorted, so that requests of one quantum keep their order; the quanta do not overlap.
    return np.sort(times + rng.random(num_requests) * arrivals.quantum_s)
