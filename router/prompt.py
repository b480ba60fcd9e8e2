"""The prompt of a call as token ids and, where it is to be echoed, as text.

Tokenizing takes a worker thread, so that a long prompt does not hold the event loop. Owns the threads; app asks
for each call once, before it is submitted.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pdserve.router.api import Call, prompt_too_long
from pdserve.router.api_error import invalid
from pdserve.router.messages import Conversation
from pdserve.router.tokenize import TokenizeCall
from pdserve.router.tokenizer import TextModel

T = TypeVar("T")

NUM_THREADS = 2


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """text, offsets: of the prompt and of each token in it; empty where nothing is echoed."""

    token_ids: list[int]
    text: str = ""
    offsets: Sequence[int] = ()


class PromptEncoder:
    """max_model_len: in tokens; what cannot fit is not tokenized."""

    def __init__(self, text: TextModel, max_model_len: int):
        self._text = text
        self._max_model_len = max_model_len
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")

    def close(self) -> None:
        """Ends the threads; prompts not begun by then are dropped."""
        self._threads.shutdown(cancel_futures=True)

    async def encode(self, call: Call) -> EncodedPrompt:
        """At least one token; raises ApiError."""
        prompt = call.prompt
        if isinstance(prompt, Conversation):
            encoded = await self.in_thread(partial(self._encode_chat, prompt))
        elif isinstance(prompt, str):
            encoded = await self.in_thread(partial(self._encode_text, prompt, call.echo))
        elif call.echo:
            encoded = await self.in_thread(partial(self._spell, prompt))
        else:
            encoded = EncodedPrompt(prompt)
        if not encoded.token_ids:
            raise invalid(call.prompt_field, "it must not be empty; the tokenizer finds no token in it")
        return encoded

    async def tokenize(self, call: TokenizeCall) -> list[int]:
        """The ids alone, also none, and no more than fit; raises ApiError."""
        prompt = call.prompt
        if isinstance(prompt, Conversation):
            token_ids, field = (await self.in_thread(partial(self._encode_chat, prompt))).token_ids, "messages"
        else:
            self._check_length(prompt, "prompt")
            encode = self._text.encode if call.add_special_tokens else self._text.encode_rendered
            token_ids, field = await self.in_thread(partial(encode, prompt)), "prompt"
        if len(token_ids) > self._max_model_len:
            raise prompt_too_long(f"{len(token_ids)} tokens", self._max_model_len, field)
        return token_ids

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Also for what else takes long for a long prompt."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _encode_chat(self, conversation: Conversation) -> EncodedPrompt:
        rendered = self._text.render_chat(conversation.messages)
        self._check_length(rendered, "messages")
        return EncodedPrompt(self._text.encode_rendered(rendered))

    def _encode_text(self, prompt: str, echo: bool) -> EncodedPrompt:
        self._check_length(prompt, "prompt")
        if not echo:
            return EncodedPrompt(self._text.encode(prompt))
        token_ids, offsets = self._text.encode_with_offsets(prompt)
        return EncodedPrompt(token_ids, prompt, offsets)

    def _spell(self, token_ids: list[int]) -> EncodedPrompt:
        return EncodedPrompt(token_ids, *self._text.vocabulary.spell(token_ids))

    def _check_length(self, text: str, field: str) -> None:
        """A text that cannot fit is not worth a tokenizer's time; raises ApiError."""
        if len(text) > self._text.max_characters(self._max_model_len):
            raise prompt_too_long(f"{len(text)} characters", self._max_model_len, field)
