"""What this machine has, as plain data: GPUs of the driver and of the engine, RAM this process may use, CPU cores, engine build.

Best effort: a probe that fails or takes too long becomes a note in words, never an error and never a stop. Imports neither the
engine nor CUDA: NVIDIA is asked through its driver's library, the engine's devices through a child process.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from localfast import cgroups

Kind = Literal["gpu", "igpu", "cpu", "other"]
_STDERR_TAIL = 5
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A processor with memory. `free_bytes` is the smallest number that any source gave, never more than `total_bytes`."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBuild:
    """The installed engine. `error` says why it does not start; `log` holds what its drivers complained about."""

    installed: bool
    version: str = ""
    backends: tuple[str, ...] = ()
    supports_gpu_offload: bool = False
    error: str = ""
    log: tuple[str, ...] = ()


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

    @property
    def engine_gpus(self) -> tuple[Device, ...]:
        """What layers can be offloaded to: discrete GPUs, or integrated ones when there are no others (llama.cpp's own rule)."""
        usable = [device for device in self.devices if device.in_engine and device.total_bytes > 0]
        discrete = tuple(device for device in usable if device.kind == "gpu")
        return discrete or tuple(device for device in usable if device.kind == "igpu")[:1]

    @property
    def unused_gpus(self) -> tuple[Device, ...]:
        """GPUs that the driver sees and the engine does not."""
        return tuple(device for device in self.devices if device.kind in ("gpu", "igpu") and not device.in_engine)


@dataclass(frozen=True, slots=True)
class _Nvidia:
    devices: tuple[Device, ...] = ()
    driver_version: str = ""
    cuda_version: str = ""
    compute_capability: tuple[int, int] = (0, 0)
    notes: tuple[str, ...] = ()


def detect(timeout_s: float = 20.0, ask_engine: bool = True) -> Hardware:
    """Look at the machine. Asking the engine costs up to a second, each probe at most `timeout_s`."""
    nvidia = _bounded(_ask_nvidia, min(timeout_s, 5.0)) or _Nvidia(notes=("the NVIDIA driver did not answer in time",))
    devices = nvidia.devices + _other_gpus()
    notes = list(nvidia.notes)
    engine = None
    if ask_engine:
        engine, engine_devices, engine_notes = ask_engine_devices(timeout_s)
        devices = merge(devices, engine_devices)
        notes += engine_notes
    memory = psutil.virtual_memory()
    limit = cgroups.memory_limit()
    if limit.total_bytes < memory.total:
        notes.append(
            f"this process may use {limit.total_bytes / 2**30:.1f} of {memory.total / 2**30:.1f} GiB of RAM (container limit)"
        )
    hardware = Hardware(
        devices=devices,
        ram_total_bytes=min(memory.total, limit.total_bytes),
        ram_available_bytes=min(memory.available, limit.available_bytes),
        physical_cores=cgroups.usable_cores(),
        driver_version=nvidia.driver_version,
        cuda_version=nvidia.cuda_version,
        compute_capability=nvidia.compute_capability,
        engine=engine,
    )
    return replace(hardware, notes=tuple(notes) + _verdicts(hardware))


def _verdicts(hardware: Hardware) -> tuple[str, ...]:
    """The loud notes: a GPU that will stay idle."""
    engine = hardware.engine
    if engine is None or not engine.installed or engine.error or hardware.engine_gpus or not hardware.unused_gpus:
        return ()
    names = ", ".join(device.name for device in hardware.unused_gpus)
    if engine.backends and set(engine.backends) <= {"CPU", "BLAS", "RPC"}:
        return (f"{names}: seen by the driver, but the installed engine is a CPU-only build; 'localfast doctor' shows the fix",)
    return (
        f"{names}: seen by the driver, but not by the engine ({', '.join(engine.backends)}); 'localfast doctor' shows the fix",
    )


def merge(driver_devices: tuple[Device, ...], engine_devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """One list from both sources, matched by PCI id; the engine's order comes first, because its indices count in that order.

    Two backends of one build may drive the same card; the first is kept, as llama.cpp does.
    """
    by_pci = {device.pci_id: device for device in driver_devices if device.pci_id}
    merged: list[Device] = []
    for device in engine_devices:
        if device.pci_id and any(device.pci_id == other.pci_id for other in merged):
            continue
        twin = by_pci.pop(device.pci_id, None)
        total = min((size for size in (device.total_bytes, twin.total_bytes if twin else 0) if size), default=0)
        frees = [device.free_bytes] + ([twin.free_bytes] if twin and twin.total_bytes else [])
        own_context = device.backend in ("CUDA", "ROCm", "HIP") and device.free_bytes == min(frees)
        merged.append(
            replace(
                device,
                name=twin.name if twin else device.name,
                total_bytes=total,
                free_bytes=min(*frees, total) if total else 0,
                display=twin.display if twin else device.display,
                context_counted=own_context,
                source=f"{device.source} and {twin.source}" if twin else device.source,
            )
        )
    seen = {device.pci_id for device in merged if device.pci_id}
    return (*merged, *(device for device in driver_devices if not device.pci_id or device.pci_id not in seen))


def ask_engine_devices(timeout_s: float) -> tuple[EngineBuild | None, tuple[Device, ...], list[str]]:
    """Ask the engine in a child process: its build, its GPUs, notes. None when the child crashed or took too long."""
    command = [sys.executable, "-m", "localfast.engine.devices"]
    # The folder that holds the package: a file of the user's folder must not stand in for a module of ours.
    folder = Path(__file__).resolve().parents[1]
    flags = getattr(subprocess, "CREATE_NO_WINDOW", 0)
    try:
        result = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            creationflags=flags,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return None, (), [f"the engine did not name its devices within {timeout_s:g} s{_tail(error.stderr)}"]
    except OSError as error:
        return None, (), [f"the engine's device probe did not start: {error}"]
    return read_engine_report(result.stdout, result.stderr, result.returncode)


def read_engine_report(
    stdout: bytes, stderr: bytes | None, exit_status: int
) -> tuple[EngineBuild | None, tuple[Device, ...], list[str]]:
    """Make data of the child's last line of output; anything unexpected becomes a note with the end of its error output."""
    lines = [line for line in stdout.decode("utf-8", "replace").splitlines() if line.startswith("{")]
    try:
        report = json.loads(lines[-1])
        rows = [row for row in report["devices"] if row["kind"] in ("gpu", "igpu")]
        build = EngineBuild(
            installed=report["installed"],
            version=report["version"],
            backends=tuple(report["backends"]),
            supports_gpu_offload=report["supports_gpu_offload"],
            error=report["error"],
            log=tuple(line for line in _lines(stderr) if "failed" in line.lower() or "error" in line.lower())[-_STDERR_TAIL:],
        )
        devices = tuple(_engine_device(row) for row in rows)
    except (IndexError, KeyError, TypeError, ValueError):
        return None, (), [f"the engine's device probe ended with status {exit_status}{_tail(stderr)}"]
    notes = [f"the engine is installed but does not start: {build.error}"] if build.error else []
    return build, devices, notes


def _engine_device(row: dict[str, Any]) -> Device:
    total, free = int(row["total_bytes"]), int(row["free_bytes"])
    return Device(
        backend=row["backend"],
        name=row["description"] or row["name"],
        kind=row["kind"],
        pci_id=row["pci_id"].lower(),
        total_bytes=total,
        free_bytes=min(free, total),
        in_engine=True,
        source="the engine",
    )


def _ask_nvidia() -> _Nvidia:
    try:
        import pynvml
    except ImportError as error:
        return _Nvidia(notes=(f"nvidia-ml-py is not usable: {error}",))
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        # No library or no driver is the normal case of a machine without NVIDIA: nothing to tell.
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return _Nvidia(notes=() if error.value in absent else (f"the NVIDIA driver refused to answer: {error}",))
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = [_nvidia_device(pynvml, handle) for handle in handles]
        capabilities = [tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles]
        return _Nvidia(
            devices=tuple(found),
            driver_version=str(pynvml.nvmlSystemGetDriverVersion()),
            cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}",
            compute_capability=min(((int(major), int(minor)) for major, minor in capabilities), default=(0, 0)),
            notes=tuple(f"{device.name}: the driver does not tell its memory" for device in found if not device.total_bytes),
        )
    except pynvml.NVMLError as error:
        return _Nvidia(notes=(f"the NVIDIA driver stopped answering: {error}",))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _nvidia_device(pynvml: Any, handle: Any) -> Device:
    """One card. On a card split by MIG, and where the driver says 'not supported', memory is left to the engine."""

    def ask(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(handle, *arguments)
        except pynvml.NVMLError:
            return None

    split = ask(pynvml.nvmlDeviceGetMigMode)
    memory = None if split and split[0] else ask(pynvml.nvmlDeviceGetMemoryInfo)
    display = ask(pynvml.nvmlDeviceGetDisplayActive)
    pci = ask(pynvml.nvmlDeviceGetPciInfo)
    bus = str(pci.busId).lower() if pci else ""
    return Device(
        backend="NVIDIA",
        name=str(ask(pynvml.nvmlDeviceGetName) or "NVIDIA GPU"),
        kind="gpu",
        pci_id=bus[-12:],  # the driver writes 8 digits of domain, the engine 4
        total_bytes=int(memory.total) if memory else 0,
        free_bytes=min(int(memory.free), int(memory.total)) if memory else 0,
        display=None if display is None else bool(display),
        source="the NVIDIA driver",
    )


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


def _other_gpus(root: Path = Path("/sys/class/drm")) -> tuple[Device, ...]:
    """AMD and Intel GPUs on Linux, from sysfs; memory is known for AMD only."""
    makers = {"0x1002": "AMD", "0x8086": "Intel"}
    found = []
    for card in sorted(root.glob("card[0-9]*")) if root.is_dir() else ():
        folder = card / "device"
        maker = makers.get(cgroups.read_text(folder / "vendor"))
        if "-" in card.name or maker is None:
            continue
        total = cgroups.read_number(folder / "mem_info_vram_total") or 0
        used = cgroups.read_number(folder / "mem_info_vram_used") or 0
        pci_id = folder.resolve().name.lower()
        integrated = maker == "Intel" or total < 2 * 2**30
        kind: Kind = "igpu" if integrated else "gpu"
        found.append(
            Device(
                backend=maker,
                name=f"{maker} GPU {pci_id}",
                kind=kind,
                pci_id=pci_id,
                total_bytes=total,
                free_bytes=max(0, total - used),
                source="the kernel",
            )
        )
    return tuple(found)


def _bounded(probe: Callable[[], _Answer], timeout_s: float) -> _Answer | None:
    """The probe's answer, or None when it hangs; a hanging driver call cannot be ended, only left behind."""
    answers: list[_Answer] = []
    thread = threading.Thread(target=lambda: answers.append(probe()), daemon=True, name="hardware probe")
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else None


def _lines(raw: bytes | None) -> list[str]:
    return [line.strip() for line in (raw or b"").decode("utf-8", "replace").splitlines() if line.strip()]


def _tail(raw: bytes | None) -> str:
    lines = _lines(raw)
    return f": {' | '.join(lines[-_STDERR_TAIL:])}" if lines else ""
