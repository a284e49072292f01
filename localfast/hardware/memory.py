"""How much RAM this process may use: the smallest of the system's number, the containers' limits and Windows' commit limit."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import psutil

from localfast import cgroups
from localfast.hardware.windows import commit_available_bytes

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ram:
    total_bytes: int
    available_bytes: int
    swap_free_bytes: int
    source: str
    notes: tuple[str, ...] = ()


def usable_ram() -> Ram:
    memory = psutil.virtual_memory()
    return smallest_ram((memory.total, memory.available), cgroups.memory_limit(), commit_available_bytes(), free_swap())


def smallest_ram(system: tuple[int, int], limit: cgroups.MemoryLimit, commit_bytes: int | None, swap_free_bytes: int) -> Ram:
    """`system` is (total, available) of the whole machine."""
    total, available = system
    notes = []
    claims = [(available, "the system's available memory"), (limit.available_bytes, f"the container limit, {limit.source}")]
    if commit_bytes is not None:
        claims.append((commit_bytes, "Windows' commit limit"))
        if commit_bytes < available:
            notes.append(
                f"Windows lets programs allocate only {commit_bytes / 2**30:.1f} GiB more although {available / 2**30:.1f} GiB of"
                " RAM are free: a larger page file would let models use it"
            )
    if limit.total_bytes < total:
        notes.append(f"this process may use {limit.total_bytes / 2**30:.1f} of {total / 2**30:.1f} GiB of RAM (container limit)")
    smallest, source = min(claims, key=lambda claim: claim[0])
    return Ram(
        total_bytes=min(total, limit.total_bytes),
        available_bytes=max(0, min(smallest, total)),
        swap_free_bytes=min(swap_free_bytes, limit.swap_bytes),
        source=source,
        notes=tuple(notes),
    )


def free_swap(table: Path = _MEMINFO) -> int:
    """Of the whole machine."""
    if found := re.search(r"^SwapFree:\s*(\d+) kB", cgroups.read_text(table), re.MULTILINE):
        return int(found[1]) * 1024
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # counters of paging that nobody asks for here
            return int(psutil.swap_memory().free)
    except (OSError, RuntimeError, psutil.Error):
        return 0
