"""How prompts are written for a server: as token ids, as text, or as the messages of a chat.

Each form has the size of its alphabet and `write`, which gives the prompt and its number of tokens: exact for ids and
wherever a tokenizer is known, else that of the words. Called by the schedule.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from pdserve.loadtest.client.target import Api
from pdserve.loadtest.workload.chat import Chat, Message
from pdserve.loadtest.workload.load import Load, PromptFormat, Vocabulary
from pdserve.loadtest.workload.parts import Part, Parts, join
from pdserve.loadtest.workload.tokenizer import Tokenizer
from pdserve.loadtest.workload.words import WORDS, single_token_words

Prompt = tuple[int, ...] | str | Chat

# A count is right at the first try where words are one token each; others get there in a few.
_MAX_CORRECTIONS = 8


class Form(Protocol):
    @property
    def size(self) -> int:
        """How many symbols there are to write with."""

    def write(self, parts: Parts, num_tokens: int | None) -> tuple[Prompt, int]:
        """The prompt and its tokens; the last part may be cut or lengthened to reach num_tokens exactly."""


def choose_form(load: Load, api: Api, tokenizer: Tokenizer | None) -> Form:
    if api is Api.CHAT:
        return _word_form(_write_chat, tokenizer)
    if load.prompt_format is PromptFormat.TEXT:
        return _word_form(_write_text, tokenizer)
    return IdForm(load.vocabulary)


@dataclass(frozen=True, slots=True)
class IdForm:
    vocabulary: Vocabulary

    @property
    def size(self) -> int:
        return self.vocabulary.size

    def write(self, parts: Parts, num_tokens: int | None) -> tuple[Prompt, int]:
        ids = join([part.symbols for part in parts]) + self.vocabulary.low
        return tuple(ids.tolist()), len(ids)


@dataclass(frozen=True, slots=True)
class WordForm:
    """overhead: tokens of a prompt that are none of its words, of a single message."""

    words: tuple[str, ...]
    assemble: Callable[[Parts, tuple[str, ...]], str | Chat]
    tokenizer: Tokenizer | None
    overhead: int = 0

    @property
    def size(self) -> int:
        return len(self.words)

    def write(self, parts: Parts, num_tokens: int | None) -> tuple[Prompt, int]:
        if self.tokenizer is None:
            return self.assemble(parts, self.words), sum(len(part.symbols) for part in parts)
        if num_tokens is None:
            prompt = self.assemble(parts, self.words)
            return prompt, self.tokenizer.count(prompt)
        missing = -self.overhead
        for _ in range(_MAX_CORRECTIONS):
            parts = _lengthened(parts, missing)
            prompt = self.assemble(parts, self.words)
            found = self.tokenizer.count(prompt)
            missing = num_tokens - found
            if missing == 0 or (missing < 0 and len(parts[-1].symbols) == 1):
                break
        return prompt, found


def _word_form(assemble: Callable[[Parts, tuple[str, ...]], str | Chat], tokenizer: Tokenizer | None) -> WordForm:
    if tokenizer is None:
        return WordForm(WORDS, assemble, None)
    words = single_token_words(tokenizer.count)
    one_word = assemble((Part("user", np.zeros(1, dtype=np.int64)),), words)
    return WordForm(words, assemble, tokenizer, tokenizer.count(one_word) - 1)


def _write_text(parts: Parts, words: tuple[str, ...]) -> str:
    return " ".join(words[symbol] for symbol in join([part.symbols for part in parts]).tolist())


def _write_chat(parts: Parts, words: tuple[str, ...]) -> Chat:
    return Chat(
        tuple(Message(part.role, " ".join(words[symbol] for symbol in part.symbols.tolist())) for part in parts)
    )


def _lengthened(parts: Parts, num_symbols: int) -> Parts:
    """The last part longer, or shorter, but never empty."""
    *before, last = parts
    return (*before, replace(last, symbols=np.resize(last.symbols, max(1, len(last.symbols) + num_symbols))))
