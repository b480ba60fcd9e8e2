"""Prompts that share no prefix by accident, with exact lengths.

Every prompt starts with its own short code, drawn without replacement, so a prefix cache finds
nothing between two prompts of a run beyond code length - 1 tokens (none as long as there are fewer
prompts than ids). Called by the schedule.
"""

import numpy as np

from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.workload.load import Vocabulary

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


def draw_token_prompts(rng: np.random.Generator, lengths: np.ndarray, vocabulary: Vocabulary) -> list[tuple[int, ...]]:
    """Uniform token ids of the vocabulary, one prompt for each of lengths [num_prompts]."""
    rows = _distinct_rows(rng, lengths, vocabulary.size, "--vocab")
    return [tuple((row + vocabulary.low).tolist()) for row in rows]


def draw_text_prompts(rng: np.random.Generator, lengths: np.ndarray) -> list[str]:
    """Random words, one prompt for each of lengths [num_prompts].

    A word is about one token; the exact count is the server's, which adds its chat template.
    """
    rows = _distinct_rows(rng, lengths, len(WORDS), "the chat word list")
    return [" ".join(WORDS[i] for i in row) for row in rows]


def _distinct_rows(rng: np.random.Generator, lengths: np.ndarray, size: int, source: str) -> list[np.ndarray]:
    """Rows of numbers below size whose first `code_length` numbers differ between any two rows.

    Raises OptionError where the shortest row is too short for that.
    """
    num_rows = len(lengths)
    code_length = 1
    while size**code_length < num_rows:
        code_length += 1
        if code_length > int(lengths.min()) or size == 1:
            raise OptionError(
                f"--num-requests {num_rows}: cannot all differ with --input-tokens from {int(lengths.min())} "
                f"and {size} ids in {source}; raise --input-tokens or widen --vocab"
            )
    codes = rng.choice(size**code_length, size=num_rows, replace=False)
    rows = []
    for code, length in zip(codes, lengths, strict=True):
        row = rng.integers(size, size=int(length))
        for position in range(code_length):
            code, row[position] = divmod(int(code), size)
        rows.append(row)
    return rows
