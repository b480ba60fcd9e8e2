"""The server's tokenizer out of the model's own folder, with `tokenizers` and Jinja, without the model.

Counts as OpenAI-style servers do: a completion's text with the special tokens that the tokenizer puts around it, a
chat as its template writes it. A template is the model author's text: it runs in Jinja's sandbox and sees text only.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Encoder

from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.workload.chat import Chat

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# All that a small program over text raises by itself.
_TEMPLATE_FAILURES = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class FolderTokenizer:
    """folder: with tokenizer.json, and for chats a template. Raises OptionError where it cannot be used."""

    def __init__(self, folder: str):
        self.name = f"the tokenizer in {folder}"
        self._where = f"--tokenizer {folder}"
        path = Path(folder)
        try:
            self._encoder = Encoder.from_buffer((path / "tokenizer.json").read_bytes())
        except OSError as error:
            raise OptionError(f"{self._where}: tokenizer.json cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise OptionError(f"{self._where}: tokenizer.json is no tokenizer: {error}") from None
        self._encoder.no_truncation()
        self._encoder.no_padding()
        config = self._read_object(path / "tokenizer_config.json")
        self._variables = {
            name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None
        }
        self._template = self._read_template(path, config)

    def count(self, prompt: str | Chat) -> int:
        if isinstance(prompt, str):
            return len(self._encoder.encode(prompt).ids)
        # The template writes its special tokens itself.
        return len(self._encoder.encode(self._render(prompt), add_special_tokens=False).ids)

    def _render(self, chat: Chat) -> str:
        if self._template is None:
            raise OptionError(f"{self._where}: has no chat template, which --api chat needs")
        try:
            return self._template.render(
                **self._variables, messages=chat.to_json(), tools=None, documents=None, add_generation_prompt=True
            )
        except _TEMPLATE_FAILURES as error:
            raise OptionError(f"{self._where}: its chat template refuses a chat: {error}") from None

    def _read_template(self, path: Path, config: dict[str, Any]) -> Template | None:
        """chat_template.jinja, else the default one of tokenizer_config.json."""
        source = config.get("chat_template")
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        try:
            if (path / "chat_template.jinja").exists():
                source = (path / "chat_template.jinja").read_text(encoding="utf-8")
            return _environment().from_string(source) if isinstance(source, str) else None
        except (OSError, UnicodeDecodeError, TemplateError, RecursionError) as error:
            raise OptionError(f"{self._where}: its chat template cannot be used: {error}") from None

    def _read_object(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads(path.read_bytes()) if path.exists() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise OptionError(f"{self._where}: {path.name} cannot be read: {error}") from None
        if not isinstance(content, dict):
            raise OptionError(f"{self._where}: {path.name} is not an object")
        return content


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives a template, as far as plain chats use it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _token_text(entry: Any) -> str | None:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None
