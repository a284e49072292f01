"""Reads how busy the NVIDIA cards are, as often as it is asked; for measurements, not for plans."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GpuUse:
    """All NVIDIA cards at one moment. `process_bytes` is by pid, and empty where the driver tells of no single process."""

    busy_percent: float | None
    """Of the busiest card."""
    used_bytes: int
    process_bytes: dict[int, int]


GpuReading = Callable[[], GpuUse | None]


@contextlib.contextmanager
def nvidia_meter() -> Iterator[GpuReading]:
    """What reads the cards as often as it is called while the context is open; it gives None without a card or a driver."""
    pynvml = _started_nvml()
    try:
        yield lambda: pynvml and _gpu_use(pynvml)
    finally:
        if pynvml:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()


def _started_nvml() -> Any:
    try:
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            return pynvml
    except ImportError:
        pass
    return None


def _gpu_use(pynvml: Any) -> GpuUse | None:
    busy: list[float] = []
    used_bytes, process_bytes = 0, dict[int, int]()
    with contextlib.suppress(pynvml.NVMLError):
        for handle in [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]:
            with contextlib.suppress(pynvml.NVMLError):  # a card split by MIG does not tell
                busy.append(float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu))
            used_bytes += int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            own: dict[int, int] = {}  # a process that computes and draws stands in both lists
            for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
                with contextlib.suppress(pynvml.NVMLError):
                    own |= {process.pid: int(process.usedGpuMemory or 0) for process in ask(handle)}
            for pid, size_bytes in own.items():
                process_bytes[pid] = process_bytes.get(pid, 0) + size_bytes
    return GpuUse(max(busy, default=None), used_bytes, process_bytes) if used_bytes else None
