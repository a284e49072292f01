from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from localfast.cli import cli
from localfast.doctor import examine, port_owner
from localfast.hardware import PCI_SOURCE, Device, EngineBuild, Hardware
from localfast.settings import Settings

GIB = 2**30
CPU_BUILD = EngineBuild(installed=True, version="0.3.36", backends=("CPU",))
CUDA_BUILD = replace(CPU_BUILD, backends=("CUDA", "CPU"))
NVIDIA = Device(backend="NVIDIA", name="NVIDIA Test", kind="gpu", total_bytes=8 * GIB, free_bytes=7 * GIB)
AMD = replace(NVIDIA, backend="AMD", name="AMD")
UNDRIVEN = replace(NVIDIA, total_bytes=0, free_bytes=0, source=PCI_SOURCE, warning="no NVIDIA driver: install it")
USED = replace(NVIDIA, in_engine=True, backend="CUDA")
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
        (EngineBuild(installed=False), "problem", "not installed", "localfast engine install; or"),
        (replace(CPU_BUILD, error="OSError: libcudart.so.12"), "problem", "does not start", "nvidia-cuda-runtime-cu12"),
        (replace(CPU_BUILD, error="OSError: libcuda.so.1"), "problem", "does not start", "driver is not installed"),
        (replace(CPU_BUILD, error="OSError: bad ELF"), "problem", "does not start", "localfast engine install"),
    ],
)
def test_doctor_engine(settings: Settings, engine: EngineBuild | None, level: str, words: str, fix: str) -> None:
    found = find(replace(MACHINE, engine=engine), "engine", settings)
    assert found[0] == level and words in found[1] and fix in found[2]


@pytest.mark.parametrize(
    ("hardware", "level", "words", "fix"),
    [
        (MACHINE, "ok", "no GPU found", ""),
        (replace(MACHINE, devices=(USED,)), "ok", "7.0 of 8.0 GiB free", ""),
        (replace(MACHINE, devices=(NVIDIA,)), "problem", "built for CPU only", "localfast engine install"),
        (replace(MACHINE, devices=(AMD,), driver_version=""), "warning", "AMD", "localfast engine install"),
        (replace(MACHINE, devices=(AMD,), engine=CUDA_BUILD), "warning", "finds no GPU", "NVIDIA cards only"),
        (replace(MACHINE, devices=(UNDRIVEN,)), "warning", "cannot be used", "install it"),
        (replace(MACHINE, devices=(NVIDIA,), engine=EngineBuild(installed=False)), "ok", "the engine does not use it", ""),
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
    ("gpu", "level", "words"),
    [
        (replace(USED, display=True), "ok", "drives a screen"),
        (replace(USED, mig=True), "ok", "a slice of a split card"),
        (replace(USED, kind="igpu", unified=True), "ok", "its memory is the machine's RAM"),
        (replace(USED, reserved_bytes=5 * GIB // 2), "ok", "2.5 GiB of that are taken by the driver"),
        (replace(USED, warning="a claim that nothing confirms"), "warning", "a claim that nothing confirms"),
    ],
)
def test_doctor_gpu_says_what_is_special(settings: Settings, gpu: Device, level: str, words: str) -> None:
    found = find(replace(MACHINE, devices=(gpu,)), "gpu", settings)
    assert found[0] == level and "7.0 of 8.0 GiB free" in found[1] and words in found[1]


@pytest.mark.parametrize(
    ("compiled", "devices", "level"),
    [(("SSE3",), (), "warning"), (("AVX2", "FMA"), (), "ok"), ((), (), "ok"), (("SSE3",), (USED,), "ok")],
)
def test_doctor_engine_that_ignores_this_processor(
    settings: Settings, compiled: tuple[str, ...], devices: tuple[Device, ...], level: str
) -> None:
    engine = replace(CPU_BUILD, cpu_features=compiled)
    found = find(replace(MACHINE, engine=engine, devices=devices, cpu_features=("AVX", "AVX2", "FMA")), "engine", settings)
    assert found[0] == level and ("without AVX2, FMA" in found[1] and "--from-source" in found[2]) is (level == "warning")


def test_doctor_models_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    level, fact, fix = find(MACHINE, "models folder", Settings(home=str(tmp_path / "file"), port=0))
    assert level == "problem" and "cannot be written" in fact and "LOCALFAST_HOME" in fix


def test_doctor_little_ram_is_a_warning(settings: Settings) -> None:
    assert find(replace(MACHINE, ram_available_bytes=GIB), "ram", settings)[0] == "warning"
    assert find(MACHINE, "ram", settings)[0] == "ok"
    assert ".wslconfig" in find(replace(MACHINE, ram_available_bytes=GIB, wsl=True), "ram", settings)[2]


def test_doctor_ram_says_who_gave_the_number(settings: Settings) -> None:
    machine = replace(MACHINE, ram_source="the container limit, cgroup v2", swap_free_bytes=GIB)
    assert "8.0 of 16.0 GiB available (the container limit, cgroup v2), 1.0 GiB of swap" in find(machine, "ram", settings)[1]


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


def test_doctor_export_is_a_machine_that_stands_in_for_this_one(tmp_path: Path) -> None:
    def run(*arguments: str, hardware: str = "") -> Result:
        environ = {"LOCALFAST_HOME": str(tmp_path), "LOCALFAST_HARDWARE": hardware}
        return CliRunner().invoke(cli, ["doctor", *arguments], env=environ)

    target = tmp_path / "machine.json"
    printed, written = run("--export"), run("--export", str(target))
    assert printed.exit_code == written.exit_code == 0 and "is described in" in written.stderr
    machine = json.loads(printed.stdout)
    assert machine["ram_bandwidth_bytes_s"] == json.loads(target.read_text())["ram_bandwidth_bytes_s"] > 0
    assert str(tmp_path) not in printed.stdout and str(Path.home()) not in printed.stdout

    target.write_text(json.dumps(machine | {"physical_cores": 77}))
    findings = {row["name"]: row["fact"] for row in json.loads(run("--json", hardware=str(target)).stdout)["findings"]}
    assert "77 CPU cores" in findings["ram"]
    target.write_text("{}x")
    refused = run("--json", hardware=str(target))
    assert refused.exit_code == 2 and "does not describe a machine" in refused.stderr and not refused.stdout
    refused = run("--export", str(tmp_path / "none" / "machine.json"))
    assert refused.exit_code == 2 and "cannot be written" in refused.stderr
