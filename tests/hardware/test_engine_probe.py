from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localfast import hardware
from localfast.hardware import read_engine_report

GIB = 2**30
PCI = "0000:c1:00.0"
GPU_ROW = {"backend": "CUDA", "name": "CUDA0", "description": "Card", "kind": "gpu", "pci_id": "0000:C1:00.0"}


def report(**facts: object) -> bytes:
    whole: dict[str, object] = {"installed": True, "version": "1", "error": "", "backends": ["CPU"], "devices": []}
    return b"a driver greets\n" + json.dumps(whole | {"supports_gpu_offload": False} | facts).encode() + b"\n"


def gpu(total_bytes: int, free_bytes: int, **facts: Any) -> bytes:
    return report(devices=[{**GPU_ROW, "total_bytes": total_bytes, "free_bytes": free_bytes, **facts}])


def test_engine_probe_report_becomes_facts() -> None:
    raw = report(backends=["CUDA", "CPU"], supports_gpu_offload=True, cpu_features=["AVX2"], path="/engines/cuda")
    log = b"ggml_cuda_init: failed to initialize CUDA: driver is insufficient\nfine\n"
    build, _, notes = read_engine_report(raw, log, 0)
    assert build is not None and build.backends == ("CUDA", "CPU") and "insufficient" in build.log[0] and len(build.log) == 1
    assert (build.cpu_features, build.path, notes) == (("AVX2",), "/engines/cuda", [])


@pytest.mark.parametrize(
    ("total", "free", "kept", "trusted"),
    [
        (8 * GIB, 7 * GIB, 7 * GIB, True),
        (8 * GIB, 9 * GIB, 8 * GIB, False),  # llama.cpp#29277
        (8 * GIB, 2**64 - GIB, 8 * GIB, False),  # a usage above the budget, subtracted without a sign
        (0, 0, 0, True),
    ],
)
def test_engine_probe_clamps_free_memory_and_says_whether_it_can_be_true(total: int, free: int, kept: int, trusted: bool) -> None:
    _, (device,), _ = read_engine_report(gpu(total, free), b"", 0)
    assert (device.pci_id, device.free_bytes, device.trusted, device.in_engine) == (PCI, kept, trusted, True)


@pytest.mark.parametrize(
    ("kind", "name", "unified"),
    [("igpu", "Radeon 780M", True), ("gpu", "Apple M2 Max", True), ("gpu", "Radeon Pro 5500M", False)],
)
def test_engine_probe_knows_memory_that_is_the_machines(kind: str, name: str, unified: bool) -> None:
    _, (device,), _ = read_engine_report(gpu(GIB, GIB, kind=kind, description=name), b"", 0)
    assert device.unified is unified


@pytest.mark.parametrize(
    "output", [b"", b"{", b"{}", b'{"devices": 3}', report(devices=[{"kind": "gpu"}]), report(cpu_features=3)]
)
def test_engine_probe_report_that_is_damaged_is_a_note_with_the_evidence(output: bytes) -> None:
    build, devices, notes = read_engine_report(output, b"terminate called\n", -6)
    assert build is None and devices == () and "status -6" in notes[0] and "terminate called" in notes[0]


def test_engine_probe_of_an_engine_that_does_not_load_says_why() -> None:
    build, _, notes = read_engine_report(report(error="OSError: libcudart.so.12: cannot open"), b"", 0)
    assert build is not None and build.installed and "libcudart" in build.error and "does not start" in notes[0]


def test_engine_probe_child_answers_one_line_of_json() -> None:
    build, _, notes = hardware.ask_engine_devices(60)
    assert build is not None
    if build.installed and not build.error:
        assert "CPU" in build.backends and build.version and build.cpu_features and not notes


def test_engine_probe_looks_into_the_given_folder_first(tmp_path: Path) -> None:
    package = tmp_path / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open')")
    build, devices, notes = hardware.ask_engine_devices(60, str(tmp_path))
    assert build is not None and (build.installed, build.path, devices) == (True, str(tmp_path), ())
    assert "libcudart.so.12" in build.error and "does not start" in notes[0]


def test_engine_probe_that_takes_too_long_or_crashes_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "did not start" in hardware.ask_engine_devices(5.0, "no\0folder")[2][0]
    monkeypatch.setattr(sys, "executable", str(Path(sys.executable).with_name("no-such-python")))
    assert "did not start" in hardware.ask_engine_devices(5.0)[2][0]

    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("probe", 0.5, stderr=b"loading driver")

    monkeypatch.setattr(subprocess, "run", hang)
    assert hardware.ask_engine_devices(0.5)[2] == ["the engine did not name its devices within 0.5 s: loading driver"]
