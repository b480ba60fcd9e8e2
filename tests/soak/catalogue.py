"""What is asked in a soak: conversations of one turn or several, drawn from a seed.

A catalogue is smaller than the load is long, so that each of its single runs is computed once, before the load, and
compared with many times. Prompts are token ids or text of the byte-level tokenizer of tests/checkpoints.py, where a
token is a byte. Pure.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.checkpoints import SPECIAL_TOKENS, VOCAB_SIZE

CONTEXT = 512
BLOCK_SIZE = 16
MAX_TOKENS = (1, 2, 3, 24, 60, 120, 200, 200)
NUM_PREFIXES = 6
# The tokens of "!" to "~" come right after the special ones. An answer of them alone is text of the same tokens again.
FIRST_OTHER = len(SPECIAL_TOKENS) + ord("~") - ord("!") + 1
ASCII_ONLY = {str(token): -100 for token in range(FIRST_OTHER, VOCAB_SIZE)}


@dataclass(frozen=True, slots=True)
class Turn:
    """A request but for what comes before it in its conversation.

    body         of POST path, without its prompt
    prompt       ids, or the text that this turn adds; a chat's next message
    has_stop     it ends at a string that is found in what it answers without one
    """

    path: str
    body: dict[str, Any]
    prompt: list[int] | str
    has_stop: bool = False

    @property
    def is_chat(self) -> bool:
        return self.path.endswith("/chat/completions")


def catalogue(seed: int, num_conversations: int) -> list[list[Turn]]:
    """Conversations, each a list of turns."""
    writer = _Writer(random.Random(seed))
    return [list(writer.conversation()) for _ in range(num_conversations)]


class _Writer:
    def __init__(self, source: random.Random):
        self._source = source
        self._prefixes = [self._ids(source.randrange(2 * BLOCK_SIZE, 9 * BLOCK_SIZE)) for _ in range(NUM_PREFIXES)]

    def conversation(self) -> Iterator[Turn]:
        source = self._source
        kind = source.choices(("alone", "shared", "turns", "chat"), (5, 3, 2, 1))[0]
        if kind == "turns":
            for _ in range(source.randrange(2, 5)):
                body = self._sampling() | {"max_tokens": source.choice((8, 24, 40)), "logit_bias": ASCII_ONLY}
                yield Turn("/v1/completions", body, self._text(source.randrange(5, 60)))
            return
        if kind == "chat":
            body = self._sampling() | {"max_tokens": source.choice((16, 48)), "logit_bias": ASCII_ONLY}
            if "logprobs" in body:
                body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
            yield Turn("/v1/chat/completions", body, self._text(source.randrange(1, 120)))
            return
        max_tokens = source.choice(MAX_TOKENS)
        if kind == "shared":
            prompt = source.choice(self._prefixes) + self._ids(source.randrange(1, 40))
        else:
            prompt = self._ids(self._length(CONTEXT - max_tokens))
        body = self._sampling() | {"max_tokens": max_tokens}
        if source.random() < 0.15:
            body["echo"] = True
        if source.random() < 0.2:
            body["min_tokens"] = source.randrange(max_tokens)
        has_stop = max_tokens > 8 and not body.keys() & {"echo", "min_tokens"} and source.random() < 0.4
        yield Turn("/v1/completions", body, prompt, has_stop)

    def _length(self, longest: int) -> int:
        """Of a prompt: any, one token, around the edges of blocks, near the limit."""
        source = self._source
        near_edge = BLOCK_SIZE * source.randrange(1, 10) + source.choice((-1, 0, 1))
        lengths = (source.randrange(1, 200), 1, near_edge, longest - source.randrange(3))
        return min(source.choices(lengths, (5, 1, 3, 2))[0], longest)

    def _sampling(self) -> dict[str, Any]:
        source = self._source
        body: dict[str, Any] = {"temperature": 0}
        if source.random() < 0.6:
            body = {"temperature": source.choice((0.3, 0.8, 1.0, 1.5)), "seed": source.getrandbits(62)}
        limits = {
            "top_k": source.randrange(2, 80),
            "top_p": source.choice((0.5, 0.9, 0.99)),
            "min_p": source.choice((0.01, 0.1)),
            "presence_penalty": source.choice((-0.5, 0.7)),
            "frequency_penalty": source.choice((0.2, 1.1)),
            "repetition_penalty": source.choice((0.8, 1.3)),
            "logit_bias": {str(source.randrange(VOCAB_SIZE)): source.choice((-5, 3)) for _ in range(3)},
            "ignore_eos": True,
            "priority": source.choice((-1, 5)),
            "stop_token_ids": [source.randrange(VOCAB_SIZE)],
            "logprobs": source.choice((0, 1, 3)),
        }
        body |= {name: value for name, value in limits.items() if source.random() < 0.25}
        if source.random() < 0.25:
            body["n"] = 4
        return body

    def _ids(self, length: int) -> list[int]:
        return [self._source.randrange(len(SPECIAL_TOKENS), VOCAB_SIZE) for _ in range(length)]

    def _text(self, length: int) -> str:
        return "".join(self._source.choice("abcdefghijklmnop qrstuvwxyz.,") for _ in range(length))


def find_stop(source: random.Random, text: str) -> str | None:
    """A piece of whole characters from the later part of a text; None where there is no such piece."""
    start = source.randrange(len(text) // 2, len(text)) if text else 0
    piece = text[start : start + source.randrange(1, 4)]
    return piece if piece and "\ufffd" not in piece else None
