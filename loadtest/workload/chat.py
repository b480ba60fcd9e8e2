"""The messages of a chat, as the wire has them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Chat:
    messages: tuple[Message, ...]

    def to_json(self) -> list[dict[str, str]]:
        return [{"role": message.role, "content": message.content} for message in self.messages]
