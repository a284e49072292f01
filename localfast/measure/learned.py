"""What real loads taught about this machine: the memory a driver takes beside the model, and shapes that did not load.

Kept per driver and engine build, because either changes it. The file may be deleted, damaged or unwritable at any time.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from localfast.footprint import MIB, RAM, Part, Shape
from localfast.hardware import Hardware
from localfast.measure import files
from localfast.measure.answers import device_number

LABELS = {"model": "model", "KV": "chat memory", "RS": "recurrent state", "compute": "work space"}
"""Uses of memory in the engine's log, and the plan's words for them."""
MOST_OVERHEAD_BYTES = 2048 * MIB
MAX_OBSERVATIONS, MAX_FAILURES, MAX_ENTRIES = 5, 32, 256
MAX_LOADS = 100
_TOTALS_STEP = 256 * MIB
"""Kernels and firmware keep a little more or less at every start."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One use of memory on one device."""

    device: int
    label: str
    planned_bytes: int
    real_bytes: int

    @property
    def error(self) -> float:
        """Share of the real size that the plan was off; positive: planned too much."""
        return (self.planned_bytes - self.real_bytes) / self.real_bytes if self.real_bytes else float(self.planned_bytes > 0)

    def sentence(self) -> str:
        where = "RAM" if self.device == RAM else f"GPU {self.device}"
        planned, real = self.planned_bytes / MIB, self.real_bytes / MIB
        return f"{where}: {self.label} {planned:.0f} MiB planned, {real:.0f} MiB real ({self.error:+.1%})"


@dataclass(frozen=True, slots=True)
class Difference:
    """A plan against the load that followed. `overhead_bytes`: per GPU, what was taken beside the model's own memory."""

    lines: tuple[Comparison, ...]
    overhead_bytes: Mapping[int, int]


def compare(
    parts: Sequence[Part],
    buffers: Sequence[tuple[str, str, int]],
    used_delta_bytes: Mapping[int, int] | None = None,
    gpus: Sequence[str] = (),
) -> Difference:
    """`buffers` are EngineFacts.buffers; `used_delta_bytes`: by how much each GPU's used memory grew with the load.

    `gpus`: the engine's device names in order; without them they are read from the buffers' names, such as CUDA0.
    Weights mapped from the file are left out: the log gives the mapped range, which is no measure of the memory it takes.
    """
    gpus = gpus or sorted({name for name, _, _ in buffers if name[-1:].isdigit()}, key=lambda name: (len(name), name))
    mapped = any(device_number(name, gpus) == RAM and name.endswith("_Mapped") for name, _, _ in buffers)
    real: defaultdict[tuple[int, str], int] = defaultdict(int)
    planned: defaultdict[tuple[int, str], int] = defaultdict(int)
    held: defaultdict[int, int] = defaultdict(int)
    for name, use, size_bytes in buffers:
        device = device_number(name, gpus)
        held[device] += size_bytes
        if use in LABELS:
            real[device, LABELS[use]] += size_bytes
    for part in parts:
        if part.label in LABELS.values():
            planned[part.device, part.label] += part.size_bytes
    places = sorted(place for place in real.keys() | planned.keys() if not (mapped and place == (RAM, "model")))
    lines = tuple(Comparison(*place, planned[place], real[place]) for place in places)
    overhead = {device: used - held[device] for device, used in (used_delta_bytes or {}).items()}
    return Difference(lines, overhead)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a lesson holds for: another driver, engine build or amount of memory, and it is forgotten."""

    driver: str
    engine: str
    totals: str

    @property
    def text(self) -> str:
        return f"{self.driver} | {self.engine} | {self.totals}"


def machine_of(hardware: Hardware, engine: str) -> Machine:
    """`engine` is `engine_build`'s hash of the build that loads the models."""
    totals = [f"RAM {round(hardware.ram_total_bytes / _TOTALS_STEP)}"]
    totals += [f"{gpu.name} {round(gpu.total_bytes / _TOTALS_STEP)}" for gpu in hardware.engine_gpus if not gpu.unified]
    totals += [gpu.name for gpu in hardware.engine_gpus if gpu.unified]
    return Machine(hardware.driver_version, engine, ", ".join(totals))


@dataclass(frozen=True, slots=True)
class Failure:
    """A shape that did not load on this machine."""

    shape: Shape
    reason: str
    usable_bytes: tuple[int, ...] = ()
    """What was usable then, on each device of the plan: with more memory it may load."""


class _Failures(msgspec.Struct):
    machine: str
    failed: list[Failure]


class _Lessons(msgspec.Struct):
    overheads: dict[str, list[int]] = {}
    failures: dict[str, _Failures] = {}
    loads: dict[str, list[str]] = {}


class Learned:
    """One small file in `folder`, read at every question: several processes may write it, the last one wins."""

    def __init__(self, folder: Path, machine: Machine) -> None:
        self._path = folder / "learned.json"
        self._machine = machine

    def observe(self, device: str, overhead_bytes: int) -> None:
        """What a load took beside the model on the device of this name. A number that cannot be, because something else took
        or gave back memory meanwhile, is not kept."""
        if not 0 <= overhead_bytes <= MOST_OVERHEAD_BYTES:
            return
        lessons = self._read()
        key = self._overhead_key(device)
        seen = lessons.overheads.pop(key, [])
        lessons.overheads[key] = [*seen, overhead_bytes][-MAX_OBSERVATIONS:]
        self._write(lessons)

    def overhead_bytes(self, device: str) -> int | None:
        """Median of the last loads; None: none was seen with this driver and engine."""
        seen = self._read().overheads.get(self._overhead_key(device), [])[-MAX_OBSERVATIONS:]
        return min(MOST_OVERHEAD_BYTES, max(0, int(statistics.median(seen)))) if seen else None

    def remember_failure(self, model_key: str, failed: Failure) -> None:
        lessons = self._read()
        known = [failure for failure in self.failures(model_key) if failure.shape != failed.shape]
        kept = [*known, failed][-MAX_FAILURES:]
        lessons.failures.pop(model_key, None)
        lessons.failures[model_key] = _Failures(self._machine.text, kept)
        self._write(lessons)

    def failures(self, model_key: str) -> tuple[Failure, ...]:
        """Of this model with the present hardware, driver and engine, the oldest first."""
        found = self._read().failures.get(model_key)
        if not found or found.machine != self._machine.text:
            return ()
        return tuple(found.failed)

    def forget_failures(self, model_key: str) -> None:
        lessons = self._read()
        if lessons.failures.pop(model_key, None):
            self._write(lessons)

    def remember_load(self, model_key: str, lines: Sequence[str]) -> None:
        """How the plan compared with what a load really took, in sentences."""
        lessons = self._read()
        lessons.loads.pop(model_key, None)
        lessons.loads[model_key] = list(lines)
        while len(lessons.loads) > MAX_LOADS:
            del lessons.loads[next(iter(lessons.loads))]
        self._write(lessons)

    def last_load(self, model_key: str) -> tuple[str, ...]:
        return tuple(self._read().loads.get(model_key, ()))

    def _overhead_key(self, device: str) -> str:
        return f"{device} | {self._machine.driver} | {self._machine.engine}"

    def _read(self) -> _Lessons:
        return files.read(self._path, _Lessons) or _Lessons({}, {}, {})

    def _write(self, lessons: _Lessons) -> None:
        overheads, failures = list(lessons.overheads.items()), list(lessons.failures.items())
        files.write(self._path, _Lessons(dict(overheads[-MAX_ENTRIES:]), dict(failures[-MAX_ENTRIES:])))
