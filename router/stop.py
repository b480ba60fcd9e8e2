"""Stop strings: finds the first one in text that arrives in pieces, and holds back what may become one.

    released text | held: the longest end of the text that begins a stop string | not yet arrived

The match that ends first wins; of those that end at the same character, the longest. So the result
does not depend on how the text is cut into pieces. Owned by one Answer.
"""

from collections.abc import Sequence


class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton, fed a character at a time.

    length is the number of characters of the string that the text so far ends with.
    """

    __slots__ = ("_fallback", "length", "string")

    def __init__(self, string: str):
        self.string = string
        self.length = 0
        self._fallback = [0] * (len(string) + 1)  # [length] -> longest proper border of string[:length]
        border = 0
        for index in range(1, len(string)):
            while border and string[index] != string[border]:
                border = self._fallback[border]
            border += string[index] == string[border]
            self._fallback[index + 1] = border

    def feed(self, character: str) -> bool:
        """Whether the string is complete with this character."""
        length = self.length
        while length and self.string[length] != character:
            length = self._fallback[length]
        self.length = length + (self.string[length] == character)
        return self.length == len(self.string)


class StopMatcher:
    """Passes text on until one of `strings` (none of them empty) is complete.

    keep_match  whether the matched string itself is part of the text
    matched     the string that was found; nothing is passed on after it
    """

    def __init__(self, strings: Sequence[str], keep_match: bool = False):
        self._patterns = [_Pattern(string) for string in strings]
        self._keep_match = keep_match
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is now certain to be shown."""
        if self.matched is not None:
            return ""
        if not self._patterns:
            return text
        self._held += text
        start = len(self._held) - len(text)
        for index in range(start, len(self._held)):
            character = self._held[index]
            complete = [pattern.string for pattern in self._patterns if pattern.feed(character)]
            if complete:
                self.matched = max(complete, key=len)
                return self._take(index + 1 - (0 if self._keep_match else len(self.matched)))
        return self._take(len(self._held) - max(pattern.length for pattern in self._patterns))

    def flush(self) -> str:
        """What was held back, when no more text comes; empty after a match."""
        return "" if self.matched is not None else self._take(len(self._held))

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken
