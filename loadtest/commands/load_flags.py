"""The flags that say what is sent, shared by every command that sends something, and the load they become.

Values are read by the owners of what they describe, whose messages name the flag and the limit. Imports little: help
must be fast.
"""

import argparse
import math
from dataclasses import replace

from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.options import parse_count, parse_number
from pdserve.loadtest.workload.arrivals import Arrivals, Replay, Steps, parse_arrivals
from pdserve.loadtest.workload.lengths import DrawnLengths, parse_span
from pdserve.loadtest.workload.load import Load, PromptFormat, num_steady, num_with_ramps, parse_vocabulary
from pdserve.loadtest.workload.sharing import Conversations, SharedPrefix, parse_seconds
from pdserve.loadtest.workload.trace import Trace

DEFAULT_NUM_REQUESTS = 100
# Of each run of a search: the verdict's default is up to three of them at a rate.
VERDICT_NUM_REQUESTS = 150
DEFAULT_INPUT_TOKENS = "256-768"
DEFAULT_OUTPUT_TOKENS = "32-96"


def add_load(parser: argparse.ArgumentParser, num_requests: int = DEFAULT_NUM_REQUESTS) -> None:
    """All but --rate, which a command that searches it does not have. num_requests: what help calls the default."""
    add = parser.add_argument
    add("--arrivals", metavar="P", help="poisson, constant, gamma:CV, steps:RATE@SECONDS,... (poisson)")
    add("--num-requests", metavar="N", help=f"requests to measure ({num_requests}; of a trace or steps all)")
    add("--input-tokens", metavar="A-B", help="prompt length, uniform, both included (256-768)")
    add("--output-tokens", metavar="A-B", help="exact output length, likewise (32-96)")
    add("--shared-prefix", metavar="N", help="a system prompt of N more tokens, one of --prefix-groups (1)")
    add("--turns", metavar="A-B", help="conversations of so many turns, --think-s A-B apart (5-15)")
    add("--trace", metavar="FILE", help="a trace's times, lengths and prefixes; --length-scale X, --time-scale X")
    add("--seed", default="0", metavar="N", help="fixes times, lengths and prompts (0)")
    add_rare(parser, "--ramp", "0.1", "SHARE")
    add_rare(parser, "--vocab", "100-30000", "A-B")
    add_rare(parser, "--prefix-groups", None, "K")
    add_rare(parser, "--think-s", None, "A-B")
    add_rare(parser, "--length-scale", None, "X")
    add_rare(parser, "--max-request-tokens", None, "N")
    add_rare(parser, "--time-scale", None, "X")
    add_rare(parser, "--start-s", None, "S")
    add_rare(parser, "--duration-s", None, "S")
    add_rare(parser, "--prompt-format", "ids", "ids|text")
    add_rare(parser, "--tokenizer", None, "DIR")


def add_rare(parser: argparse.ArgumentParser, flag: str, default: str | None, metavar: str) -> None:
    """A flag that help names only in its last line."""
    parser.add_argument(flag, default=default, metavar=metavar, help=argparse.SUPPRESS)
    parser.epilog = f"{parser.epilog or 'more, see docs/load.md:'} {flag}"


def read_load(args: argparse.Namespace, rate_text: str | None) -> Load:
    """The load of the flags; without a rate that of the trace or of the steps. Raises OptionError."""
    ramp = parse_number("--ramp", "", args.ramp)
    num_requests = None if args.num_requests is None else parse_count("--num-requests", args.num_requests)
    trace = _read_trace(args)
    if trace is not None and trace.has_times and num_requests is not None:
        trace = trace.first(num_with_ramps(num_requests, ramp))
    arrivals = _read_arrivals(args, trace)
    return Load(
        rate_per_s=_read_rate(args, rate_text, arrivals),
        num_requests=_default_num_requests(arrivals, ramp) if num_requests is None else num_requests,
        lengths=_read_lengths(args) if trace is None else trace,
        arrivals=arrivals,
        seed=parse_count("--seed", args.seed),
        vocabulary=parse_vocabulary(args.vocab),
        ramp=ramp,
        shared_prefix=_read_shared_prefix(args),
        conversations=_read_conversations(args),
        prompt_format=_read_format(args.prompt_format),
        tokenizer=args.tokenizer,
    )


def read_searched_load(args: argparse.Namespace) -> Load:
    """The load of a command that searches a rate: --rate is where it begins, 1 or what a trace or steps have.

    Runs are of the length that a verdict rests on, unless the flags say otherwise or they are all of a trace.
    """
    has_own_rate = args.trace is not None or (args.arrivals or "").startswith("steps")
    load = read_load(args, args.rate or (None if has_own_rate else "1"))
    if args.num_requests is None and not isinstance(load.arrivals, Replay | Steps):
        load = replace(load, num_requests=VERDICT_NUM_REQUESTS)
    if math.isinf(load.rate_per_s):
        raise OptionError(f"--rate {args.rate}: the search begins at a finite rate")
    return load


def _read_trace(args: argparse.Namespace) -> Trace | None:
    """The trace, cut to its span and scaled to what was asked for."""
    if args.trace is None:
        _refuse(
            args, ("length_scale", "time_scale", "max_request_tokens", "start_s", "duration_s"), "needs --trace FILE"
        )
        return None
    _refuse(args, ("input_tokens", "output_tokens"), "cannot be given with --trace, which has its own lengths")
    # Not at the top: only a trace needs the readers.
    from pdserve.loadtest.workload.trace_file import read_trace

    trace = read_trace(args.trace)
    if args.start_s is not None or args.duration_s is not None:
        start_s = _read_seconds("--start-s", args.start_s, 0.0)
        trace = trace.within(start_s, _read_seconds("--duration-s", args.duration_s, math.inf))
    if args.length_scale is not None:
        trace = trace.scaled(parse_number("--length-scale", "", args.length_scale))
    if args.max_request_tokens is not None:
        trace = trace.capped(parse_count("--max-request-tokens", args.max_request_tokens))
    return trace


def _read_arrivals(args: argparse.Namespace, trace: Trace | None) -> Arrivals:
    """A trace is replayed unless something else is asked for."""
    if args.arrivals is None and trace is not None:
        return trace.arrivals
    return parse_arrivals(args.arrivals or "poisson")


def _read_rate(args: argparse.Namespace, text: str | None, arrivals: Arrivals) -> float:
    own = arrivals.own_rate_per_s if isinstance(arrivals, Replay | Steps) else None
    if args.time_scale is not None:
        scale = parse_number("--time-scale", "", args.time_scale)
        if text is not None or not isinstance(arrivals, Replay):
            raise OptionError(f"--time-scale {args.time_scale}: scales a trace's own times, so no --rate or --arrivals")
        if not 0 < scale < math.inf:
            raise OptionError(f"--time-scale {args.time_scale}: must be a number above 0; 0.5 is twice as fast")
        return arrivals.own_rate_per_s / scale
    if text is not None:
        return parse_number("--rate", "", text)
    if own is None:
        raise OptionError(f"--rate: is needed, as {arrivals} arrivals have no rate of their own")
    return own


def _default_num_requests(arrivals: Arrivals, ramp: float) -> int:
    match arrivals:
        case Replay():
            return num_steady(len(arrivals.times_s), ramp)
        case Steps():
            return num_steady(max(1, round(arrivals.mean_requests)), ramp)
    return DEFAULT_NUM_REQUESTS


def _read_lengths(args: argparse.Namespace) -> DrawnLengths:
    return DrawnLengths(
        parse_span("--input-tokens", args.input_tokens or DEFAULT_INPUT_TOKENS),
        parse_span("--output-tokens", args.output_tokens or DEFAULT_OUTPUT_TOKENS),
    )


def _read_shared_prefix(args: argparse.Namespace) -> SharedPrefix | None:
    if args.shared_prefix is None:
        _refuse(args, ("prefix_groups",), "needs --shared-prefix N")
        return None
    return SharedPrefix(
        parse_count("--shared-prefix", args.shared_prefix), parse_count("--prefix-groups", args.prefix_groups or "1")
    )


def _read_conversations(args: argparse.Namespace) -> Conversations | None:
    if args.turns is None:
        _refuse(args, ("think_s",), "needs --turns A-B")
        return None
    return Conversations(parse_span("--turns", args.turns), parse_seconds("--think-s", args.think_s or "5-15"))


def _read_format(text: str) -> PromptFormat:
    if text not in list(PromptFormat):
        raise OptionError(f"--prompt-format {text}: must be {' or '.join(PromptFormat)}")
    return PromptFormat(text)


def _read_seconds(flag: str, text: str | None, default: float) -> float:
    value = default if text is None else parse_number(flag, "", text)
    if not value >= 0:
        raise OptionError(f"{flag} {text}: must be a number of seconds, at least 0")
    return value


def _refuse(args: argparse.Namespace, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise OptionError(f"--{name.replace('_', '-')} {getattr(args, name)}: {reason}")
