"""How fast memory is read: of a GPU by its name, of the machine by copying for a fraction of a second.

The copy runs in threads of this process (a foreign memmove releases the interpreter), and its result is kept in a small file.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import tempfile
import threading
import time
from pathlib import Path

import psutil

from localfast import cgroups
from localfast.hardware.processor import cpu_model
from localfast.hardware.spec_sheets import BANDWIDTH_GB_S, MODIFIERS

MIB = 2**20
_BUFFER_BYTES = 64 * MIB
"""Of each of the two buffers of a thread: more than its share of any processor's caches."""
_MAX_THREADS = 8
_FILE_NAME = "ram-bandwidth.json"


def gpu_bandwidth(name: str, total_bytes: int = 0) -> float:
    """Bytes/s by the specification of the card; 0 for a card that the table does not know for certain."""
    words = set(re.findall(r"[a-z0-9]+", re.sub(r"\((r|tm)\)", "", name.lower())))
    if total_bytes:
        words.add(f"{_size_gb(total_bytes)}gb")
    rows = [row for row in BANDWIDTH_GB_S if row <= words and not (words - row) & MODIFIERS]
    return BANDWIDTH_GB_S[max(rows, key=len)] * 1e9 if rows else 0.0


def _size_gb(total_bytes: int) -> int:
    """The size on the box: drivers keep up to a tenth, and boxes show whole, mostly even numbers."""
    size = total_bytes / 2**30
    return next((box for box in (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96) if box * 0.92 <= size <= box * 1.02), 0)


def cached_ram_bandwidth(folder: Path) -> float:
    """Bytes/s of this machine's RAM: the number in `folder` if it was measured on this processor, else measured now and kept."""
    path = folder / _FILE_NAME
    machine = f"{cpu_model()}, {round(psutil.virtual_memory().total / 2**30)} GiB, {cgroups.usable_cores()} cores"
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        known = json.loads(path.read_text(encoding="utf-8")).get(machine)
        if isinstance(known, int | float) and known > 0:
            return float(known)
    measured = measured_ram_bandwidth()
    if measured > 0:
        with contextlib.suppress(OSError):
            _write(path, json.dumps({machine: measured}))
    return measured


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def measured_ram_bandwidth(duration_s: float = 0.2) -> float:
    """Bytes/s read and written by as many copies at once as there are cores; 0 where there is no memory to measure with."""
    spare = min(psutil.virtual_memory().available, cgroups.memory_limit().available_bytes) // 4
    threads = min(cgroups.usable_cores(), _MAX_THREADS, spare // (2 * _BUFFER_BYTES))
    if threads < 1:
        return 0.0
    rates: list[float] = []
    start = threading.Barrier(threads)
    workers = [
        threading.Thread(target=_copy, args=(start, duration_s, rates), daemon=True, name="bandwidth") for _ in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return float(round(sum(rates))) if len(rates) == threads else 0.0


def _copy(start: threading.Barrier, duration_s: float, rates: list[float]) -> None:
    try:
        source, target = bytearray(_BUFFER_BYTES), bytearray(_BUFFER_BYTES)
        views = [(ctypes.c_char * _BUFFER_BYTES).from_buffer(buffer) for buffer in (source, target)]
        for view in views:
            ctypes.memset(view, 1, _BUFFER_BYTES)  # pages that were never written are all the same page
    except MemoryError:
        start.abort()
        return
    with contextlib.suppress(threading.BrokenBarrierError):
        start.wait()
        begin, begin_busy, copied_bytes = time.perf_counter(), time.thread_time(), 0
        while (elapsed_s := time.perf_counter() - begin) < duration_s:
            ctypes.memmove(views[1], views[0], _BUFFER_BYTES)
            copied_bytes += _BUFFER_BYTES
        # While others have the processor nothing is copied: that time says nothing about the memory.
        rates.append(2 * copied_bytes / (time.thread_time() - begin_busy or elapsed_s))
