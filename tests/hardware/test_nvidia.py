from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from localfast.hardware import nvidia
from localfast.hardware.nvidia import Nvidia, ask_nvidia, read_smi

GIB = 2**30


class NVMLError(Exception):
    def __init__(self, value: int = 3) -> None:
        self.value = value


def unsupported(*_: object) -> Any:
    raise NVMLError


def driver(**changes: Any) -> SimpleNamespace:
    """One RTX 3090 with 20 of 24 GiB free; a slice of it is a string."""
    answers = {
        "NVMLError": NVMLError,
        "NVML_ERROR_LIBRARY_NOT_FOUND": 12,
        "NVML_ERROR_DRIVER_NOT_LOADED": 9,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
        "nvmlSystemGetDriverVersion": lambda: "570.86",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetCudaComputeCapability": lambda card: (9 - card, 6),
        "nvmlDeviceGetMigMode": unsupported,
        "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(total=24 * GIB, free=20 * GIB),
        "nvmlDeviceGetDisplayActive": lambda card: 1,
        "nvmlDeviceGetPciInfo": lambda card: SimpleNamespace(busId=f"0000000{card}:C1:00.0"),
        "nvmlDeviceGetName": lambda card: "NVIDIA GeForce RTX 3090",
    }
    return SimpleNamespace(**{**answers, **changes})


def ask(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Nvidia:
    monkeypatch.setitem(sys.modules, "pynvml", driver(**changes))
    return ask_nvidia()


def test_nvidia_card_becomes_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ask(monkeypatch, nvmlDeviceGetCount=lambda: 2)
    assert [(one.pci_id, one.total_bytes, one.free_bytes, one.display) for one in found.devices] == [
        ("0000:c1:00.0", 24 * GIB, 20 * GIB, True),
        ("0001:c1:00.0", 24 * GIB, 20 * GIB, True),
    ]
    assert (found.driver_version, found.cuda_version, found.compute_capability) == ("570.86", "12.8", (8, 6))
    assert found.devices[0].compute_capability == (9, 6) and found.devices[0].bandwidth_bytes_s == 936e9 and not found.notes


def test_nvidia_bandwidth_of_an_unknown_card_is_clock_times_width(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {"nvmlDeviceGetMaxClockInfo": lambda card, kind: 9751, "nvmlDeviceGetMemoryBusWidth": lambda card: 384}
    (card,) = ask(monkeypatch, nvmlDeviceGetName=lambda card: "NVIDIA Test", **clocks).devices
    assert card.bandwidth_bytes_s == pytest.approx(936.1e9, rel=1e-3)


@pytest.mark.parametrize(("name", "unified"), [("NVIDIA GB10", True), ("Orin (nvgpu)", True), ("GRID A100-10C", False)])
def test_nvidia_memory_that_is_not_supported_is_left_to_others(monkeypatch: pytest.MonkeyPatch, name: str, unified: bool) -> None:
    found = ask(monkeypatch, nvmlDeviceGetName=lambda card: name, nvmlDeviceGetMemoryInfo=unsupported)
    assert (found.devices[0].total_bytes, found.devices[0].unified) == (0, unified)
    assert found.notes == (f"{name}: the driver does not tell its memory",)


def test_nvidia_card_split_by_mig_is_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {0: 80, "slice": 10}
    found = ask(
        monkeypatch,
        nvmlDeviceGetMigMode=lambda card: (1, 1),
        nvmlDeviceGetMaxMigDeviceCount=lambda card: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=lambda card, index: "slice" if index == 2 else unsupported(),
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(total=sizes[card] * GIB, free=(sizes[card] - 1) * GIB),
        nvmlDeviceGetName=lambda card: b"NVIDIA A100-SXM4-80GB" + (b" MIG 1g.10gb" if card == "slice" else b""),
    )
    (part,) = found.devices
    assert (part.name, part.total_bytes, part.free_bytes) == ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 10 * GIB, 9 * GIB)
    assert part.mig and part.pci_id == "0000:c1:00.0" and part.bandwidth_bytes_s == pytest.approx(2039e9 / 8)


@pytest.mark.parametrize("count", [unsupported, lambda card: 0])
def test_nvidia_card_whose_slices_are_hidden_shows_no_memory(monkeypatch: pytest.MonkeyPatch, count: Any) -> None:
    (card,) = ask(monkeypatch, nvmlDeviceGetMigMode=lambda card: (1, 1), nvmlDeviceGetMaxMigDeviceCount=count).devices
    assert card.mig and (card.total_bytes, card.free_bytes) == (0, 0) and "split by MIG" in card.warning


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"nvmlDeviceGetCount": unsupported}, "stopped answering"),
        ({"nvmlInit": unsupported}, "refused to answer"),
    ],
)
def test_nvidia_driver_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], note: str) -> None:
    monkeypatch.setattr(nvidia.shutil, "which", lambda *_, **__: None)
    found = ask(monkeypatch, **changes)
    assert found.devices == () and note in found.notes[0]


@pytest.mark.parametrize("value", [9, 12])
def test_nvidia_that_is_not_there_is_not_worth_a_word(monkeypatch: pytest.MonkeyPatch, value: int) -> None:
    def absent() -> None:
        raise NVMLError(value)

    monkeypatch.setattr(nvidia.shutil, "which", lambda *_, **__: None)
    assert ask(monkeypatch, nvmlInit=absent) == Nvidia()


SMI = """\
00000000:01:00.0, NVIDIA GeForce RTX 3060, 12288, 11500, 535.183.01, 8.6, [N/A], Enabled
00000000:21:00.0, NVIDIA A100-SXM4-80GB, 81920, 81000, 535.183.01, 8.0, Enabled, Disabled
0000000F:01:00.0, NVIDIA GB10, [N/A], [N/A], 535.183.01, 12.1, [N/A], Disabled
00000000:41:00.0, "GRID, odd", [Not Supported], [Not Supported], [N/A], [N/A], [N/A], [N/A]
Field "x" is not a valid field to query.
"""


def test_nvidia_smi_rows_become_devices() -> None:
    found = read_smi(SMI)
    plain, split, shared, odd = found.devices
    assert (plain.pci_id, plain.total_bytes, plain.free_bytes) == ("0000:01:00.0", 12 * GIB, 11500 * 2**20)
    assert plain.display is True and plain.compute_capability == (8, 6) and plain.bandwidth_bytes_s == 360e9
    assert split.mig and split.total_bytes == split.free_bytes == 0
    assert shared.unified and shared.total_bytes == 0 and shared.pci_id == "000f:01:00.0"
    assert (odd.name, odd.total_bytes, odd.display, odd.compute_capability) == ("GRID, odd", 0, None, (0, 0))
    assert (found.driver_version, found.compute_capability) == ("535.183.01", (8, 0))


def test_nvidia_smi_is_asked_where_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(nvidia.shutil, "which", lambda *_, **__: "nvidia-smi")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout=SMI.encode()))
    found = ask_nvidia()
    assert len(found.devices) == 4 and "nvidia-ml-py is not usable" in found.notes[0]

    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=9, stdout=b"No devices were found"))
    assert "No devices were found" in ask_nvidia().notes[1]

    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 5)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "nvidia-smi did not answer" in ask_nvidia().notes[1]
