"""What the machine has, as plain data: devices, the engine build, the whole machine at one moment.

Holds no way to look at a machine, so that decisions and their tests need none.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gpu", "igpu", "cpu", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A processor with memory. `free_bytes` is the smallest number of the trusted sources, never more than `total_bytes`."""

    backend: str
    """Part of the engine that drives it (CUDA, Vulkan, ...); for a GPU that only the driver sees: its maker."""
    name: str
    kind: Kind
    pci_id: str = ""
    total_bytes: int = 0
    """0: unknown."""
    free_bytes: int = 0
    in_engine: bool = False
    display: bool | None = None
    """Whether a screen hangs on it; None: unknown."""
    context_counted: bool = False
    """Whether `free_bytes` was read after an engine process had taken its fixed share of the device."""
    source: str = ""
    """Who gave the numbers, in words."""
    bandwidth_bytes_s: float = 0.0
    """Of its memory; 0: unknown. A unified device without a number reads as fast as the RAM."""
    unified: bool = False
    """Its memory is the machine's RAM: count it once."""
    carve_out_bytes: int = 0
    """Part of `free_bytes` that firmware keeps for the GPU and that is not part of the machine's RAM."""
    compute_capability: tuple[int, int] = (0, 0)
    """Of an NVIDIA GPU."""
    mig: bool = False
    """A slice of a card that is split by MIG, or such a card whose slices the driver does not tell."""
    reserved_bytes: int = 0
    """Taken by a driver outside of its counters: not free, although `free_bytes` holds it."""
    trusted: bool = True
    """False: the free memory is a claim that nothing confirms, such as more than the card has."""
    warning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBuild:
    """The installed engine. `error` says why it does not start; `log` holds what its drivers complained about."""

    installed: bool
    version: str = ""
    backends: tuple[str, ...] = ()
    supports_gpu_offload: bool = False
    error: str = ""
    log: tuple[str, ...] = ()
    cpu_features: tuple[str, ...] = ()
    """What its CPU code was compiled for, such as AVX2; empty: it did not say."""
    path: str = ""
    """Folder it was loaded from; empty: the Python environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """This machine now. `engine` is None when it was not asked or did not answer; RAM is what this process may use."""

    devices: tuple[Device, ...] = ()
    ram_total_bytes: int = 0
    ram_available_bytes: int = 0
    physical_cores: int = 1
    driver_version: str = ""
    """NVIDIA's; empty without one."""
    cuda_version: str = ""
    """Newest CUDA that the driver runs, such as 12.8."""
    compute_capability: tuple[int, int] = (0, 0)
    """Of the oldest NVIDIA GPU."""
    engine: EngineBuild | None = None
    system: str = sys.platform
    notes: tuple[str, ...] = ()
    ram_bandwidth_bytes_s: float = 0.0
    """0: not measured."""
    wsl: bool = False
    swap_free_bytes: int = 0
    ram_source: str = ""
    """Who gave the RAM numbers, in words."""
    cpu_features: tuple[str, ...] = ()
    """Instructions of the processor that matter to the engine, such as AVX2; empty: unknown."""

    @property
    def engine_gpus(self) -> tuple[Device, ...]:
        """What layers can be offloaded to: discrete GPUs, or integrated ones when there are no others (llama.cpp's own rule)."""
        usable = [device for device in self.devices if device.in_engine and device.total_bytes > 0]
        discrete = tuple(device for device in usable if device.kind == "gpu")
        return discrete or tuple(device for device in usable if device.kind == "igpu")[:1]

    @property
    def unused_gpus(self) -> tuple[Device, ...]:
        """GPUs that the driver or the PCI bus shows and the engine does not."""
        return tuple(device for device in self.devices if device.kind in ("gpu", "igpu") and not device.in_engine)
