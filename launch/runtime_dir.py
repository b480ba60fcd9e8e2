"""A private folder for unix sockets that is gone after use, even when its owner was killed.

The owner holds a lock on a file in it; whoever makes the next folder removes those that nobody locks.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.cluster.readers import MAX_IPC_PATH_BYTES
from pdserve.core.errors import ConfigError

PREFIX = "pdserve-"
LONGEST_NAME = "decode-00.ipc"


@contextmanager
def runtime_dir(parent: Path | None = None) -> Iterator[Path]:
    """A new folder that only this user can enter (mode 0700), short enough for socket paths."""
    parent = parent or _short_parent()
    remove_abandoned(parent)
    try:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise ConfigError(f"cannot make a folder for sockets in {parent} (TMPDIR): {error.strerror}") from None
    # Locked before it gets its name, so that nobody ever sees an unlocked "lock".
    lock = os.open(path / "lock.new", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(path / "lock.new", path / "lock")
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Remove this user's folders whose owners died without doing it."""
    for lock_path in parent.glob(f"{PREFIX}*/lock"):
        try:
            if lock_path.parent.stat().st_uid != os.getuid():
                continue
            lock = os.open(lock_path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_path.parent, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _short_parent() -> Path:
    """The user's temporary folder, or /tmp when its path is too long for a unix socket."""
    parent = Path(tempfile.gettempdir())
    longest = parent / (PREFIX + "x" * 8) / LONGEST_NAME
    return parent if len(os.fsencode(longest)) <= MAX_IPC_PATH_BYTES else Path("/tmp")
