"""The commands that a document shows in its console blocks."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Block:
    """One fenced block. title: its first line if that is a comment, without the #; commands: continued lines joined."""

    title: str
    text: str

    @property
    def commands(self) -> list[str]:
        return [" ".join(command.split()) for command in _split(self.text.replace("\\\n", " "))]


def blocks(document: Path, language: str = "console") -> list[Block]:
    found = re.findall(rf"```{language}\n(?:# ([^\n]*)\n)?(.*?)```", document.read_text(), re.DOTALL)
    return [Block(title, text) for title, text in found]


def commands(document: Path) -> list[str]:
    return [command for block in blocks(document) for command in block.commands]


def _split(block: str) -> list[str]:
    """One entry a command: a quote that is open at the end of a line goes on in the next."""
    found: list[str] = []
    held = ""
    for line in block.splitlines():
        held += line + "\n"
        try:
            shlex.split(held)
        except ValueError:
            continue
        if held.strip():
            found.append(held)
        held = ""
    return found
