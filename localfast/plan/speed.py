"""How fast one stream will be, from what must be read for each token and how fast each device reads it.

tokens/s = 1 / (sum over devices of bytes read / (efficiency × bandwidth) + a fixed cost). A bandwidth that is not known gives no
number. Reading prompts is bound by arithmetic instead, and is not predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from localfast.footprint import KV_TYPE_BYTES, RAM, Shape, layer_places
from localfast.hardware import Device, Hardware
from localfast.models.gguf import LayerFacts, ModelFacts
from localfast.plan.budgets import is_pool

TYPICAL_CONTEXT = 2_048
"""Tokens in the cache that a prediction assumes."""
_GPU_EFFICIENCY, _CPU_EFFICIENCY, _GENERIC_CPU_EFFICIENCY = 0.6, 0.6, 0.3
_FIXED_S = 0.001


def predicted_tokens_per_s(hardware: Hardware, facts: ModelFacts, shape: Shape, shares: Sequence[float]) -> float:
    """0 when a device that is read has no known bandwidth."""
    seconds = _FIXED_S
    for device, read_bytes in bytes_per_token(facts, shape, shares).items():
        if not read_bytes:
            continue
        speed = _cpu_speed(hardware) if device == RAM else _gpu_speed(hardware, hardware.engine_gpus[device])
        if speed <= 0:
            return 0.0
        seconds += read_bytes / speed
    return 1 / seconds


def bytes_per_token(facts: ModelFacts, shape: Shape, shares: Sequence[float]) -> dict[int, int]:
    """What each device reads for one token: of experts only those that are used, of the cache what is filled."""
    places = layer_places(facts.layers, shape.gpu_layers, shares)
    read = dict.fromkeys((RAM, *places), 0)
    for number, (layer, place) in enumerate(zip(facts.per_layer, places, strict=False)):
        experts = layer.expert_bytes * facts.experts_used // facts.experts if facts.experts else layer.expert_bytes
        read[RAM if number < shape.cpu_experts else place] += experts
        read[place] += layer.weight_bytes - layer.expert_bytes + _cache_bytes(layer, facts, shape)
    read[places[-1]] += facts.output_bytes or (facts.input_bytes if facts.tied_embeddings else 0)
    return read


def _cache_bytes(layer: LayerFacts, facts: ModelFacts, shape: Shape) -> int:
    filled = min(TYPICAL_CONTEXT, shape.cells, facts.sliding_window if layer.windowed else shape.cells)
    cache = int(filled * (layer.key_width + layer.value_width) * KV_TYPE_BYTES[shape.kv_type])
    return cache + 4 * layer.state_elements


def _gpu_speed(hardware: Hardware, gpu: Device) -> float:
    shared = hardware.ram_bandwidth_bytes_s if is_pool(gpu) else 0.0
    return _GPU_EFFICIENCY * (gpu.bandwidth_bytes_s or shared)


def _cpu_speed(hardware: Hardware) -> float:
    """Builds for every CPU leave out the vector instructions that make the difference."""
    features = hardware.engine.cpu_features if hardware.engine else ()
    generic = bool(features) and not {"AVX2", "NEON"} & set(features)
    return (_GENERIC_CPU_EFFICIENCY if generic else _CPU_EFFICIENCY) * hardware.ram_bandwidth_bytes_s
