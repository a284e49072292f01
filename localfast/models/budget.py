"""What loaded models hold of each device, and what another one's plan is worth beside them. Pure.

Memory is a vector: bytes on each device in the order of a plan's `memory`, the RAM first and then the engine's GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from localfast.hardware import Device, Hardware
from localfast.models.eviction import Vector, Worth
from localfast.plan import Plan, Wishes, limit_bytes
from localfast.plan.budgets import gib_of, is_pool

SERVER_PART = "server"
"""Label of the part of a plan that no buffer of the engine shows: Python, tokenizer, native libraries."""


def held_bytes(plan: Plan, gpus: Sequence[Device], buffers: Iterable[tuple[str, str, int]]) -> Vector:
    """What a loaded model really holds, from the engine's own log; as planned where the log says nothing."""
    buffers = list(buffers)
    if not buffers:
        return tuple(memory.needed_bytes for memory in plan.memory)
    held = [0] * (1 + len(gpus))
    held[0] = sum(size for label, size in plan.memory[0].parts if label == SERVER_PART)
    for name, _, size_bytes in buffers:
        held[_device_number(name, gpus)] += size_bytes
    held[0] += sum(size for gpu, size in zip(gpus, held[1:], strict=True) if is_pool(gpu))
    return tuple(held)


def _device_number(buffer: str, gpus: Sequence[Device]) -> int:
    """Of a buffer such as CPU_Mapped, CUDA_Host or CUDA0: 0 for RAM, else 1 + the GPU's place in the engine's order."""
    if not gpus or buffer.startswith("CPU") or buffer.lower().endswith("host"):
        return 0
    for number, gpu in enumerate(gpus):
        same_before = sum(other.backend == gpu.backend for other in gpus[:number])
        if buffer == f"{gpu.backend}{same_before}":
            return 1 + number
    return len(gpus)


def after_unloading(hardware: Hardware, freed: Vector) -> Hardware:
    """The machine as it would be with so many bytes more free on each device."""
    ram, *rest = freed or (0,)
    more = {id(gpu): size for gpu, size in zip(hardware.engine_gpus, rest, strict=False)}
    devices = tuple(
        replace(device, free_bytes=min(device.total_bytes, device.free_bytes + more.get(id(device), 0)))
        for device in hardware.devices
    )
    available = min(hardware.ram_total_bytes, hardware.ram_available_bytes + ram)
    return replace(hardware, devices=devices, ram_available_bytes=available)


def beyond_limits(plan: Plan, wishes: Wishes) -> str:
    """Why the plan, the smallest there is, does not fit into what the user allowed; empty when it does."""
    ram, *gpus = plan.memory
    for name, text, memory in (("ram_limit", wishes.ram_limit, ram), *(("vram_limit", wishes.vram_limit, gpu) for gpu in gpus)):
        limit = limit_bytes(text, memory.total_bytes)
        if limit is not None and memory.needed_bytes > limit:
            return f"it needs {gib_of(memory.needed_bytes)} on {memory.device}, {name} allows {gib_of(limit)}"
    if plan.model_limit_bytes is not None and plan.total_bytes > plan.model_limit_bytes:
        return f"it needs {gib_of(plan.total_bytes)} on all devices, model_limit allows {gib_of(plan.model_limit_bytes)}"
    return ""


def worth(plan: Plan, wanted_context: int) -> Worth:
    """For comparing plans of one model; context beyond `wanted_context` is a luxury and counts for nothing."""
    missing = sum(max(0, memory.needed_bytes - memory.usable_bytes) for memory in plan.memory)
    return Worth(plan.fits, -missing, plan.gpu_layers - plan.cpu_experts, min(plan.context_tokens, wanted_context))
