"""What knows how many tokens a server will count in a text or a chat. Called by the schedule."""

from typing import Protocol

from pdserve.loadtest.workload.chat import Chat


class Tokenizer(Protocol):
    def count_text(self, text: str) -> int:
        """The prompt tokens of a completion, special ones included."""

    def count_chat(self, chat: Chat) -> int:
        """The prompt tokens of a chat, its template included."""
