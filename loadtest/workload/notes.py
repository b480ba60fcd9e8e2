"""What a reader must know about a load before believing its numbers: what was moved, or is only roughly as asked.

Called by the runner, for the report.
"""

import math
from collections.abc import Sequence

from pdserve.loadtest.client.target import Api
from pdserve.loadtest.workload.arrivals import Replay
from pdserve.loadtest.workload.load import Load, PromptFormat
from pdserve.loadtest.workload.schedule import PlannedRequest, asked_tokens
from pdserve.loadtest.workload.tokenizer import Tokenizer
from pdserve.loadtest.workload.trace import Trace


def describe_plan(
    load: Load, api: Api, tokenizer: Tokenizer | None, schedule: Sequence[PlannedRequest]
) -> tuple[str, ...]:
    """A sentence each."""
    notes = []
    if isinstance(load.lengths, Trace):
        notes += _describe_trace(load, load.lengths)
    if load.conversations is not None:
        low, high = load.conversations.think_s
        num = len({planned.conversation for planned in schedule})
        notes.append(
            f"{num} conversations of {load.conversations.turns} turns, {low:g}-{high:g} s apart; answers in later "
            "prompts are planned ones, not the server's"
        )
    if api is Api.CHAT or load.prompt_format is PromptFormat.TEXT:
        notes += _describe_counts(load, tokenizer, schedule)
    return tuple(notes)


def _describe_trace(load: Load, trace: Trace) -> list[str]:
    sizes = f"lengths times {trace.length_scale:g}" if trace.length_scale != 1 else "lengths as they were"
    notes = [f"{trace.name}: {len(trace.requests)} requests, {sizes}"]
    if isinstance(load.arrivals, Replay):
        if math.isfinite(load.arrivals.own_rate_per_s):
            notes[0] += f", times stretched by {load.arrivals.own_rate_per_s / load.rate_per_s:.3g}"
        if trace.first_s:
            notes[0] += f", from {trace.first_s:g} s on"
        if load.arrivals.quantum_s:
            notes.append(
                f"the trace has its times in steps of {load.arrivals.quantum_s:g} s; requests were moved at random "
                "within a step"
            )
    if trace.has_prefixes:
        notes.append(f"common prefixes are the trace's, in blocks of {trace.block_tokens:g} tokens")
    return notes


def _describe_counts(load: Load, tokenizer: Tokenizer | None, schedule: Sequence[PlannedRequest]) -> list[str]:
    if tokenizer is None:
        return [
            "prompt lengths are rough, a word for a token: the server has no /tokenize, and --tokenizer was not given"
        ]
    notes = [f"prompt tokens are counted by {tokenizer.name}"]
    if load.conversations is None:
        pairs = zip(schedule, asked_tokens(load), strict=True)
        num = sum(planned.input_tokens != asked for planned, asked in pairs)
        if num:
            notes.append(
                f"{num} prompts have other lengths than were asked for: the chat template is longer, or the tokenizer "
                "does not allow them"
            )
    return notes
