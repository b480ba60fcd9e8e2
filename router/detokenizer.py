"""Token ids to text, as they come: no character is split, repeated or changed once shown.

    window:  [ context: ids whose text is shown | new ids, whose text ends in an unfinished character ]

Decoding the context along with the new ids keeps what a decoder does at the start of a text (a
sentencepiece decoder strips the first space) from happening in its middle. An unfinished character
decodes to U+FFFD, so trailing U+FFFD are held until they change or the text ends; what is then left is
shown as it is, so a character cut by the last token ends in U+FFFD. Streamed or not, the text is the
concatenation of these pieces. It equals the decoding of all ids at once, with one exception: where
byte-fallback tokens mix whole characters and invalid bytes, a decoder that sees them all at once
gives up the whole characters too, and this one has shown them already.

Owned by one Answer, made by TextModel.
"""

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"

# A UTF-8 character has at most 4 bytes: an unfinished one is at most 3 tokens, which are one U+FFFD
# together (byte level) or one each (byte fallback).
MAX_UNFINISHED = 3

# New ids beyond this many hold invalid bytes, not a character; the window is cut so that it stays short.
MAX_NEW_IDS = 16


class Detokenizer:
    """Text of one sequence.

    hidden_ids  ids that never show (special tokens)
    context     ids before the first one pushed, when the text continues theirs
    """

    def __init__(self, tokenizer: Tokenizer, hidden_ids: Collection[int], context: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._window = [token_id for token_id in context if token_id not in hidden_ids]
        self._num_context = len(self._window)
        self._context_text = self._decode(self._window)
        self._num_shown = 0  # characters of the new ids' text that are shown already
        if self._context_text.endswith(REPLACEMENT):
            self._drop_context()

    def push(self, token_id: int) -> str:
        """The text that `token_id` makes certain; often none."""
        if token_id in self._hidden_ids:
            return ""
        self._window.append(token_id)
        text = self._new_text()
        num_held = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_UNFINISHED)
        num_ready = max(len(text) - num_held, self._num_shown)
        ready = text[self._num_shown : num_ready]
        self._num_shown = num_ready
        if text and num_held == 0:
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._context_text = self._decode(self._window)
            self._num_shown = 0
        elif len(self._window) - self._num_context > MAX_NEW_IDS:
            ready += self._cut_window(text)
        return ready

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        return self._new_text()[self._num_shown :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _new_text(self) -> str:
        text = self._decode(self._window)
        if not text.startswith(self._context_text):
            # Invalid bytes after the context made a byte-fallback decoder give up its characters.
            self._drop_context()
            text = self._decode(self._window)
        return text[len(self._context_text) :]

    def _drop_context(self) -> None:
        del self._window[: self._num_context]
        self._num_context = 0
        self._context_text = ""

    def _cut_window(self, text: str) -> str:
        """Forget ids that cannot change what comes, and return their text that was still held.

        text  of the new ids. A cut is right where both parts decode to what they are in the whole:
        inside an unfinished character two parts would give two U+FFFD.
        """
        for num_kept in range(1, MAX_UNFINISHED + 1):
            head, kept = self._decode(self._window[:-num_kept]), self._decode(self._window[-num_kept:])
            if (kept or not text) and head + kept == self._context_text + text:
                num_cut = len(text) - len(kept)
                released = text[self._num_shown : num_cut]
                self._num_shown = max(self._num_shown - num_cut, 0)
                self._window = self._window[-num_kept:]
                self._num_context = 0
                self._context_text = ""
                return released
        return ""
