"""Small JSON files that may be lost: written whole or not at all, and a damaged one reads as absent."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

LIMIT_BYTES = 4 * 2**20
_Content = TypeVar("_Content")


def read(path: Path, kind: type[_Content]) -> _Content | None:
    try:
        if path.stat().st_size <= LIMIT_BYTES:
            return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError, RecursionError):  # msgspec's errors and bad UTF-8 are ValueErrors
        pass
    return None


def write(path: Path, content: object) -> None:
    """Best effort: a full or read-only disk only means that the work is done again next time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(content))
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)


def keep_newest(folder: Path, count: int) -> None:
    """Remove the files that were written longest ago, and what a killed write left."""
    with contextlib.suppress(OSError):
        files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in files[count:]:
            path.unlink(missing_ok=True)
