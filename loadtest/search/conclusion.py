"""Does splitting prefill from decode pay, and at what ratio: the verdict of an A/B in words. Pure.

The best split layout is compared with the best colocated one at each promise and at all of them; the intervals are
widened for having chosen both (Bonferroni over all pairs that might have been compared). A difference whose interval
reaches beyond 1 on both sides is none. Where colocated wins, the reason is what held the best split layout back.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.loadtest.measures.bootstrap import CONFIDENCE, Interval
from pdserve.loadtest.search.diagnosis import Diagnosis
from pdserve.loadtest.search.verdict import PromiseVerdict, Side, Verdict, compare_servers, highest_rate

# Of a ratio that nothing bounds.
_ANY = Interval(0.0, math.inf)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout. is_split: prefill and decode on nodes of their own. side: its name and its runs."""

    side: Side
    is_split: bool
    diagnosis: Diagnosis | None


@dataclass(frozen=True, slots=True)
class Conclusion:
    """headline: one sentence; details: one each. verdict: of the best split layout against the best colocated one."""

    headline: str
    details: tuple[str, ...] = ()
    verdict: Verdict | None = None


def conclude(candidates: Sequence[Candidate], promises: Sequence[str], share: float) -> Conclusion:
    """The verdict on the layouts that were measured."""
    splits = [each for each in candidates if each.is_split]
    others = [each for each in candidates if not each.is_split]
    split, colocated = _best(splits, share), _best(others, share)
    if split is None or colocated is None:
        missing = "split" if split is None else "colocated"
        return Conclusion(f"No verdict: no {missing} layout was measured within the budget. Raise --budget.")
    confidence = 1 - (1 - CONFIDENCE) / (len(splits) * len(others))
    verdict = compare_servers(split.side, colocated.side, promises, share, confidence)
    return Conclusion(
        _headline(verdict, verdict.promises[0], split, colocated),
        (*(_by_promise(each, verdict) for each in verdict.promises[1:]), *_reasons(split, colocated)),
        verdict,
    )


def _best(candidates: Sequence[Candidate], share: float) -> Candidate | None:
    return max(candidates, key=lambda each: highest_rate(each.side, share), default=None)


def _headline(verdict: Verdict, whole: PromiseVerdict, split: Candidate, colocated: Candidate) -> str:
    rates = (
        f"{_rate(whole.rate_a)} requests/s with {split.side.name}, {_rate(whole.rate_b)} with {colocated.side.name}, "
        f"{verdict.share:.0%} keeping every promise"
    )
    if whole.winner == split.side.name:
        return f"Splitting pays, {_by_how_much(whole)}: {rates}. Use {split.side.name}."
    if whole.winner == colocated.side.name:
        why = f", because the split one is {split.diagnosis.bound}" if split.diagnosis is not None else ""
        return f"Colocated wins here, {_by_how_much(_turned(whole))}: {rates}{why}. Use {colocated.side.name}."
    return (
        f"No difference shown, {_by_how_much(whole)} for splitting: {rates}. Take the simpler one, or raise --budget."
    )


def _by_promise(each: PromiseVerdict, verdict: Verdict) -> str:
    if each.interval == _ANY:
        return f"{each.promise} alone: not known, no rate that was tried is clearly too high for it."
    if each.winner is None:
        return f"{each.promise} alone: no difference shown, {_by_how_much(each)} for splitting."
    shown = each if each.winner == verdict.name_a else _turned(each)
    return f"{each.promise} alone: {each.winner} serves more, {_by_how_much(shown)}."


def _reasons(*candidates: Candidate) -> tuple[str, ...]:
    return tuple(f"{each.side.name} is {each.diagnosis.text}." for each in candidates if each.diagnosis is not None)


def _by_how_much(each: PromiseVerdict) -> str:
    """A ratio with its interval; of a rate that is only bounded the interval alone."""
    interval = f"{_times(each.interval.low)} to {_times(each.interval.high)}"
    return interval if each.ratio is None else f"{_times(each.ratio)} ({interval})"


def _turned(each: PromiseVerdict) -> PromiseVerdict:
    """The same with the second server's rate over the first's."""
    low, high = (_inverse(each.interval.high), _inverse(each.interval.low))
    ratio = None if each.ratio is None else _inverse(each.ratio)
    return PromiseVerdict(each.promise, each.rate_b, each.rate_a, ratio, Interval(low, high), each.winner)


def _inverse(value: float) -> float:
    return float("inf") if value == 0 else 1 / value


def _times(value: float) -> str:
    return "any" if value == float("inf") else f"{value:.2f}x"


def _rate(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
