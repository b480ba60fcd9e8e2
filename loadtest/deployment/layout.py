"""Ways to lay pdserve's nodes over the same cores: every ratio of prefill to decode nodes, and colocated ones.

Pure: names, counts and the command line of `pdserve up`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.loadtest.errors import OptionError

MAX_SPLITS = 5


@dataclass(frozen=True, slots=True)
class Layout:
    """num_prefill: 0 for colocated nodes, each of which prefills and decodes. cores: shared evenly by the nodes."""

    num_prefill: int
    num_decode: int
    cores: int

    @property
    def is_split(self) -> bool:
        return self.num_prefill > 0

    @property
    def num_nodes(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def name(self) -> str:
        if self.is_split:
            return f"{self.num_prefill}P{self.num_decode}D"
        threads = self.cores // self.num_nodes
        return f"{self.num_decode} both" + (f", {threads} threads" if threads > 1 else "")

    def up_command(self, url: str, flags: Sequence[str]) -> tuple[str, ...]:
        """The command line that serves it at a loopback URL; flags are further ones of `pdserve up`."""
        own = (sys.executable, "-m", "pdserve.launch.cli", "up", "--port", url.rpartition(":")[2])
        if self.is_split:
            nodes = ("--prefill", str(self.num_prefill), "--decode", str(self.num_decode))
        else:
            nodes = ("--role-mode", "both", "--decode", str(self.num_decode))
        return (*own, *nodes, *flags)


def layouts(cores: int, ratios: Sequence[tuple[int, int]] = ()) -> tuple[Layout, ...]:
    """Colocated ones first: a node a core, one node with all cores; then the splits, a node a core.

    ratios: of prefill to decode nodes that are to be tried; none: every one that fits, MAX_SPLITS at most, evenly
    spread. Raises OptionError for fewer than two cores and for ratios that do not fill the cores.
    """
    if cores < 2:
        raise OptionError(f"--cores {cores}: splitting needs a core for prefill and one for decode, at least 2")
    for prefill, decode in ratios:
        if prefill < 1 or decode < 1 or prefill + decode != cores:
            raise OptionError(f"--ratios {prefill}:{decode}: needs {cores} nodes in all, a core each (--cores)")
    colocated = (Layout(0, cores, cores), Layout(0, 1, cores))
    splits = ratios or tuple((prefill, cores - prefill) for prefill in _spread(cores - 1))
    return (*colocated, *(Layout(prefill, decode, cores) for prefill, decode in splits))


def _spread(highest: int) -> list[int]:
    """1 to highest, at most MAX_SPLITS of them, both ends among them."""
    if highest <= MAX_SPLITS:
        return list(range(1, highest + 1))
    return sorted({round(1 + step * (highest - 1) / (MAX_SPLITS - 1)) for step in range(MAX_SPLITS)})


def parse_ratios(text: str) -> tuple[tuple[int, int], ...]:
    """Read "1:3,2:2"."""
    ratios = []
    for part in text.split(","):
        prefill, colon, decode = part.strip().partition(":")
        if not (colon and prefill.isdecimal() and decode.isdecimal()):
            raise OptionError(f"--ratios {text}: must be P:D,P:D,... for example 1:3,2:2")
        ratios.append((int(prefill), int(decode)))
    return tuple(ratios)
