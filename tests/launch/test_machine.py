from pathlib import Path

import pytest

from pdserve.cluster.machine import (
    available_memory_bytes,
    cpu_quota,
    current_cores,
    default_kv_memory,
    split_cores,
    usable_cores,
)

GIB = 1 << 30


def make_tree(root: Path, files: dict[str, str]) -> dict[str, Path]:
    """A /proc and a /sys/fs/cgroup with these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"cgroup": root / "cgroup", "proc": root / "proc"}


@pytest.mark.parametrize(
    ("cores", "num_nodes", "expected"),
    [
        ((0, 1), 2, [(0,), (1,)]),
        ((0, 1), 1, [(0, 1)]),
        ((0, 1, 2), 2, [(0, 1), (2,)]),
        ((2, 3, 6, 7), 3, [(2, 3), (6,), (7,)]),
        ((0, 1), 3, [(0,), (1,), (0,)]),
        ((5,), 2, [(5,), (5,)]),
    ],
)
def test_cores_are_split_between_nodes(cores, num_nodes, expected):
    assert split_cores(cores, num_nodes) == expected


@pytest.mark.parametrize(
    ("quota", "expected"), [(None, (1, 3, 5)), (8.0, (1, 3, 5)), (2.9, (1, 3)), (1.0, (1,)), (0.2, (1,))]
)
def test_a_quota_caps_the_affinity_at_whole_cores_but_leaves_one(quota, expected):
    assert usable_cores({5, 1, 3}, quota) == expected


def test_the_tightest_v2_group_above_the_process_gives_the_quota(tmp_path):
    tree = make_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/app\n",
            "cgroup/pod/app/cpu.max": "max 100000\n",
            "cgroup/pod/cpu.max": "150000 100000\n",
            "cgroup/cpu.max": "400000 100000\n",
        },
    )
    assert cpu_quota(**tree) == 1.5


def test_a_v1_quota_is_found_where_the_controllers_share_a_mount(tmp_path):
    tree = make_tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/box\n3:memory:/box\n",
            "cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "200000\n",
            "cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            "cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cpu_quota(**tree) == 2.0


def test_in_a_container_whose_group_path_is_the_hosts_the_mounted_root_counts(tmp_path):
    files = {"proc/self/cgroup": "0::/../../host/path\n", "cgroup/cpu.max": "100000 100000\n"}
    assert cpu_quota(**make_tree(tmp_path, files)) == 1.0


def test_without_cgroups_there_is_no_quota(tmp_path):
    assert cpu_quota(tmp_path, tmp_path) is None


def test_a_memory_limit_counts_without_the_page_cache(tmp_path):
    tree = make_tree(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n",
            "proc/self/cgroup": "0::/app\n",
            "cgroup/app/memory.max": str(4 * GIB),
            "cgroup/app/memory.current": str(3 * GIB),
            "cgroup/app/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
            "cgroup/memory.max": "max",
            "cgroup/memory.current": str(7 * GIB),
        },
    )
    assert available_memory_bytes(**tree) == 3 * GIB


def test_a_v1_group_without_a_limit_leaves_what_the_machine_has(tmp_path):
    tree = make_tree(
        tmp_path,
        {
            "proc/meminfo": f"MemAvailable: {GIB // 1024} kB\n",
            "proc/self/cgroup": "4:memory:/\n",
            "cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "cgroup/memory/memory.usage_in_bytes": "1",
        },
    )
    assert available_memory_bytes(**tree) == GIB


def test_kv_memory_defaults_to_a_tenth_of_what_is_available_up_to_a_gibibyte():
    assert default_kv_memory(5 * GIB) == GIB // 2
    assert default_kv_memory(500 * GIB) == GIB


def test_this_machine_can_be_read():
    assert len(current_cores()) >= 1
    assert available_memory_bytes() > 0
