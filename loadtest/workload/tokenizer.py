"""What knows how many tokens a server will count in a prompt: the model's own files, or the server itself."""

from typing import Protocol

from pdserve.loadtest.client.target import Api, Target
from pdserve.loadtest.workload.chat import Chat
from pdserve.loadtest.workload.load import Load, PromptFormat


class Tokenizer(Protocol):
    """name: where its counts come from, for the report."""

    name: str

    def count(self, prompt: str | Chat) -> int:
        """The prompt tokens of a completion, special ones included, or of a chat, its template included.

        Raises LoadtestError where it cannot say.
        """


def choose_tokenizer(load: Load, target: Target, model: str) -> Tokenizer | None:
    """The load's own, else the server's; None where prompts are ids, or where neither is there.

    Asks the server, so it blocks. Raises OptionError for a tokenizer that cannot be used.
    """
    if target.api is Api.COMPLETIONS and load.prompt_format is PromptFormat.IDS:
        return None
    if load.tokenizer is not None:
        # Not at the top: ids need neither.
        from pdserve.loadtest.workload.folder_tokenizer import FolderTokenizer

        return FolderTokenizer(load.tokenizer)
    from pdserve.loadtest.workload.server_tokenizer import find_server_tokenizer

    return find_server_tokenizer(target, model)
