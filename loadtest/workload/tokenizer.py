"""What knows how many tokens a server will count in a prompt: the tokenizer's own files, or the server itself."""

from typing import Protocol

from pdserve.loadtest.workload.chat import Chat


class Tokenizer(Protocol):
    @property
    def name(self) -> str:
        """Where its counts come from, for the report."""

    def count(self, prompt: str | Chat) -> int:
        """The prompt tokens of a completion, special ones included, or of a chat, its template included.

        Raises TargetError where it cannot say.
        """
