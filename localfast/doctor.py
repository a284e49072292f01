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
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from localfast.errors import EngineMissing
from localfast.hardware import Hardware
from localfast.settings import Settings

Level = Literal["ok", "warning", "problem"]
LOW_DISK_BYTES = 10 * 2**30
LOW_RAM_BYTES = 2 * 2**30
WHEEL_INDEX = "https://abetlen.github.io/llama-cpp-python/whl"
"""Prebuilt engines by kind (cpu, cu124, vulkan, ...), kept by llama-cpp-python itself."""
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


def wheel_variant(hardware: Hardware) -> str:
    """Which prebuilt engine suits this machine's GPU and driver: a CUDA build that both can run, otherwise Vulkan."""
    capability, linux = hardware.compute_capability, hardware.system == "linux"
    driver = int(hardware.driver_version.partition(".")[0]) if hardware.driver_version[:1].isdecimal() else 0
    if capability < (6, 0) or driver < 525:
        return "vulkan"
    if capability >= (10, 0):
        return "cu130" if driver >= 580 else "cu125"
    if capability >= (7, 5) and driver >= 580:
        return "cu130"
    if driver >= 550:
        return "cu124"
    if linux:
        return "cu121"
    return "cu118" if capability <= (8, 9) else "vulkan"


# --- findings -----------------------------------------------------------------------------------------------------------------


def _python() -> Finding:
    return Finding("python", "ok", f"Python {platform.python_version()} on {platform.platform(terse=True)}")


def _engine(hardware: Hardware) -> list[Finding]:
    engine = hardware.engine
    if engine is None:
        why = "; ".join(note for note in hardware.notes if "engine" in note) or "the engine was not asked"
        return [Finding("engine", "problem", why, "start it by hand to see more: python -m localfast.engine.devices")]
    if not engine.installed:
        return [Finding("engine", "problem", "llama-cpp-python is not installed", EngineMissing().hint)]
    if engine.error:
        return [
            Finding(
                "engine", "problem", f"llama-cpp-python {engine.version} does not start: {engine.error}", _broken(engine.error)
            )
        ]
    return [Finding("engine", "ok", f"llama-cpp-python {engine.version}, built for {', '.join(engine.backends)}")]


def _broken(error: str) -> str:
    if "libcudart" in error or "libcublas" in error:
        major = "13" if ".so.13" in error else "12"
        return f"the CUDA runtime is missing: pip install nvidia-cuda-runtime-cu{major} nvidia-cublas-cu{major}"
    if "libcuda.so" in error or "nvcuda" in error:
        return "the NVIDIA driver is not installed, or hidden from this container (start it with --gpus all)"
    return f"install it again: {_pip()} install --force-reinstall --no-deps llama-cpp-python"


def _gpus(hardware: Hardware) -> list[Finding]:
    findings = [
        Finding("gpu", "ok", f"{gpu.name} through {gpu.backend}: {_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} GiB free")
        for gpu in hardware.engine_gpus
    ]
    engine = hardware.engine
    if findings:
        return findings
    if engine is None or not engine.installed or engine.error:  # the engine's own finding says what to do
        return [Finding("gpu", "ok", f"the driver sees {gpu.name}") for gpu in hardware.unused_gpus]
    if not hardware.unused_gpus:
        return [Finding("gpu", "ok", "no GPU found: models run on the CPU")]
    return [_idle_gpu(hardware, ", ".join(gpu.name for gpu in hardware.unused_gpus), " ".join(engine.log))]


def _idle_gpu(hardware: Hardware, names: str, log: str) -> Finding:
    """A GPU that the driver sees and a working engine does not."""
    assert hardware.engine is not None
    nvidia = any(gpu.backend == "NVIDIA" for gpu in hardware.unused_gpus)
    if "CUDA" not in hardware.engine.backends:
        fix = (
            f"install a build for it: {_pip()} install --force-reinstall --no-deps --only-binary=:all: "
            f'"llama-cpp-python=={hardware.engine.version}" --extra-index-url {WHEEL_INDEX}/{wheel_variant(hardware)}'
        )
        fact = f"{names} stays idle: the engine is built for {', '.join(hardware.engine.backends)} only"
        return Finding("gpu", "problem" if nvidia else "warning", fact, fix)
    fact = f"{names}: the engine is a CUDA build but finds no GPU{f' ({log})' if log else ''}"
    if "insufficient" in log:
        fix = f"the driver {hardware.driver_version} (CUDA {hardware.cuda_version}) is too old for this build: update it"
    else:
        fix = "see whether CUDA_VISIBLE_DEVICES hides the GPU, or the container was started without --gpus all"
    return Finding("gpu", "problem", fact, fix)


def _ram(hardware: Hardware) -> Finding:
    available, total = hardware.ram_available_bytes, hardware.ram_total_bytes
    fact = f"{_gib(available)} of {_gib(total)} GiB available, {hardware.physical_cores} CPU cores"
    if available < LOW_RAM_BYTES:
        return Finding("ram", "warning", fact, "close other programs, or use a small model")
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


def _pip() -> str:
    return f"{Path(sys.executable).name} -m pip"


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
