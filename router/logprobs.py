"""Log-probabilities as clients read them: OpenAI's two shapes, and vLLM's for prompts.

    completions   {"tokens", "token_logprobs", "top_logprobs", "text_offset"}, a list each
    chat          {"content": [{"token", "logprob", "bytes", "top_logprobs"}], "refusal": null}
    a prompt      [null, {"ID": {"logprob", "rank", "decoded_token"}}, ...]

Every token that usage counts is listed once, those that do not show too: the stop token that ended an answer
(as vLLM and OpenAI's completions do; who scores a prompt with max_tokens 1 counts on it) and the tokens of a
stop string. Tokens are turned into JSON as they come, so that a long answer is never encoded at a stretch.
Made by app, one of each shape a served model; fed by exchange.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.core.logprobs import TokenLogprob
from pdserve.router.vocabulary import Vocabulary

# What vLLM says in place of minus infinity, which JSON has no word for.
FLOOR = -9999.0


@dataclass(frozen=True, slots=True)
class ListedToken:
    """row: the token itself, then the likeliest, best first; empty for the first of a prompt.

    offset: where in the choice's text the token's own begins
    """

    token: int
    row: Sequence[TokenLogprob]
    offset: int


Run = tuple[bytes, ...]
"""Tokens in the columns of a shape: JSON items with commas between them."""


class Listing(Protocol):
    """One shape of an answer's log-probabilities."""

    def run(self, tokens: Sequence[ListedToken], num_top: int) -> Run:
        """These tokens encoded, each with the num_top likeliest."""

    def join(self, runs: Sequence[Run]) -> bytes:
        """The `logprobs` of a choice; null of no tokens."""


class TokenNames:
    """Each token as a JSON string; one that is not whole characters is "bytes:\\xe2\\x80", its bytes in hexadecimal."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._names: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        found = self._names.get(token)
        if found is None:
            found = self._names[token] = _encoded(_name(self._vocabulary.bytes_of(token), "bytes:"))
        return found


class CompletionListing:
    """top_logprobs has the likeliest and the token itself; of tokens of one name the likeliest."""

    def __init__(self, names: TokenNames):
        self._names = names

    def run(self, tokens: Sequence[ListedToken], num_top: int) -> Run:
        return (
            _items(self._names[listed.token] for listed in tokens),
            _items(_number(listed.row[0].logprob) if listed.row else "null" for listed in tokens),
            _items(self._top(listed.row, num_top) if listed.row else "null" for listed in tokens),
            _items(str(listed.offset) for listed in tokens),
        )

    def join(self, runs: Sequence[Run]) -> bytes:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        columns = [b'"%b":[%b]' % (name.encode(), _joined(runs, column)) for column, name in enumerate(names)]
        return b"{" + b",".join(columns) + b"}" if any(run[0] for run in runs) else b"null"

    def _top(self, row: Sequence[TokenLogprob], num_top: int) -> str:
        shown: dict[str, str] = {}
        for entry in (*row[1 : 1 + num_top], row[0]):
            shown.setdefault(self._names[entry.token], _number(entry.logprob))
        return "{" + ",".join(f"{name}:{value}" for name, value in shown.items()) + "}"


class PromptListing:
    """vLLM's `prompt_logprobs`, of either endpoint. A rank is given where it follows: of the likeliest."""

    def __init__(self, names: TokenNames):
        self._names = names

    def encode(self, tokens: Sequence[ListedToken], num_top: int) -> bytes:
        """Of a whole prompt."""
        return b"[%b]" % _items(self._ranked(listed, num_top) for listed in tokens)

    def _ranked(self, listed: ListedToken, num_top: int) -> str:
        if not listed.row:
            return "null"
        top = listed.row[1 : 1 + num_top]
        ranks = {entry.token: rank for rank, entry in enumerate(top, start=1)}
        entries = {entry.token: entry for entry in (listed.row[0], *top)}
        return "{" + ",".join(self._ranked_entry(entry, ranks.get(token)) for token, entry in entries.items()) + "}"

    def _ranked_entry(self, entry: TokenLogprob, rank: int | None) -> str:
        shown_rank = "" if rank is None else f'"rank":{rank},'
        value, name = _number(entry.logprob), self._names[entry.token]
        return f'"{entry.token}":{{"logprob":{value},{shown_rank}"decoded_token":{name}}}'


class ChatListing:
    """A token that is not whole characters is called "\\xe2\\x80", its bytes in hexadecimal; `bytes` are exact."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._openings: dict[int, str] = {}

    def run(self, tokens: Sequence[ListedToken], num_top: int) -> Run:
        return (_items(self._item(listed.row, num_top) for listed in tokens),)

    def join(self, runs: Sequence[Run]) -> bytes:
        content = _joined(runs, 0)
        return b'{"content":[%b],"refusal":null}' % content if content else b"null"

    def _item(self, row: Sequence[TokenLogprob], num_top: int) -> str:
        top = ",".join(self._entry(entry) + "}" for entry in row[1 : 1 + num_top])
        return f'{self._entry(row[0])},"top_logprobs":[{top}]}}'

    def _entry(self, entry: TokenLogprob) -> str:
        """All that an entry has in both places, not closed."""
        opening = self._openings.get(entry.token)
        if opening is None:
            text = self._vocabulary.bytes_of(entry.token)
            opening = f'{{"token":{_encoded(_name(text, ""))},"bytes":{_encoded(list(text))},"logprob":'
            self._openings[entry.token] = opening
        return opening + _number(entry.logprob)


def _name(text: bytes, escaped: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return escaped + "".join(f"\\x{byte:02x}" for byte in text)


def _number(value: float) -> str:
    # This way round, because no comparison with NaN holds.
    return repr(value if value > FLOOR else FLOOR)


def _encoded(value: str | list[int]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _items(items: Iterable[str]) -> bytes:
    return ",".join(items).encode()


def _joined(runs: Sequence[Run], column: int) -> bytes:
    return b",".join(run[column] for run in runs if run[column])
