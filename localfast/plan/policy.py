"""Goes through the possible ways to load a model in order of preference, takes the first that fits, and spends what is left.

Order: all layers on GPUs, then the experts of some layers in RAM, then some layers in RAM, then no GPU; within each the longer
context, more slots, a finer cache type, the larger step. What the user pinned is never changed. Pure: same question, same choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from localfast.footprint import CELL_STEP, Shape, padded_cells
from localfast.plan.case import Case, Choice
from localfast.plan.sharing import placements

WANTED_CONTEXTS = (16_384, 8_192, 4_096)
GROWN_CONTEXT = 32_768
"""Contexts grow up to this when memory is left: what agents ask for."""
WANTED_SLOTS = (4, 2, 1)
GPU_BATCH_TOKENS, CPU_BATCH_TOKENS = 512, 128
UBATCHES = (512, 256, 128)

_Fits = Callable[[Choice], bool]


@dataclass(frozen=True, slots=True)
class _Stage:
    """`loads`: (gpu_layers, cpu_experts) in order of preference; each takes less of the GPUs than the one before."""

    loads: Sequence[tuple[int, int]]
    spills: bool = False


@dataclass(frozen=True, slots=True)
class _Base:
    """A candidate before its layers are settled."""

    context_tokens: int
    drafts: bool
    slots: int
    kv_type: str
    batch_tokens: int
    ubatch_tokens: int


def choose(case: Case) -> Choice:
    """The best choice that fits, with what is left spent; when none does, the smallest."""
    for choice in _solutions(case, case.fits):
        return _spend(case, choice)
    return _least_bad(case)


def wanted_context(case: Case) -> int:
    """The context of one request that counts as enough."""
    return _contexts(case)[0]


# --- candidates ---------------------------------------------------------------------------------------------------------------


def _solutions(case: Case, fits: _Fits) -> Iterator[Choice]:
    for stage in _stages(case):
        for base in _bases(case, stage):
            if choice := _solve(case, stage, base, fits):
                yield choice


def _stages(case: Case) -> list[_Stage]:
    wishes, layers, everything = case.wishes, case.facts.layers, case.everything
    experts = min(max(0, wishes.cpu_experts), layers)
    searched = case.facts.experts > 0 and wishes.cpu_experts < 0
    if not case.gpus or wishes.gpu_layers == 0:
        return [_Stage([(min(max(0, wishes.gpu_layers), everything), 0)])]
    gpu_layers = everything if wishes.gpu_layers < 0 else min(wishes.gpu_layers, everything)
    stages = [_Stage([(gpu_layers, experts)], spills=gpu_layers < everything or experts > 0)]
    if searched:
        stages.append(_Stage([(gpu_layers, count) for count in range(1, layers + 1)], spills=True))
    if wishes.gpu_layers < 0:
        kept = layers if searched else experts
        stages += [_Stage([(count, kept) for count in range(layers, 0, -1)], spills=True), _Stage([(0, 0)])]
    return stages


def _bases(case: Case, stage: _Stage) -> Iterator[_Base]:
    on_gpu = bool(case.gpus) and stage.loads[0][0] > 0
    wished = case.wishes
    steps = UBATCHES if on_gpu else (CPU_BATCH_TOKENS,)
    if wished.batch:
        steps = (min(wished.batch, UBATCHES[0]),)
    most = wished.batch or (GPU_BATCH_TOKENS if on_gpu else CPU_BATCH_TOKENS)
    drafting = (True, False) if wished.draft_facts else (False,)
    slot_counts = (wished.slots,) if wished.slots else WANTED_SLOTS
    for context, drafts, slots, kv_type in product(_contexts(case), drafting, slot_counts, _kv_types(case, stage)):
        if case.facts.causal:
            for step in steps:
                yield _Base(context, drafts, slots, kv_type, max(most, slots), step)
        else:  # a text that is read both ways must be in one batch
            whole = max(most, context)
            yield _Base(context, drafts, slots, kv_type, max(whole, slots), whole)


def _contexts(case: Case) -> tuple[int, ...]:
    if case.wishes.ctx:
        return (case.wishes.ctx,)
    first = min(WANTED_CONTEXTS[0], case.facts.train_context or WANTED_CONTEXTS[-1])
    return (first, *(context for context in WANTED_CONTEXTS if context < first))


def _kv_types(case: Case, stage: _Stage) -> tuple[str, ...]:
    """A q8_0 cache loses less than any step down in weights or layers. Where layers spill it comes first: it buys layers."""
    if case.wishes.kv_type != "auto":
        return (case.wishes.kv_type,)
    if not quantizable(case):
        return ("f16",)
    return ("q8_0",) if stage.spills else ("f16", "q8_0")


def quantizable(case: Case) -> bool:
    """Whether the cache can be quantized: there is one, and the width of every head is a multiple of the block's."""
    cached = [layer for layer in case.facts.per_layer if layer.key_width]
    return bool(cached) and all(
        layer.key_width // layer.kv_heads % 32 == 0 and layer.value_width // layer.kv_heads % 32 == 0
        for layer in cached
        if layer.kv_heads
    )


def _solve(case: Case, stage: _Stage, base: _Base, fits: _Fits) -> Choice | None:
    """The first of the stage's loads that fits: found by halving, as each takes less of the GPUs than the one before."""
    low, high, found = 0, len(stage.loads), None
    while low < high:
        middle = (low + high) // 2
        choice = _placed(case, base, stage.loads[middle], case.gpus_fit)
        if choice:
            high, found = middle, choice
        else:
            low = middle + 1
    if found is None or fits(found):
        return found
    return _placed(case, base, (found.shape.gpu_layers, found.shape.cpu_experts), fits)


def _placed(case: Case, base: _Base, load: tuple[int, int], fits: _Fits) -> Choice | None:
    for choice in _completed(case, base, load):
        if fits(choice):
            return choice
    return None


def _completed(case: Case, base: _Base, load: tuple[int, int]) -> Iterator[Choice]:
    """Every way to place one shape, best first; the projector leaves the GPU before a layer does."""
    cells = case.wishes.cells or padded_cells(base.context_tokens)
    shape = Shape(
        gpu_layers=load[0],
        cells=cells,
        slots=base.slots,
        ubatch_tokens=base.ubatch_tokens,
        kv_type=base.kv_type,
        cpu_experts=load[1],
    )
    projecting = (True, False) if case.wishes.mmproj_bytes and case.gpus and load[0] else (False,)
    for shares, projector_on_gpu in product(placements(case, shape), projecting):
        yield Choice(shape, shares, min(base.context_tokens, cells), base.batch_tokens, projector_on_gpu, base.drafts)


def _least_bad(case: Case) -> Choice:
    """Nothing fits. RAM that is short slows the machine, a GPU that is short ends the engine: spare the GPUs first."""
    on_gpus = list(_solutions(case, case.gpus_fit))
    if on_gpus:
        return min(on_gpus, key=lambda choice: case.memory(choice)[0].needed_bytes)
    stage = _stages(case)[-1]
    base = list(_bases(case, stage))[-1]
    return list(_completed(case, base, stage.loads[-1]))[-1]


# --- spending what is left ----------------------------------------------------------------------------------------------------


def _spend(case: Case, choice: Choice) -> Choice:
    """Longer contexts, then the cache back to f16, then a context of its own for every slot. Never the margin."""
    longest = _longest_context(case, choice)
    choice = _roomier(case, _with_cells(case, choice, padded_cells(longest), longest), longest)
    if case.wishes.kv_type == "auto" and choice.shape.kv_type == "q8_0":
        finer = replace(choice, shape=replace(choice.shape, kv_type="f16"))  # where a layer's worth of room was left
        choice = finer if case.fits(finer) else choice
    each = case.wishes.ctx or min(choice.context_tokens, WANTED_CONTEXTS[0])
    return _with_cells(case, choice, padded_cells(each * choice.shape.slots), longest)


def _roomier(case: Case, choice: Choice, longest: int) -> Choice:
    """A q8_0 cache where f16 would leave a shorter context: so more memory never means less of it."""
    shape = choice.shape
    if case.wishes.kv_type != "auto" or shape.kv_type != "f16" or choice.context_tokens >= longest or not quantizable(case):
        return choice
    steps = (shape.ubatch_tokens,) if case.wishes.batch or not shape.gpu_layers else UBATCHES
    for step in steps:
        coarser = replace(choice, shape=replace(shape, kv_type="q8_0", ubatch_tokens=step))
        if case.fits(coarser):
            grown = _with_cells(case, coarser, padded_cells(longest), longest)
            return grown if grown.context_tokens > choice.context_tokens else choice
    return choice


def _longest_context(case: Case, choice: Choice) -> int:
    if case.wishes.ctx or not case.facts.causal or not case.facts.train_context:
        return choice.context_tokens
    return max(choice.context_tokens, min(GROWN_CONTEXT, case.facts.train_context))


def _with_cells(case: Case, choice: Choice, most_cells: int, longest: int) -> Choice:
    """As many cells as fit, up to `most_cells`; a request may use them all, up to `longest`."""
    if case.wishes.cells:
        return replace(choice, context_tokens=min(longest, case.wishes.cells))
    low = choice.shape.cells // CELL_STEP
    high = max(low, most_cells // CELL_STEP)
    while low < high:
        middle = (low + high + 1) // 2
        if case.fits(_sized(choice, middle * CELL_STEP, longest)):
            low = middle
        else:
            high = middle - 1
    return _sized(choice, low * CELL_STEP, longest)


def _sized(choice: Choice, cells: int, longest: int) -> Choice:
    context = max(choice.context_tokens, min(longest, cells))
    return replace(choice, shape=replace(choice.shape, cells=cells), context_tokens=context)
