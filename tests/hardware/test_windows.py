from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from localfast.hardware import windows
from localfast.hardware.windows import Adapter, adapter_devices, registry_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("adapter", "registry", "kind", "total", "free"),
    [
        # The budget is what Windows leaves to this process (xyntetik-runner PR #105).
        (
            Adapter(name="RTX 3070", vendor=0x10DE, dedicated_bytes=8 * GIB, budget_bytes=7 * GIB, usage_bytes=GIB),
            [],
            "gpu",
            8,
            6,
        ),
        # The registry knows the whole card.
        (Adapter(name="RX 7900 XTX", vendor=0x1002, dedicated_bytes=23 * GIB), [("RX 7900 XTX", 24 * GIB)], "gpu", 24, 24),
        # What a 32-bit field shows is no size (llmfit#55 and others).
        (Adapter(name="RX 9070", vendor=0x1002, dedicated_bytes=16 * GIB), [("RX 9070", 4293918720)], "gpu", 16, 16),
        # Shared memory is not the card's (LMS#1216: 12 GB shown as 19.8).
        (Adapter(name="A2000", vendor=0x10DE, dedicated_bytes=12 * GIB, shared_bytes=8 * GIB), [], "gpu", 12, 12),
        # A processor's GPU has nothing else.
        (
            Adapter(name="Iris", vendor=0x8086, dedicated_bytes=GIB // 8, shared_bytes=8 * GIB, budget_bytes=6 * GIB),
            [],
            "igpu",
            8.125,
            6,
        ),
        # A budget above the card is clamped.
        (Adapter(name="RTX", vendor=0x10DE, dedicated_bytes=8 * GIB, budget_bytes=20 * GIB), [], "gpu", 8, 8),
        (
            Adapter(name="RTX", vendor=0x10DE, dedicated_bytes=8 * GIB, budget_bytes=GIB, usage_bytes=2 * GIB),
            [("other", 4 * GIB)],
            "gpu",
            8,
            0,
        ),
    ],
)
def test_windows_adapter_becomes_a_device(
    adapter: Adapter, registry: list[tuple[str, int]], kind: str, total: float, free: float
) -> None:
    (found,) = adapter_devices([adapter], registry)
    assert (found.kind, found.total_bytes / GIB, found.free_bytes / GIB) == (kind, total, free)
    assert found.unified is (kind == "igpu") and found.trusted is (adapter.budget_bytes > 0)


def test_windows_drops_adapters_of_no_gpu_maker() -> None:
    assert adapter_devices([Adapter(name="Microsoft Remote Display", vendor=0x1414)], []) == ()


@pytest.mark.parametrize(("value", "size"), [(8 * GIB, 8 * GIB), ((8 * GIB).to_bytes(8, "little"), 8 * GIB), ("8", 0), (None, 0)])
def test_windows_registry_size_is_a_number_or_its_bytes(value: Any, size: int) -> None:
    assert registry_bytes(value) == size


# --- the calls themselves, on COM objects made here ---------------------------------------------------------------------------


class Com:
    """Objects with tables of methods, as DXGI hands them out."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.alive = 0

    def make(self, **methods: Callable[..., int]) -> int:
        """Address of an object; a method is named by its place: `_12`."""
        self.alive += 1
        table = (ctypes.c_void_p * 16)()
        for place, (method, kinds) in {2: (self.drop, ()), **{int(name[1:]): call for name, call in methods.items()}}.items():  # type: ignore[misc]
            function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, *kinds)(method)
            self.kept.append(function)
            table[place] = ctypes.cast(function, ctypes.c_void_p).value
        holder = ctypes.pointer(table)
        self.kept += [table, holder]
        return ctypes.addressof(holder)

    def drop(self, _: int) -> int:
        self.alive -= 1
        return 0


def give(address: int, target: int) -> int:
    ctypes.c_void_p.from_address(target).value = address
    return 0


def dxgi(com: Com, name: str, flags: int = 0) -> Callable[..., int]:
    """CreateDXGIFactory1 of a machine with one adapter."""

    def describe(_: int, target: int) -> int:
        raw = name.encode("utf-16-le")
        description = windows._Description.from_address(target)
        description.name = (ctypes.c_uint16 * 128).from_buffer_copy(raw.ljust(256, b"\0"))
        description.vendor, description.dedicated_video, description.shared, description.flags = 0x10DE, 8 * GIB, 16 * GIB, flags
        return 0

    def measure(_: int, node: int, segment: int, target: int) -> int:
        assert (node, segment) == (0, 0)
        memory = windows._VideoMemory.from_address(target)
        memory.budget, memory.usage = 7 * GIB, GIB
        return 0

    def query(this: int, identifier: int, target: int) -> int:
        assert uuid.UUID(bytes_le=ctypes.string_at(identifier, 16)) == uuid.UUID("645967a4-1392-4310-a798-8053ce3e93fd")
        number, place = ctypes.c_uint32, ctypes.c_void_p
        return give(com.make(_14=(measure, (number, number, place))), target)  # type: ignore[arg-type]

    def adapters(_: int, index: int, target: int) -> int:
        if index:
            return -2005270526  # DXGI_ERROR_NOT_FOUND
        place, number = ctypes.c_void_p, ctypes.c_uint32
        outputs = (lambda _, output, target: give(com.make(), target), (number, place))
        one = com.make(_0=(query, (place, place)), _7=outputs, _10=(describe, (place,)))  # type: ignore[arg-type]
        return give(one, target)

    def create(identifier: Any, target: Any) -> int:
        factory = com.make(_12=(adapters, (ctypes.c_uint32, ctypes.c_void_p)))  # type: ignore[arg-type]
        return give(factory, ctypes.addressof(target._obj))

    return create


def kernel(bus: int) -> SimpleNamespace:
    """gdi32 with the one adapter in slot `bus`:03.1."""

    def answer(query: Any) -> int:
        assert query._obj.kind == 6 and query._obj.adapter == 77
        ctypes.memmove(query._obj.answer, (ctypes.c_uint32 * 3)(bus, 3, 1), 12)
        return 0

    def opened(request: Any) -> int:
        request._obj.adapter = 77
        return 0

    return SimpleNamespace(D3DKMTOpenAdapterFromLuid=opened, D3DKMTQueryAdapterInfo=answer, D3DKMTCloseAdapter=lambda _: 0)


@pytest.mark.parametrize(("bus", "pci_id"), [(0x41, "0000:41:03.1"), (0xFFFFFFFF, "")])
def test_windows_adapters_are_read_through_dxgi_and_released(monkeypatch: pytest.MonkeyPatch, bus: int, pci_id: str) -> None:
    com = Com()
    libraries = {"dxgi.dll": SimpleNamespace(CreateDXGIFactory1=dxgi(com, "NVIDIA GeForce RTX 3070")), "gdi32.dll": kernel(bus)}
    monkeypatch.setattr(ctypes, "WinDLL", libraries.__getitem__, raising=False)
    monkeypatch.setattr(ctypes, "WINFUNCTYPE", ctypes.CFUNCTYPE, raising=False)
    (adapter,) = windows._read_adapters()
    assert (adapter.name, adapter.vendor, adapter.pci_id, adapter.display) == ("NVIDIA GeForce RTX 3070", 0x10DE, pci_id, True)
    assert (adapter.dedicated_bytes, adapter.shared_bytes) == (8 * GIB, 16 * GIB)
    assert (adapter.budget_bytes, adapter.usage_bytes, com.alive) == (7 * GIB, GIB, 0)


def test_windows_software_adapters_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    com = Com()
    library = SimpleNamespace(CreateDXGIFactory1=dxgi(com, "Microsoft Basic Render Driver", flags=2))
    monkeypatch.setattr(ctypes, "WinDLL", lambda _: library, raising=False)
    monkeypatch.setattr(ctypes, "WINFUNCTYPE", ctypes.CFUNCTYPE, raising=False)
    assert windows._read_adapters() == [] and com.alive == 0


def test_windows_registry_is_read_card_by_card(monkeypatch: pytest.MonkeyPatch) -> None:
    class Key:
        def __init__(self, values: dict[str, Any]) -> None:
            self.values = values

        def __enter__(self) -> Key:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    cards = {
        "0000": {"DriverDesc": "Card", "HardwareInformation.qwMemorySize": (24 * GIB).to_bytes(8, "little")},
        "0001": {"DriverDesc": "Mirror"},  # remote desktops and virtual screens have no memory
        "0002": {"DriverDesc": "Old", "HardwareInformation.qwMemorySize": 0},
    }

    def value(key: Key, name: str) -> tuple[Any, int]:
        if name not in key.values:
            raise FileNotFoundError
        return key.values[name], 0

    def opened(key: Any, name: str) -> Key:
        if name == "Properties":
            raise PermissionError
        return Key(cards.get(name, {}))

    registry = SimpleNamespace(
        HKEY_LOCAL_MACHINE=0,
        OpenKey=opened,
        QueryInfoKey=lambda key: (4, 0, 0),
        EnumKey=lambda key, index: [*cards, "Properties"][index],
        QueryValueEx=value,
    )
    monkeypatch.setitem(windows.importlib.sys.modules, "winreg", registry)  # type: ignore[attr-defined]
    assert windows._read_registry() == [("Card", 24 * GIB)]


def test_windows_is_not_asked_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows.sys, "platform", "linux")
    assert windows.windows_gpus() == () and windows.commit_available_bytes() is None
