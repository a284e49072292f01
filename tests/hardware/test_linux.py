from __future__ import annotations

from pathlib import Path

import pytest

from localfast.hardware.linux import driverless_nvidia, is_wsl, kernel_gpus

GIB = 2**30


def grow(root: Path, files: dict[str, str | bytes | int]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())
    return root


def amd(vram: int, used: int, mapped: int, mapped_used: int, card: str = "card0") -> dict[str, str | bytes | int]:
    sizes = {"vram_total": vram, "vram_used": used, "gtt_total": mapped, "gtt_used": mapped_used}
    return {f"{card}/device/vendor": "0x1002", **{f"{card}/device/mem_info_{name}": size for name, size in sizes.items()}}


def test_linux_amd_card_has_its_vram_and_not_what_is_mapped(tmp_path: Path) -> None:
    grow(tmp_path, amd(24 * GIB, GIB, 32 * GIB, 0))
    grow(tmp_path, {"card0-DP-1/status": "connected", "card0-DP-1/device/vendor": "0x1002", "card1/device/vendor": "0x10de"})
    (card,) = kernel_gpus(tmp_path)
    assert (card.backend, card.kind, card.total_bytes, card.free_bytes) == ("AMD", "gpu", 24 * GIB, 23 * GIB)
    assert (card.unified, card.display, card.trusted, card.carve_out_bytes) == (False, True, True, 0)


def test_linux_apu_with_a_small_carve_out_is_one_pool(tmp_path: Path) -> None:
    grow(tmp_path, amd(GIB // 2, GIB // 4, 16 * GIB, GIB) | {"card0-HDMI-A-1/status": "disconnected"})
    (pool,) = kernel_gpus(tmp_path)
    assert (pool.kind, pool.unified, pool.display) == ("igpu", True, False)
    assert (pool.total_bytes, pool.free_bytes, pool.carve_out_bytes) == (16 * GIB + GIB // 2, 15 * GIB + GIB // 4, GIB // 4)


@pytest.mark.parametrize(("head", "kind"), [(bytes([112, 0, 3, 0]), "igpu"), (bytes([96, 0, 1, 3]), "gpu"), (b"", "gpu")])
def test_linux_apu_with_a_large_carve_out_is_known_by_its_metrics(tmp_path: Path, head: bytes, kind: str) -> None:
    grow(tmp_path, amd(96 * GIB, GIB, 16 * GIB, 0) | {"card0/device/gpu_metrics": head + bytes(92) if head else b""})
    (found,) = kernel_gpus(tmp_path)
    assert (found.kind, found.total_bytes) == (kind, (112 if kind == "igpu" else 96) * GIB)


@pytest.mark.parametrize(
    ("files", "kind", "total", "free", "trusted"),
    [
        ({}, "igpu", 0, 0, True),
        ({"lmem_total_bytes": 16 * GIB}, "gpu", 16 * GIB, 16 * GIB, False),
        ({"lmem_total_bytes": 16 * GIB, "lmem_avail_bytes": 15 * GIB}, "gpu", 16 * GIB, 15 * GIB, True),
        ({"device/lmem_total_bytes": 8 * GIB}, "gpu", 8 * GIB, 8 * GIB, False),
        ({f"device/tile{n}/physical_vram_size_bytes": 6 * GIB for n in (0, 1)}, "gpu", 12 * GIB, 12 * GIB, False),
    ],
)
def test_linux_intel_gpu_has_local_memory_or_none(
    tmp_path: Path, files: dict[str, int], kind: str, total: int, free: int, trusted: bool
) -> None:
    grow(tmp_path, {"card0/device/vendor": "0x8086"} | {f"card0/{name}": size for name, size in files.items()})
    (gpu,) = kernel_gpus(tmp_path)
    assert (gpu.kind, gpu.total_bytes, gpu.free_bytes, gpu.trusted) == (kind, total, free, trusted)
    assert gpu.unified is (kind == "igpu") and gpu.display is None


def test_linux_nvidia_card_without_a_driver_is_seen_on_the_bus(tmp_path: Path) -> None:
    grow(tmp_path, {"0000:01:00.0/vendor": "0x10de", "0000:01:00.0/class": "0x030000"})
    grow(tmp_path, {"0000:01:00.1/vendor": "0x10de", "0000:01:00.1/class": "0x040300"})  # its sound
    grow(tmp_path, {"0000:02:00.0/vendor": "0x1a03", "0000:02:00.0/class": "0x030000"})
    (card,) = driverless_nvidia(tmp_path)
    assert (card.pci_id, card.total_bytes) == ("0000:01:00.0", 0) and "driver" in card.warning


def test_linux_without_sysfs_has_no_gpus(tmp_path: Path) -> None:
    assert kernel_gpus(tmp_path / "none") == () == driverless_nvidia(tmp_path / "none")


@pytest.mark.parametrize(("release", "inside"), [("5.15.153.1-microsoft-standard-WSL2", True), ("6.8.0-45-generic", False)])
def test_linux_inside_windows_is_known_by_its_kernel(release: str, inside: bool) -> None:
    assert is_wsl(release) is inside
