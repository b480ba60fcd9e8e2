"""What each token says on its own: its bytes, and the text of a run of tokens with where each begins.

A token need not be whole characters. Its bytes are told from how the vocabulary writes it:

    byte level      a character for each byte, "Ġ" for a space
    byte fallback   "<0xE2>" for one byte, everything else as text
    added token     its own text ("<|im_end|>")

Part of a TextModel; what it found out about an id it keeps.
"""

import codecs
import re
from collections.abc import Iterable

from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary.

    As GPT-2's encoder has them: printable Latin-1 stands for itself, the other bytes follow in order from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class Vocabulary:
    """Bytes of the tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._added_ids = frozenset(tokenizer.get_added_tokens_decoder())
        # Asked of the decoder itself: how it is configured differs more than what it does.
        self._alphabet = byte_alphabet() if self._decode("Ġ") == " " else {}
        self._has_byte_tokens = self._decode("<0x41>") == "A"
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for an id that the tokenizer does not know: a model may have more rows than its tokenizer ids."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find(token_id)
        return found

    def spell(self, token_ids: Iterable[int]) -> tuple[str, list[int]]:
        """The text of these tokens, special ones too, and for each the characters that are certain before it.

        Of tokens that share a character, all begin where it does.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces, offsets, num_characters = [], [], 0
        for token_id in token_ids:
            offsets.append(num_characters)
            pieces.append(decoder.decode(self.bytes_of(token_id)))
            num_characters += len(pieces[-1])
        pieces.append(decoder.decode(b"", final=True))
        return "".join(pieces), offsets

    def _find(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return token.encode()
        if self._alphabet and all(character in self._alphabet for character in token):
            return bytes(self._alphabet[character] for character in token)
        byte = BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        if byte is not None:
            return bytes.fromhex(byte[1])
        # A decoder may strip the first space of a text, so the token is looked at behind another: itself.
        alone, twice = self._decode(token), self._decode(token, token)
        return (twice.removeprefix(alone) if twice.startswith(alone) else alone).encode()

    def _decode(self, *tokens: str) -> str:
        decoder = self._tokenizer.decoder
        return "".join(tokens) if decoder is None else decoder.decode(list(tokens))
