"""How much memory a model takes on each device, by formula: weights, KV cache, recurrent state, work space.

Pure arithmetic over plain facts; decides nothing. Formulas are those of llama.cpp (`llama-model.cpp: load_tensors`,
`llama-kv-cache*.cpp`, `llama-hparams.cpp`), for the context that `engine/llama.py` makes: unified cache, windowed layers cached
by window, flash attention, few output rows. Exact for weights, cache and state, a few percent off for work space.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from localfast.engine.messages import SPARE_OUTPUT_ROWS
from localfast.models.gguf import LayerFacts, ModelFacts

MIB = 2**20
RAM = -1
"""Device number of the machine's own memory; GPUs count from 0."""
CELL_STEP = 256
"""llama.cpp rounds the cache up to this many cells."""
KV_TYPE_BYTES = {"f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
PROCESS_BYTES = 300 * MIB
"""Python, the tokenizer and the native library in the server and engine processes."""
_WEIGHT_SLACK = 1.005
_OFFLOAD_MIN_BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What decides the memory of a loaded model. `gpu_layers` counts the output as one layer: 0 to layers + 1."""

    gpu_layers: int
    cells: int
    slots: int
    ubatch_tokens: int
    kv_type: str = "f16"
    cpu_experts: int = 0
    """Leading layers whose experts stay in RAM although the layer is on a GPU."""


@dataclass(frozen=True, slots=True)
class Part:
    """One use of memory on one device."""

    device: int
    label: str
    size_bytes: int


def footprint(facts: ModelFacts, shape: Shape, gpu_weights: Sequence[float] = (1.0,)) -> tuple[Part, ...]:
    """Every part of the model's memory. `gpu_weights` are the GPUs' shares of the offloaded layers."""
    places = layer_places(facts.layers, shape.gpu_layers, gpu_weights)
    parts = []
    for device in sorted({RAM, *places}):
        layers = [layer for layer, place in zip(facts.per_layer, places, strict=False) if place == device]
        weights = sum(layer.weight_bytes for layer in layers)
        kept_back = sum(layer.expert_bytes for layer in _experts_in_ram(facts, shape, places, device))
        if device == RAM:
            weights += facts.input_bytes + kept_back
            weights += facts.output_bytes - facts.copied_bytes if places[-1] == RAM else 0
        else:
            output = facts.output_bytes if places[-1] == device else 0
            weights = int((weights - kept_back + output) * _WEIGHT_SLACK)
        parts += [
            Part(device, "model", weights),
            Part(device, "chat memory", sum(cache_bytes(layers, facts, shape))),
            Part(device, "recurrent state", sum(4 * layer.state_elements * shape.slots for layer in layers)),
            Part(device, "work space", _work_bytes(facts, shape, places, device)),
        ]
    parts.append(Part(RAM, "server", PROCESS_BYTES + 4 * _output_rows(shape) * facts.vocabulary))
    return tuple(part for part in parts if part.size_bytes)


def layer_costs(facts: ModelFacts, shape: Shape) -> tuple[int, ...]:
    """What each layer takes of the GPU that it is on: weights, cache and state; the output last."""
    caches = cache_bytes(facts.per_layer, facts, shape)
    weights = (
        layer.weight_bytes - (layer.expert_bytes if number < shape.cpu_experts else 0)
        for number, layer in enumerate(facts.per_layer)
    )
    layers = (
        int(weight_bytes * _WEIGHT_SLACK) + cache + 4 * layer.state_elements * shape.slots
        for weight_bytes, cache, layer in zip(weights, caches, facts.per_layer, strict=True)
    )
    return (*layers, int(facts.output_bytes * _WEIGHT_SLACK))


def layer_places(layers: int, gpu_layers: int, gpu_weights: Sequence[float]) -> tuple[int, ...]:
    """Device of each layer, the output last. The last `gpu_layers` go to the GPUs, split in order by cumulative share."""
    if gpu_layers <= 0 or not gpu_weights or sum(gpu_weights) <= 0:
        return (RAM,) * (layers + 1)
    offloaded = min(gpu_layers, layers + 1)
    total = sum(gpu_weights)
    bounds = [share / total for share in accumulate(gpu_weights)]
    bounds[-1] = 2.0  # rounding must not push the last layer off the last GPU
    on_gpu = [bisect_right(bounds, index / offloaded) for index in range(offloaded)]
    return (*([RAM] * (layers + 1 - offloaded)), *on_gpu)


def padded_cells(tokens: int) -> int:
    return -(-tokens // CELL_STEP) * CELL_STEP


def window_cells(facts: ModelFacts, shape: Shape) -> int:
    """Cells of a windowed layer: each slot's window and one batch, at most the whole cache."""
    return padded_cells(min(padded_cells(shape.cells), facts.sliding_window * shape.slots + shape.ubatch_tokens))


def cache_bytes(layers: Iterable[LayerFacts], facts: ModelFacts, shape: Shape) -> tuple[int, ...]:
    """KV cache of each of the layers."""
    cells = (padded_cells(shape.cells), window_cells(facts, shape))
    width_bytes = KV_TYPE_BYTES[shape.kv_type]
    return tuple(int(cells[layer.windowed] * (layer.key_width + layer.value_width) * width_bytes) for layer in layers)


def _experts_in_ram(facts: ModelFacts, shape: Shape, places: Sequence[int], device: int) -> list[LayerFacts]:
    """Layers on `device`, or for RAM on any GPU, whose experts are kept in RAM."""
    leading = list(zip(facts.per_layer, places, strict=False))[: shape.cpu_experts]
    return [layer for layer, place in leading if place != RAM and device in (RAM, place)]


def _output_rows(shape: Shape) -> int:
    return min(shape.slots + SPARE_OUTPUT_ROWS, max(shape.ubatch_tokens, shape.slots))


def _work_bytes(facts: ModelFacts, shape: Shape, places: Sequence[int], device: int) -> int:
    """Compute buffer of one device: the largest of the layers' intermediate results and the logits."""
    ubatch, cells = shape.ubatch_tokens, padded_cells(shape.cells)
    windowed = any(layer.windowed for layer in facts.per_layer)
    if not any(layer.key_width for layer in facts.per_layer):
        cells = 0 if facts.causal else ubatch  # without a cache a text looks at itself, a recurrent model at nothing
    mask = 2 * ubatch * (cells + (window_cells(facts, shape) if windowed else 0))
    if device not in places and not _experts_in_ram(facts, shape, places, device):  # full offload: RAM only stages the input
        return 4 * ubatch * facts.embedding + mask
    feed_forward = 3 * facts.feed_forward
    if facts.experts_used:
        routed = 3 * (facts.expert_feed_forward or facts.feed_forward) + facts.embedding
        feed_forward = max(feed_forward, facts.experts_used * routed)
    body = 4 * ubatch * (feed_forward + 3 * facts.embedding + facts.heads * facts.head_width)
    logits = 4 * _output_rows(shape) * (facts.vocabulary + 2 * facts.embedding) if places[-1] == device else 0
    if device == RAM:
        return max(body + mask, logits)
    return max(body + mask * _mask_copies(shape, places), logits) + _staging_bytes(facts, shape, places)


def _mask_copies(shape: Shape, places: Sequence[int]) -> int:
    """With all layers on several GPUs, experts included, llama.cpp keeps up to 4 batches in flight."""
    return 4 if RAM not in places and len(set(places)) > 1 and not shape.cpu_experts else 1


def _staging_bytes(facts: ModelFacts, shape: Shape, places: Sequence[int]) -> int:
    """What a GPU holds for a moment: weights of a layer left in RAM (large batches), an f16 copy of a quantized cache layer."""
    layers = list(zip(facts.per_layer, places, strict=False))
    staged = 0
    if shape.ubatch_tokens >= _OFFLOAD_MIN_BATCH:
        staged = max((max(layer.expert_bytes, layer.largest_tensor_bytes) for layer, place in layers if place == RAM), default=0)
        staged = max([staged, *(layer.expert_bytes for layer in _experts_in_ram(facts, shape, places, RAM))])
    if KV_TYPE_BYTES[shape.kv_type] < 2:
        widest = max((layer.key_width + layer.value_width for layer, place in layers if place != RAM), default=0)
        staged += 2 * padded_cells(shape.cells) * widest
    return staged
