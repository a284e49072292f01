"""Decides how a model runs on this machine, and says why in sentences that add up.

Pure: same hardware, facts and wishes, same plan. Goes through the possible shapes in order of preference and takes the first that
fits; what fits is `footprint`'s answer against the budgets. What the user pinned is never changed: if it does not fit, a warning
gives the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from localfast.footprint import CELL_STEP, KV_TYPE_BYTES, MIB, RAM, Part, Shape, footprint, padded_cells
from localfast.hardware import Device, Hardware
from localfast.models.gguf import ModelFacts

WANTED_CONTEXTS = (16_384, 8_192, 4_096)
WANTED_SLOTS = (4, 2, 1)
GPU_BATCH_TOKENS, CPU_BATCH_TOKENS, MAX_UBATCH_TOKENS = 512, 128, 512
_CONTEXT_BYTES = {"CUDA": 300 * MIB, "ROCm": 300 * MIB, "HIP": 300 * MIB}
_OTHER_CONTEXT_BYTES = 150 * MIB
_PARTIAL_BYTES = 128 * MIB
_EMPTY = Shape(gpu_layers=0, cells=0, slots=1, ubatch_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user pinned, with the names and the "decide for me" values of the settings."""

    gpu_layers: int = -1
    ctx: int = 0
    cells: int = 0
    slots: int = 0
    threads: int = 0
    batch: int = 0
    kv_type: str = "auto"
    draft: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """One device's sum: total - used - driver - kept free = usable, against the parts that the model puts there."""

    device: str
    total_bytes: int
    used_bytes: int
    driver_bytes: int
    kept_free_bytes: int
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def usable_bytes(self) -> int:
        return max(0, self.total_bytes - self.used_bytes - self.driver_bytes - self.kept_free_bytes)

    @property
    def needed_bytes(self) -> int:
        return sum(size_bytes for _, size_bytes in self.parts)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.usable_bytes

    def sentence(self) -> str:
        """The sum in GiB. What is printed adds up: totals are made of the rounded numbers."""
        total, used, driver, kept = map(_hundredths, (self.total_bytes, self.used_bytes, self.driver_bytes, self.kept_free_bytes))
        usable = max(0, total - used - driver - kept)
        needed = sum(_hundredths(size_bytes) for _, size_bytes in self.parts)
        taken = f"{_gib(used)} used" + (f" - {_gib(driver)} driver" if driver else "") + f" - {_gib(kept)} kept free"
        parts = " + ".join(f"{label} {_gib(_hundredths(size_bytes))}" for label, size_bytes in self.parts)
        parts = f"{parts} = {_gib(needed)}" if len(self.parts) > 1 else parts or "nothing needed"
        verdict = "fits" if self.fits else f"{_gib(max(1, needed - usable))} too much"
        return f"{self.device}: {_gib(total)} GiB - {taken} = {_gib(usable)} usable; {parts}: {verdict}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every number that the engine needs, with the memory it stands for. `layers` counts the output layer too."""

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
    memory: tuple[DeviceMemory, ...]
    """The RAM first, then every GPU that the engine can use."""
    summary: str
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return all(memory.fits for memory in self.memory)

    def sentences(self) -> tuple[str, ...]:
        """The whole explanation, for the command line, the log and the API alike."""
        return (self.summary, *self.reasons, *(f"warning: {warning}" for warning in self.warnings))


@dataclass(frozen=True, slots=True)
class _Machine:
    hardware: Hardware
    gpus: tuple[Device, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """What each GPU takes of the layers; a full one must still take some, or it would seem to hold them for nothing."""
        return tuple(max(1.0, gpu.free_bytes) for gpu in self.gpus)


@dataclass(frozen=True, slots=True)
class _Choice:
    """A candidate: its shape, the context of one request and the tokens of one step."""

    shape: Shape
    context_tokens: int
    batch_tokens: int


def make_plan(hardware: Hardware, facts: ModelFacts, wishes: Wishes | None = None) -> Plan:
    """The best plan that fits; when none does, the smallest one, with a warning. Never raises."""
    wishes = wishes or Wishes()
    machine = _Machine(hardware, hardware.engine_gpus)
    choices = list(_choices(facts, wishes, machine))
    found = next((choice for choice in choices if all(part.fits for part in _memory(machine, facts, choice.shape))), None)
    choice = found or _least_bad(machine, facts, choices)
    if found and not wishes.cells:
        choice = _grow_cells(machine, facts, choice)
    memory = _memory(machine, facts, choice.shape)
    shape = choice.shape
    return Plan(
        gpu_layers=shape.gpu_layers,
        layers=facts.layers + 1,
        context_tokens=choice.context_tokens,
        cells=shape.cells,
        slots=shape.slots,
        batch_tokens=choice.batch_tokens,
        ubatch_tokens=shape.ubatch_tokens,
        threads=wishes.threads or hardware.physical_cores,
        kv_type=shape.kv_type,
        use_mmap=not any(gpu.kind == "igpu" for gpu in machine.gpus) or shape.gpu_layers == 0,
        memory=memory,
        summary=_summary(machine, facts, choice, wishes),
        reasons=_reasons(machine, facts, choice, memory),
        warnings=_warnings(machine, facts, choice, wishes, memory),
    )


# --- candidates ---------------------------------------------------------------------------------------------------------------


def _choices(facts: ModelFacts, wishes: Wishes, machine: _Machine) -> Iterator[_Choice]:
    """All shapes worth trying, best first: all layers on GPUs before some, some before none; then context, slots, layers."""
    everything = facts.layers + 1
    stages: list[Sequence[int]] = [(everything,), range(facts.layers, 0, -1), (0,)] if machine.gpus else [(0,)]
    if wishes.gpu_layers >= 0:
        stages = [(min(wishes.gpu_layers, everything),)]
    for stage in stages:
        for context in _contexts(facts, wishes):
            for slots in (wishes.slots,) if wishes.slots else WANTED_SLOTS:
                for gpu_layers in stage:
                    yield _choice(facts, wishes, replace(_EMPTY, gpu_layers=gpu_layers, slots=slots), context, bool(machine.gpus))


def _least_bad(machine: _Machine, facts: ModelFacts, choices: Sequence[_Choice]) -> _Choice:
    """Nothing fits. RAM that is short slows the machine, a GPU that is short ends the engine: spare the GPUs first."""
    kept = [(choice, _memory(machine, facts, choice.shape)) for choice in choices]
    on_gpus = [(choice, memory) for choice, memory in kept if all(gpu.fits for gpu in memory[1:])]
    if not on_gpus:
        return choices[-1]
    return min(on_gpus, key=lambda pair: pair[1][0].needed_bytes)[0]


def _choice(facts: ModelFacts, wishes: Wishes, shape: Shape, context_tokens: int, has_gpu: bool) -> _Choice:
    """Complete a shape of which layers and slots are settled."""
    cells = wishes.cells or padded_cells(context_tokens)
    context_tokens = min(context_tokens, cells)
    batch = wishes.batch or (GPU_BATCH_TOKENS if has_gpu and shape.gpu_layers else CPU_BATCH_TOKENS)
    ubatch = min(batch, MAX_UBATCH_TOKENS)
    if not facts.causal:  # a text that is read both ways must be in one batch
        batch = ubatch = max(batch, context_tokens)
    shape = replace(shape, cells=cells, ubatch_tokens=ubatch, kv_type=_kv_type(wishes))
    return _Choice(shape, context_tokens, max(batch, shape.slots))


def _kv_type(wishes: Wishes) -> str:
    return "f16" if wishes.kv_type == "auto" else wishes.kv_type


def _contexts(facts: ModelFacts, wishes: Wishes) -> tuple[int, ...]:
    if wishes.ctx:
        return (wishes.ctx,)
    first = min(WANTED_CONTEXTS[0], facts.train_context or WANTED_CONTEXTS[-1])
    return (first, *(context for context in WANTED_CONTEXTS if context < first))


def _grow_cells(machine: _Machine, facts: ModelFacts, choice: _Choice) -> _Choice:
    """Give the shared cache what is left, up to a full context for every slot."""
    low = choice.shape.cells // CELL_STEP
    high = max(low, padded_cells(choice.context_tokens * choice.shape.slots) // CELL_STEP)
    while low < high:
        middle = (low + high + 1) // 2
        if all(device.fits for device in _memory(machine, facts, replace(choice.shape, cells=middle * CELL_STEP))):
            low = middle
        else:
            high = middle - 1
    return replace(choice, shape=replace(choice.shape, cells=low * CELL_STEP))


# --- budgets ------------------------------------------------------------------------------------------------------------------


def _memory(machine: _Machine, facts: ModelFacts, shape: Shape) -> tuple[DeviceMemory, ...]:
    parts = footprint(facts, shape, machine.shares)
    partial = 0 < shape.gpu_layers <= facts.layers
    gpus = tuple(
        replace(_gpu_budget(machine.hardware, gpu, partial), parts=_labelled(parts, index))
        for index, gpu in enumerate(machine.gpus)
    )
    ram_parts = _labelled(parts, RAM)
    for gpu, memory in zip(machine.gpus, gpus, strict=True):
        if gpu.kind == "igpu" and memory.parts:  # an integrated GPU's memory is RAM
            ram_parts += (("integrated GPU", memory.needed_bytes),)
    return (replace(_ram_budget(machine.hardware), parts=ram_parts), *gpus)


def _labelled(parts: Sequence[Part], device: int) -> tuple[tuple[str, int], ...]:
    return tuple((part.label, part.size_bytes) for part in parts if part.device == device)


def _gpu_budget(hardware: Hardware, gpu: Device, partial: bool) -> DeviceMemory:
    free = gpu.free_bytes
    driver = 0 if gpu.context_counted else _CONTEXT_BYTES.get(gpu.backend, _OTHER_CONTEXT_BYTES)
    if gpu.kind == "igpu":
        free, kept = min(free, hardware.ram_available_bytes), 2048 * MIB
    elif gpu.backend == "CUDA" and hardware.system == "linux" and gpu.display is False:
        kept = max(256 * MIB, gpu.total_bytes * 3 // 100)
    else:
        kept = min(max(gpu.total_bytes // 16, 512 * MIB), 1024 * MIB)
        kept = kept if gpu.backend == "CUDA" else kept * 3 // 2
    return DeviceMemory(
        device=gpu.name,
        total_bytes=gpu.total_bytes,
        used_bytes=gpu.total_bytes - free,
        driver_bytes=driver,
        kept_free_bytes=kept + (_PARTIAL_BYTES if partial else 0),
    )


def _ram_budget(hardware: Hardware) -> DeviceMemory:
    total = hardware.ram_total_bytes
    kept = max(1024 * MIB, total // 10) if hardware.system == "linux" else max(2048 * MIB, total * 15 // 100)
    used = total - min(total, hardware.ram_available_bytes)
    return DeviceMemory(device="RAM", total_bytes=total, used_bytes=used, driver_bytes=0, kept_free_bytes=kept)


# --- words --------------------------------------------------------------------------------------------------------------------


def _summary(machine: _Machine, facts: ModelFacts, choice: _Choice, wishes: Wishes) -> str:
    everything, gpu_layers = facts.layers + 1, choice.shape.gpu_layers
    if not machine.gpus:
        return f"{everything}/{everything} layers on CPU: {_without_gpu(machine.hardware)}"
    names = " and ".join(gpu.name for gpu in machine.gpus)
    if gpu_layers == 0:
        why = "gpu_layers=0 was asked for" if wishes.gpu_layers == 0 else f"not one layer fits on {names}"
        return f"{everything}/{everything} layers on CPU: {why}"
    rest = everything - gpu_layers
    return f"{gpu_layers}/{everything} layers on {names}" + (f", {rest} on CPU" if rest else "")


def _without_gpu(hardware: Hardware) -> str:
    engine = hardware.engine
    if engine is None:
        return "the engine did not tell what devices it has"
    if not engine.installed:
        return "the engine is not installed"
    if engine.error:
        return f"the engine does not start ({engine.error})"
    if hardware.unused_gpus and engine.backends and not engine.supports_gpu_offload:
        names = ", ".join(device.name for device in hardware.unused_gpus)
        return f"the installed engine cannot use a GPU ({', '.join(engine.backends)} build), so {names} stays idle"
    return "no GPU that the engine can use"


def _reasons(machine: _Machine, facts: ModelFacts, choice: _Choice, memory: Sequence[DeviceMemory]) -> tuple[str, ...]:
    shape = choice.shape
    reasons = [device.sentence() for device in memory]
    if machine.gpus and shape.gpu_layers <= facts.layers:
        whole = _memory(machine, facts, replace(shape, gpu_layers=facts.layers + 1))
        for device in whole[1:]:
            if not device.fits:
                reasons.append(f"with all layers on it, {device.sentence()}")
    trained = f"the model was trained for {facts.train_context}" if facts.train_context else "the file does not name its limit"
    reasons.append(f"one request may use {choice.context_tokens} tokens; {trained}")
    together = (
        f"{shape.slots} requests generate at the same time and share"
        if shape.slots > 1
        else "one request generates at a time with"
    )
    reasons.append(f"{together} {shape.cells} tokens of chat memory ({shape.kv_type})")
    if facts.sliding_window:
        windowed = sum(layer.windowed for layer in facts.per_layer)
        reasons.append(f"{windowed} of {facts.layers} layers look back only {facts.sliding_window} tokens and keep no more")
    return tuple(reasons)


def _warnings(
    machine: _Machine, facts: ModelFacts, choice: _Choice, wishes: Wishes, memory: Sequence[DeviceMemory]
) -> tuple[str, ...]:
    warnings = []
    for device in memory:
        if not device.fits:
            needed, usable = _gib(_hundredths(device.needed_bytes)), _gib(_hundredths(device.usable_bytes))
            warnings.append(f"{device.device}: {needed} GiB needed, {usable} GiB usable; loading may fail or be very slow")
    if wishes.gpu_layers > 0 and not machine.gpus:
        warnings.append(f"gpu_layers={wishes.gpu_layers} has no effect: {_without_gpu(machine.hardware)}")
    if facts.train_context and choice.context_tokens > facts.train_context:
        warnings.append(f"a context of {choice.context_tokens} is longer than the {facts.train_context} tokens of the training")
    if wishes.draft:
        warnings.append(f"draft model '{wishes.draft}' is not used yet")
    if wishes.ctx > choice.context_tokens:
        warnings.append(
            f"ctx={wishes.ctx} does not fit in cells={wishes.cells}: a request may use {choice.context_tokens} tokens"
        )
    if wishes.batch and choice.batch_tokens > wishes.batch:
        warnings.append(f"batch={wishes.batch} is too small for this model and its slots: {choice.batch_tokens} is used")
    if KV_TYPE_BYTES[_kv_type(wishes)] < 2 and any(layer.key_width % 32 or layer.value_width % 32 for layer in facts.per_layer):
        warnings.append(f"kv_type={wishes.kv_type} needs heads in multiples of 32; this model may not load with it")
    return tuple(warnings)


def _hundredths(size_bytes: int) -> int:
    """Of a GiB, rounded."""
    return round(size_bytes * 100 / 2**30)


def _gib(hundredths: int) -> str:
    return f"{hundredths / 100:.2f}"
