"""Looks at everything that keeps a machine from serving well, and says what to do about it.

Findings are plain data for `localfast doctor` and bug reports. Asks the machine, changes nothing but a temporary file in the
models folder, and never raises for what it finds.
"""

from __future__ import annotations

import contextlib
import ipaddress
import platform
import shutil
import socket
import tempfile
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from localfast.errors import EngineMissing
from localfast.hardware import PCI_SOURCE, Device, Hardware
from localfast.settings import Settings

Level = Literal["ok", "warning", "problem"]
LOW_DISK_BYTES = 10 * 2**30
LOW_RAM_BYTES = 2 * 2**30
INSTALL = "localfast engine install"
_SHOWN_TO_CONTAINER = "start it with --gpus all"
_NOT_PERMITTED = "a process that this user may not see"


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked fact; `fix` is the next step, empty when there is nothing to do."""

    name: str
    level: Level
    fact: str
    fix: str = ""


def examine(settings: Settings, hardware: Hardware) -> list[Finding]:
    """All findings, in the order in which a person would look."""
    return [_python(), *_engine(hardware), *_gpus(hardware), _ram(hardware), *_folder(settings), _port(settings)]


def port_owner(host: str, port: int) -> str | None:
    """Who listens on host:port, as "python3 (pid 123)"; None when nobody does.

    A listener on all addresses owns the port of each. Another user's process may be invisible: then the answer says so.
    """
    owners = {one.pid for one in _listeners() if one.port == port and _covers(one.address, host)}
    for pid in sorted(owner for owner in owners if owner):
        with contextlib.suppress(psutil.Error):
            return f"{psutil.Process(pid).name()} (pid {pid})"
        return f"pid {pid}"
    return _NOT_PERMITTED if owners or _answers(host, port) else None


# --- findings -----------------------------------------------------------------------------------------------------------------


def _python() -> Finding:
    return Finding("python", "ok", f"Python {platform.python_version()} on {platform.platform(terse=True)}")


def _engine(hardware: Hardware) -> list[Finding]:
    engine = hardware.engine
    if engine is None:
        why = "; ".join(note for note in hardware.notes if "engine" in note) or "the engine was not asked"
        return [Finding("engine", "problem", why, "start it by hand to see more: python -m localfast.engine.devices")]
    if not engine.installed:
        return [Finding("engine", "problem", "llama-cpp-python is not installed", f"{INSTALL}; or {EngineMissing().hint}")]
    if engine.error:
        fact = f"llama-cpp-python {engine.version} does not start: {engine.error}"
        return [Finding("engine", "problem", fact, _broken(engine.error))]
    fact = f"llama-cpp-python {engine.version}, built for {', '.join(engine.backends)}"
    missing = [name for name in hardware.cpu_features if name in ("AVX2", "FMA", "F16C") and name not in engine.cpu_features]
    if missing and engine.cpu_features and not hardware.engine_gpus:
        fix = "build it for this processor, which needs a compiler: localfast engine install --from-source"
        return [Finding("engine", "warning", f"{fact}, without {', '.join(missing)} of this processor: slow on the CPU", fix)]
    return [Finding("engine", "ok", fact)]


def _broken(error: str) -> str:
    if "libcudart" in error or "libcublas" in error:
        major = "13" if ".so.13" in error else "12"
        return f"the CUDA runtime is missing: pip install nvidia-cuda-runtime-cu{major} nvidia-cublas-cu{major}; or {INSTALL}"
    if "libcuda.so" in error or "nvcuda" in error:
        return f"the NVIDIA driver is not installed, or hidden from this container ({_SHOWN_TO_CONTAINER})"
    return f"install one that starts: {INSTALL}"


def _gpus(hardware: Hardware) -> list[Finding]:
    engine = hardware.engine
    if hardware.engine_gpus:
        return [_used_gpu(gpu) for gpu in hardware.engine_gpus]
    if engine is None or not engine.installed or engine.error:  # the engine's own finding says what to do
        return [Finding("gpu", "ok", f"found {gpu.name}; the engine does not use it") for gpu in hardware.unused_gpus]
    driverless = [gpu for gpu in hardware.unused_gpus if gpu.source == PCI_SOURCE]
    idle = [gpu for gpu in hardware.unused_gpus if gpu.source != PCI_SOURCE]
    findings = [Finding("gpu", "warning", f"{gpu.name} cannot be used", gpu.warning) for gpu in driverless]
    if idle:
        return [_idle_gpu(hardware, idle, " ".join(engine.log)), *findings]
    return findings or [Finding("gpu", "ok", "no GPU found: models run on the CPU")]


def _used_gpu(gpu: Device) -> Finding:
    traits = {
        "a slice of a split card": gpu.mig,
        "drives a screen": gpu.display,
        "its memory is the machine's RAM": gpu.unified,
        f"{_gib(gpu.reserved_bytes)} GiB of that are taken by the driver": gpu.reserved_bytes,
    }
    extra = "".join(f", {trait}" for trait, holds in traits.items() if holds)
    fact = f"{gpu.name} through {gpu.backend}: {_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} GiB free{extra}"
    if gpu.warning:
        return Finding("gpu", "warning", f"{fact}; {gpu.warning}", "if a model does not load, set a limit: --vram-limit 0.8")
    return Finding("gpu", "ok", fact)


def _idle_gpu(hardware: Hardware, idle: list[Device], log: str) -> Finding:
    """GPUs that a driver shows and a working engine does not."""
    assert hardware.engine is not None
    names = ", ".join(gpu.name for gpu in idle)
    if "CUDA" not in hardware.engine.backends:
        nvidia = any(gpu.backend == "NVIDIA" for gpu in idle)
        fact = f"{names} stays idle: the engine is built for {', '.join(hardware.engine.backends)} only"
        return Finding("gpu", "problem" if nvidia else "warning", fact, f"get a build for it: {INSTALL}")
    fact = f"{names}: the engine is a CUDA build but finds no GPU{f' ({log})' if log else ''}"
    if not any(gpu.backend == "NVIDIA" for gpu in idle):
        return Finding("gpu", "warning", fact, f"CUDA drives NVIDIA cards only; get a build for this one: {INSTALL}")
    if "insufficient" in log:
        fix = (
            f"the driver {hardware.driver_version} (CUDA {hardware.cuda_version}) is too old for this build: update it, or get a"
            f" build for it: {INSTALL}"
        )
    else:
        fix = f"see whether CUDA_VISIBLE_DEVICES hides the GPU, or the container lacks it ({_SHOWN_TO_CONTAINER})"
    return Finding("gpu", "problem", fact, fix)


def _ram(hardware: Hardware) -> Finding:
    available, total = hardware.ram_available_bytes, hardware.ram_total_bytes
    source = f" ({hardware.ram_source})" if hardware.ram_source else ""
    swap = f", {_gib(hardware.swap_free_bytes)} GiB of swap" if hardware.swap_free_bytes else ""
    fact = f"{_gib(available)} of {_gib(total)} GiB available{source}{swap}, {hardware.physical_cores} CPU cores"
    if available < LOW_RAM_BYTES:
        more = "; WSL gets what .wslconfig of Windows allows" if hardware.wsl else ""
        return Finding("ram", "warning", fact, f"close other programs, or use a small model{more}")
    return Finding("ram", "ok", fact)


def _folder(settings: Settings) -> list[Finding]:
    """Models folder: can it be written, and is there room for a model."""
    folder = settings.store_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free
    except OSError as error:
        fact = f"{folder} cannot be written: {error.strerror or error}"
        return [Finding("models folder", "problem", fact, "choose another place with LOCALFAST_HOME")]
    findings = [Finding("models folder", "ok", str(folder))]
    if free < LOW_DISK_BYTES:
        fix = "remove a model with 'localfast rm', or move the folder with LOCALFAST_HOME"
        return [*findings, Finding("disk", "warning", f"{_gib(free)} GiB free for models", fix)]
    return [*findings, Finding("disk", "ok", f"{_gib(free)} GiB free for models")]


def _port(settings: Settings) -> Finding:
    if settings.port == 0:
        return Finding("port", "ok", "any free port will be taken")
    owner = port_owner(settings.host, settings.port)
    if owner is None:
        return Finding("port", "ok", f"{settings.host}:{settings.port} is free")
    fix = f"if that is not your localfast: stop it, or choose another port: localfast serve --port {settings.port + 1}"
    return Finding("port", "warning", f"{settings.host}:{settings.port} is taken by {owner}", fix)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f}"


# --- the port -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Listener:
    address: str
    port: int
    pid: int | None


def _listeners() -> list[_Listener]:
    """Listening TCP sockets; without the right to see the whole table (macOS), those of this user's processes."""
    found: list[tuple[Any, int | None]] = []
    try:
        found += [(connection, connection.pid) for connection in psutil.net_connections(kind="tcp")]
    except (psutil.Error, OSError):
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                found += [(connection, process.pid) for connection in process.net_connections(kind="tcp")]
    listening = [(one.laddr, pid) for one, pid in found if one.status == psutil.CONN_LISTEN and one.laddr]
    return [_Listener(address.ip, address.port, pid) for address, pid in listening]


def _covers(address: str, host: str) -> bool:
    """Whether a listener on `address` takes connections to `host`, or blocks binding there."""
    listening, wanted = _parse(address), _addresses(host)
    if listening.is_unspecified or not wanted or any(one.is_unspecified for one in wanted):
        return True
    return listening in wanted or getattr(listening, "ipv4_mapped", None) in wanted


def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        return [_parse(str(row[4][0])) for row in socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])


def _answers(host: str, port: int) -> bool:
    """Whether something takes connections there, for owners that this user may not see."""
    wanted = next((one for one in _addresses(host)), None)
    if wanted is None:
        return False
    target = str(wanted) if not wanted.is_unspecified else ("::1" if wanted.version == 6 else "127.0.0.1")
    with contextlib.suppress(OSError), socket.create_connection((target, port), timeout=1):
        return True
    return False
