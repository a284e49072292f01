"""What a dry run's answer means: the engine's device names, layers and sizes as the plan's parts.

Pure. The engine counts caches and work space; the weights of a layer are the header's, put where the engine puts that layer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from localfast.footprint import RAM, Part, Shape, footprint
from localfast.models.gguf import ModelFacts

_BLOCK = re.compile(r"^blk\.(\d+)\.")


class Cache(msgspec.Struct, frozen=True):
    """A cache of the engine, or the states of its recurrent layers, with the device of each layer in it."""

    state: bool
    size_bytes: int
    layers: list[tuple[int, str]]


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the child. `refused`: no shape of this file will do; `error`: this one will not; `failed`: no engine."""

    gpus: list[str] = []
    layers: list[str] = []
    """Device of each layer, the output last."""
    unused: list[tuple[str, int]] = []
    """Tensors that are in the file and not loaded."""
    caches: list[Cache] = []
    buffers: list[tuple[str, str, int]] = []
    """(device, use, bytes)"""
    refused: str = ""
    error: str = ""
    failed: str = ""


def device_number(name: str, gpus: Sequence[str]) -> int:
    """GPU number of a device or of one of its buffers (MTL0_Mapped, RPC0[...]); RAM for everything else (CPU, CUDA_Host)."""
    for number, gpu in enumerate(gpus):
        if name == gpu or (name.startswith(gpu) and not name[len(gpu)].isalnum()):
            return number
    return RAM


def parts_of(answer: Answer, facts: ModelFacts, shape: Shape) -> tuple[Part, ...]:
    """Labels as in `footprint`. Raises ValueError when the engine counts other layers than the header."""
    places = [device_number(name, answer.gpus) for name in answer.layers]
    if len(places) != facts.layers + 1:
        raise ValueError(f"the engine counts {len(places)} layers, the header {facts.layers + 1}")
    sizes: defaultdict[tuple[int, str], int] = defaultdict(int)
    for device, size_bytes in _weights(answer, facts, shape, places):
        sizes[device, "model"] += size_bytes
    for cache in answer.caches:
        label = "recurrent state" if cache.state else "chat memory"
        for device, size_bytes in _spread(cache, answer, facts):
            sizes[device, label] += size_bytes
    for name, use, size_bytes in answer.buffers:
        if use == "compute":
            sizes[device_number(name, answer.gpus), "work space"] += size_bytes
    for part in footprint(facts, shape, ()):
        if part.label == "server":  # rows of logits are reserved when first used, so the engine does not count them here
            sizes[RAM, part.label] = part.size_bytes
    return tuple(Part(device, label, size_bytes) for (device, label), size_bytes in sizes.items() if size_bytes)


def _weights(answer: Answer, facts: ModelFacts, shape: Shape, places: Sequence[int]) -> list[tuple[int, int]]:
    """Bytes by device, as `llama-model.cpp: load_tensors` places them: the input stays in RAM, a tied output is a copy of it."""
    found = [(RAM, facts.input_bytes)]
    copied = facts.input_bytes if facts.tied_embeddings and places[-1] == RAM else 0
    found.append((places[-1], facts.output_bytes - copied))
    for number, (layer, place) in enumerate(zip(facts.per_layer, places, strict=False)):
        in_ram = layer.expert_bytes if number < shape.cpu_experts else 0
        found += [(place, layer.weight_bytes - in_ram), (RAM, in_ram)]
    for name, size_bytes in answer.unused:
        block = _BLOCK.match(name)
        found.append((places[int(block[1])] if block and int(block[1]) < len(places) else RAM, -size_bytes))
    return found


def _spread(cache: Cache, answer: Answer, facts: ModelFacts) -> list[tuple[int, int]]:
    """The engine tells one size for a cache; its layers share it by their width."""
    held = [(device_number(name, answer.gpus), _width(number, facts, cache.state)) for number, name in cache.layers]
    if not any(width for _, width in held):
        held = [(device, 1) for device, _ in held] or [(RAM, 1)]
    total = sum(width for _, width in held)
    return [(device, cache.size_bytes * width // total) for device, width in held]


def _width(number: int, facts: ModelFacts, state: bool) -> int:
    if number >= facts.layers:
        return 0
    layer = facts.per_layer[number]
    return layer.state_elements if state else layer.key_width + layer.value_width
