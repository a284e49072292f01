"""GPUs as Windows tells them: DXGI for this process's budget, the registry for a card's true size, the commit limit for RAM.

Win32_VideoController.AdapterRAM is never read: it has 32 bits and shows at most 4 GB. Importable everywhere; what reads the
system returns nothing elsewhere, what decides takes plain values.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from localfast.hardware.facts import Device

GIB = 2**30
MAKERS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x1022: "AMD", 0x8086: "Intel", 0x5143: "Qualcomm"}
SATURATED_BYTES = 4293918720
"""What a 32-bit field shows for every card of 4 GB and more."""
_CLASS_KEY = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
_SOFTWARE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One DXGI adapter. `budget_bytes` is what this process may keep in local memory; 0: Windows did not say."""

    name: str
    vendor: int
    pci_id: str = ""
    dedicated_bytes: int = 0
    shared_bytes: int = 0
    budget_bytes: int = 0
    usage_bytes: int = 0
    display: bool = False


def windows_gpus() -> tuple[Device, ...]:
    """Nothing on another system. Raises OSError or AttributeError where Windows lacks DXGI."""
    return adapter_devices(_read_adapters(), _read_registry()) if sys.platform == "win32" else ()


def adapter_devices(adapters: list[Adapter], registry: list[tuple[str, int]]) -> tuple[Device, ...]:
    """Devices of the adapters; `registry` holds (name, bytes) of each installed display driver."""
    return tuple(
        _device(adapter, [size for name, size in registry if name == adapter.name and size != SATURATED_BYTES])
        for adapter in adapters
        if adapter.vendor in MAKERS
    )


def _device(adapter: Adapter, sizes: list[int]) -> Device:
    dedicated = min(sizes, default=0) or adapter.dedicated_bytes
    unified = dedicated < 2 * GIB
    total = dedicated + adapter.shared_bytes if unified else dedicated  # shared memory is RAM: never part of a card's own
    known = adapter.budget_bytes > 0
    left = max(0, adapter.budget_bytes - adapter.usage_bytes) if known else total
    return Device(
        backend=MAKERS[adapter.vendor],
        name=adapter.name,
        kind="igpu" if unified else "gpu",
        pci_id=adapter.pci_id,
        total_bytes=total,
        free_bytes=min(left, total),
        unified=unified,
        carve_out_bytes=min(left, dedicated) if unified else 0,
        trusted=known,
        display=adapter.display,
        source="Windows (registry and DXGI)" if sizes else "Windows (DXGI)",
    )


# --- registry -----------------------------------------------------------------------------------------------------------------


def _read_registry() -> list[tuple[str, int]]:
    winreg: Any = importlib.import_module("winreg")
    found = []
    with contextlib.suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _CLASS_KEY) as drivers:
        for index in range(winreg.QueryInfoKey(drivers)[0]):
            with contextlib.suppress(OSError), winreg.OpenKey(drivers, winreg.EnumKey(drivers, index)) as driver:
                name = winreg.QueryValueEx(driver, "DriverDesc")[0]
                found.append((str(name), registry_bytes(winreg.QueryValueEx(driver, "HardwareInformation.qwMemorySize")[0])))
    return [(name, size) for name, size in found if size > 0]


def registry_bytes(value: Any) -> int:
    """A size that drivers store as a number or as its eight bytes."""
    if isinstance(value, bytes):
        return int.from_bytes(value[:8], "little")
    return value if isinstance(value, int) else 0


# --- DXGI ---------------------------------------------------------------------------------------------------------------------


class _Luid(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint32), ("high", ctypes.c_int32)]


class _Description(ctypes.Structure):
    """DXGI_ADAPTER_DESC1."""

    _fields_ = [
        ("name", ctypes.c_uint16 * 128),  # WCHAR: two bytes, whatever this platform's wchar_t is
        ("vendor", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("subsystem", ctypes.c_uint32),
        ("revision", ctypes.c_uint32),
        ("dedicated_video", ctypes.c_size_t),
        ("dedicated_system", ctypes.c_size_t),
        ("shared", ctypes.c_size_t),
        ("luid", _Luid),
        ("flags", ctypes.c_uint32),
    ]


class _VideoMemory(ctypes.Structure):
    """DXGI_QUERY_VIDEO_MEMORY_INFO."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("budget", "usage", "reservable", "reserved")]


class _Interface:
    """A COM object; methods are called by their place in its table."""

    def __init__(self, pointer: ctypes.c_void_p) -> None:
        self._pointer = pointer

    def call(self, place: int, *arguments: Any) -> int:
        """HRESULT; negative: failed."""
        table = ctypes.cast(self._pointer, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p))).contents
        loader: Any = ctypes
        prototype = loader.WINFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, *map(_argument_type, arguments))
        return int(prototype(table[place])(self._pointer, *arguments))

    def ask(self, place: int, *arguments: Any) -> _Interface | None:
        """The object that the method makes."""
        made = ctypes.c_void_p()
        return _Interface(made) if self.call(place, *arguments, ctypes.byref(made)) >= 0 and made else None

    def release(self) -> None:
        self.call(2)


def _argument_type(argument: Any) -> Any:
    return type(argument) if isinstance(argument, ctypes.c_uint32) else ctypes.c_void_p


def _identifier(text: str) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(uuid.UUID(text).bytes_le, 16)


def _read_adapters() -> list[Adapter]:
    loader: Any = ctypes
    made = ctypes.c_void_p()
    identifier = _identifier("770aae78-f26f-4dba-a829-253c83d1b387")  # IDXGIFactory1
    if loader.WinDLL("dxgi.dll").CreateDXGIFactory1(ctypes.byref(identifier), ctypes.byref(made)) < 0 or not made:
        return []
    factory = _Interface(made)
    try:
        return [adapter for adapter in _adapters(factory) if adapter]
    finally:
        factory.release()


def _adapters(factory: _Interface) -> Iterator[Adapter | None]:
    for index in range(64):
        one = factory.ask(12, ctypes.c_uint32(index))  # IDXGIFactory1::EnumAdapters1
        if one is None:
            return
        try:
            yield _adapter(one)
        finally:
            one.release()


def _adapter(one: _Interface) -> Adapter | None:
    description, memory = _Description(), _VideoMemory()
    if one.call(10, ctypes.byref(description)) < 0 or description.flags & _SOFTWARE:  # IDXGIAdapter1::GetDesc1
        return None
    output = one.ask(7, ctypes.c_uint32(0))  # IDXGIAdapter::EnumOutputs
    if output is not None:
        output.release()
    newer = one.ask(0, ctypes.byref(_identifier("645967a4-1392-4310-a798-8053ce3e93fd")))  # QueryInterface: IDXGIAdapter3
    if newer is not None:
        newer.call(14, ctypes.c_uint32(0), ctypes.c_uint32(0), ctypes.byref(memory))  # QueryVideoMemoryInfo, node 0, LOCAL
        newer.release()
    return Adapter(
        name=bytes(description.name).decode("utf-16-le", "replace").partition("\0")[0],
        vendor=description.vendor,
        pci_id=_pci_id(description.luid),
        dedicated_bytes=description.dedicated_video,
        shared_bytes=description.shared,
        budget_bytes=memory.budget,
        usage_bytes=memory.usage,
        display=output is not None,
    )


class _OpenAdapter(ctypes.Structure):
    """D3DKMT_OPENADAPTERFROMLUID."""

    _fields_ = [("luid", _Luid), ("adapter", ctypes.c_uint32)]


class _Query(ctypes.Structure):
    """D3DKMT_QUERYADAPTERINFO."""

    _fields_ = [
        ("adapter", ctypes.c_uint32),
        ("kind", ctypes.c_int32),
        ("answer", ctypes.c_void_p),
        ("answer_bytes", ctypes.c_uint32),
    ]


def _pci_id(luid: _Luid) -> str:
    """Bus, device and function of an adapter, as the engine writes them; empty where the kernel does not tell."""
    loader: Any = ctypes
    with contextlib.suppress(OSError, AttributeError):
        kernel = loader.WinDLL("gdi32.dll")
        opened = _OpenAdapter(luid, 0)
        if kernel.D3DKMTOpenAdapterFromLuid(ctypes.byref(opened)) != 0:
            return ""
        address = (ctypes.c_uint32 * 3)()
        query = _Query(opened.adapter, 6, ctypes.addressof(address), ctypes.sizeof(address))  # 6: KMTQAITYPE_ADAPTERADDRESS
        status = kernel.D3DKMTQueryAdapterInfo(ctypes.byref(query))
        kernel.D3DKMTCloseAdapter(ctypes.byref(ctypes.c_uint32(opened.adapter)))
        if status == 0 and address[0] < 256:
            return f"0000:{address[0]:02x}:{address[1]:02x}.{address[2]:x}"
    return ""


# --- RAM ----------------------------------------------------------------------------------------------------------------------


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *[
            (name, ctypes.c_uint64)
            for name in ("total", "free", "commit_total", "commit_free", "virtual_total", "virtual_free", "extended")
        ],
    ]


def commit_available_bytes() -> int | None:
    """What this process may still allocate: without a page file it ends before the RAM does. None elsewhere than on Windows."""
    if sys.platform != "win32":
        return None
    loader: Any = ctypes
    status = _MemoryStatus(size=ctypes.sizeof(_MemoryStatus))
    return int(status.commit_free) if loader.WinDLL("kernel32.dll").GlobalMemoryStatusEx(ctypes.byref(status)) else None
