import math
from dataclasses import replace

import numpy as np
import pytest

from pdserve.loadtest.errors import ReportError
from pdserve.loadtest.measures.comparison import compare_attainment, compare_latencies
from pdserve.loadtest.measures.promise import Measure, Promise
from pdserve.loadtest.report.comparison_document import compare, describe_comparison
from pdserve.loadtest.report.pairing import Source, pair_runs, records_of
from pdserve.loadtest.report.text import format_document
from pdserve.loadtest.workload.lengths import Span
from tests.loadtest.report.runs import make_report
from tests.loadtest.samples import make_load, make_record

TTFT_1S = Promise(Measure.TTFT, 1.0)


def answers(seed: int, factor: float = 1.0, count: int = 150, own_noise: float = 0.02):
    """Requests that differ a lot among each other, by the seed, and little between two servers."""
    hardness = np.random.default_rng(0).lognormal(sigma=0.8, size=count)
    noise = np.random.default_rng(seed).lognormal(sigma=own_noise, size=count)
    records = []
    for i in range(count):
        ttft_s, gap_s = 0.5 * factor * hardness[i] * noise[i], 0.05 * factor * noise[i]
        records.append(make_record(i, float(i), tuple(i + ttft_s + gap_s * k for k in range(4))))
    return records


def by_name(ratios, latency, percent):
    return next(ratio for ratio in ratios if (ratio.latency, ratio.percent) == (latency, percent))


def test_a_pair_finds_a_difference_far_below_what_requests_differ_by():
    """5 %, where two thirds of the requests lie within a factor of 2.2 of the median."""
    ttft = by_name(compare_latencies([(answers(1), answers(2, 1.05))]), "ttft", 50)
    assert ttft.is_shown
    assert 1.05 in ttft.interval
    # Of requests that were not the same it would be 1.6: two medians of 150, each to 1.25 * 0.8 / sqrt(150).
    assert ttft.interval.high / ttft.interval.low < 1.1


def test_of_equal_servers_few_rows_are_marked():
    """At 95 % each, of 30 pairs one or two; more than five have a probability of 0.3 %."""
    medians = [
        by_name(compare_latencies([(answers(2 * i, count=40), answers(2 * i + 1, count=40))]), "tpot", 50).is_shown
        for i in range(30)
    ]
    assert sum(medians) <= 5


def test_a_ratio_is_of_the_percentiles_themselves():
    ratios = compare_latencies([(answers(1), answers(1, 2.0))])
    assert [ratio.ratio for ratio in ratios] == pytest.approx([2.0] * len(ratios))
    assert all(ratio.interval is None or ratio.interval.low == pytest.approx(2.0) for ratio in ratios)


@pytest.mark.parametrize(("count", "percents"), [(12, {50}), (60, {50, 90}), (599, {50, 90}), (600, {50, 90, 99})])
def test_a_percentile_that_rests_on_few_requests_has_no_interval(count, percents):
    ratios = compare_latencies([(answers(1, count=count), answers(2, count=count))])
    assert {ratio.percent for ratio in ratios if ratio.interval is not None} == percents


def test_a_request_that_failed_on_one_side_counts_on_the_other():
    a, b = answers(1), answers(1)
    b[3] = make_record(3, error="timeout", token_times_s=())
    ttft = by_name(compare_latencies([(a, b)]), "ttft", 50)
    assert 1.0 in ttft.interval


def test_gaps_of_zero_have_no_ratio():
    merged = [make_record(i, token_times_s=(1.0, 2.0), output_tokens=9) for i in range(20)]
    gap = by_name(compare_latencies([(merged, merged)]), "gap", 50)
    assert (gap.a, gap.ratio, gap.interval, gap.is_shown) == (0.0, None, None, False)


def test_what_no_request_has_is_not_compared():
    one_token = [make_record(i, token_times_s=(1.0,)) for i in range(20)]
    assert {ratio.latency for ratio in compare_latencies([(one_token, one_token)])} == {"ttft", "e2e"}


def test_attainment_is_compared_request_by_request():
    """Half of the requests break on both sides, which says nothing; 12 of 100 on one side alone."""
    a = [make_record(i, token_times_s=(9.0 if i % 2 else 0.5,)) for i in range(100)]
    b = [make_record(i, token_times_s=(9.0 if i % 2 or i < 24 else 0.5,)) for i in range(100)]
    found = compare_attainment([(a, b)], [TTFT_1S])
    assert (found.a, found.b, found.difference) == (0.5, 0.38, pytest.approx(-0.12))
    assert found.is_shown
    # The binomial's standard error of 12 in 100, both ways.
    assert found.interval.high - found.interval.low == pytest.approx(2 * 1.96 * math.sqrt(0.12 * 0.88 / 100), rel=0.2)


def test_equal_attainment_is_no_difference():
    a = answers(1)
    assert not compare_attainment([(a, a)], [TTFT_1S]).is_shown


def source(name: str, *reports) -> Source:
    return Source(name, reports)


def report_with(digest="d", promises=(TTFT_1S,), records=None, **load):
    records = answers(1, count=40) if records is None else records
    report = make_report(records)
    config = replace(report.config, load=make_load(**{"rate_per_s": 2.0, "num_requests": 40, "ramp": 0.0, **load}))
    return replace(report, config=replace(config, promises=promises), schedule_digest=digest)


def test_runs_of_the_same_schedule_are_paired_whatever_their_order():
    a = source("a", report_with("1", seed=1), report_with("2", seed=2), report_with("3", seed=3))
    b = source("b", report_with("3", seed=3), report_with("1", seed=1))
    pairs = pair_runs(a, b)
    assert [(of_a.schedule_digest, of_b.schedule_digest) for of_a, of_b in pairs] == [("1", "1"), ("3", "3")]


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ({"rate_per_s": 3.0}, "--rate: is 3.0, but a has 2.0"),
        ({"seed": 5}, "--seed: is 5, but a has 0"),
        ({"num_requests": 41}, "--num-requests: is 41, but a has 40"),
        ({"input_tokens": Span(9, 11)}, "--input-tokens: is 9-11, but a has 8-12"),
        ({"ramp": 0.2}, "--ramp: is 0.2, but a has 0.0"),
        ({}, "schedule_digest: is 2, but a has 1"),
    ],
)
def test_runs_of_other_schedules_are_refused_by_what_differs(load, words):
    with pytest.raises(ReportError, match=f"^b: {words}"):
        pair_runs(source("a", report_with("1")), source("b", report_with("2", **load)))


def test_runs_of_other_promises_are_refused_with_both():
    b = source("b", report_with(promises=(Promise(Measure.TTFT, 2.0),)))
    with pytest.raises(ReportError, match=r"^b: --slo: is ttft=2, but a has ttft=1;"):
        pair_runs(source("a", report_with()), b)


def test_of_a_run_that_ended_early_only_the_requests_before_the_first_missing_are_compared():
    early = [record for record in answers(1, count=40) if record.index not in (7, 20)]
    ((of_a, of_b),) = records_of([(report_with(records=early), report_with())])
    assert [record.index for record in of_a] == [record.index for record in of_b] == list(range(7))


def test_a_comparison_is_told_at_each_rate_with_who_serves_more():
    fast = [report_with("1", rate_per_s=1.0), report_with("2", rate_per_s=2.0)]
    slow = [
        report_with("1", rate_per_s=1.0),
        report_with("2", rate_per_s=2.0, records=answers(2, factor=9.0, count=40)),
    ]
    a, b = source("a.json", *fast), source("b.json", *slow)
    comparison = compare(a, b)
    assert [(at.rate_per_s, at.num_requests) for at in comparison.rates] == [(1.0, 40), (2.0, 40)]
    told = " ".join(format_document(describe_comparison(comparison, a, b)).split())
    assert "9.0" in told
    assert "no difference shown, +0.0 points" in told


def test_a_comparison_of_one_rate_says_nothing_of_goodput():
    assert compare(source("a", report_with()), source("b", report_with())).goodput == ()
