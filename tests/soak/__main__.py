"""python -m tests.soak --seconds 1200 --seed 0: exit code 1 when anything was not as it must be."""

import argparse
import asyncio
import sys
import time

from tests.soak.driver import MAX_SHOWN, soak

BAR = 30


class Bar:
    """One line that is drawn over and over on a terminal; elsewhere a line for each tenth."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last = ("", 0)

    def __call__(self, phase: str, done: float, figures: str) -> None:
        bar = f"[{'#' * int(done * BAR):<{BAR}}] {phase}: {figures}"
        if self._is_terminal:
            print(f"\r{bar}", end="\033[K", file=sys.stderr, flush=True)
        elif self._last != (phase, int(done * 10)):
            self._last = (phase, int(done * 10))
            print(bar, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._is_terminal:
            print(file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Mixed traffic on pools that are small.")
    parser.add_argument("--seconds", type=float, default=1200.0, help="how long the load lasts")
    parser.add_argument("--seed", type=int, default=0, help="of all that is asked")
    options = parser.parse_args()
    started = time.monotonic()
    bar = Bar()
    report = asyncio.run(soak(options.seconds, options.seed, bar))
    bar.close()
    for failure in report.failures[:MAX_SHOWN]:
        print(f"- {failure}")
    verdict = f"FAILED ({len(report.failures)} failures)" if report.failures else "PASSED"
    print(f"{verdict} in {time.monotonic() - started:.0f} s, seed {options.seed}: {report.figures()}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
