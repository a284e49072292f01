"""Which loaded models must go so that another may come. Pure: it is asked about possible states too, and must not log or act."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that is loaded or being loaded; `last_used_s` by any one clock."""

    name: str
    busy: bool
    last_used_s: float


def victim(residents: Iterable[Resident]) -> str | None:
    """The idle model that was unused for longest; None while all are busy: work in progress is never thrown away."""
    idle = [resident for resident in residents if not resident.busy]
    return min(idle, key=lambda resident: resident.last_used_s).name if idle else None
