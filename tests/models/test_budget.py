"""What models hold of each device, by the engine's log, and what plans are worth beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localfast.hardware import Device, Hardware
from localfast.models.budget import after_unloading, beyond_limits, held_bytes, worth
from localfast.plan import DeviceMemory, Plan, Wishes

GIB = 2**30
CARD = Device(backend="CUDA", name="Card", kind="gpu", total_bytes=8 * GIB, free_bytes=2 * GIB, in_engine=True)
TWIN = replace(CARD, free_bytes=3 * GIB)
SMALL = Device(backend="Vulkan", name="Small", kind="igpu", total_bytes=8 * GIB, free_bytes=2 * GIB, in_engine=True)


def memory(device: str, **parts: int) -> DeviceMemory:
    return DeviceMemory(
        device=device, total_bytes=16 * GIB, used_bytes=0, driver_bytes=0, kept_free_bytes=8 * GIB, parts=tuple(parts.items())
    )


def plan(*devices: DeviceMemory, **changes: int) -> Plan:
    numbers = {"gpu_layers": 0, "layers": 9, "context_tokens": 4096, "cells": 4096, "slots": 1, "batch_tokens": 1} | changes
    return Plan(
        **numbers,  # type: ignore[arg-type]
        ubatch_tokens=1,
        threads=1,
        kv_type="f16",
        use_mmap=True,
        memory=devices,
        total_bytes=sum(device.needed_bytes for device in devices),
        summary="",
        reasons=(),
    )


PLANNED = plan(memory("RAM", model=5, server=100), memory("Card", model=7), memory("Card (2)", model=9))


@pytest.mark.parametrize(
    ("gpus", "buffers", "held"),
    [
        ([CARD, TWIN], [("CUDA0", "model", 10), ("CUDA1", "KV", 20), ("CPU_Mapped", "model", 1)], (101, 10, 20)),
        ([CARD, TWIN], [("CUDA_Host", "output", 4), ("CPU_REPACK", "model", 3), ("CUDA1", "compute", 2)], (107, 0, 2)),
        ([CARD], [("RPC[127.0.0.1:1]", "model", 6)], (100, 6)),
        ([], [("CPU", "KV", 8)], (108,)),
        ([SMALL], [("Vulkan0", "model", 8)], (108, 8)),  # its memory is RAM
        ([CARD, TWIN], [], (105, 7, 9)),
    ],
)
def test_held_bytes_by_the_engines_log(gpus: list[Device], buffers: list[tuple[str, str, int]], held: tuple[int, ...]) -> None:
    assert held_bytes(PLANNED, gpus, buffers) == held


def test_after_unloading_never_more_than_there_is() -> None:
    hardware = Hardware(devices=(CARD, TWIN), ram_total_bytes=16 * GIB, ram_available_bytes=4 * GIB)
    freed = after_unloading(hardware, (2 * GIB, 0, 99 * GIB))
    assert freed.ram_available_bytes == 6 * GIB
    assert [gpu.free_bytes for gpu in freed.engine_gpus] == [2 * GIB, 8 * GIB]
    assert after_unloading(hardware, ()) == hardware


def test_worth_fitting_first_then_layers_then_wanted_context() -> None:
    ram = memory("RAM", model=5)
    too_much, more = memory("RAM", model=9 * GIB), memory("RAM", model=10 * GIB)
    in_order = [
        plan(more, gpu_layers=9),
        plan(too_much, gpu_layers=9),
        plan(ram, gpu_layers=3, context_tokens=16_384),
        plan(ram, gpu_layers=9, context_tokens=4096),
        plan(ram, gpu_layers=9, context_tokens=8192),
    ]
    values = [worth(one, 8192) for one in in_order]
    assert values == sorted(values) and len(set(values)) == len(values)
    assert worth(in_order[-1], 8192) == worth(plan(ram, gpu_layers=9, context_tokens=32_768), 8192)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (Wishes(), ""),
        (Wishes(ram_limit="7GiB"), ""),
        (Wishes(ram_limit="2GiB"), "it needs 6.00 GiB on RAM, ram_limit allows 2.00 GiB"),
        (Wishes(ram_limit="0.25"), "it needs 6.00 GiB on RAM, ram_limit allows 4.00 GiB"),
        (Wishes(vram_limit="1GiB"), "it needs 3.00 GiB on Card, vram_limit allows 1.00 GiB"),
    ],
)
def test_beyond_limits_says_which_and_by_how_much(wishes: Wishes, words: str) -> None:
    assert beyond_limits(plan(memory("RAM", model=6 * GIB), memory("Card", model=3 * GIB)), wishes) == words
