"""NVIDIA cards through the driver's library (NVML), or through nvidia-smi where the library cannot be loaded.

A question that the driver does not answer leaves that one fact unknown. A card split by MIG is told by its slices: the memory
of the whole card is never shown as usable.
"""

from __future__ import annotations

import contextlib
import csv
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from localfast.hardware.bandwidth import gpu_bandwidth
from localfast.hardware.facts import Device

MIB = 2**20
SMI_FIELDS = "pci.bus_id,name,memory.total,memory.free,driver_version,compute_cap,mig.mode.current,display_active"
_SHARED_MEMORY = ("GB10", "Orin", "Thor", "Xavier", "Tegra")
_MIG_ON = "split by MIG: only its slices can be used"


@dataclass(frozen=True, slots=True)
class Nvidia:
    """What the driver says; no devices and no notes without a driver."""

    devices: tuple[Device, ...] = ()
    driver_version: str = ""
    cuda_version: str = ""
    notes: tuple[str, ...] = ()

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Of the oldest card that tells."""
        return min((device.compute_capability for device in self.devices if any(device.compute_capability)), default=(0, 0))


def ask_nvidia(smi_timeout_s: float = 5.0) -> Nvidia:
    """NVML first. nvidia-smi is asked only when the library itself is missing."""
    try:
        import pynvml
    except ImportError as error:
        return _with_smi(f"nvidia-ml-py is not usable: {error}", smi_timeout_s)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        # No library or no driver is the normal case of a machine without NVIDIA: nothing to tell.
        if error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
            return Nvidia()
        missing = error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        return _with_smi("" if missing else f"the NVIDIA driver refused to answer: {error}", smi_timeout_s)
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        devices = tuple(device for handle in handles for device in _card(pynvml, handle))
        return Nvidia(
            devices=devices,
            driver_version=str(pynvml.nvmlSystemGetDriverVersion()),
            cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}",
            notes=tuple(f"{device.name}: the driver does not tell its memory" for device in devices if not device.total_bytes),
        )
    except pynvml.NVMLError as error:
        return Nvidia(notes=(f"the NVIDIA driver stopped answering: {error}",))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _with_smi(why: str, timeout_s: float) -> Nvidia:
    answer = ask_smi(timeout_s)
    return replace(answer, notes=(why, *answer.notes)) if why else answer


# --- the library --------------------------------------------------------------------------------------------------------------


def _card(pynvml: Any, handle: Any) -> list[Device]:
    """One card, or its slices."""

    def ask(question: str, *arguments: Any, of: Any = handle) -> Any:
        # AttributeError: a binding older than the question.
        with contextlib.suppress(pynvml.NVMLError, AttributeError):
            return getattr(pynvml, question)(of, *arguments)
        return None

    display, pci = ask("nvmlDeviceGetDisplayActive"), ask("nvmlDeviceGetPciInfo")
    memory = ask("nvmlDeviceGetMemoryInfo")
    name = _text(ask("nvmlDeviceGetName")) or "NVIDIA GPU"
    total = int(memory.total) if memory else 0
    card = Device(
        backend="NVIDIA",
        name=name,
        kind="gpu",
        pci_id=_text(pci.busId).lower()[-12:] if pci else "",  # the driver writes 8 digits of domain, the engine 4
        total_bytes=total,
        free_bytes=max(0, min(int(memory.free), total)) if memory else 0,
        display=None if display is None else bool(display),
        compute_capability=_pair(ask("nvmlDeviceGetCudaComputeCapability")),
        bandwidth_bytes_s=gpu_bandwidth(name, total) or _clocked_bandwidth(ask),
        unified=not total and any(word in name for word in _SHARED_MEMORY),
        source="the NVIDIA driver",
    )
    mode = ask("nvmlDeviceGetMigMode")
    if not mode or not mode[0]:
        return [card]
    slices = (ask("nvmlDeviceGetMigDeviceHandleByIndex", index) for index in range(ask("nvmlDeviceGetMaxMigDeviceCount") or 0))
    return [_slice(card, ask, part) for part in slices if part is not None] or [_split(card)]


def _slice(card: Device, ask: Callable[..., Any], part: Any) -> Device:
    """A MIG slice; its bandwidth is its share of the card's memory."""
    memory = ask("nvmlDeviceGetMemoryInfo", of=part)
    total = int(memory.total) if memory else 0
    share = min(1.0, total / card.total_bytes) if card.total_bytes else 0.0
    return replace(
        _split(card),
        name=_text(ask("nvmlDeviceGetName", of=part)) or f"{card.name} MIG",
        total_bytes=total,
        free_bytes=max(0, min(int(memory.free), total)) if memory else 0,
        bandwidth_bytes_s=card.bandwidth_bytes_s * share,
        warning="" if memory else _MIG_ON,
        source="the NVIDIA driver (MIG slice)",
    )


def _split(card: Device) -> Device:
    return replace(card, total_bytes=0, free_bytes=0, bandwidth_bytes_s=0.0, mig=True, warning=_MIG_ON)


def _clocked_bandwidth(ask: Callable[..., Any]) -> float:
    """Bytes/s from the memory clock in MHz and the bus width in bits; memory of every kind moves two words a clock."""
    clock_mhz, width_bits = ask("nvmlDeviceGetMaxClockInfo", 2), ask("nvmlDeviceGetMemoryBusWidth")  # 2: NVML_CLOCK_MEM
    return float(clock_mhz) * 1e6 * 2 * float(width_bits) / 8 if clock_mhz and width_bits else 0.0


def _pair(answer: Any) -> tuple[int, int]:
    return (int(answer[0]), int(answer[1])) if answer else (0, 0)


def _text(answer: Any) -> str:
    """Older bindings answer bytes."""
    return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else str(answer or "")


# --- nvidia-smi ---------------------------------------------------------------------------------------------------------------


def ask_smi(timeout_s: float = 5.0) -> Nvidia:
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")
    if program is None:
        return Nvidia()
    try:
        result = subprocess.run(
            [program, f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Nvidia(notes=(f"nvidia-smi did not answer: {error}",))
    text = result.stdout.decode("utf-8", "replace")
    if result.returncode:
        return Nvidia(notes=(f"nvidia-smi ended with status {result.returncode}: {' '.join(text.split())[:200]}",))
    return read_smi(text)


def read_smi(text: str) -> Nvidia:
    """Rows of SMI_FIELDS; sizes in MiB; whatever is in brackets ([N/A], [Not Supported]) is unknown."""
    devices, versions = [], []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(SMI_FIELDS.split(",")):
            continue
        bus, name, total, free, driver, capability, mig, display = (value.strip() for value in row)
        size = _number(total) * MIB
        major, _, minor = capability.partition(".")
        card = Device(
            backend="NVIDIA",
            name=name,
            kind="gpu",
            pci_id=bus.lower()[-12:],
            total_bytes=size,
            free_bytes=min(_number(free) * MIB, size),
            display={"enabled": True, "disabled": False}.get(display.lower()),
            compute_capability=(_number(major), _number(minor)) if _number(major) else (0, 0),
            bandwidth_bytes_s=gpu_bandwidth(name, size),
            unified=not size and any(word in name for word in _SHARED_MEMORY),
            source="nvidia-smi",
        )
        devices.append(_split(card) if mig.lower() == "enabled" else card)
        versions.append("" if driver.startswith("[") else driver)
    return Nvidia(devices=tuple(devices), driver_version=next(filter(None, versions), ""))


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
