"""Files that hold secrets: nobody but their owner may read or write them.

Called by cluster/keys.py, the router's API keys and the commands that make or send keys.
"""

import os
import stat
from pathlib import Path

from pdserve.core.errors import ConfigError


def read_private(path: Path, flag: str) -> str:
    """The text of a secret file. Raises ConfigError, naming `flag`, when it cannot be read or others can use it."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{flag} {path}: cannot be read: {reason}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{flag} {path}: others than its owner may use it (mode {stat.S_IMODE(mode):04o}): chmod 600")
    return text


def read_lines(path: Path, flag: str) -> list[tuple[int, str]]:
    """The secrets of a file that holds one a line, each with its line's number; # begins a comment.

    Raises ConfigError as read_private does, and for a file without one.
    """
    lines = [(number, line.strip()) for number, line in enumerate(read_private(path, flag).splitlines(), 1)]
    secrets = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if not secrets:
        raise ConfigError(f"{flag} {path}: holds no key")
    return secrets


def write_private(path: Path, text: str) -> None:
    """Make a new file with mode 0600. Raises ConfigError when there is one already or none can be made."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} is there already: keys are not overwritten, remove it first") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
