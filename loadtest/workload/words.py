"""The words of which texts are made, and which of them a tokenizer takes for one token each."""

from collections.abc import Callable, Sequence

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
# A word that is one token adds this many when it stands there as often.
_REPEATS = 4
# With fewer words than this texts would look alike: then any words do, and their number is corrected.
_MIN_WORDS = 16


def single_token_words(count_text: Callable[[str], int], words: Sequence[str] = WORDS) -> tuple[str, ...]:
    """Those words that add one token each to a text; all of them where hardly any does."""
    overhead = count_text(words[0])
    if count_text(" ".join(words)) - overhead == len(words) - 1:
        return tuple(words)
    single = tuple(
        word for word in words if count_text(" ".join([words[0], *[word] * _REPEATS])) - overhead == _REPEATS
    )
    return single if len(single) >= _MIN_WORDS else tuple(words)
