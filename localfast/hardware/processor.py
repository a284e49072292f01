"""The processor as the system names it: its model, and the instructions that decide how fast the engine computes on it."""

from __future__ import annotations

import ctypes
import platform
import re
import sys
from pathlib import Path
from typing import Any

from localfast.cgroups import read_text

_TABLE = Path("/proc/cpuinfo")
_INSTRUCTIONS = ("AVX", "AVX2", "F16C", "FMA", "BMI2", "AVX512F")
_WINDOWS_NUMBERS = {39: "AVX", 40: "AVX2", 41: "AVX512F"}
"""PF_*_INSTRUCTIONS_AVAILABLE of IsProcessorFeaturePresent."""


def cpu_model(table: Path = _TABLE) -> str:
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", read_text(table), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def cpu_features(table: Path = _TABLE) -> tuple[str, ...]:
    """Instructions under the engine's names for them; empty where the system does not tell."""
    if sys.platform == "win32":
        loader: Any = ctypes
        asked = loader.WinDLL("kernel32.dll").IsProcessorFeaturePresent
        return tuple(name for number, name in _WINDOWS_NUMBERS.items() if asked(number))
    found = re.search(r"^flags\s*:\s*(.+)$", read_text(table), re.MULTILINE)
    flags = found[1].upper().split() if found else []
    return tuple(name for name in _INSTRUCTIONS if name in flags)
