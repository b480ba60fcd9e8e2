"""The public workloads under tests/traces, as their compact files hold them: lengths and prefix trees, no text.

Read by the benchmarks and by tests. `python benchmarks/traces.py FOLDER` makes the files anew out of the
publishers' own, which tests/traces/README.md names.
"""

import argparse
import csv
import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TRACES = Path(__file__).parents[1] / "tests" / "traces"
AZURE_CONVERSATION = TRACES / "azure_conversation_lengths.txt.gz"
MOONCAKE_CONVERSATION = TRACES / "mooncake_conversation_prefixes.txt.gz"
MOONCAKE_BLOCK_TOKENS = 512
NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of one request: its prompt and its answer."""

    num_prompt: int
    num_output: int


def azure_conversation() -> list[Lengths]:
    """All requests in order of arrival."""
    return [Lengths(*pair) for pair in _read(AZURE_CONVERSATION)]


def mooncake_conversation() -> list[list[int]]:
    """The numbers of each prompt's blocks of 512 tokens, in order of arrival; equal numbers are equal prefixes."""
    return list(unpack_prefixes(_read(MOONCAKE_CONVERSATION)))


def pack_prefixes(prompts: Iterable[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Each prompt as (its last block that an earlier one has, NO_BLOCK for none; how many new ones follow).

    That is everything, because blocks are numbered in order of appearance and each has one predecessor. Raises
    ValueError where they are not.
    """
    parents: list[int] = []
    for blocks in prompts:
        last, num_new = NO_BLOCK, 0
        for before, block in zip([NO_BLOCK, *blocks], blocks, strict=False):
            if block == len(parents):
                parents.append(before)
                num_new += 1
            elif num_new or block > len(parents) or parents[block] != before:
                raise ValueError(f"block {block} cannot follow block {before}")
            else:
                last = block
        yield last, num_new


def unpack_prefixes(pairs: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
    """The inverse of pack_prefixes."""
    parents: list[int] = []
    for last, num_new in pairs:
        blocks = []
        block = last
        while block != NO_BLOCK:
            blocks.append(block)
            block = parents[block]
        blocks.reverse()
        for _ in range(num_new):
            parents.append(blocks[-1] if blocks else NO_BLOCK)
            blocks.append(len(parents) - 1)
        yield blocks


def _read(path: Path) -> Iterator[tuple[int, int]]:
    with gzip.open(path, "rt", encoding="ascii") as file:
        for line in file:
            first, second = line.split()
            yield int(first), int(second)


def _write(path: Path, pairs: Iterable[tuple[int, int]]) -> None:
    text = "".join(f"{first} {second}\n" for first, second in pairs)
    path.write_bytes(gzip.compress(text.encode("ascii"), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the publishers' files lie")
    folder = parser.parse_args().folder
    with (folder / "AzureLLMInferenceTrace_conv.csv").open(encoding="utf-8", newline="") as file:
        _write(AZURE_CONVERSATION, [(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(file)])
    with (folder / "mooncake_conversation_trace.jsonl").open(encoding="utf-8") as file:
        _write(MOONCAKE_CONVERSATION, pack_prefixes(json.loads(line)["hash_ids"] for line in file))


if __name__ == "__main__":
    main()
