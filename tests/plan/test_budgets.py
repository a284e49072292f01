"""What a model may take of each device."""

from __future__ import annotations

import pytest
from machines import GIB, card, machine
from plain_models import QWEN3_8B, SMALL

from localfast.footprint import MIB
from localfast.plan import Wishes, limit_bytes, make_plan


def test_budgets_integrated_gpu_counts_as_ram_and_is_not_mapped() -> None:
    shared = card(16_384, 16_384, kind="igpu", backend="Vulkan")
    plan = make_plan(machine(shared, ram_gib=16, available_gib=14), SMALL)
    assert plan.gpu_layers == 13 and not plan.use_mmap
    ram = dict(plan.memory[0].parts)
    assert ram["integrated GPU"] == plan.memory[1].needed_bytes and plan.fits


@pytest.mark.parametrize(
    ("text", "limit"),
    [("", None), ("0.5", 500), (".25", 250), ("1.0", 1000), ("6GB", 6 * 10**9), ("512 MiB", 512 * MIB), ("1.5gib", 3 * 2**29)],
)
def test_budgets_limits_are_shares_or_sizes(text: str, limit: int | None) -> None:
    assert limit_bytes(text, 1000) == limit


def test_budgets_limits_bind_and_are_part_of_the_sum() -> None:
    hardware = machine(card(24_576, 24_000, display=False))
    free = make_plan(hardware, QWEN3_8B)
    plan = make_plan(hardware, QWEN3_8B, Wishes(vram_limit="8GiB"))
    assert plan.fits and free.memory[1].needed_bytes > 8 * GIB
    assert (
        plan.memory[1].needed_bytes + plan.memory[1].driver_bytes <= 8 * GIB and "beyond the limit" in plan.memory[1].sentence()
    )
    held = make_plan(hardware, QWEN3_8B, Wishes(vram_limit="16GiB"), residents_bytes=(0, 10 * GIB))
    assert held.memory[1].needed_bytes <= 6 * GIB
    whole = make_plan(hardware, QWEN3_8B, Wishes(model_limit="7GB"))
    assert whole.fits and whole.total_bytes <= 7e9 and "one model may take" in " ".join(whole.reasons)
    never = make_plan(hardware, QWEN3_8B, Wishes(model_limit="1GB"))
    assert not never.fits and any("model_limit=1GB" in warning for warning in never.warnings)
    assert make_plan(machine(), SMALL, Wishes(ram_limit="1GB")).memory[0].needed_bytes <= 1e9


def test_budgets_learned_overhead_replaces_the_guess() -> None:
    hardware = machine(card(8192))
    assert make_plan(hardware, SMALL, overheads={"NVIDIA Test": 555 * MIB}).memory[1].driver_bytes == 555 * MIB
