"""The text of one sample: tokens in, certain text out, until a token, a length or a stop string ends it.

Joins detokenizer and stop matcher, counts the tokens that were generated, and says of each where it stands
in the text, with the text that it belongs to:

    shown text, its tokens told | held: text that may become a stop string, characters not whole | not yet here

One instance a sample, fed by exchange with what the service behind the seam reports; streamed or not, the text
and the tokens are the same.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.logprobs import TokenLogprob
from pdserve.router.detokenizer import Detokenizer
from pdserve.router.generation import Progress
from pdserve.router.logprobs import ListedToken
from pdserve.router.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be shown now; `finish` is set on the last piece: "stop" or "length".

    tokens  whose text is complete with this piece, where log-probabilities were asked for: each token once, in order
    """

    text: str
    finish: str | None
    tokens: Sequence[ListedToken] = ()


class Answer:
    """min_tokens: stop strings are not looked for in the text of that many first tokens.

    keep_stop   what ended the answer, a stop string or a visible stop token, is part of the text
    offset      where the answer begins in the choice's text; None: its tokens are not listed
    num_tokens  generated up to the end of the text: those of a stop string are counted, those after it are not
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        matcher: StopMatcher,
        min_tokens: int,
        keep_stop: bool,
        offset: int | None = None,
    ):
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._keep_stop = keep_stop
        self._tokens = None if offset is None else _TokenLine(offset)
        self.num_tokens = 0

    def push(self, progress: Progress) -> Piece:
        """The text that these tokens make certain. Tokens after a stop string are neither shown, counted nor listed."""
        pieces: list[str] = []
        rows = [()] * len(progress.token_ids) if self._tokens is None else progress.logprobs
        num_left = len(progress.token_ids)
        for token_id, row in zip(progress.token_ids, rows, strict=True):
            self.num_tokens += 1
            num_left -= 1
            is_stop_token = progress.finish == "stop" and num_left == 0
            text = self._detokenizer.push(token_id) if self._keep_stop or not is_stop_token else ""
            if self._tokens is not None:
                self._tokens.push(token_id, row, len(text))
            pieces.append(self._match(text))
            if self._matcher.matched is not None:
                return self._piece(pieces, "stop")
        if progress.finish is None:
            return self._piece(pieces, None)
        pieces += [self._match(self._detokenizer.finish()), self._matcher.flush()]
        return self._piece(pieces, progress.finish if self._matcher.matched is None else "stop")

    def _match(self, text: str) -> str:
        return text if self.num_tokens <= self._min_tokens else self._matcher.push(text)

    def _piece(self, pieces: list[str], finish: str | None) -> Piece:
        text = "".join(pieces)
        if self._tokens is None:
            return Piece(text, finish)
        return Piece(text, finish, self._tokens.told(len(text)) if finish is None else self._tokens.rest())


class _TokenLine:
    """Tokens in the order of their text, until all of it is shown."""

    def __init__(self, offset: int):
        self._tokens: deque[ListedToken] = deque()
        self._ends: deque[int] = deque()  # of the first tokens: characters up to the end of their text
        self._num_certain = offset
        self._num_shown = offset

    def push(self, token_id: int, row: Sequence[TokenLogprob], num_characters: int) -> None:
        """A token that made so many characters certain; what is not yet certain is told with what will be."""
        self._tokens.append(ListedToken(token_id, row, self._num_certain))
        self._num_certain += num_characters
        if num_characters:
            self._ends.extend([self._num_certain] * (len(self._tokens) - len(self._ends)))

    def told(self, num_characters: int) -> list[ListedToken]:
        """The tokens whose text is complete when so many characters more are shown."""
        self._num_shown += num_characters
        tokens = []
        while self._ends and self._ends[0] <= self._num_shown:
            self._ends.popleft()
            tokens.append(self._tokens.popleft())
        return tokens

    def rest(self) -> list[ListedToken]:
        """All that was not told yet."""
        return list(self._tokens)
