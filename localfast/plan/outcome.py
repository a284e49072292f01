"""The plan as plain numbers: all that an engine needs to load a model, the memory it stands for, and why, in sentences."""

from __future__ import annotations

from dataclasses import dataclass

from localfast.footprint import Shape
from localfast.plan.budgets import DeviceMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every number that the engine needs. `layers` counts the output layer too."""

    gpu_layers: int
    layers: int
    context_tokens: int
    """Longest context of one request; never more than `cells`."""
    cells: int
    slots: int
    batch_tokens: int
    ubatch_tokens: int
    threads: int
    kv_type: str
    use_mmap: bool
    cpu_experts: int = 0
    """Leading layers whose experts stay in RAM although the layer is on a GPU."""
    shares: tuple[float, ...] = ()
    """Of the offloaded layers, one per GPU of the engine, in its order."""
    projector_on_gpu: bool = False
    drafts: bool = False
    """Whether there is room for the draft model; it is where the model's layers are."""
    memory: tuple[DeviceMemory, ...]
    """The RAM first, then every GPU that the engine can use."""
    total_bytes: int = 0
    """On all devices together; memory that a GPU shares with the RAM counts once."""
    model_limit_bytes: int | None = None
    tokens_per_s: float = 0.0
    """Predicted speed of one stream, with 2,048 tokens in its cache; 0: the bandwidth of a device is unknown."""
    summary: str
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape:
        """What the memory was computed for, or measured with."""
        return Shape(
            gpu_layers=self.gpu_layers,
            cells=self.cells,
            slots=self.slots,
            ubatch_tokens=self.ubatch_tokens,
            kv_type=self.kv_type,
            cpu_experts=self.cpu_experts,
        )

    @property
    def split(self) -> tuple[float, ...]:
        """Shares of several GPUs for the engine; empty where there is nothing to share out."""
        return self.shares if len(self.shares) > 1 and self.gpu_layers else ()

    @property
    def on_gpu(self) -> bool:
        """Whether all of the model that is read for each token is on GPUs."""
        return self.gpu_layers == self.layers and not self.cpu_experts

    @property
    def parts_on_gpus(self) -> tuple[tuple[str, int], ...]:
        return tuple(part for memory in self.memory[1:] for part in memory.parts)

    @property
    def fits(self) -> bool:
        within = self.model_limit_bytes is None or self.total_bytes <= self.model_limit_bytes
        return within and all(memory.fits for memory in self.memory)

    def sentences(self) -> tuple[str, ...]:
        """The whole explanation, for the command line, the log and the API alike."""
        return (self.summary, *self.reasons, *(f"warning: {warning}" for warning in self.warnings))
