from __future__ import annotations

import threading
from typing import Any

import pytest

from localfast.hardware import Device, EngineBuild, detect, detection
from localfast.hardware.nvidia import Nvidia

GIB = 2**30
CARD = Device(
    backend="NVIDIA",
    name="NVIDIA GeForce RTX 3090",
    kind="gpu",
    pci_id="0000:01:00.0",
    total_bytes=24 * GIB,
    free_bytes=23 * GIB,
    compute_capability=(8, 6),
    source="the NVIDIA driver",
)
CPU_BUILD = EngineBuild(installed=True, version="1", backends=("CPU",))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No GPU anywhere, and a CPU build; tests put in what they need."""
    for name in ("kernel_gpus", "windows_gpus", "driverless_nvidia"):
        monkeypatch.setattr(detection, name, lambda: ())
    monkeypatch.setattr(detection, "ask_nvidia", lambda timeout_s: Nvidia())
    monkeypatch.setattr(detection, "ask_engine_devices", lambda timeout_s, path: (CPU_BUILD, (), []))
    return monkeypatch


def test_detection_reports_ram_and_cores_of_this_machine() -> None:
    found = detect(ask_engine=False)
    assert 0 < found.ram_available_bytes <= found.ram_total_bytes and found.physical_cores >= 1
    assert found.engine is None and found.ram_source


def test_detection_survives_a_driver_that_hangs(machine: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    machine.setattr(detection, "ask_nvidia", lambda timeout_s: release.wait(30))
    machine.setattr(detection, "kernel_gpus", lambda: release.wait(30))
    found = detect(timeout_s=0.01)
    release.set()
    assert found.notes[:2] == ("the NVIDIA driver did not answer in time", "the kernel's list of GPUs did not answer in time")
    assert found.engine == CPU_BUILD


@pytest.mark.parametrize("name", ["ask_nvidia", "kernel_gpus", "windows_gpus", "driverless_nvidia", "usable_ram", "cpu_features"])
def test_detection_survives_a_source_that_breaks(machine: pytest.MonkeyPatch, name: str) -> None:
    def explode(*_: Any) -> Any:
        raise ZeroDivisionError("inside a foreign library")

    machine.setattr(detection, name, explode)
    assert any("failed: ZeroDivisionError: inside a foreign library" in note for note in detect().notes)


def test_detection_says_loudly_that_a_gpu_stays_idle(machine: pytest.MonkeyPatch) -> None:
    """llama-cpp-python#514, #1723, #1953, #2079."""
    machine.setattr(detection, "ask_nvidia", lambda timeout_s: Nvidia(devices=(CARD,), driver_version="550.1"))
    found = detect()
    assert found.unused_gpus and found.driver_version == "550.1" and found.compute_capability == (8, 6)
    (note,) = found.notes
    assert "RTX 3090" in note and "CPU-only build" in note and "localfast engine install" in note

    other = EngineBuild(installed=True, backends=("ROCm", "CPU"))
    machine.setattr(detection, "ask_engine_devices", lambda timeout_s, path: (other, (), []))
    assert "not by the engine (ROCm, CPU)" in detect().notes[0]


def test_detection_joins_driver_windows_and_engine(machine: pytest.MonkeyPatch) -> None:
    def known(free_gib: int, **facts: Any) -> Device:
        facts = {"backend": "NVIDIA", "name": CARD.name, "pci_id": CARD.pci_id, "total_bytes": 24 * GIB} | facts
        return Device(kind="gpu", free_bytes=free_gib * GIB, **facts)

    asked = []
    engine = (
        EngineBuild(installed=True, backends=("CUDA",)),
        (known(22, backend="CUDA", in_engine=True, source="the engine"),),
        ["n"],
    )
    machine.setattr(detection, "ask_nvidia", lambda timeout_s: Nvidia(devices=(CARD,)))
    machine.setattr(detection, "windows_gpus", lambda: (known(21, source="Windows (DXGI)"),))
    machine.setattr(detection, "ask_engine_devices", lambda timeout_s, path: (asked.append(path), engine)[1])
    found = detect(engine_path="/engines/cuda")
    (card,) = found.devices
    assert card.free_bytes == 21 * GIB and card.source == "the engine and the NVIDIA driver and Windows (DXGI)"
    assert card.bandwidth_bytes_s == 936e9 and card.in_engine and found.notes == ("n",) and asked == ["/engines/cuda"]


def test_detection_names_an_nvidia_card_without_a_driver(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(
        detection, "driverless_nvidia", lambda: (Device(backend="NVIDIA", name="N", kind="gpu", warning="no driver"),)
    )
    assert "N: no driver" in detect().notes
    machine.setattr(detection, "ask_nvidia", lambda timeout_s: Nvidia(devices=(CARD,)))
    assert [device.name for device in detect().devices] == [CARD.name]


def test_detection_gives_a_unified_nvidia_the_ram(machine: pytest.MonkeyPatch) -> None:
    card = Device(backend="NVIDIA", name="NVIDIA GB10", kind="gpu", unified=True)
    machine.setattr(detection, "ask_nvidia", lambda timeout_s: Nvidia(devices=(card,)))
    found = detect()
    assert found.devices[0].total_bytes == found.ram_total_bytes and found.devices[0].bandwidth_bytes_s == 273e9
