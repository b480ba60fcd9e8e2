"""Text to token ids and back, for one model folder, with `tokenizers` alone.

    completions  text       -> ids with the tokenizer's own rule for BOS (tokenizer.json's; like transformers, it
                               is not overruled by add_bos_token)
    chat         messages   -> template text -> ids as they stand: the template writes BOS itself, once

Special tokens that a client types into a prompt or a message become their ids, as in transformers.
Owns the tokenizer and the chat template; app calls the encoders in a worker thread.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pdserve.core.errors import ModelError
from pdserve.core.model_config import read_json_object
from pdserve.router.api_error import ApiError
from pdserve.router.chat_template import ChatTemplate, find_template
from pdserve.router.detokenizer import Detokenizer
from pdserve.router.vocabulary import Vocabulary

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Enough text before the first generated token for any decoder to see that it is not at a start.
NUM_CONTEXT_IDS = 4


class TextModel:
    """Encoders and decoder of one model; `template` is None when the model has no chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._special_ids = {
            token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._hidden_ids = frozenset(self._special_ids.values())
        self.vocabulary = Vocabulary(tokenizer)
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    @classmethod
    def load(cls, model_dir: Path) -> "TextModel":
        """Read tokenizer.json, tokenizer_config.json and the chat template. Raises ModelError."""
        file = model_dir / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{file} is missing: a tokenizer in that format is needed")
        try:
            tokenizer = Tokenizer.from_buffer(file.read_bytes())
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {file}: {error}") from error
        config = _read_if_there(model_dir / "tokenizer_config.json")
        source = find_template(model_dir, config)
        template = None if source is None else ChatTemplate(source, _special_tokens(model_dir, config))
        return cls(tokenizer, template)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def max_characters(self, num_tokens: int) -> int:
        """A text with more characters has more than `num_tokens` tokens, whatever it says."""
        return num_tokens * self._longest_token

    def special_id(self, text: str) -> int | None:
        """The id of the special token written exactly so, if there is one."""
        return self._special_ids.get(text)

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with what the tokenizer puts around a text (usually BOS)."""
        return self._encode(text, add_special_tokens=True)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of a raw prompt, and for each the character of the text at which its own begins.

        Tokens have no gaps between them, though tokenizers leave spaces out of the spans that they tell; and
        where several make up a character, their spans are all that character's.
        """
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=True)[0]
        offsets, end = [], 0
        for span_start, span_end in encoding.offsets:
            # An empty span is of what the tokenizer put around the text.
            offsets.append(end if span_start == span_end else min(span_start, end))
            end = max(end, span_end)
        return encoding.ids, offsets

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text of a conversation; raises ApiError 400, also when the model has no template."""
        if self._template is None:
            message = "this model has no chat template; use /v1/completions"
            raise ApiError(400, "no_chat_template", message, "messages")
        return self._template.render(messages)

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered conversation: nothing is added to it."""
        return self._encode(text, add_special_tokens=False)

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """A decoder of one answer; `prompt_ids` where the answer continues the prompt's text."""
        return Detokenizer(self._tokenizer, self._hidden_ids, prompt_ids[-NUM_CONTEXT_IDS:])

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The batch call, unlike encode(), works without the interpreter's lock (0.8 s for 800,000
        # characters, measured 2026-11): the event loop goes on meanwhile.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _read_if_there(file: Path) -> dict[str, Any]:
    return read_json_object(file) if file.exists() else {}


def _special_tokens(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Names of the special tokens to their text, from tokenizer_config.json or the older special_tokens_map.json."""
    entries = {**_read_if_there(model_dir / "special_tokens_map.json"), **config}
    result = {}
    for name in SPECIAL_TOKEN_NAMES:
        entry = entries.get(name)
        text = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(text, str):
            result[name] = text
    return result
