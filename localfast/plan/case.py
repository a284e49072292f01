"""One question of the plan: this model on this machine with these wishes. Answers what a choice takes, and whether it fits.

Decides nothing; remembers what it was asked, because the search asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from localfast.footprint import MIB, RAM, Part, Shape, footprint
from localfast.hardware import Device, Hardware
from localfast.models.gguf import ModelFacts
from localfast.plan.budgets import (
    DeviceMemory,
    device_names,
    gpu_budget,
    is_pool,
    ram_budget,
)
from localfast.plan.wishes import Wishes, limit_bytes

Measure = Callable[[ModelFacts, Shape, Sequence[float]], tuple[Part, ...]]
"""Signature of `footprint`: every part of a model's memory for a shape and the GPUs' shares of its layers."""

_PROJECTOR_WORK_BYTES = 512 * MIB
"""Its own compute graph: 0.3 to 1.5 GB, by the size of the image."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate: all that decides memory. `shares` has one number per GPU of the engine."""

    shape: Shape
    shares: tuple[float, ...]
    context_tokens: int
    batch_tokens: int
    projector_on_gpu: bool = False
    drafts: bool = False
    """Whether the draft model is loaded: where the model's layers are."""


class Case:
    """`residents_bytes`: what our own loaded models take already, in the order of a plan's memory."""

    def __init__(
        self,
        hardware: Hardware,
        facts: ModelFacts,
        wishes: Wishes,
        measure: Measure,
        *,
        overheads: Mapping[str, int],
        residents_bytes: Sequence[int],
    ) -> None:
        self.hardware, self.facts, self.wishes = hardware, facts, wishes
        self.gpus: tuple[Device, ...] = hardware.engine_gpus
        self.everything = facts.layers + 1
        self._measure = measure
        self._budgets = {partial: self._all_budgets(partial, overheads, residents_bytes) for partial in (False, True)}
        every_byte = hardware.ram_total_bytes + sum(gpu.total_bytes for gpu in self.gpus if not is_pool(gpu))
        self.model_limit_bytes = limit_bytes(wishes.model_limit, every_byte)
        self._known: dict[Choice, tuple[DeviceMemory, ...]] = {}

    def spills(self, shape: Shape) -> bool:
        """Whether a GPU is used and something of the layers stays in RAM all the same."""
        return shape.gpu_layers > 0 and (shape.gpu_layers < self.everything or shape.cpu_experts > 0)

    def budgets(self, shape: Shape) -> tuple[DeviceMemory, ...]:
        return self._budgets[self.spills(shape)]

    def _all_budgets(
        self, partial: bool, overheads: Mapping[str, int], residents_bytes: Sequence[int]
    ) -> tuple[DeviceMemory, ...]:
        ram_held, *held = (*residents_bytes, *[0] * (1 + len(self.gpus) - len(residents_bytes)))
        gpus = (
            gpu_budget(
                self.hardware,
                gpu,
                name,
                self.wishes,
                partial=partial,
                driver_bytes=overheads.get(gpu.name),
                residents_bytes=holds,
            )
            for gpu, name, holds in zip(self.gpus, device_names(self.gpus), held, strict=True)
        )
        return (ram_budget(self.hardware, self.wishes, ram_held), *gpus)

    def memory(self, choice: Choice) -> tuple[DeviceMemory, ...]:
        """The RAM first, then every GPU; a part whose GPU's memory is RAM is counted there too."""
        if choice not in self._known:
            self._known[choice] = self._sum(choice)
        return self._known[choice]

    def fits(self, choice: Choice) -> bool:
        return self.gpus_fit(choice) and self.memory(choice)[0].fits

    def gpus_fit(self, choice: Choice) -> bool:
        """On the GPUs, and within the model's own limit."""
        memory = self.memory(choice)
        within = self.model_limit_bytes is None or total_bytes(memory) <= self.model_limit_bytes
        return within and all(gpu.fits for gpu in memory[1:])

    def _sum(self, choice: Choice) -> tuple[DeviceMemory, ...]:
        parts = [*self._measure(self.facts, choice.shape, choice.shares), *self._companions(choice)]
        ram, *gpus = (
            replace(budget, parts=_labelled(parts, device)) for device, budget in enumerate(self.budgets(choice.shape), RAM)
        )
        for gpu, memory in zip(self.gpus, gpus, strict=True):
            shared = memory.needed_bytes - gpu.carve_out_bytes
            if is_pool(gpu) and shared > 0:
                ram = replace(ram, parts=(*ram.parts, (POOL_LABEL, shared)))
        return (ram, *gpus)

    def _companions(self, choice: Choice) -> list[Part]:
        """The projector and the draft model. They go to the GPU with the largest share of the layers."""
        place = choice.shares.index(max(choice.shares)) if choice.shares and choice.shape.gpu_layers else RAM
        parts = []
        if self.wishes.mmproj_bytes:
            device = place if choice.projector_on_gpu else RAM
            parts.append(Part(device, "projector", self.wishes.mmproj_bytes + _PROJECTOR_WORK_BYTES))
        draft = self.wishes.draft_facts
        if draft and choice.drafts:
            layers = draft.layers + 1 if place != RAM else 0
            one_hot = [float(number == place) for number in range(len(self.gpus))]
            found = footprint(draft, replace(choice.shape, gpu_layers=layers, cpu_experts=0), one_hot)
            parts += [Part(part.device, "draft model", part.size_bytes) for part in found if part.label != "server"]
        return parts


POOL_LABEL = "integrated GPU"


def total_bytes(memory: Sequence[DeviceMemory]) -> int:
    """All that the model takes, shared memory once."""
    ram, *gpus = memory
    own = sum(size_bytes for label, size_bytes in ram.parts if label != POOL_LABEL)
    return own + sum(gpu.needed_bytes for gpu in gpus)


def _labelled(parts: Sequence[Part], device: int) -> tuple[tuple[str, int], ...]:
    sums: dict[str, int] = {}
    for part in parts:
        if part.device == device:
            sums[part.label] = sums.get(part.label, 0) + part.size_bytes
    return tuple(sums.items())
