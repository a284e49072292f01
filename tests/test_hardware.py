from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from localfast import cgroups, hardware
from localfast.cgroups import MemoryLimit, cpu_quota, memory_limit, usable_cores
from localfast.hardware import Device, EngineBuild, Hardware, merge, read_engine_report

GIB = 2**30
PCI = "0000:c1:00.0"


def device(**facts: object) -> Device:
    return Device(**{"backend": "NVIDIA", "name": "NVIDIA Test", "kind": "gpu", "source": "the driver", **facts})  # type: ignore[arg-type]


def report(**facts: object) -> bytes:
    whole = {
        "installed": True,
        "version": "1",
        "error": "",
        "backends": ["CPU"],
        "devices": [],
        "supports_gpu_offload": False,
        **facts,
    }
    return b"a driver greets\n" + json.dumps(whole).encode() + b"\n"


GPU_ROW = {"backend": "CUDA", "name": "CUDA0", "description": "Card", "kind": "gpu", "pci_id": "0000:C1:00.0"}


def test_merge_matches_by_pci_id_and_takes_the_smaller_numbers() -> None:
    seen = (device(pci_id=PCI, total_bytes=24 * GIB, free_bytes=20 * GIB, display=True),)
    used = (device(backend="CUDA", name="Card", pci_id=PCI, total_bytes=23 * GIB, free_bytes=21 * GIB, in_engine=True),)
    (merged,) = merge(seen, used)
    assert (merged.total_bytes, merged.free_bytes, merged.display, merged.in_engine) == (23 * GIB, 20 * GIB, True, True)
    assert merged.backend == "CUDA" and not merged.context_counted  # the driver's number was taken without a context of ours


def test_merge_clamps_free_to_total_and_drops_the_second_backend_of_a_card() -> None:
    cuda = device(backend="CUDA", pci_id=PCI, total_bytes=8 * GIB, free_bytes=9 * GIB, in_engine=True)
    vulkan = device(backend="Vulkan", pci_id=PCI, total_bytes=16 * GIB, free_bytes=16 * GIB, in_engine=True)
    (merged,) = merge((), (cuda, vulkan))
    assert merged.backend == "CUDA" and merged.free_bytes == 8 * GIB and merged.context_counted


def test_merge_keeps_a_card_that_only_the_driver_sees() -> None:
    split = device(pci_id="0000:01:00.0", total_bytes=0)
    assert merge((split,), ()) == (split,)
    found = Hardware(devices=merge((split,), ()))
    assert found.unused_gpus == (split,) and found.engine_gpus == ()


def test_engine_gpus_prefer_discrete_ones() -> None:
    small = device(kind="igpu", total_bytes=GIB, in_engine=True)
    large = device(total_bytes=GIB, in_engine=True)
    assert Hardware(devices=(small, large)).engine_gpus == (large,)
    assert Hardware(devices=(small,)).engine_gpus == (small,)


def test_engine_report_becomes_data() -> None:
    raw = report(
        backends=["CUDA", "CPU"], devices=[{**GPU_ROW, "total_bytes": 8 * GIB, "free_bytes": 9 * GIB}], supports_gpu_offload=True
    )
    build, devices, notes = read_engine_report(
        raw, b"ggml_cuda_init: failed to initialize CUDA: driver is insufficient\nfine\n", 0
    )
    assert build is not None and build.backends == ("CUDA", "CPU") and "insufficient" in build.log[0] and len(build.log) == 1
    assert devices[0].pci_id == PCI and devices[0].free_bytes == 8 * GIB and devices[0].in_engine and not notes


@pytest.mark.parametrize("output", [b"", b"{", b"{}", b'{"devices": 3}', report(devices=[{"kind": "gpu"}])])
def test_engine_report_that_is_damaged_is_a_note_with_the_evidence(output: bytes) -> None:
    build, devices, notes = read_engine_report(output, b"terminate called\n", -6)
    assert build is None and devices == () and "status -6" in notes[0] and "terminate called" in notes[0]


def test_engine_that_does_not_load_is_installed_and_says_why() -> None:
    build, _, notes = read_engine_report(report(error="OSError: libcudart.so.12: cannot open"), b"", 0)
    assert build is not None and build.installed and "libcudart" in build.error and "does not start" in notes[0]


def test_probe_child_answers_one_line_of_json() -> None:
    result = subprocess.run([sys.executable, "-m", "localfast.engine.devices"], capture_output=True, check=True)
    build, _, notes = read_engine_report(result.stdout, result.stderr, result.returncode)
    assert build is not None
    if build.installed and not build.error:
        assert "CPU" in build.backends and build.version and not notes


def test_probe_that_takes_too_long_or_crashes_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(Path(sys.executable).with_name("no-such-python")))
    assert "did not start" in hardware.ask_engine_devices(5.0)[2][0]

    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("probe", 0.5, stderr=b"loading driver")

    monkeypatch.setattr(subprocess, "run", hang)
    assert hardware.ask_engine_devices(0.5)[2] == ["the engine did not name its devices within 0.5 s: loading driver"]


def test_nvidia_cards_become_devices_and_a_split_card_is_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        value = 3

    def unsupported(handle: int) -> None:
        raise NVMLError

    driver = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_ERROR_LIBRARY_NOT_FOUND=12,
        NVML_ERROR_DRIVER_NOT_LOADED=9,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetCudaDriverVersion_v2=lambda: 12080,
        nvmlSystemGetDriverVersion=lambda: "570.86",
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9 - handle, 0),
        nvmlDeviceGetMigMode=lambda handle: (handle, handle),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=8 * GIB, free=7 * GIB),
        nvmlDeviceGetDisplayActive=unsupported,
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=f"0000000{handle}:C1:00.0"),
        nvmlDeviceGetName=lambda handle: f"card {handle}",
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    found = hardware._ask_nvidia()
    assert [(one.name, one.pci_id, one.total_bytes) for one in found.devices] == [
        ("card 0", PCI, 8 * GIB),
        ("card 1", "0001:c1:00.0", 0),
    ]
    assert (found.driver_version, found.cuda_version, found.compute_capability) == ("570.86", "12.8", (8, 0))
    assert found.devices[0].display is None and found.notes == ("card 1: the driver does not tell its memory",)
    monkeypatch.setattr(driver, "nvmlDeviceGetCount", lambda: unsupported(0))
    assert "stopped answering" in hardware._ask_nvidia().notes[0]


def test_detect_survives_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(hardware, "_ask_nvidia", lambda: release.wait(30))
    found = hardware.detect(timeout_s=0.01, ask_engine=False)
    release.set()
    assert "did not answer in time" in found.notes[0] and found.engine is None


def test_detect_reports_ram_and_cores_of_this_machine() -> None:
    found = hardware.detect(ask_engine=False)
    assert 0 < found.ram_available_bytes <= found.ram_total_bytes and found.physical_cores >= 1


def test_detect_says_loudly_that_a_gpu_stays_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hardware, "_ask_nvidia", lambda: hardware._Nvidia(devices=(device(total_bytes=GIB),), driver_version="550.1")
    )
    build = EngineBuild(installed=True, version="1", backends=("CPU",))
    monkeypatch.setattr(hardware, "ask_engine_devices", lambda timeout_s: (build, (), []))
    assert any("CPU-only build" in note and "NVIDIA Test" in note for note in hardware.detect().notes)


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_memory_limit_v2_walks_up_and_does_not_count_page_cache(tmp_path: Path) -> None:
    own = write(tmp_path, own="0::/slice/service\n") / "own"
    root = write(tmp_path / "fs")
    write(root / "slice", memory__max=str(4 * GIB), memory__current=str(3 * GIB), memory__stat=f"anon 5\ninactive_file {GIB}\n")
    write(root / "slice/service", memory__max="max\n", memory__current="5")
    assert memory_limit(root, own) == MemoryLimit(4 * GIB, 2 * GIB)


def test_memory_limit_v2_in_a_container_is_found_at_the_mount(tmp_path: Path) -> None:
    own = write(tmp_path, own="0::/docker/abc/../..\n") / "own"
    root = write(tmp_path / "fs", memory__max=str(GIB), memory__current=str(GIB // 2))
    assert memory_limit(root, own) == MemoryLimit(GIB, GIB // 2)


def test_memory_limit_v1_reads_its_own_names(tmp_path: Path) -> None:
    own = write(tmp_path, own="5:cpuset:/x\n4:memory,other:/box\n") / "own"
    root = tmp_path / "fs"
    write(root / "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="1")
    write(
        root / "memory/box",
        memory__limit_in_bytes=str(2 * GIB),
        memory__usage_in_bytes=str(GIB),
        memory__stat="total_inactive_file 0",
    )
    assert memory_limit(root, own) == MemoryLimit(2 * GIB, GIB)


def test_limits_without_cgroups_are_none(tmp_path: Path) -> None:
    assert memory_limit(tmp_path, tmp_path / "none") == MemoryLimit() and cpu_quota(tmp_path, tmp_path / "none") is None


def test_cpu_quota_of_both_versions(tmp_path: Path) -> None:
    own = write(tmp_path, own="0::/a\n1:cpu,cpuacct:/a\n") / "own"
    root = write(tmp_path / "fs", cpu__max="max 100000")
    write(root / "a", cpu__max="250000 100000")
    assert cpu_quota(root, own) == 2.5
    write(root / "cpu/a", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    assert cpu_quota(root, own) == 1.5


def test_usable_cores_counts_hyperthreads_once_and_keeps_to_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(8):
        write(tmp_path / f"cpu{cpu}/topology", physical_package_id="0", core_id=str(cpu // 2))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: None)
    assert usable_cores(tmp_path) == 3
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: 0.5)
    assert usable_cores(tmp_path) == 1


def test_other_gpus_reads_amd_memory_from_the_kernel(tmp_path: Path) -> None:
    write(tmp_path / "card0/device", vendor="0x1002", mem_info_vram_total=str(24 * GIB), mem_info_vram_used=str(GIB))
    write(tmp_path / "card0-DP-1/device", vendor="0x1002")
    write(tmp_path / "card1/device", vendor="0x10de")
    (gpu,) = hardware._other_gpus(tmp_path)
    assert (gpu.backend, gpu.kind, gpu.total_bytes, gpu.free_bytes) == ("AMD", "gpu", 24 * GIB, 23 * GIB)
