"""What this machine lets a process use: cores and memory, with the limits of its cgroups.

Read by `pdserve up` to split cores between nodes, and by a node for its defaults.
"""

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")
DEFAULT_KV_MEMORY_BYTES = 1 << 30
# A v1 group without a limit shows the largest page-aligned int64.
NO_LIMIT_BYTES = 1 << 62


def usable_cores(affinity: Iterable[int], quota: float | None) -> tuple[int, ...]:
    """The cores of an affinity mask that a quota of so many CPUs can keep busy, at least one.

    A quota is rounded down: one thread more than it pays for gets all of them throttled.
    """
    cores = tuple(sorted(affinity))
    return cores if quota is None else cores[: max(1, int(quota))]


def split_cores(cores: tuple[int, ...], num_nodes: int) -> list[tuple[int, ...]]:
    """Neighbouring cores for each node, the first nodes getting the odd ones.

    With fewer cores than nodes, nodes share: node i runs on core i modulo their number.
    """
    if len(cores) < num_nodes:
        return [(cores[index % len(cores)],) for index in range(num_nodes)]
    each, odd = divmod(len(cores), num_nodes)
    ends = [each * index + min(index, odd) for index in range(num_nodes + 1)]
    return [cores[start:end] for start, end in itertools.pairwise(ends)]


def cpu_quota(cgroup: Path = CGROUP, proc: Path = PROC) -> float | None:
    """CPUs that the tightest cgroup above this process allows, None without a limit."""
    found: list[float] = []
    for group in _groups("cpu", cgroup, proc):
        both = _words(group / "cpu.max") or [*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us")]
        if len(both) == 2 and both[0] not in {"max", "-1"} and int(both[1]) > 0:
            found.append(int(both[0]) / int(both[1]))
    return min(found, default=None)


def available_memory_bytes(cgroup: Path = CGROUP, proc: Path = PROC) -> int:
    """Memory that could be taken now without swapping or meeting a cgroup's limit."""
    meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    for group in _groups("memory", cgroup, proc):
        limit = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
        used = _words(group / "memory.current") or _words(group / "memory.usage_in_bytes")
        if not limit or not used or limit[0] == "max" or int(limit[0]) >= NO_LIMIT_BYTES:
            continue
        stat = _words(group / "memory.stat")
        # The page cache counts as used but is given back under pressure.
        cache = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
        available = min(available, int(limit[0]) - int(used[0]) + cache)
    return max(available, 0)


def default_kv_memory(available_bytes: int) -> int:
    """Bytes for KV blocks when nobody asked: the smaller of 1 GiB and a tenth of what is available."""
    return min(DEFAULT_KV_MEMORY_BYTES, available_bytes // 10)


def current_cores() -> tuple[int, ...]:
    """The cores that this process may run on and keep busy."""
    return usable_cores(os.sched_getaffinity(0), cpu_quota())


def _groups(controller: str, cgroup: Path, proc: Path) -> Iterator[Path]:
    """This process's cgroup for a controller and every group above it, in both versions' hierarchies.

    In a container the path may be the host's, of which only the root is mounted: the walk ends there.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = [cgroup, cgroup / "unified"]
        elif controller in controllers.split(","):
            mounts = [cgroup / controllers, cgroup / controller]
        else:
            continue
        below = [part for part in path.split("/") if part not in {"", ".."}]
        for mount in mounts:
            for depth in range(len(below), -1, -1):
                yield mount.joinpath(*below[:depth])


def _words(path: Path) -> list[str]:
    """The words of a small file, none when it does not exist."""
    try:
        return path.read_text().split()
    except OSError:
        return []
