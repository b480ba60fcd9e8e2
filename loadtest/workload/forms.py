"""How prompts are written for a server: as token ids, as text, or as the messages of a chat.

Each form has the size of its alphabet and `write`, which gives the prompt and its number of tokens: exact for ids and
wherever a tokenizer is known, else that of the words. Called by the schedule.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from pdserve.loadtest.client.target import Api
from pdserve.loadtest.workload.alphabet import ROUGH, Alphabet, choose_alphabet
from pdserve.loadtest.workload.chat import Chat, Message
from pdserve.loadtest.workload.load import Load, PromptFormat, Vocabulary
from pdserve.loadtest.workload.parts import Part, Parts, join
from pdserve.loadtest.workload.tokenizer import Tokenizer

Prompt = tuple[int, ...] | str | Chat

# A count is right at the first try where units are one token each; others come near in a few.
_MAX_CORRECTIONS = 8
_MAX_SHARED_IDS = 1 << 20


class Form(Protocol):
    @property
    def size(self) -> int:
        """How many symbols there are to write with."""

    def write(self, parts: Parts, num_tokens: int | None) -> tuple[Prompt, int]:
        """The prompt and its tokens; the last part may be cut or lengthened to reach num_tokens exactly."""


def choose_form(load: Load, api: Api, tokenizer: Tokenizer | None) -> Form:
    if api is Api.CHAT:
        return _text_form(_write_chat, tokenizer)
    if load.prompt_format is PromptFormat.TEXT:
        return _text_form(_write_text, tokenizer)
    return IdForm(load.vocabulary)


class IdForm:
    """Ids are exact as they are."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        # A whole trace is 100 million tokens, so prompts share the numbers they consist of: 8 bytes a token, not 36.
        is_small = vocabulary.size <= _MAX_SHARED_IDS
        self._ids = np.arange(vocabulary.low, vocabulary.end).astype(object) if is_small else None

    @property
    def size(self) -> int:
        return self._vocabulary.size

    def write(self, parts: Parts, num_tokens: int | None) -> tuple[Prompt, int]:
        symbols = join([part.symbols for part in parts])
        ids = symbols + self._vocabulary.low if self._ids is None else self._ids[symbols]
        return tuple(ids.tolist()), len(ids)


@dataclass(frozen=True, slots=True)
class TextForm:
    """overhead: tokens of a prompt of one message that are none of its units."""

    alphabet: Alphabet
    assemble: Callable[[Parts, Alphabet], str | Chat]
    tokenizer: Tokenizer | None
    overhead: int = 0

    @property
    def size(self) -> int:
        return len(self.alphabet.units)

    def write(self, parts: Parts, num_tokens: int | None) -> tuple[Prompt, int]:
        if self.tokenizer is None:
            return self.assemble(parts, self.alphabet), sum(len(part.symbols) for part in parts)
        if num_tokens is None:
            prompt = self.assemble(parts, self.alphabet)
            return prompt, self.tokenizer.count(prompt)
        parts = _lengthened(parts, -self.overhead)
        for _ in range(_MAX_CORRECTIONS):
            prompt = self.assemble(parts, self.alphabet)
            found = self.tokenizer.count(prompt)
            longer = _lengthened(parts, int((num_tokens - found) / self.alphabet.tokens_per_unit))
            if len(longer[-1].symbols) == len(parts[-1].symbols):
                break
            parts = longer
        return prompt, found


def _text_form(assemble: Callable[[Parts, Alphabet], str | Chat], tokenizer: Tokenizer | None) -> TextForm:
    if tokenizer is None:
        return TextForm(ROUGH, assemble, None)
    alphabet = choose_alphabet(tokenizer.count)
    one_unit = assemble((Part("user", np.zeros(1, dtype=np.int64)),), alphabet)
    return TextForm(alphabet, assemble, tokenizer, tokenizer.count(one_unit) - 1)


def _write_text(parts: Parts, alphabet: Alphabet) -> str:
    return alphabet.write(join([part.symbols for part in parts]).tolist())


def _write_chat(parts: Parts, alphabet: Alphabet) -> Chat:
    return Chat(tuple(Message(part.role, alphabet.write(part.symbols.tolist())) for part in parts))


def _lengthened(parts: Parts, num_symbols: int) -> Parts:
    """The last part longer, or shorter, but never empty."""
    *before, last = parts
    return (*before, replace(last, symbols=np.resize(last.symbols, max(1, len(last.symbols) + num_symbols))))
