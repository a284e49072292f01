from __future__ import annotations

from pathlib import Path

import pytest

from localfast import cgroups
from localfast.cgroups import UNLIMITED_BYTES, MemoryLimit, cpu_quota, memory_limit, usable_cores

GIB = 2**30


def write(folder: Path, **files: str | int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")
    return folder


def test_cgroups_v2_walks_up_and_does_not_count_page_cache(tmp_path: Path) -> None:
    """ollama#15474 and others: page cache is not used memory."""
    own = write(tmp_path, own="0::/slice/service") / "own"
    root = write(tmp_path / "fs")
    write(root / "slice", memory__max=4 * GIB, memory__current=3 * GIB, memory__stat=f"anon 5\ninactive_file {GIB}")
    write(root / "slice/service", memory__max="max", memory__current=5)
    assert memory_limit(root, own) == MemoryLimit(4 * GIB, 2 * GIB, source="cgroup v2")


@pytest.mark.parametrize(
    ("files", "total", "left"),
    [
        ({"memory__max": "max", "memory__current": 5}, UNLIMITED_BYTES, UNLIMITED_BYTES),  # ollama#11497
        ({"memory__max": 4 * GIB, "memory__high": 3 * GIB, "memory__current": GIB}, 3 * GIB, 2 * GIB),
        ({"memory__max": "max", "memory__high": 3 * GIB, "memory__current": GIB}, 3 * GIB, 2 * GIB),
        ({"memory__max": GIB, "memory__current": 2 * GIB}, GIB, 0),
        ({"memory__max": GIB}, GIB, GIB),
        ({"memory__max": GIB, "memory__current": GIB // 4, "memory__stat": f"inactive_file {GIB}"}, GIB, GIB),
        ({"memory__max": "nonsense"}, UNLIMITED_BYTES, UNLIMITED_BYTES),
    ],
)
def test_cgroups_v2_limit_is_what_the_group_has_left(tmp_path: Path, files: dict[str, str | int], total: int, left: int) -> None:
    own = write(tmp_path, own="0::/docker/abc/../..") / "own"  # inside a container the mount's root holds the limit
    found = memory_limit(write(tmp_path / "fs", **files), own)
    assert (found.total_bytes, found.available_bytes) == (total, left)


def test_cgroups_v1_reads_its_own_names(tmp_path: Path) -> None:
    own = write(tmp_path, own="5:cpuset:/x\n4:memory,other:/box") / "own"
    root = tmp_path / "fs"
    write(root / "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=1)
    stat = f"inactive_file 7\ntotal_inactive_file {GIB // 2}"
    write(root / "memory/box", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB, memory__stat=stat)
    assert memory_limit(root, own) == MemoryLimit(2 * GIB, GIB + GIB // 2, source="cgroup v1")


def test_cgroups_swap_of_both_versions(tmp_path: Path) -> None:
    own = write(tmp_path, own="0::/a\n4:memory:/a") / "own"
    new, old = tmp_path / "new", tmp_path / "old"
    write(new / "a", memory__swap__max=2 * GIB, memory__swap__current=GIB)
    assert memory_limit(new, own).swap_bytes == GIB
    write(new / "a", memory__swap__max="max")
    assert memory_limit(new, own).swap_bytes == UNLIMITED_BYTES
    write(old / "memory/a", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    assert memory_limit(old, own).swap_bytes == UNLIMITED_BYTES
    write(old / "memory/a", memory__memsw__limit_in_bytes=5 * GIB, memory__memsw__usage_in_bytes=2 * GIB)
    assert memory_limit(old, own).swap_bytes == 2 * GIB


def test_cgroups_that_are_not_there_limit_nothing(tmp_path: Path) -> None:
    assert memory_limit(tmp_path, tmp_path / "none") == MemoryLimit() and cpu_quota(tmp_path, tmp_path / "none") is None


def test_cgroups_cpu_quota_of_both_versions(tmp_path: Path) -> None:
    own = write(tmp_path, own="0::/a\n1:cpu,cpuacct:/a") / "own"
    root = write(tmp_path / "fs", cpu__max="max 100000")
    write(root / "a", cpu__max="250000 100000")
    assert cpu_quota(root, own) == 2.5
    write(root / "cpu/a", cpu__cfs_quota_us=150000, cpu__cfs_period_us=100000)
    assert cpu_quota(root, own) == 1.5


def test_cgroups_cores_count_hyperthreads_once_and_keep_to_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(8):
        write(tmp_path / f"cpu{cpu}/topology", physical_package_id="0", core_id=cpu // 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: None)
    assert usable_cores(tmp_path) == 3
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: 0.5)
    assert usable_cores(tmp_path) == 1
