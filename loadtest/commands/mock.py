"""`pdserve bench mock`: the mock server on a port."""

import argparse
import asyncio
import math

from pdserve.loadtest.commands.exit_codes import EXIT_OK
from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.options import parse_count, parse_number

HELP = "a server of known times, to try the load test on"
USAGE = "%(prog)s [options]"
DESCRIPTION = "Serves the streaming API with fixed times and meaningless text."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", default="8001", metavar="N", help="port, 0 takes a free one (8001)")
    add("--ttft-s", default="0.2", metavar="S", help="seconds to the first token (0.2)")
    add("--gap-s", default="0.03", metavar="S", help="seconds between tokens (0.03)")


def main(args: argparse.Namespace) -> int:
    port = parse_count("--port", args.port)
    if not 0 <= port <= 65535:
        raise OptionError(f"--port {port}: must be within 0 and 65535")
    times = {}
    for flag, text in (("--ttft-s", args.ttft_s), ("--gap-s", args.gap_s)):
        times[flag] = parse_number(flag, "", text)
        if not (times[flag] >= 0 and math.isfinite(times[flag])):
            raise OptionError(f"{flag} {text}: must be a number of seconds, at least 0")

    from pdserve.loadtest.mock.server import Behaviour, MockServer

    async def serve() -> None:
        behaviour = Behaviour(first_token_s=times["--ttft-s"], gap_s=times["--gap-s"])
        try:
            async with MockServer([behaviour], host=args.host, port=port) as server:
                print(f"mock server at {server.url}  (Ctrl-C stops)", flush=True)
                await asyncio.Event().wait()
        except OSError as error:
            raise OptionError(f"--host {args.host} --port {port}: {error.strerror}") from None

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        return EXIT_OK
    return EXIT_OK
