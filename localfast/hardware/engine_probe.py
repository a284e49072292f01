"""Asks the engine for its build and its devices, in a child process: drivers hang, abort, and keep memory of whoever asked.

Whatever the child does becomes data or a note, never an error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from localfast.hardware.facts import Device, EngineBuild

_STDERR_TAIL = 5


def ask_engine_devices(timeout_s: float, engine_path: str = "") -> tuple[EngineBuild | None, tuple[Device, ...], list[str]]:
    """Build, GPUs and notes of the engine in `engine_path` (empty: of this Python environment).

    None instead of a build when the child crashed or took too long.
    """
    command = [sys.executable, "-m", "localfast.engine.devices", *([str(Path(engine_path).absolute())] if engine_path else [])]
    try:
        result = subprocess.run(
            command,
            # The folder that holds the package: a file of the user's folder must not stand in for a module of ours.
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return None, (), [f"the engine did not name its devices within {timeout_s:g} s{_tail(error.stderr)}"]
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        return None, (), [f"the engine's device probe did not start: {error}"]
    return read_engine_report(result.stdout, result.stderr, result.returncode)


def read_engine_report(
    stdout: bytes, stderr: bytes | None, exit_status: int
) -> tuple[EngineBuild | None, tuple[Device, ...], list[str]]:
    """Make data of the child's last line of output; anything unexpected becomes a note with the end of its error output."""
    lines = [line for line in stdout.decode("utf-8", "replace").splitlines() if line.startswith("{")]
    try:
        report = json.loads(lines[-1])
        rows = [row for row in report["devices"] if row["kind"] in ("gpu", "igpu")]
        build = EngineBuild(
            installed=report["installed"],
            version=report["version"],
            backends=tuple(report["backends"]),
            supports_gpu_offload=report["supports_gpu_offload"],
            error=report["error"],
            log=tuple(line for line in _lines(stderr) if "failed" in line.lower() or "error" in line.lower())[-_STDERR_TAIL:],
            cpu_features=tuple(report.get("cpu_features", ())),
            path=report.get("path", ""),
        )
        devices = tuple(_device(row) for row in rows)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError):
        return None, (), [f"the engine's device probe ended with status {exit_status}{_tail(stderr)}"]
    notes = [f"the engine is installed but does not start: {build.error}"] if build.error else []
    return build, devices, notes


def _device(row: dict[str, Any]) -> Device:
    total, free = int(row["total_bytes"]), int(row["free_bytes"])
    name = row["description"] or row["name"]
    return Device(
        backend=row["backend"],
        name=name,
        kind=row["kind"],
        pci_id=row["pci_id"].lower(),
        total_bytes=total,
        free_bytes=max(0, min(free, total)),
        in_engine=True,
        # Metal calls every GPU discrete; Apple's own have no memory but the machine's.
        unified=row["kind"] == "igpu" or name.startswith("Apple "),
        # Vulkan subtracts a usage from a smaller budget without a sign.
        trusted=0 <= free <= total,
        source="the engine",
    )


def _lines(raw: bytes | None) -> list[str]:
    return [line.strip() for line in (raw or b"").decode("utf-8", "replace").splitlines() if line.strip()]


def _tail(raw: bytes | None) -> str:
    lines = _lines(raw)
    return f": {' | '.join(lines[-_STDERR_TAIL:])}" if lines else ""
