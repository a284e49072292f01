"""What a container or a service manager leaves to this process: memory and CPU limits of cgroup v1 and v2, CPU affinity.

Reads small text files of the kernel, and answers "no limit" wherever they are missing (Windows, macOS).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
    swap_bytes: int = UNLIMITED_BYTES
    """Swap that is left to the tightest group."""
    source: str = "none"
    """Whose limit leaves the least: cgroup v1 or v2."""


def memory_limit(filesystem: Path = _FILESYSTEM, own_groups: Path = _OWN_GROUPS) -> MemoryLimit:
    """The tightest memory limit between this process's group and the root."""
    result = MemoryLimit()
    for folder, version in _groups(filesystem, own_groups, "memory"):
        # Above memory.high a group is slowed down until it hangs: as good as a limit.
        names, usage_name, cache_key = (
            (("memory.max", "memory.high"), "memory.current", "inactive_file")
            if version == 2
            else (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
        )
        # "max", and v1's largest page count, mean no limit.
        limit = min((read_number(folder / name) or UNLIMITED_BYTES for name in names), default=UNLIMITED_BYTES)
        usage = read_number(folder / usage_name) or 0
        result = replace(result, swap_bytes=min(result.swap_bytes, _swap_left(folder, version, limit, usage)))
        if limit >= UNLIMITED_BYTES:
            continue
        left = max(0, limit - max(0, usage - _statistic(folder / "memory.stat", cache_key)))
        if left < result.available_bytes:
            result = replace(result, available_bytes=left, source=f"cgroup v{version}")
        result = replace(result, total_bytes=min(result.total_bytes, limit))
    return result


def _swap_left(folder: Path, version: int, limit_bytes: int, usage_bytes: int) -> int:
    """v2 counts swap alone, v1 together with RAM."""
    if version == 2:
        allowed, used = read_number(folder / "memory.swap.max"), read_number(folder / "memory.swap.current") or 0
        return UNLIMITED_BYTES if allowed is None else max(0, allowed - used)
    both = read_number(folder / "memory.memsw.limit_in_bytes")
    if both is None or both >= UNLIMITED_BYTES or limit_bytes >= UNLIMITED_BYTES:
        return UNLIMITED_BYTES
    both_used = read_number(folder / "memory.memsw.usage_in_bytes") or 0
    return max(0, both - limit_bytes - max(0, both_used - usage_bytes))


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
