"""What can be seen of a server from outside while it works: memory of its processes, GPUs, and what its /metrics page counts.

Best effort: what a server or the machine does not tell is left out. The counters are localfast's own; a peer has none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import socket
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from localfast import hardware
from localfast.bench.client import Target, get_page
from localfast.errors import LocalfastError

SAMPLE_S = 0.2
MIB = 2**20
_COUNTER = re.compile(r"^localfast_(\w+)_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Watch:
    """A context around one work; `numbers` is what was seen, once it is left."""

    def __init__(self, target: Target) -> None:
        self.numbers: dict[str, float] = {}
        self._target = target
        self._over = asyncio.Event()
        self._rss_bytes: list[int] = []
        self._gpus: list[tuple[hardware.GpuUse, int]] = []

    async def __aenter__(self) -> Watch:
        self._processes = await asyncio.to_thread(processes, self._target)
        self._before = await counters(self._target)
        self._sampling = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await self._sampling
        self.numbers = engine_numbers(self._before, await counters(self._target)) | self._memory()

    async def _sample(self) -> None:
        if not self._processes:
            return
        with hardware.nvidia_meter() as read_gpus:
            while True:
                # In a thread: the clock of the work must not wait for the operating system's tables.
                await asyncio.to_thread(self._read, read_gpus)
                if self._over.is_set():
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), SAMPLE_S)

    def _read(self, read_gpus: hardware.GpuReading) -> None:
        sizes = resident_bytes(self._processes)
        self._rss_bytes.append(sum(sizes.values()))
        if use := read_gpus():
            self._gpus.append((use, sum(size for pid, size in use.process_bytes.items() if pid in sizes)))

    def _memory(self) -> dict[str, float]:
        numbers = {"peak_rss_mib": max(self._rss_bytes) / MIB} if any(self._rss_bytes) else {}
        if not self._gpus:
            return numbers
        if own_bytes := max(own for _, own in self._gpus):
            numbers["peak_vram_mib"] = own_bytes / MIB
        else:
            numbers["cards_vram_mib"] = max(use.used_bytes for use, _ in self._gpus) / MIB
        busy = [use.busy_percent for use, _ in self._gpus if use.busy_percent is not None]
        return numbers | ({"gpu_percent": statistics.mean(busy)} if busy else {})


def find_process(target: Target) -> psutil.Process | None:
    """The process that listens at the server's address; None on another machine, or when the system does not tell."""
    try:
        if target.pid is not None:
            return psutil.Process(target.pid)
        parts = urlsplit(target.url)
        port = parts.port or 80
        wanted = {str(found[4][0]) for found in socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)}
        here = {address.address.partition("%")[0] for card in psutil.net_if_addrs().values() for address in card}
        wanted &= here | {"127.0.0.1", "::1"}
        ends = (port, *wanted, "0.0.0.0", "::")
        for one in psutil.net_connections("tcp") if wanted else ():
            if one.status == psutil.CONN_LISTEN and one.pid and all(part in ends for part in one.laddr):
                return psutil.Process(one.pid)
    except (OSError, psutil.Error):
        pass
    return None


def processes(target: Target) -> list[psutil.Process]:
    """The server's process and all below it."""
    server = find_process(target)
    with contextlib.suppress(psutil.Error):
        return [server, *server.children(recursive=True)] if server else []
    return []


def resident_bytes(running: Iterable[psutil.Process]) -> dict[int, int]:
    """By pid; of those that still run."""
    sizes = {}
    for process in running:
        with contextlib.suppress(psutil.Error):
            sizes[process.pid] = process.memory_info().rss
    return sizes


async def counters(target: Target) -> dict[str, float]:
    """Totals of the server's engines, all models together; empty when there is no such page."""
    try:
        page = await get_page(target, "/metrics")
    except LocalfastError:
        return {}
    totals: dict[str, float] = {}
    for name, value in _COUNTER.findall(page):
        totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def engine_numbers(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What an engine spent outside the model's computation, and how well its batches and guesses went."""
    names = ("decode_calls", "batched_tokens", "decode_seconds", "step_seconds", "drafted_tokens", "accepted_tokens")
    calls, tokens, decode_s, step_s, drafted, accepted = (after.get(name, 0.0) - before.get(name, 0.0) for name in names)
    if calls <= 0 or step_s <= 0:  # it does not count them, or began anew
        return {}
    numbers = {
        "overhead_us_per_step": (step_s - decode_s) / calls * 1e6,
        "overhead_percent": 100 * (step_s - decode_s) / step_s,
        "tokens_per_call": tokens / calls,
    }
    return numbers | ({"drafted_tokens": drafted, "accepted_tokens": accepted} if drafted > 0 else {})


def machine() -> str:
    """This machine in a line: system, processor, cores, memory, GPUs."""
    found = hardware.detect(timeout_s=5.0, ask_engine=False)
    cores = os.cpu_count() or 1
    gpus = ", ".join(device.name for device in found.devices if device.kind in ("gpu", "igpu")) or "no GPU"
    memory = f"{found.ram_total_bytes / 2**30:.1f} GiB RAM"
    return ", ".join([f"{platform.system()} {platform.machine()}", _processor(), f"{cores} cores", memory, gpus])


def _processor(table: Path = Path("/proc/cpuinfo")) -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*: (.+)$", table.read_text(encoding="utf-8", errors="replace"), re.MULTILINE):
            return found[1].strip()
    return platform.processor() or "unknown processor"
