"""The whole load, fixed before the first request is sent: when, how long, with which prompt.

    times and turns -> lengths -> parts (what prompts say and share) -> form (ids, text, chat) -> PlannedRequest

Arrival times, lengths and prompts come from generators spawned from the seed, so the same seed at another rate sends
the same prompts in the same order at scaled times. Called by the runner.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pdserve.loadtest.client.target import Api
from pdserve.loadtest.workload.conversations import Turn, draw_turns, grow
from pdserve.loadtest.workload.forms import Form, Prompt, choose_form
from pdserve.loadtest.workload.lengths import DrawnLengths
from pdserve.loadtest.workload.load import Load
from pdserve.loadtest.workload.parts import Part, Parts, check_distinct, distinct_rows, draw_prefixes, trace_row
from pdserve.loadtest.workload.times import draw_times
from pdserve.loadtest.workload.tokenizer import Tokenizer
from pdserve.loadtest.workload.trace import TraceRequest
from pdserve.loadtest.workload.window import Window


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

    Asks the tokenizer, which may be a server, for each prompt that is text. Raises OptionError where the prompts
    cannot all differ, TargetError where the tokenizer does not answer.
    """
    return _Plan(load, np.random.SeedSequence(load.seed), load.num_total).write(choose_form(load, api, tokenizer))


def asked_tokens(load: Load) -> list[int]:
    """The prompt lengths that were asked for, in the order of the schedule; of a conversation's turn its message's."""
    plan = _Plan(load, np.random.SeedSequence(load.seed), load.num_total)
    return [plan.length_of(asked) for asked in plan.asked]


def plan_preflight(
    load: Load, api: Api, num_requests: int, tokenizer: Tokenizer | None = None
) -> tuple[PlannedRequest, ...]:
    """Requests of the same kind from another seed: they leave the schedule as it is and its prompts uncached."""
    if num_requests == 0:
        return ()
    seeds = np.random.SeedSequence([load.seed, 1])
    return _Plan(load.at_rate(math.inf), seeds, num_requests).write(choose_form(load, api, tokenizer))


def digest_schedule(schedule: tuple[PlannedRequest, ...]) -> str:
    """A short name for a schedule: two runs with the same one sent the same load at the same times."""
    digest = hashlib.blake2b(digest_size=8)
    for planned in schedule:
        digest.update(repr(planned).encode())
    return digest.hexdigest()


class _Plan:
    """What is drawn for num_requests of a load, from one generator for each thing, so that none moves another."""

    def __init__(self, load: Load, seeds: np.random.SeedSequence, num_requests: int):
        self._load = load
        self._num_requests = num_requests
        arrivals, lengths, self._prompts, self._prefixes, self._answers = (
            np.random.default_rng(seed) for seed in seeds.spawn(5)
        )
        self._trace_key = int(seeds.generate_state(1, np.uint64)[0])
        self._turns = self._draw_turns(arrivals)
        self.asked = self._draw_lengths(lengths)

    def write(self, form: Form) -> tuple[PlannedRequest, ...]:
        is_single = self._load.conversations is None
        planned = []
        for index, (turn, asked, parts) in enumerate(
            zip(self._turns, self.asked, self._draw_parts(form.size), strict=True)
        ):
            prompt, input_tokens = form.write(parts, self.length_of(asked) if is_single else None)
            planned.append(
                PlannedRequest(
                    index,
                    turn.at_s,
                    input_tokens,
                    asked.output_tokens,
                    prompt,
                    self._window_of(index),
                    None if is_single else turn.conversation,
                    turn.number,
                )
            )
        return tuple(planned)

    def _draw_turns(self, rng: np.random.Generator) -> list[Turn]:
        load = self._load
        if load.conversations is not None:
            return draw_turns(rng, load.arrivals, load.rate_per_s, load.conversations, self._num_requests)
        times_s = draw_times(rng, load.arrivals, load.rate_per_s, self._num_requests)
        return [Turn(at_s, index, 0) for index, at_s in enumerate(times_s.tolist())]

    def _draw_lengths(self, rng: np.random.Generator) -> Sequence[TraceRequest]:
        """What is asked of each request: of its own message where it has a shared prefix or a history."""
        lengths, num = self._load.lengths, self._num_requests
        if isinstance(lengths, DrawnLengths):
            inputs, outputs = (
                rng.integers(span.low, span.high, size=num, endpoint=True).tolist()
                for span in (lengths.input_tokens, lengths.output_tokens)
            )
            return [TraceRequest(*pair) for pair in zip(inputs, outputs, strict=True)]
        if lengths.has_times:
            return [lengths.requests[i % len(lengths.requests)] for i in range(num)]
        order = rng.permutation(len(lengths.requests))
        return [lengths.requests[order[i % len(order)]] for i in range(num)]

    def _draw_parts(self, size: int) -> Iterable[Parts]:
        shared = self._load.shared_prefix
        prefixes: Sequence[Parts] = [()] * self._num_requests
        if shared is not None:
            prefixes = draw_prefixes(self._prefixes, shared, size, self._num_requests)
        messages = self._draw_messages(size)
        if self._load.conversations is not None:
            answers = [self._answers.integers(size, size=asked.output_tokens) for asked in self.asked]
            return grow(self._turns, prefixes, messages, answers)
        return ((*prefix, Part("user", message)) for prefix, message in zip(prefixes, messages, strict=True))

    def _draw_messages(self, size: int) -> list[np.ndarray]:
        lengths = np.array([asked.input_tokens for asked in self.asked])
        if isinstance(self._load.lengths, DrawnLengths):
            check_distinct(lengths, size, f"--num-requests {self._num_requests}", "--input-tokens")
            return distinct_rows(self._prompts, lengths, size)
        rows = distinct_rows(self._prompts, lengths, size)
        block_tokens = self._load.lengths.block_tokens
        return [
            trace_row(self._trace_key, asked, block_tokens, size) if asked.block_ids else row
            for asked, row in zip(self.asked, rows, strict=True)
        ]

    def length_of(self, asked: TraceRequest) -> int:
        shared = self._load.shared_prefix
        return asked.input_tokens + (0 if shared is None else shared.num_tokens)

    def _window_of(self, index: int) -> Window:
        num_warm_up = self._load.num_warm_up
        if index < num_warm_up:
            return Window.WARM_UP
        return Window.STEADY if index < num_warm_up + self._load.num_requests else Window.COOL_DOWN
