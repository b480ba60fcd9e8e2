"""What texts are made of: words, or where a tokenizer has no words, letters; one token each wherever that can be."""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Common words that are one token each, with the space before them, in the usual byte-pair vocabularies.
WORDS = tuple(
    (  # noqa: SIM905 - a list of one word a line would fill two screens
        "time year people way day man thing woman life child world school state family student group country problem "
        "hand part place case week company system program question work government number night point home water room "
        "mother area money story fact month lot right study book eye job word business issue side kind head house "
        "service friend father power hour game line end member law car city community name president team minute idea "
        "body information back parent face others level office door health person art war history party result change "
        "morning reason research girl guy moment air teacher force education"
    ).split()
)
# With fewer units than this texts would look alike.
_MIN_UNITS = 16
# A unit that is one token adds this many when it stands there as often.
_REPEATS = 4


@dataclass(frozen=True, slots=True)
class Alphabet:
    """units are joined by joiner; tokens_per_unit is what one adds to a text, on average."""

    units: tuple[str, ...]
    joiner: str = " "
    tokens_per_unit: float = 1.0

    def write(self, symbols: Sequence[int]) -> str:
        return self.joiner.join(self.units[symbol] for symbol in symbols)


ROUGH = Alphabet(WORDS)
# For tokenizers of bytes or characters.
_LETTERS = Alphabet(tuple(string.ascii_lowercase), joiner="")


def choose_alphabet(count_text: Callable[[str], int]) -> Alphabet:
    """Words that are one token each, else letters that are; where neither is, all words and how long they are."""
    for candidate in (ROUGH, _LETTERS):
        units = _single_token_units(count_text, candidate)
        if len(units) >= _MIN_UNITS:
            return Alphabet(units, candidate.joiner)
    added = count_text(" ".join(WORDS)) - count_text(WORDS[0])
    return Alphabet(WORDS, tokens_per_unit=max(1.0, added / (len(WORDS) - 1)))


def _single_token_units(count_text: Callable[[str], int], candidate: Alphabet) -> tuple[str, ...]:
    first, *others = candidate.units
    alone = count_text(first)
    # Usually all are, which one question tells.
    if count_text(candidate.joiner.join(candidate.units)) == alone + len(others):
        return candidate.units
    return tuple(
        unit
        for unit in candidate.units
        if count_text(candidate.joiner.join([first, *[unit] * _REPEATS])) == alone + _REPEATS
    )
