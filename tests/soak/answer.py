"""What a request was answered, streamed or whole, in one shape; and in what two answers differ."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

# What two runs in fp32 may differ by.
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Listed:
    """A token as `logprobs` lists it; top: names and values, the likeliest first."""

    name: str
    logprob: float | None
    top: tuple[tuple[str, float], ...]
    offset: int | None


@dataclass(slots=True)
class Choice:
    text: str = ""
    finish: str | None = None
    listed: list[Listed] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] | None = None

    @classmethod
    def of(cls, body: dict[str, Any]) -> "Answer":
        """Of a whole answer."""
        answer = cls()
        answer.add(body)
        return answer

    def add(self, body: dict[str, Any]) -> None:
        """One event of a stream, or a whole answer."""
        for each in body["choices"]:
            choice = self.choices.setdefault(each["index"], Choice())
            if choice.finish is not None:
                raise ValueError(f"something comes after the end of choice {each['index']}: {each}")
            message = each.get("message") or each.get("delta")
            choice.text += each["text"] if message is None and "text" in each else (message or {}).get("content", "")
            choice.listed += _listed(each["logprobs"])
            choice.finish = each["finish_reason"]
        self.usage = body.get("usage") or self.usage

    def difference(self, expected: "Answer") -> str | None:
        """Where this, complete, is not what was expected."""
        if self.usage != expected.usage:
            return f"usage {self.usage}, alone {expected.usage}"
        if sorted(self.choices) != sorted(expected.choices):
            return f"choices {sorted(self.choices)}, alone {sorted(expected.choices)}"
        for index, choice in self.choices.items():
            if (difference := _difference(choice, expected.choices[index])) is not None:
                return f"choice {index}: {difference}"
        return None

    def departure(self, expected: "Answer") -> str | None:
        """Where this, cut at any moment, is no beginning of what was expected."""
        for index, choice in self.choices.items():
            whole = expected.choices.get(index, Choice())
            if not whole.text.startswith(choice.text):
                return f"choice {index}: cut at {choice.text!r}, alone {whole.text!r}"
            if choice.finish not in (None, whole.finish):
                return f"choice {index}: finish {choice.finish}, alone {whole.finish}"
            if (difference := _listed_difference(choice.listed, whole.listed[: len(choice.listed)])) is not None:
                return f"choice {index}: {difference}"
        return None


def _listed(logprobs: dict[str, Any] | None) -> Iterator[Listed]:
    """From either of OpenAI's two shapes."""
    if logprobs is None:
        return
    if "content" in logprobs:
        for each in logprobs["content"]:
            top = ((other["token"], other["logprob"]) for other in each["top_logprobs"])
            yield Listed(each["token"], each["logprob"], _ranked(top), None)
        return
    columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], logprobs["text_offset"])
    for name, logprob, top, offset in zip(*columns, strict=True):
        yield Listed(name, logprob, _ranked((top or {}).items()), offset)


def _ranked(top: Iterable[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(top, key=lambda entry: -entry[1]))


def _difference(found: Choice, expected: Choice) -> str | None:
    if found.text != expected.text:
        common = sum(1 for _ in _common(found.text, expected.text))
        return f"from character {common} on {found.text[common:][:60]!r}, alone {expected.text[common:][:60]!r}"
    if found.finish != expected.finish:
        return f"finish {found.finish}, alone {expected.finish}"
    return _listed_difference(found.listed, expected.listed)


def _common(a: str, b: str) -> Iterator[str]:
    for one, other in zip(a, b, strict=False):
        if one != other:
            return
        yield one


def _listed_difference(found: list[Listed], expected: list[Listed]) -> str | None:
    for number, (one, other) in enumerate(zip_longest(found, expected)):
        if one is None or other is None or not _is_close(one, other):
            return f"token {number} is listed as {one}, alone as {other}"
    return None


def _is_close(one: Listed, other: Listed) -> bool:
    if (one.name, one.offset, len(one.top)) != (other.name, other.offset, len(other.top)):
        return False
    if not _is_near(one.logprob, other.logprob):
        return False
    # Neighbours in rank that are as near as the tolerance may change places.
    return all(
        _is_near(value, wanted) and (name == wanted_name or _has_neighbour(other, rank))
        for rank, ((name, value), (wanted_name, wanted)) in enumerate(zip(one.top, other.top, strict=True))
    )


def _has_neighbour(listed: Listed, rank: int) -> bool:
    """Whether another token may take this rank; of the last one nobody has told who comes next."""
    values = [value for _, value in listed.top]
    near = [value for value in values if _is_near(value, values[rank])]
    return len(near) > 1 or rank == len(values) - 1


def _is_near(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and abs(a - b) <= TOLERANCE)
