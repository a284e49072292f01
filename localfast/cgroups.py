"""What a container or a service manager leaves to this process: memory and CPU limits of cgroup v1 and v2, CPU affinity.

Reads small text files of the kernel, and answers "no limit" wherever they are missing (Windows, macOS).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

UNLIMITED_BYTES = 2**62
_FILESYSTEM = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes that the tightest group allows, and what is left of them; page cache that can be dropped counts as left."""

    total_bytes: int = UNLIMITED_BYTES
    available_bytes: int = UNLIMITED_BYTES


def memory_limit(filesystem: Path = _FILESYSTEM, own_groups: Path = _OWN_GROUPS) -> MemoryLimit:
    """The tightest memory limit between this process's group and the root."""
    total = available = UNLIMITED_BYTES
    for folder, version in _groups(filesystem, own_groups, "memory"):
        limit_name, usage_name, cache_key = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        limit, usage = read_number(folder / limit_name), read_number(folder / usage_name)
        if limit is None or limit >= UNLIMITED_BYTES:  # "max", and v1's largest page count, mean no limit
            continue
        cache = _statistic(folder / "memory.stat", cache_key)
        total = min(total, limit)
        available = min(available, max(0, limit - max(0, (usage or 0) - cache)))
    return MemoryLimit(total, available)


def cpu_quota(filesystem: Path = _FILESYSTEM, own_groups: Path = _OWN_GROUPS) -> float | None:
    """CPUs' worth of time that the tightest group allows, such as 1.5; None without a limit."""
    quotas = []
    for folder, version in _groups(filesystem, own_groups, "cpu"):
        if version == 2:
            words = read_text(folder / "cpu.max").split()
        else:
            words = [read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")]
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def usable_cores(cpus: Path = _CPUS) -> int:
    """Physical cores this process may use, at least 1: affinity and CPU quota are respected, hyper-threads count once."""
    logical = psutil.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        cores = len({_core(cpus, cpu) for cpu in allowed})
    else:
        cores = min(psutil.cpu_count(logical=False) or logical, logical)
    quota = cpu_quota()
    return max(1, min(cores, int(quota)) if quota else cores)


def _core(cpus: Path, cpu: int) -> tuple[str, str]:
    """Package and core of a logical CPU; where the kernel does not tell, every logical CPU is a core."""
    topology = cpus / f"cpu{cpu}" / "topology"
    return read_text(topology / "physical_package_id"), read_text(topology / "core_id") or f"cpu{cpu}"


def _groups(filesystem: Path, own_groups: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Folders from this process's own group up to the root, with the cgroup version.

    Inside a container the path that the kernel names often does not exist under the mount; the mount's root then holds the limit.
    """
    for line in read_text(own_groups).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            mount, version = filesystem, 2
        elif controller in controllers.split(","):
            mount, version = filesystem / controller, 1
        else:
            continue
        group = mount / path.lstrip("/")
        while group != mount and mount in group.parents:
            yield group, version
            group = group.parent
        yield mount, version


def _statistic(path: Path, key: str) -> int:
    for line in read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdecimal():
            return int(value)
    return 0


def read_text(path: Path) -> str:
    """Content of a small kernel file without surrounding space; empty when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """The file's number; None when there is none (missing file, `max`)."""
    text = read_text(path)
    return int(text) if text.isdecimal() else None
