"""How much of each device a model may take, as a sum that adds up: what is there, in use, the driver's, kept free, forbidden.

Margins are those of measured servers: enough for a desktop that grows and for what allocators round up. Knows no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from localfast.footprint import MIB
from localfast.hardware import Device, Hardware
from localfast.plan.wishes import Wishes, limit_bytes

_CONTEXT_BYTES = {"CUDA": 300 * MIB, "ROCm": 300 * MIB, "HIP": 300 * MIB}
_OTHER_CONTEXT_BYTES = 150 * MIB
_POOL_KEPT_BYTES = 2048 * MIB
_PARTIAL_BYTES = 128 * MIB
"""Copies of weights that stay in RAM pass through the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """One device's sum: total - used - driver - kept free - forbidden = usable, against the parts that the model puts there."""

    device: str
    total_bytes: int
    used_bytes: int
    driver_bytes: int
    kept_free_bytes: int
    forbidden_bytes: int = 0
    """Free, but beyond the limit that the user set."""
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def usable_bytes(self) -> int:
        taken_bytes = self.used_bytes + self.driver_bytes + self.kept_free_bytes + self.forbidden_bytes
        return max(0, self.total_bytes - taken_bytes)

    @property
    def needed_bytes(self) -> int:
        return sum(size_bytes for _, size_bytes in self.parts)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.usable_bytes

    def sentence(self) -> str:
        """The sum in GiB. What is printed adds up: totals are made of the rounded numbers."""
        total, used, driver, kept, forbidden = map(
            hundredths, (self.total_bytes, self.used_bytes, self.driver_bytes, self.kept_free_bytes, self.forbidden_bytes)
        )
        usable = max(0, total - used - driver - kept - forbidden)
        needed = sum(hundredths(size_bytes) for _, size_bytes in self.parts)
        taken = f"{gib(used)} used" + (f" - {gib(driver)} driver" if driver else "") + f" - {gib(kept)} kept free"
        taken += f" - {gib(forbidden)} beyond the limit" if forbidden else ""
        parts = " + ".join(f"{label} {gib(hundredths(size_bytes))}" for label, size_bytes in self.parts)
        parts = f"{parts} = {gib(needed)}" if len(self.parts) > 1 else parts or "nothing needed"
        verdict = "fits" if self.fits else f"{gib(max(1, needed - usable))} too much"
        return f"{self.device}: {gib(total)} GiB - {taken} = {gib(usable)} usable; {parts}: {verdict}"


def device_names(gpus: Sequence[Device]) -> tuple[str, ...]:
    """Names of the GPUs; two of the same kind are told apart by their place."""
    counts = Counter(gpu.name for gpu in gpus)
    return tuple(gpu.name if counts[gpu.name] == 1 else f"{gpu.name} ({number})" for number, gpu in enumerate(gpus, 1))


def is_pool(gpu: Device) -> bool:
    """Whether its memory is the machine's RAM."""
    return gpu.unified or gpu.kind == "igpu"


def gpu_budget(
    hardware: Hardware,
    gpu: Device,
    name: str,
    wishes: Wishes,
    *,
    driver_bytes: int | None = None,
    residents_bytes: int = 0,
    partial: bool = False,
) -> DeviceMemory:
    """`driver_bytes`: what this machine's driver was seen to take; `residents_bytes`: what our own models take already."""
    free = gpu.free_bytes
    if is_pool(gpu):
        free = min(free, hardware.ram_available_bytes + gpu.carve_out_bytes)
    driver = driver_bytes if driver_bytes is not None else _CONTEXT_BYTES.get(gpu.backend, _OTHER_CONTEXT_BYTES)
    driver = 0 if gpu.context_counted else driver
    kept = _kept_free_bytes(hardware, gpu) + (_PARTIAL_BYTES if partial else 0)
    used = min(gpu.total_bytes, gpu.total_bytes - free + gpu.reserved_bytes)
    usable = max(0, gpu.total_bytes - used - driver - kept)
    return DeviceMemory(
        device=name,
        total_bytes=gpu.total_bytes,
        used_bytes=used,
        driver_bytes=driver,
        kept_free_bytes=kept,
        forbidden_bytes=_forbidden_bytes(wishes.vram_limit, gpu.total_bytes, residents_bytes + driver, usable),
    )


def ram_budget(hardware: Hardware, wishes: Wishes, residents_bytes: int = 0) -> DeviceMemory:
    total = hardware.ram_total_bytes
    kept = max(1024 * MIB, total // 10) if hardware.system == "linux" else max(2048 * MIB, total * 15 // 100)
    used = total - min(total, hardware.ram_available_bytes)
    usable = max(0, total - used - kept)
    return DeviceMemory(
        device="RAM",
        total_bytes=total,
        used_bytes=used,
        driver_bytes=0,
        kept_free_bytes=kept,
        forbidden_bytes=_forbidden_bytes(wishes.ram_limit, total, residents_bytes, usable),
    )


def _kept_free_bytes(hardware: Hardware, gpu: Device) -> int:
    if is_pool(gpu):
        return _POOL_KEPT_BYTES
    if gpu.backend == "CUDA" and (gpu.mig or (hardware.system == "linux" and gpu.display is False)):
        return max(256 * MIB, gpu.total_bytes * 3 // 100)
    kept = min(max(gpu.total_bytes // 16, 512 * MIB), 1024 * MIB)
    # Other backends take scratch memory that they do not report, and single allocations of theirs fail earlier.
    return kept if gpu.backend == "CUDA" and gpu.trusted else kept * 3 // 2


def _forbidden_bytes(limit: str, total_bytes: int, taken_bytes: int, usable_bytes: int) -> int:
    allowed = limit_bytes(limit, total_bytes)
    return 0 if allowed is None else max(0, usable_bytes - max(0, allowed - taken_bytes))


def hundredths(size_bytes: int) -> int:
    """Of a GiB, rounded."""
    return round(size_bytes * 100 / 2**30)


def gib(count_hundredths: int) -> str:
    return f"{count_hundredths / 100:.2f}"


def gib_of(size_bytes: int) -> str:
    """Bytes in GiB, for a sentence."""
    return f"{gib(hundredths(size_bytes))} GiB"
