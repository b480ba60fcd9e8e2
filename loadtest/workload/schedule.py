"""The whole load, fixed before the first request is sent: when, how long, with which prompt.

Arrival times, lengths and prompts come from three generators spawned from the seed, so the same seed at
another rate sends the same prompts in the same order at scaled times. Called by the runner.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from pdserve.loadtest.client.target import Api
from pdserve.loadtest.workload.load import Load
from pdserve.loadtest.workload.prompts import draw_text_prompts, draw_token_prompts
from pdserve.loadtest.workload.window import Window


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to come. at_s counts from the start of the run; prompt is token ids, or text for chat.

    conversation, turn   of several turns: whose it is and which, from 0
    """

    index: int
    at_s: float
    input_tokens: int
    output_tokens: int
    prompt: tuple[int, ...] | str
    window: Window = Window.STEADY
    conversation: int | None = None
    turn: int = 0


def plan_requests(load: Load, api: Api) -> tuple[PlannedRequest, ...]:
    """The schedule of a run, ordered by time; the first request is due at 0.

    Raises OptionError where the prompts cannot all differ.
    """
    return _plan(load, api, load.num_requests, np.random.SeedSequence(load.seed))


def plan_warmup(load: Load, api: Api, num_requests: int) -> tuple[PlannedRequest, ...]:
    """Requests of the same kind from another seed: they leave the schedule as it is and its prompts uncached."""
    if num_requests == 0:
        return ()
    return _plan(load, api, num_requests, np.random.SeedSequence([load.seed, 1]))


def digest_schedule(schedule: tuple[PlannedRequest, ...]) -> str:
    """A short name for a schedule: two runs with the same one sent the same load at the same times."""
    digest = hashlib.blake2b(digest_size=8)
    for planned in schedule:
        digest.update(repr(planned).encode())
    return digest.hexdigest()


def _plan(load: Load, api: Api, num_requests: int, seeds: np.random.SeedSequence) -> tuple[PlannedRequest, ...]:
    arrivals, lengths, prompts = (np.random.default_rng(seed) for seed in seeds.spawn(3))
    times_s = _arrival_times(arrivals, load.rate_per_s, num_requests)
    input_tokens = lengths.integers(load.input_tokens.low, load.input_tokens.high, size=num_requests, endpoint=True)
    output_tokens = lengths.integers(load.output_tokens.low, load.output_tokens.high, size=num_requests, endpoint=True)
    drawn: list[tuple[int, ...]] | list[str]
    if api is Api.CHAT:
        drawn = draw_text_prompts(prompts, input_tokens)
    else:
        drawn = draw_token_prompts(prompts, input_tokens, load.vocabulary)
    return tuple(
        PlannedRequest(i, float(times_s[i]), int(input_tokens[i]), int(output_tokens[i]), drawn[i])
        for i in range(num_requests)
    )


def _arrival_times(rng: np.random.Generator, rate_per_s: float, num_requests: int) -> np.ndarray:
    """Poisson arrivals, given that num_requests of them take (num_requests - 1) / rate seconds.

    Exponential gaps divided by their sum are the spacings of a Poisson process with that many arrivals in that
    time (Devroye 1986, chapter V.2): the offered rate is the one asked for, whatever the seed. Rates only scale.
    """
    if math.isinf(rate_per_s) or num_requests == 1:
        return np.zeros(num_requests)
    gaps = rng.standard_exponential(num_requests)
    gaps[0] = 0.0
    return np.cumsum(gaps) * ((num_requests - 1) / gaps.sum() / rate_per_s)
