"""The machine of the client, which is often the server's too: what a number is worthless without.

Read once at the end of a run by the runner; nothing here names a checkout or a user.
"""

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_PACKAGES = ("pdserve", "aiohttp", "h11", "numpy")


@dataclass(frozen=True, slots=True)
class Environment:
    """kernel is the operating system's name and release; num_cpus are those that this process may use."""

    platform: str
    kernel: str
    python: str
    cpu_model: str
    num_cpus: int
    memory_bytes: int
    load_average: float
    packages: dict[str, str]


def describe_environment() -> Environment:
    return Environment(
        platform=platform.platform(),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        cpu_model=_cpu_model(),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        load_average=os.getloadavg()[0],
        packages={name: version for name in _PACKAGES if (version := _version(name)) is not None},
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Hardware")))
    return next(names, platform.machine())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
