"""The text of one answer: tokens in, certain text out, until a token, a length or a stop string ends it.

Joins detokenizer and stop matcher, and counts the tokens that were generated. One instance a request,
fed by app with what the service behind the seam reports; streamed or not, the text is the same.
"""

from dataclasses import dataclass

from pdserve.router.detokenizer import Detokenizer
from pdserve.router.generation import Progress
from pdserve.router.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be shown now; `finish` is set on the last piece: "stop" or "length"."""

    text: str
    finish: str | None


class Answer:
    """min_tokens: stop strings are not looked for in the text of that many first tokens.

    keep_stop: what ended the answer, a stop string or a visible stop token, is part of the text.
    """

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher, min_tokens: int, keep_stop: bool):
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._keep_stop = keep_stop
        self.num_tokens = 0

    def push(self, progress: Progress) -> Piece:
        """The text that these tokens make certain. Tokens after a stop string are neither shown nor counted."""
        text = ""
        num_left = len(progress.token_ids)
        for token_id in progress.token_ids:
            self.num_tokens += 1
            num_left -= 1
            is_stop_token = progress.finish == "stop" and num_left == 0
            if self._keep_stop or not is_stop_token:
                text += self._match(self._detokenizer.push(token_id))
            if self._matcher.matched is not None:
                return Piece(text, "stop")
        if progress.finish is None:
            return Piece(text, None)
        text += self._match(self._detokenizer.finish()) + self._matcher.flush()
        return Piece(text, progress.finish if self._matcher.matched is None else "stop")

    def _match(self, text: str) -> str:
        return text if self.num_tokens <= self._min_tokens else self._matcher.push(text)
