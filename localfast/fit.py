"""From a model file to a plan that stands on measurements: brings together the machine, the engine build, dry runs and lessons.

Server side and command line; slow, so not for the event loop's thread. Decides nothing itself: `plan` does, from what is
gathered here. What it keeps between calls only saves time.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from localfast.engines.installed import active
from localfast.errors import EngineMissing
from localfast.footprint import RAM, Part, Shape, footprint
from localfast.hardware import Hardware, cached_ram_bandwidth, detect
from localfast.measure import (
    DryRuns,
    HeaderSource,
    Key,
    Learned,
    Machine,
    Measure,
    compare,
    corrected,
    engine_build,
    machine_of,
    settle,
)
from localfast.models.gguf import ModelFacts
from localfast.plan import Plan, Wishes, make_plan
from localfast.settings import OPTIONS, Settings

ROOMY = 0.8
"""A plan that takes less than this of every device would be the same with exact numbers, so starting need not wait for them."""

DetectHardware = Callable[[], Hardware]


@dataclass(eq=False, slots=True)
class Fitter:
    """What a plan is made from. `detect_hardware` stands in for this machine, in tests."""

    settings: Settings
    detect_hardware: DetectHardware | None = None
    _measured: dict[tuple[str, str], Mapping[Key, tuple[Part, ...]]] = field(default_factory=dict)
    _oracles: dict[tuple[str, str], Measure] = field(default_factory=dict)
    """By path and quant of a model: what was measured so far, and the oracle that knows it."""

    @property
    def engine_path(self) -> str:
        """Of the build that loads models. Raises EngineMissing, InvalidSetting."""
        return active(self.settings).path

    def hardware(self) -> Hardware:
        """The machine now, or the one that the settings name. Raises InvalidSetting for a file that describes none."""
        if self.detect_hardware is not None:
            return self.detect_hardware()
        if self.settings.hardware:
            return detect(inventory=self.settings.hardware)
        hardware = detect(engine_path=self._path_or_none())
        with contextlib.suppress(OSError):  # a folder that cannot be written: then no speed is predicted
            hardware = replace(hardware, ram_bandwidth_bytes_s=cached_ram_bandwidth(self.settings.facts_dir))
        return hardware

    def machine(self, hardware: Hardware) -> Machine:
        return machine_of(hardware, engine_build(self._path_or_none()))

    def learned(self, hardware: Hardware) -> Learned:
        return Learned(self.settings.facts_dir, self.machine(hardware))

    def plan(
        self,
        hardware: Hardware,
        facts: ModelFacts,
        wishes: Wishes,
        *,
        residents_bytes: Sequence[int] = (),
        source: Callable[[], HeaderSource] | None = None,
        exact: bool = False,
    ) -> Plan:
        """With `source`, which gives the header to measure with, memory is measured where it matters; with `exact`, always.

        Raises BadModelFile when the engine does not read such a model at all.
        """
        learned = self.learned(hardware)
        seen = {gpu.name: learned.overhead_bytes(gpu.name) for gpu in hardware.engine_gpus}
        overheads = {name: size_bytes for name, size_bytes in seen.items() if size_bytes is not None}

        def decide(measure: Measure) -> Plan:
            return make_plan(hardware, facts, wishes, measure, overheads=overheads, residents_bytes=residents_bytes)

        plan = decide(self.oracle)
        if source is None or not self._can_measure(hardware) or not (exact or _tight(plan)):
            return plan
        dry_runs = DryRuns(self.settings.facts_dir / "dryruns", self._path_or_none(), machine=self.machine(hardware).text)

        header = source()

        def ask(shape: Shape, shares: tuple[float, ...]) -> tuple[Mapping[Key, tuple[Part, ...]], str]:
            answer = dry_runs.measure(header, facts, [shape], shares)
            if answer.refused:
                raise answer.refused
            return answer.parts, answer.reason

        settled = settle(decide, ask, facts)
        known = self._measured[_key(facts)] = {**self._measured.get(_key(facts), {}), **settled.measured}
        self._oracles[_key(facts)] = corrected(facts, known)
        words = "the memory was measured by the engine itself" if settled.exact else f"the memory is computed: {settled.reason}"
        return replace(settled.decision, reasons=(*settled.decision.reasons, words))

    def learn(self, model_key: str, before: Hardware, plan: Plan, buffers: Sequence[tuple[str, str, int]]) -> tuple[str, ...]:
        """Compare a plan with the load that followed, and remember the difference. Returns it in sentences."""
        devices = range(RAM, len(plan.memory) - 1)
        parts = [Part(device, *part) for device, memory in zip(devices, plan.memory, strict=True) for part in memory.parts]
        grown = {}
        if before.engine_gpus and self._can_measure(before):
            now = {gpu.pci_id: gpu.free_bytes for gpu in detect(ask_engine=False).devices if gpu.pci_id}
            for number, gpu in enumerate(before.engine_gpus):
                if gpu.pci_id in now:
                    grown[number] = gpu.free_bytes - now[gpu.pci_id]
        difference = compare(parts, buffers, grown)
        lessons = self.learned(before)
        for number, overhead_bytes in difference.overhead_bytes.items():
            lessons.observe(before.engine_gpus[number].name, overhead_bytes)
        lines = tuple(line.sentence() for line in difference.lines)
        lessons.remember_load(model_key, lines)
        return lines

    def oracle(self, facts: ModelFacts, shape: Shape, shares: Sequence[float] = (1.0,)) -> tuple[Part, ...]:
        """The memory of any model: put right by what was measured of it, else by formula."""
        return self._oracles.get(_key(facts), footprint)(facts, shape, shares)

    def _can_measure(self, hardware: Hardware) -> bool:
        """Only this machine's own engine can be asked, and a described machine is another one."""
        real = self.detect_hardware is None and not self.settings.hardware
        return real and hardware.engine is not None and hardware.engine.installed and not hardware.engine.error

    def _path_or_none(self) -> str:
        try:
            return self.engine_path
        except EngineMissing:
            return ""


def wishes(settings: Settings) -> Wishes:
    """What the user pinned: wishes have the names of the settings."""
    names = {wish.name for wish in dataclasses.fields(Wishes)}
    return Wishes(**{row.name: getattr(settings, row.name) for row in OPTIONS if row.name in names})


def _key(facts: ModelFacts) -> tuple[str, str]:
    return facts.path, facts.quant


def _tight(plan: Plan) -> bool:
    return any(memory.needed_bytes > ROOMY * memory.usable_bytes for memory in plan.memory)
