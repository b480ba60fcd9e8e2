"""The C++ kernels as a loaded library: compiled for this very CPU at first use, then found in the user's cache.

    <cache>/pdserve/kernels/<digest of sources, compiler and CPU>.so

A finished file appears by one rename, so two processes may both compile and neither sees half of the other's.
Called by kernels/cpu.py.
"""

import ctypes
import hashlib
import logging
import os
import platform
import stat
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from pdserve.kernels.tiles import take_tiles

log = logging.getLogger(__name__)

COMPILER = "g++"
FLAGS = ("-O3", "-march=native", "-std=gnu++17", "-ffp-contract=fast", "-Wno-psabi", "-shared", "-fPIC")
# Of this process, not of the CPU: it may not use the tile registers.
NO_TILES = "-DNO_TILES"
COMPILE_S = 120
SOURCES = Path(__file__).parent / "cpp"


class LibraryError(Exception):
    """There is no library: what was missing or failed."""


@cache
def load_library() -> ctypes.CDLL:
    """Compile what this machine has not compiled yet, and load it. Its functions run without the GIL."""
    path = compile_into(cache_folder())
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"cannot load {path}: {error}") from None


def bind(library: ctypes.CDLL, name: str, arguments: list[Any]) -> Callable[..., None]:
    """A function of the library that returns nothing. arguments: their ctypes."""
    call = library[name]
    call.argtypes, call.restype = arguments, None
    return call


def compile_into(folder: Path) -> Path:
    """The library's file in `folder`, compiled if it is not there. Raises LibraryError."""
    sources = sorted(SOURCES.glob("*.cpp"))
    if not sources:
        raise LibraryError(f"no sources in {SOURCES}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = folder / f"{_digest()}.so"
        _check_owner(folder)
        if not target.exists():
            _compile(sources, target)
        _check_owner(target)
    except OSError as error:
        raise LibraryError(f"cannot use {error.filename or folder} (XDG_CACHE_HOME): {error.strerror}") from None
    return target


def cache_folder() -> Path:
    configured = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(configured) if os.path.isabs(configured) else Path(os.path.expanduser("~/.cache"))
    return root / "pdserve" / "kernels"


def _digest() -> str:
    """What the compiled file depends on: "native" means this CPU's features."""
    parts = [_run([COMPILER, "--version"]), " ".join(_flags()), platform.machine(), _cpu_features()]
    parts += [path.name + "\n" + path.read_text(encoding="utf-8") for path in sorted(SOURCES.iterdir())]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _flags() -> tuple[str, ...]:
    return FLAGS if take_tiles() else (*FLAGS, NO_TILES)


def _cpu_features() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((line for line in file if line.startswith(("flags", "Features"))), "")


def _compile(sources: list[Path], target: Path) -> None:
    log.info("compiling kernels for this CPU, once: some seconds")
    descriptor, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(descriptor)
    try:
        _run([COMPILER, *_flags(), *map(str, sources), "-o", name])
        os.chmod(name, 0o700)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMPILE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LibraryError(f"cannot run {command[0]}: {error}") from None
    if done.returncode:
        raise LibraryError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[:400]}")
    return done.stdout


def _check_owner(path: Path) -> None:
    """What others may write must not become code."""
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise LibraryError(f"{path} can be written by others than the user who runs this")
