"""The whole load, fixed before the first request is sent: when, how long, with which prompt.

Arrival times, lengths and prompts come from three generators spawned from the seed, so the same seed at
another rate sends the same prompts in the same order at scaled times. Called by the runner.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from pdserve.loadtest.client.target import Api
from pdserve.loadtest.workload.chat import Chat, Message
from pdserve.loadtest.workload.load import Load
from pdserve.loadtest.workload.prompts import draw_text_prompts, draw_token_prompts
from pdserve.loadtest.workload.times import draw_times
from pdserve.loadtest.workload.tokenizer import Tokenizer
from pdserve.loadtest.workload.window import Window

Prompt = tuple[int, ...] | str | Chat


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to come.

    at_s          from the start of the run, which is the first request of the warm-up
    input_tokens  of the whole prompt
    prompt        token ids or a text for completions, the messages for a chat
    conversation  its number where requests belong together; turn counts within it, from 0
    """

    index: int
    at_s: float
    input_tokens: int
    output_tokens: int
    prompt: Prompt
    window: Window = Window.STEADY
    conversation: int | None = None
    turn: int = 0


def plan_requests(load: Load, api: Api, tokenizer: Tokenizer | None = None) -> tuple[PlannedRequest, ...]:
    """The schedule of a run, ordered by time; the first request is due at 0.

    Raises OptionError where the prompts cannot all differ.
    """
    return _plan(load, api, load.num_total, np.random.SeedSequence(load.seed))


def plan_preflight(
    load: Load, api: Api, num_requests: int, tokenizer: Tokenizer | None = None
) -> tuple[PlannedRequest, ...]:
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
    times_s = draw_times(arrivals, load.arrivals, load.rate_per_s, num_requests)
    input_tokens = lengths.integers(load.input_tokens.low, load.input_tokens.high, size=num_requests, endpoint=True)
    output_tokens = lengths.integers(load.output_tokens.low, load.output_tokens.high, size=num_requests, endpoint=True)
    drawn: list[Prompt]
    if api is Api.CHAT:
        drawn = [Chat((Message("user", text),)) for text in draw_text_prompts(prompts, input_tokens)]
    else:
        drawn = [*draw_token_prompts(prompts, input_tokens, load.vocabulary)]
    return tuple(
        PlannedRequest(i, float(times_s[i]), int(input_tokens[i]), int(output_tokens[i]), drawn[i], _window_of(load, i))
        for i in range(num_requests)
    )


def _window_of(load: Load, index: int) -> Window:
    if index < load.num_warm_up:
        return Window.WARM_UP
    return Window.STEADY if index < load.num_warm_up + load.num_requests else Window.COOL_DOWN
