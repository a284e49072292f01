from __future__ import annotations

import json
from pathlib import Path

import pytest

from localfast.cgroups import MemoryLimit
from localfast.hardware import bandwidth
from localfast.hardware.bandwidth import cached_ram_bandwidth, gpu_bandwidth, measured_ram_bandwidth
from localfast.hardware.spec_sheets import BANDWIDTH_GB_S

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "total_gib", "expected"),
    [
        ("NVIDIA GeForce RTX 3060", 12, 360),
        ("NVIDIA GeForce RTX 3060", 8, 240),
        ("NVIDIA GeForce RTX 3060", 0, 0),  # two cards of one name
        ("NVIDIA GeForce RTX 3060 Ti", 8, 448),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, 576),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 16, 0),
        ("NVIDIA GeForce GTX 1080 with Max-Q Design", 8, 0),
        ("NVIDIA RTX 6000 Ada Generation", 48, 960),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, 1792),
        ("NVIDIA A100-SXM4-80GB", 79, 2039),
        ("NVIDIA A100-PCIE-40GB", 39, 1555),
        ("NVIDIA H100 80GB HBM3", 80, 3352),
        ("NVIDIA H200", 140, 4800),
        ("Tesla T4", 15, 320),
        ("AMD Radeon RX 7900 XTX (RADV NAVI31)", 24, 960),
        ("AMD Radeon RX 7900 XT", 20, 800),
        ("AMD Radeon RX 6800M", 12, 0),
        ("AMD Radeon 780M Graphics", 4, 0),
        ("Intel(R) Arc(tm) A770 Graphics (DG2)", 16, 560),
        ("Apple M2 Max", 64, 400),
        ("", 8, 0),
    ],
)
def test_bandwidth_of_a_gpu_is_the_right_cards_or_unknown(name: str, total_gib: int, expected: float) -> None:
    assert gpu_bandwidth(name, total_gib * GIB) == expected * 1e9


def test_bandwidth_table_holds_plausible_numbers_only() -> None:
    assert len(BANDWIDTH_GB_S) > 100 and all(60 <= number <= 8000 for number in BANDWIDTH_GB_S.values())


def test_bandwidth_of_the_ram_is_measured_by_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_BUFFER_BYTES", 2**20)
    assert 1e8 < measured_ram_bandwidth(0.01) < 1e13


def test_bandwidth_without_memory_to_measure_with_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth.cgroups, "memory_limit", lambda: MemoryLimit(GIB, 2**20))
    assert measured_ram_bandwidth(0.01) == 0


@pytest.mark.parametrize("damage", ["", "[1]", "{", '{"another machine": 5e9}', "[" * 100_000, None])
def test_bandwidth_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str | None) -> None:
    if damage is not None:
        (tmp_path / "ram-bandwidth.json").write_text(damage)
    answers = iter([3e10])
    monkeypatch.setattr(bandwidth, "measured_ram_bandwidth", lambda: next(answers))
    assert [cached_ram_bandwidth(tmp_path) for _ in range(2)] == [3e10, 3e10]
    assert [path.name for path in tmp_path.iterdir()] == ["ram-bandwidth.json"]


def test_bandwidth_of_another_processor_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "measured_ram_bandwidth", lambda: 3e10)
    cached_ram_bandwidth(tmp_path)
    monkeypatch.setattr(bandwidth, "cpu_model", lambda: "another one")
    monkeypatch.setattr(bandwidth, "measured_ram_bandwidth", lambda: 7e10)
    assert cached_ram_bandwidth(tmp_path) == 7e10


def test_bandwidth_is_returned_where_it_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(bandwidth, "measured_ram_bandwidth", lambda: 3e10)
    assert cached_ram_bandwidth(tmp_path / "file") == 3e10
    monkeypatch.setattr(bandwidth, "measured_ram_bandwidth", lambda: 0.0)
    assert cached_ram_bandwidth(tmp_path / "new") == 0 and not (tmp_path / "new").exists()


def test_bandwidth_file_is_small_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "measured_ram_bandwidth", lambda: 3e10)
    cached_ram_bandwidth(tmp_path)
    assert list(json.loads((tmp_path / "ram-bandwidth.json").read_text()).values()) == [30000000000]
