import math

import pytest

from pdserve.loadtest.client.target import Target, parse_url
from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.measures.promise import Measure, Promise, parse_promises
from pdserve.loadtest.options import parse_count
from pdserve.loadtest.workload.lengths import Span, parse_span
from pdserve.loadtest.workload.load import Vocabulary, parse_vocabulary
from tests.loadtest.samples import make_load


def test_a_span_is_two_numbers_or_one():
    assert parse_span("--input-tokens", "256-768") == Span(256, 768)
    assert parse_span("--input-tokens", "512") == Span(512, 512)


def test_promises_are_names_with_limits_in_seconds():
    assert parse_promises("ttft=2.0, tpot=0.06") == (Promise(Measure.TTFT, 2.0), Promise(Measure.TPOT, 0.06))


@pytest.mark.parametrize("text", ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"])
def test_a_url_may_end_with_the_api_version(text):
    assert parse_url(text) == "http://h:8000"


@pytest.mark.parametrize("text", ["", "a-b", "5-", "-5", "1-2-3", "1.5", "١-٢", "9999999999"])
def test_a_malformed_span_is_refused_naming_flag_and_value(text):
    with pytest.raises(OptionError, match=r"--input-tokens .*LOW-HIGH"):
        parse_span("--input-tokens", text)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=x", "ttft=0", "ttft=-1", "ttft=nan", "ttft=inf", "itl=1"])
def test_a_malformed_promise_is_refused_naming_the_flag(text):
    with pytest.raises(OptionError, match="--slo"):
        parse_promises(text)


def test_a_promise_given_twice_is_refused():
    with pytest.raises(OptionError, match="ttft is given twice"):
        parse_promises("ttft=1,ttft=2")


@pytest.mark.parametrize("text", ["100", "30000-100", "5-5", "0-9999999999", "a-b"])
def test_a_malformed_or_empty_vocabulary_is_refused(text):
    with pytest.raises(OptionError, match="--vocab"):
        parse_vocabulary(text)


@pytest.mark.parametrize("text", ["", "1.0", "x", "1" * 20])
def test_a_malformed_count_is_refused(text):
    with pytest.raises(OptionError, match="--seed"):
        parse_count("--seed", text)


@pytest.mark.parametrize(
    ("flag", "fields"),
    [
        ("--rate", {"rate_per_s": 0.0}),
        ("--rate", {"rate_per_s": -1.0}),
        ("--rate", {"rate_per_s": math.nan}),
        ("--rate", {"rate_per_s": 1e-300}),
        ("--num-requests", {"num_requests": 0}),
        ("--num-requests", {"num_requests": 10**9}),
        ("--input-tokens", {"input_tokens": Span(0, 5)}),
        ("--input-tokens", {"input_tokens": Span(6, 5)}),
        ("--output-tokens", {"output_tokens": Span(0, 1)}),
        ("--seed", {"seed": -1}),
    ],
)
def test_a_load_out_of_limits_is_refused_naming_the_flag(flag, fields):
    with pytest.raises(OptionError, match=flag):
        make_load(**fields)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://h",
        "http://",
        "http://h:99999",
        "http://h:0",
        "http://h:x",
        "http://[::1",
        "http://h?a=b",
        "http://u:secret@h",
    ],
)
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(OptionError, match="--url"):
        Target(url)


def test_a_password_in_the_url_is_not_repeated_in_the_error():
    with pytest.raises(OptionError) as caught:
        Target("http://u:secret@h")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "fields"),
    [
        ("--timeout-s", {"timeout_s": 0.0}),
        ("--timeout-s", {"timeout_s": math.inf}),
        ("--max-concurrency", {"max_concurrency": 0}),
        ("--preflight", {"preflight": -1}),
        ("--preflight", {"preflight": 101}),
    ],
)
def test_a_target_out_of_limits_is_refused_naming_the_flag(flag, fields):
    with pytest.raises(OptionError, match=flag):
        Target("http://h", **fields)


def test_the_vocabulary_ends_before_its_end():
    assert Vocabulary(100, 103).size == 3
