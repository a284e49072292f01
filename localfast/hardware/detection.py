"""Looks at the machine: asks every source, each for a bounded time, and makes one description of the answers.

Best effort: a probe that fails or takes too long becomes a note in words, never an error and never a stop. Imports neither the
engine nor CUDA.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from localfast import cgroups
from localfast.hardware.bandwidth import gpu_bandwidth
from localfast.hardware.engine_probe import ask_engine_devices
from localfast.hardware.facts import Device, Hardware
from localfast.hardware.inventory import read_inventory
from localfast.hardware.linux import PCI_SOURCE, driverless_nvidia, is_wsl, kernel_gpus
from localfast.hardware.matching import finish, join, merge
from localfast.hardware.memory import Ram, usable_ram
from localfast.hardware.nvidia import Nvidia, ask_nvidia
from localfast.hardware.processor import cpu_features
from localfast.hardware.windows import windows_gpus

_Answer = TypeVar("_Answer")
_DRIVER_TIMEOUT_S = 5.0
_NOTHING_KNOWN: tuple[str, ...] = ()
_NO_DEVICES: tuple[Device, ...] = ()
_NO_RAM = Ram(total_bytes=0, available_bytes=0, swap_free_bytes=0, source="nobody")
_IDLE = "'localfast engine install' gets a build for it"


def detect(timeout_s: float = 20.0, ask_engine: bool = True, *, inventory: str = "", engine_path: str = "") -> Hardware:
    """Look at the machine. Asking the engine costs up to a second, each probe at most `timeout_s`.

    A JSON file `inventory` replaces the machine: nothing is asked then. Raises InvalidSetting for a file that describes none.
    """
    if inventory:
        return read_inventory(Path(inventory))
    driver_timeout_s = min(timeout_s, _DRIVER_TIMEOUT_S)
    nvidia, notes = _bounded("the NVIDIA driver", lambda: ask_nvidia(driver_timeout_s), 2 * driver_timeout_s, Nvidia())
    notes = [*nvidia.notes, *notes]
    devices = nvidia.devices
    probes = (("the kernel's list of GPUs", lambda: kernel_gpus()), ("Windows' list of GPUs", lambda: windows_gpus()))
    for source, probe in probes:
        found, failed = _bounded(source, probe, driver_timeout_s, _NO_DEVICES)
        devices, notes = join(devices, found), notes + failed
    if not any(device.backend == "NVIDIA" for device in devices):
        found, failed = _bounded(PCI_SOURCE, lambda: driverless_nvidia(), driver_timeout_s, _NO_DEVICES)
        devices, notes = devices + found, notes + failed
    engine = None
    if ask_engine:
        engine, engine_devices, engine_notes = ask_engine_devices(timeout_s, engine_path)
        devices, notes = merge(devices, engine_devices), notes + engine_notes
    ram, failed = _bounded("the memory of this machine", usable_ram, driver_timeout_s, _NO_RAM)
    features, unknown = _bounded("the processor", lambda: cpu_features(), driver_timeout_s, _NOTHING_KNOWN)
    wsl = is_wsl()
    hardware = Hardware(
        devices=tuple(_finished(device, ram, wsl) for device in devices),
        ram_total_bytes=ram.total_bytes,
        ram_available_bytes=ram.available_bytes,
        physical_cores=cgroups.usable_cores(),
        driver_version=nvidia.driver_version,
        cuda_version=nvidia.cuda_version,
        compute_capability=nvidia.compute_capability,
        engine=engine,
        wsl=wsl,
        swap_free_bytes=ram.swap_free_bytes,
        ram_source=ram.source,
        cpu_features=features,
    )
    return replace(hardware, notes=(*notes, *failed, *unknown, *ram.notes, *verdicts(hardware)))


def _finished(device: Device, ram: Ram, wsl: bool) -> Device:
    device = finish(device, ram.total_bytes, ram.available_bytes, wsl)
    if device.bandwidth_bytes_s or device.mig:
        return device
    return replace(device, bandwidth_bytes_s=gpu_bandwidth(device.name, device.total_bytes))


def verdicts(hardware: Hardware) -> tuple[str, ...]:
    """The loud notes: a GPU that will stay idle, and numbers that should not be relied on."""
    doubts = tuple(f"{device.name}: {device.warning}" for device in hardware.devices if device.warning)
    engine = hardware.engine
    idle = [device for device in hardware.unused_gpus if device.source != PCI_SOURCE]
    if engine is None or not engine.installed or engine.error or hardware.engine_gpus or not idle:
        return doubts
    names = ", ".join(device.name for device in idle)
    if engine.backends and set(engine.backends) <= {"CPU", "BLAS", "RPC"}:
        return (f"{names}: seen by the driver, but the installed engine is a CPU-only build; {_IDLE}", *doubts)
    backends = ", ".join(engine.backends)
    return (f"{names}: seen by the driver, but not by the engine ({backends}); 'localfast doctor' says why", *doubts)


def _bounded(source: str, probe: Callable[[], _Answer], timeout_s: float, otherwise: _Answer) -> tuple[_Answer, list[str]]:
    """The probe's answer and no note; or `otherwise` and why. A hanging driver call cannot be ended, only left behind."""
    answers: list[_Answer] = []
    failures: list[str] = []

    def ask() -> None:
        try:
            answers.append(probe())
        except Exception as error:  # whatever a foreign library throws: a server must start
            failures.append(f"{source} failed: {type(error).__name__}: {error}")

    thread = threading.Thread(target=ask, daemon=True, name="hardware probe")
    thread.start()
    thread.join(timeout_s)
    if answers:
        return answers[0], []
    return otherwise, failures or [f"{source} did not answer in time"]
