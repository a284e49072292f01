"""A machine as a JSON file: written by `localfast doctor --export`, read in place of detection by the setting `hardware`.

What is written names no user, host, folder or serial number. What is read may be older or newer than this program: unknown
entries are skipped, missing ones have their defaults, wrong ones are refused in words.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from localfast.errors import InvalidSetting
from localfast.hardware.facts import Device, Hardware

FORMAT = 1
_MAX_BYTES = 2**20
_FOLDERS = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][^\\/:;,'\"|\n]*)+[\\/]")
"""Everything up to the last separator of a path, so that the name of the file stays."""


def to_json(hardware: Hardware) -> dict[str, Any]:
    """The machine for a file or a bug report."""
    content = asdict(hardware)
    engine = content["engine"]
    if engine:
        engine.pop("path")
        engine["error"] = _without_folders(engine["error"])
        engine["log"] = [_without_folders(line) for line in engine["log"]]
    content["notes"] = [_without_folders(note) for note in content["notes"]]
    return {"format": FORMAT, **content}


def _without_folders(text: str) -> str:
    return _FOLDERS.sub("", text)


def read_inventory(path: Path) -> Hardware:
    """Raises InvalidSetting for a file that cannot be read or does not describe a machine."""

    def refuse(reason: str) -> InvalidSetting:
        return InvalidSetting(name="hardware", value=str(path), source="this file", reason=reason)

    try:
        with path.expanduser().open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise refuse(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > _MAX_BYTES:
        raise refuse(f"is larger than {_MAX_BYTES // 1024} KiB, so it does not describe a machine")
    try:
        hardware = msgspec.json.decode(_text(raw), type=Hardware)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise refuse(f"does not describe a machine: {error}") from None
    problem = next(_problems(hardware), "")
    if problem:
        raise refuse(f"does not describe a machine: {problem}")
    return replace(hardware, devices=tuple(_clamped(device) for device in hardware.devices))


def _text(raw: bytes) -> str:
    """Editors and shells of Windows write marks at the beginning, and UTF-16."""
    encoding = "utf-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    return raw.decode(encoding)


def _problems(hardware: Hardware) -> Iterator[str]:
    rows = [("", asdict(hardware)), *((f"devices[{index}].", asdict(device)) for index, device in enumerate(hardware.devices))]
    for prefix, row in rows:
        for name, value in row.items():
            numbers = value if isinstance(value, tuple) else (value,)
            if any(isinstance(number, int | float) and number < 0 for number in numbers):
                yield f"{prefix}{name} is less than 0"
    if hardware.physical_cores < 1:
        yield "physical_cores is less than 1"


def _clamped(device: Device) -> Device:
    free = min(device.free_bytes, device.total_bytes)
    return replace(device, free_bytes=free, carve_out_bytes=min(device.carve_out_bytes, free))
