"""What the user pinned, and what goes with a model: limits as texts, shares, a projector, a draft model.

Reads texts that the settings have checked; decides nothing.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from localfast.models.gguf import ModelFacts

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT])(i?)B", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user pinned, with the names and the "decide for me" values of the settings; and the model's companions."""

    gpu_layers: int = -1
    cpu_experts: int = -1
    split: tuple[str, ...] = ()
    ctx: int = 0
    cells: int = 0
    slots: int = 0
    threads: int = 0
    batch: int = 0
    kv_type: str = "auto"
    draft: str = ""
    draft_facts: ModelFacts | None = None
    """The draft model's file, when it is here: it is then counted on the same devices."""
    mmproj_bytes: int = 0
    """Size of the vision or audio projector that goes with the model."""
    vram_limit: str = ""
    ram_limit: str = ""
    model_limit: str = ""


def limit_bytes(text: str, total_bytes: int) -> int | None:
    """The bytes that a limit such as 0.9, 6GB or 512MiB means on a device of `total_bytes`; None: no limit."""
    if not text:
        return None
    if size := _SIZE.fullmatch(text):
        number, unit, binary = size.groups()
        return int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(unit.upper()) + 1))
    return int(float(text) * total_bytes)


def pinned_shares(split: tuple[str, ...], gpus: int) -> tuple[float, ...]:
    """The user's shares of the layers, one per GPU, short lists filled with 0; empty when they are no shares."""
    try:
        shares = [float(text) for text in split]
    except ValueError:
        return ()
    if not shares or gpus < 1 or len(shares) > gpus or any(not math.isfinite(share) or share < 0 for share in shares):
        return ()
    return (*shares, *[0.0] * (gpus - len(shares))) if sum(shares) > 0 else ()
