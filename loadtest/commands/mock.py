"""`pdserve bench mock`: the mock server on a port."""

import argparse
import asyncio
import math

from pdserve.loadtest.client.precise_loop import new_precise_loop
from pdserve.loadtest.commands.exit_codes import EXIT_OK
from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.mock.behaviour import Behaviour, Fault
from pdserve.loadtest.options import check_count, parse_count, parse_number

HELP = "a server of known times, to try the load test on"
USAGE = "%(prog)s [options]"
DESCRIPTION = "Serves the streaming API with known times and meaningless text."

_MAX_TOKENS_PER_EVENT = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", default="8001", metavar="N", help="port, 0 takes a free one (8001)")
    add("--ttft-s", default="0.2", metavar="S", help="seconds from a request to its first token (0.2)")
    add("--gap-s", default="0.03", metavar="S", help="seconds between tokens (0.03)")
    add("--jitter-s", default="0", metavar="S", help="each token is late by up to so much, evenly drawn (0)")
    add("--tokens-per-event", default="1", metavar="N", help="tokens that come together (1)")
    add("--fault", default="none", choices=list(Fault), metavar="NAME", help=f"one of {', '.join(Fault)} (none)")


def main(args: argparse.Namespace) -> int:
    port = parse_count("--port", args.port)
    check_count("--port", port, 0, 65535)
    behaviour = Behaviour(
        first_token_s=_parse_seconds("--ttft-s", args.ttft_s),
        gap_s=_parse_seconds("--gap-s", args.gap_s),
        jitter_s=_parse_seconds("--jitter-s", args.jitter_s),
        tokens_per_event=parse_count("--tokens-per-event", args.tokens_per_event),
        fault=Fault(args.fault),
    )
    check_count("--tokens-per-event", behaviour.tokens_per_event, 1, _MAX_TOKENS_PER_EVENT)
    try:
        with asyncio.Runner(loop_factory=new_precise_loop) as runner:
            runner.run(_serve(behaviour, args.host, port))
    except KeyboardInterrupt:
        return EXIT_OK
    return EXIT_OK


async def _serve(behaviour: Behaviour, host: str, port: int) -> None:
    from pdserve.loadtest.mock.server import MockServer

    try:
        async with MockServer([behaviour], host=host, port=port, remembers=False) as server:
            print(f"mock server at {server.url}  (Ctrl-C stops)", flush=True)
            await asyncio.Event().wait()
    except OSError as error:
        raise OptionError(f"--host {host} --port {port}: {error.strerror}") from None


def _parse_seconds(flag: str, text: str) -> float:
    value = parse_number(flag, "", text)
    if not (value >= 0 and math.isfinite(value)):
        raise OptionError(f"{flag} {text}: must be a number of seconds, at least 0")
    return value
