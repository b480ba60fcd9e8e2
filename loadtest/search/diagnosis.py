"""What holds a server back at a rate that it does not keep: its prefill, its decode or its hand-off. Pure.

Every request that broke a promise has one cause: what it waited for longest, by the server's own ledger.

    promise           waited for                                                    bound
    ttft              its turn, its chunks                                          prefill
    second, not ttft  blocks, their copy and check, after its first token           hand-off
                      its turn among the running streams                            decode
    tpot              blocks, for so long that it would have kept it without them   hand-off
                      steps of the streams it ran with                              decode
    gap               blocks, where the longest gap is the one after token 1        hand-off
                      a step                                                        decode
    e2e               the larger part: before or after its first token              prefill or decode

Without a ledger the promise alone says it; a hand-off cannot be told apart then.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from pdserve.loadtest.measures.kept import broken_promises, measure
from pdserve.loadtest.measures.ledger import Kind, first_token, second_token
from pdserve.loadtest.measures.promise import Measure, Promise
from pdserve.loadtest.measures.record import Record


class Bound(StrEnum):
    PREFILL = "prefill-bound"
    HAND_OFF = "hand-off-bound"
    DECODE = "decode-bound"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """bound: the cause of most of the broken promises; num_broken: requests by cause; text: why, in a sentence."""

    bound: Bound
    num_broken: dict[Bound, int]
    text: str


def diagnose(records: Sequence[Record], promises: Sequence[Promise]) -> Diagnosis | None:
    """Of the requests that broke a promise without failing; None where none did."""
    limits = {str(promise.measure): promise.limit_s for promise in promises}
    causes: Counter[Bound] = Counter()
    broken = []
    for record in records:
        names = broken_promises(record, promises)
        if names:
            broken.append(record)
            causes[_cause(record, names, limits)] += 1
    if not broken:
        return None
    bound, number = causes.most_common(1)[0]
    evidence = _EVIDENCE[bound](broken)
    text = f"{bound}: {number} of {len(broken)} broken requests {_MEANING[bound]}"
    return Diagnosis(bound, dict(causes), f"{text} ({evidence})" if evidence else text)


_MEANING = {
    Bound.PREFILL: "waited for the computation of their prompts",
    Bound.HAND_OFF: "waited for their blocks after the first token",
    Bound.DECODE: "waited for steps of the streams that they ran with",
}


def _cause(record: Record, names: Sequence[str], limits: dict[str, float]) -> Bound:
    if Measure.TTFT in names:
        return Bound.PREFILL
    transfer_s, decode_s = _after_first_token(record)
    if Measure.SECOND in names:
        return Bound.HAND_OFF if transfer_s > decode_s else Bound.DECODE
    if Measure.TPOT in names:
        tpot_s = measure(record, Measure.TPOT) or 0.0
        over_s = (tpot_s - limits[Measure.TPOT]) * (record.planned_output_tokens - 1)
        return Bound.HAND_OFF if transfer_s >= over_s else Bound.DECODE
    if Measure.GAP in names:
        is_first = bool(record.gaps_s) and record.gaps_s[0] == max(record.gaps_s)
        return Bound.HAND_OFF if is_first and transfer_s > decode_s else Bound.DECODE
    before_s = measure(record, Measure.TTFT) or 0.0
    return Bound.PREFILL if before_s > record.e2e_s - before_s else Bound.DECODE


def _after_first_token(record: Record) -> tuple[float, float]:
    """Seconds between the first two tokens that went to blocks on their way, and to the decode node's steps."""
    account = second_token(record)
    if account is None:
        return 0.0, 0.0
    seconds = {stage.name: stage.seconds for stage in account.stages}
    transfer_s = sum(seconds.get(name, 0.0) for name in ("wait_for_blocks_s", "fetch_s", "copy_s", "verify_s"))
    return transfer_s, seconds.get("decode_queue_s", 0.0) + seconds.get("first_step_s", 0.0)


def _prefill_evidence(records: Sequence[Record]) -> str:
    accounts = [account for record in records if (account := first_token(record)) is not None]
    if not accounts:
        return ""
    queues, chunks = (
        median(sum(stage.seconds for stage in account.stages if stage.kind is kind) for account in accounts)
        for kind in (Kind.QUEUE, Kind.PREFILL)
    )
    return f"medians: {queues:.2f} s in queues, {chunks:.2f} s computing"


def _hand_off_evidence(records: Sequence[Record]) -> str:
    transfers, steps = zip(*map(_after_first_token, records), strict=True)
    return f"medians: {median(transfers) * 1e3:.0f} ms for blocks, {median(steps) * 1e3:.0f} ms for a step"


def _decode_evidence(records: Sequence[Record]) -> str:
    tpots = [record.tpot_s for record in records if record.tpot_s is not None]
    return f"median TPOT {median(tpots) * 1e3:.0f} ms" if tpots else ""


_EVIDENCE = {
    Bound.PREFILL: _prefill_evidence,
    Bound.HAND_OFF: _hand_off_evidence,
    Bound.DECODE: _decode_evidence,
}
