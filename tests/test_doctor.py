from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from localfast.doctor import examine, port_owner, wheel_variant
from localfast.hardware import Device, EngineBuild, Hardware
from localfast.settings import Settings

GIB = 2**30
CPU_BUILD = EngineBuild(installed=True, version="0.3.36", backends=("CPU",))
CUDA_BUILD = replace(CPU_BUILD, backends=("CUDA", "CPU"))
NVIDIA = Device(backend="NVIDIA", name="NVIDIA Test", kind="gpu", total_bytes=8 * GIB, free_bytes=7 * GIB)
MACHINE = Hardware(
    engine=CPU_BUILD,
    ram_total_bytes=16 * GIB,
    ram_available_bytes=8 * GIB,
    driver_version="570.86",
    compute_capability=(8, 6),
    system="linux",
)


def find(hardware: Hardware, name: str, settings: Settings) -> tuple[str, str, str]:
    (finding,) = (finding for finding in examine(settings, hardware) if finding.name == name)
    return finding.level, finding.fact, finding.fix


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=str(tmp_path), port=0)


@pytest.mark.parametrize(
    ("engine", "level", "words", "fix"),
    [
        (CPU_BUILD, "ok", "0.3.36, built for CPU", ""),
        (None, "problem", "not asked", "localfast.engine.devices"),
        (EngineBuild(installed=False), "problem", "not installed", "pip install"),
        (replace(CPU_BUILD, error="OSError: libcudart.so.12"), "problem", "does not start", "nvidia-cuda-runtime-cu12"),
        (replace(CPU_BUILD, error="OSError: libcuda.so.1"), "problem", "does not start", "driver is not installed"),
    ],
)
def test_doctor_engine(settings: Settings, engine: EngineBuild | None, level: str, words: str, fix: str) -> None:
    found = find(replace(MACHINE, engine=engine), "engine", settings)
    assert found[0] == level and words in found[1] and fix in found[2]


@pytest.mark.parametrize(
    ("hardware", "level", "words", "fix"),
    [
        (MACHINE, "ok", "no GPU found", ""),
        (replace(MACHINE, devices=(replace(NVIDIA, in_engine=True, backend="CUDA"),)), "ok", "7.0 of 8.0 GiB free", ""),
        (replace(MACHINE, devices=(NVIDIA,)), "problem", "built for CPU only", "/cu124"),
        (replace(MACHINE, devices=(replace(NVIDIA, backend="AMD", name="AMD"),), driver_version=""), "warning", "AMD", "/vulkan"),
        (
            replace(MACHINE, devices=(NVIDIA,), engine=replace(CUDA_BUILD, log=("CUDA driver version is insufficient",))),
            "problem",
            "finds no GPU",
            "570.86",
        ),
        (replace(MACHINE, devices=(NVIDIA,), engine=CUDA_BUILD), "problem", "finds no GPU", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_doctor_gpu(settings: Settings, hardware: Hardware, level: str, words: str, fix: str) -> None:
    found = find(hardware, "gpu", settings)
    assert found[0] == level and words in found[1] and fix in found[2]


@pytest.mark.parametrize(
    ("capability", "driver", "system", "variant"),
    [
        ((5, 2), "580.1", "linux", "vulkan"),
        ((6, 1), "580.1", "linux", "cu124"),
        ((8, 9), "580.1", "win32", "cu130"),
        ((8, 9), "552.22", "win32", "cu124"),
        ((8, 6), "535.1", "linux", "cu121"),
        ((8, 6), "535.1", "win32", "cu118"),
        ((9, 0), "535.1", "win32", "vulkan"),
        ((12, 0), "570.1", "linux", "cu125"),
        ((12, 0), "580.1", "linux", "cu130"),
        ((8, 6), "470.1", "linux", "vulkan"),
        ((0, 0), "", "linux", "vulkan"),
    ],
)
def test_wheel_variant_runs_on_card_and_driver(capability: tuple[int, int], driver: str, system: str, variant: str) -> None:
    assert wheel_variant(replace(MACHINE, compute_capability=capability, driver_version=driver, system=system)) == variant


def test_doctor_models_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    level, fact, fix = find(MACHINE, "models folder", Settings(home=str(tmp_path / "file"), port=0))
    assert level == "problem" and "cannot be written" in fact and "LOCALFAST_HOME" in fix


def test_doctor_little_ram_is_a_warning(settings: Settings) -> None:
    assert find(replace(MACHINE, ram_available_bytes=GIB), "ram", settings)[0] == "warning"
    assert find(MACHINE, "ram", settings)[0] == "ok"


@pytest.mark.parametrize(("bound", "asked"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0")])
def test_port_owner_names_the_process(bound: str, asked: str, settings: Settings) -> None:
    with socket.create_server((bound, 0)) as listener:
        port = listener.getsockname()[1]
        owner = port_owner(asked, port)
        assert owner is not None and owner.endswith(f"(pid {os.getpid()})")
        level, fact, fix = find(MACHINE, "port", replace(settings, host=asked, port=port))
        assert level == "warning" and owner in fact and str(port + 1) in fix
    assert port_owner(asked, port) is None
    assert find(MACHINE, "port", replace(settings, host=asked, port=port))[0] == "ok"


def test_port_owner_ignores_a_listener_on_another_address() -> None:
    if sys.platform == "darwin":
        pytest.skip("macOS has only 127.0.0.1")
    with socket.create_server(("127.0.0.2", 0)) as listener:
        assert port_owner("127.0.0.1", listener.getsockname()[1]) is None


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_port_owner_sees_ipv6_and_dual_stack_listeners() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        for host in ("::1", "127.0.0.1"):
            assert port_owner(host, listener.getsockname()[1]) is not None


def test_port_owner_of_another_process_is_named() -> None:
    script = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        owner = port_owner("127.0.0.1", int(process.stdout.readline()))
        process.stdin.close()
        assert owner is not None and f"pid {process.pid}" in owner
