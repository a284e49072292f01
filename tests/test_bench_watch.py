"""What is seen of a server from outside: its process, its memory, its counters."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from localfast.bench.client import Target
from localfast.bench.watch import engine_numbers, find_process, machine, processes, resident_bytes
from localfast.hardware import nvidia_meter


def test_process_is_found_by_the_port_it_listens_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        found = processes(Target(f"http://localhost:{port}", "m"))
        child.communicate(b"\n")
        assert found[0].pid == os.getpid() and child.pid in [one.pid for one in found]
        sizes = resident_bytes(found)  # the child has ended meanwhile
        assert sizes[os.getpid()] > 2**20 and child.pid not in sizes
    assert find_process(Target(f"http://127.0.0.1:{port}", "m")) is None


def test_process_of_another_machine_is_not_looked_for() -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        assert find_process(Target(f"http://192.0.2.1:{listener.getsockname()[1]}", "m")) is None


def test_process_can_be_named() -> None:
    found = find_process(Target("http://192.0.2.1", "m", pid=os.getpid()))
    assert found is not None and found.pid == os.getpid()
    assert find_process(Target("http://127.0.0.1", "m", pid=2**30)) is None


AFTER = {"decode_calls": 110.0, "batched_tokens": 300.0, "decode_seconds": 1.9, "step_seconds": 2.0}


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {}), (AFTER, AFTER), (AFTER, {**AFTER, "decode_calls": 5.0}), ({}, {"decode_calls": 9.0})],
)
def test_engine_numbers_are_left_out_where_they_cannot_be_told(before: dict[str, float], after: dict[str, float]) -> None:
    assert engine_numbers(before, after) == {}


def test_engine_numbers_are_of_the_work_alone() -> None:
    found = engine_numbers({"decode_calls": 10.0, "batched_tokens": 100.0, "decode_seconds": 1.0, "step_seconds": 1.0}, AFTER)
    assert found == pytest.approx({"overhead_us_per_step": 1000, "overhead_percent": 10, "tokens_per_call": 2})


def test_machine_is_one_line() -> None:
    assert "cores" in machine() and "GiB RAM" in machine() and "\n" not in machine()


# --- GPUs, which the machine of the tests need not have ---------------------------------------------------------------------


class NvmlError(Exception):
    pass


def refuse(*_: object) -> Any:
    raise NvmlError


def driver(**changes: Any) -> SimpleNamespace:
    """Two cards; process 7 computes on both and also draws on the first."""
    answers = {
        "NVMLError": NvmlError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUtilizationRates": lambda card: SimpleNamespace(gpu=30 + card),
        "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(used=1000),
        "nvmlDeviceGetComputeRunningProcesses": lambda card: [SimpleNamespace(pid=7, usedGpuMemory=100)],
        "nvmlDeviceGetGraphicsRunningProcesses": lambda card: [
            SimpleNamespace(pid=7 + card, usedGpuMemory=100 if not card else None)
        ],
    }
    return SimpleNamespace(**{**answers, **changes})


def test_gpus_are_read_over_all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver())
    with nvidia_meter() as read:
        use = read()
    assert use is not None and (use.busy_percent, use.used_bytes, use.process_bytes) == (31, 2000, {7: 200, 8: 0})


def test_gpus_that_tell_little_are_read_as_far_as_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("UtilizationRates", "ComputeRunningProcesses", "GraphicsRunningProcesses")
    monkeypatch.setitem(sys.modules, "pynvml", driver(**{f"nvmlDeviceGet{name}": refuse for name in names}))
    with nvidia_meter() as read:
        use = read()
    assert use is not None and (use.busy_percent, use.used_bytes, use.process_bytes) == (None, 2000, {})


@pytest.mark.parametrize("module", [driver(nvmlInit=refuse), driver(nvmlDeviceGetCount=refuse), None])
def test_gpus_that_are_not_there_are_nothing(module: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with nvidia_meter() as read:
        assert read() is None
