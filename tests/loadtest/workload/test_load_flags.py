"""What the load flags become, alone and together, and what they refuse."""

import argparse
import math
from pathlib import Path

import pytest

from pdserve.loadtest.commands.load_flags import add_load, read_load
from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.workload.arrivals import Gamma, Poisson, Replay, Steps
from pdserve.loadtest.workload.lengths import DrawnLengths, Span
from pdserve.loadtest.workload.load import PromptFormat
from pdserve.loadtest.workload.sharing import Conversations, SharedPrefix

TRACES = Path(__file__).parents[2] / "traces"
AZURE = str(TRACES / "azure_conversation_sample.csv")
MOONCAKE = str(TRACES / "mooncake_conversation_sample.jsonl")
LENGTHS = str(TRACES / "sharegpt_lengths_sample.csv")


def read(*words: str, rate: str | None = "2"):
    parser = argparse.ArgumentParser()
    add_load(parser)
    return read_load(parser.parse_args(words), rate)


def test_without_flags_it_is_the_reference_load():
    load = read()
    assert load.lengths == DrawnLengths(Span(256, 768), Span(32, 96))
    assert (load.arrivals, load.rate_per_s, load.num_requests, load.num_total) == (Poisson(), 2.0, 100, 120)


def test_every_flag_reaches_the_load():
    load = read(
        *(
            "--arrivals",
            "gamma:2",
            "--num-requests",
            "7",
            "--ramp",
            "0",
            "--input-tokens",
            "5",
            "--output-tokens",
            "6-7",
        ),
        *("--shared-prefix", "9", "--prefix-groups", "3", "--turns", "2-4", "--think-s", "1-2.5", "--seed", "4"),
        *("--vocab", "10-99", "--prompt-format", "text", "--tokenizer", "somewhere"),
        rate="inf",
    )
    assert (load.arrivals, load.rate_per_s, load.num_total, load.seed) == (Gamma(2.0), math.inf, 7, 4)
    assert load.lengths == DrawnLengths(Span(5, 5), Span(6, 7))
    assert load.shared_prefix == SharedPrefix(9, 3)
    assert load.conversations == Conversations(Span(2, 4), (1.0, 2.5))
    assert (load.vocabulary.low, load.vocabulary.end) == (10, 99)
    assert (load.prompt_format, load.tokenizer) == (PromptFormat.TEXT, "somewhere")


def test_steps_have_their_own_rate_and_send_one_pass():
    load = read("--arrivals", "steps:0.5@60,2@45", rate=None)
    assert isinstance(load.arrivals, Steps)
    assert load.rate_per_s == pytest.approx(120 / 105)
    assert (load.num_requests, load.num_total) == (100, 120)


def test_a_trace_is_replayed_whole_at_its_own_rate():
    load = read("--trace", AZURE, rate=None)
    assert isinstance(load.arrivals, Replay)
    assert load.rate_per_s == pytest.approx(load.arrivals.own_rate_per_s)
    assert (load.num_total, load.num_requests) == (15, 12)


def test_times_scale_by_the_time_scale_or_to_a_rate():
    own = read("--trace", AZURE, rate=None).rate_per_s
    assert read("--trace", AZURE, "--time-scale", "0.5", rate=None).rate_per_s == pytest.approx(2 * own)
    assert read("--trace", AZURE, rate="3").rate_per_s == 3.0


def test_a_trace_is_cut_scaled_and_capped_in_this_order():
    load = read(
        *("--trace", MOONCAKE, "--length-scale", "0.0625", "--max-request-tokens", "300"),
        *("--start-s", "10", "--duration-s", "60"),
        rate=None,
    )
    trace = load.lengths
    assert (len(trace.requests), trace.first_s, trace.block_tokens, trace.num_cut) == (6, 10.0, 32, 1)
    assert load.longest <= 300


def test_fewer_requests_of_a_trace_are_its_first_with_ramps():
    load = read("--trace", AZURE, "--num-requests", "10", rate=None)
    assert (load.num_requests, load.num_total, len(load.lengths.requests)) == (10, 12, 12)
    whole = read("--trace", AZURE, rate=None)
    assert load.rate_per_s == load.arrivals.own_rate_per_s
    assert load.arrivals.times_s == whole.arrivals.times_s[:12]


def test_a_trace_without_times_needs_a_rate_and_may_be_drawn_from():
    load = read("--trace", LENGTHS, "--arrivals", "poisson", "--num-requests", "10")
    assert (load.arrivals, load.num_total, len(load.lengths.requests)) == (Poisson(), 12, 15)
    with pytest.raises(OptionError, match="say with --arrivals and --rate"):
        read("--trace", LENGTHS)


def test_a_trace_may_be_sent_by_another_process():
    load = read("--trace", AZURE, "--arrivals", "poisson", "--num-requests", "10", rate="4")
    assert (load.arrivals, load.rate_per_s, len(load.lengths.requests)) == (Poisson(), 4.0, 12)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--arrivals", "sometimes"), "--arrivals sometimes"),
        (("--num-requests", "0"), "--num-requests 0"),
        (("--ramp", "-1"), "--ramp -1"),
        (("--ramp", "nan"), "--ramp nan"),
        (("--prompt-format", "words"), "--prompt-format words: must be ids or text"),
        (("--shared-prefix", "0"), "--shared-prefix 0"),
        (("--prefix-groups", "2"), "--prefix-groups 2: needs --shared-prefix"),
        (("--turns", "0"), "--turns 0"),
        (("--think-s", "5"), "--think-s 5: needs --turns"),
        (("--length-scale", "2"), "--length-scale 2: needs --trace"),
        (("--max-request-tokens", "2"), "--max-request-tokens 2: needs --trace"),
        (("--start-s", "2"), "--start-s 2: needs --trace"),
        (("--trace", "/nowhere"), "--trace /nowhere: cannot be read"),
        (("--trace", AZURE, "--input-tokens", "5"), "--input-tokens 5: cannot be given with --trace"),
        (("--trace", AZURE, "--turns", "2"), "--trace azure_conversation_sample.csv"),
        (("--trace", AZURE, "--num-requests", "14"), "--num-requests: 16 with ramps, but azure"),
        (("--trace", AZURE, "--time-scale", "2"), "--time-scale 2: scales a trace's own times, so no --rate"),
        (("--trace", AZURE, "--start-s", "-1"), "--start-s -1"),
        (("--trace", AZURE, "--start-s", "1e6"), "--start-s 1e"),
        (("--trace", AZURE, "--duration-s", "nan"), "--duration-s nan"),
        (("--trace", AZURE, "--length-scale", "x"), "--length-scale x"),
        (("--trace", AZURE, "--max-request-tokens", "1"), "--max-request-tokens 1"),
        (("--trace", LENGTHS, "--start-s", "1"), "has no times to choose by"),
        (("--trace", LENGTHS, "--arrivals", "poisson"), "--num-requests: 120 with ramps"),
    ],
)
def test_flags_that_cannot_be_used_are_refused_by_name(words, message):
    with pytest.raises(OptionError) as caught:
        read(*words)
    assert message in str(caught.value)


@pytest.mark.parametrize("scale", ["0", "-1", "inf", "nan", "x"])
def test_a_time_scale_that_is_none_is_refused(scale):
    with pytest.raises(OptionError, match="--time-scale"):
        read("--trace", AZURE, "--time-scale", scale, rate=None)


@pytest.mark.parametrize("arrivals", ["poisson", "constant", "gamma:2"])
def test_a_process_without_a_rate_is_refused(arrivals):
    with pytest.raises(OptionError, match="--rate: is needed"):
        read("--arrivals", arrivals, rate=None)
