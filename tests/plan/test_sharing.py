"""Several GPUs: which of them take which layers."""

from __future__ import annotations

from dataclasses import replace

from machines import card, machine
from plain_models import QWEN3_8B, QWEN3_14B

from localfast.plan import Wishes, make_plan


def test_sharing_two_cards_share_what_one_cannot_hold() -> None:
    first, second = card(8192, name="first"), card(8192, name="second")
    plan = make_plan(machine(first, second), QWEN3_14B)
    assert plan.gpu_layers == 41 and [memory.device for memory in plan.memory] == ["RAM", "first", "second"]
    assert all(memory.parts and memory.fits for memory in plan.memory)


def test_sharing_one_card_is_enough_and_the_fastest_one_is_taken() -> None:
    slow, fast = card(24_576, name="slow", bandwidth_bytes_s=300e9), card(24_576, name="fast", bandwidth_bytes_s=900e9)
    plan = make_plan(machine(slow, fast), QWEN3_8B)
    assert plan.split == (0.0, 1.0) and plan.summary == "37/37 layers on fast" and not plan.memory[1].parts


def test_sharing_faster_card_is_filled_before_the_slower_one() -> None:
    slow, fast = card(8192, name="slow", bandwidth_bytes_s=300e9), card(8192, name="fast", bandwidth_bytes_s=900e9)
    ordered = [make_plan(machine(*pair), QWEN3_14B) for pair in ((slow, fast), (fast, slow))]
    assert ordered[0].shares[1] > ordered[0].shares[0] > 0 and ordered[1].shares[0] > ordered[1].shares[1] > 0
    assert all(plan.fits and plan.on_gpu and sum(plan.shares) == 41 for plan in ordered)


def test_sharing_layers_of_different_size_are_split_by_bytes_and_not_by_count() -> None:
    layers = tuple(replace(layer, weight_bytes=layer.weight_bytes * (8 if number < 4 else 1)) for number, layer in
                   enumerate(QWEN3_8B.per_layer))  # fmt: skip
    plan = make_plan(machine(card(8192, name="a"), card(8192, name="b")), replace(QWEN3_8B, per_layer=layers))
    assert plan.on_gpu and plan.fits and plan.shares[0] < plan.shares[1]


def test_sharing_pinned_split_is_kept_and_nonsense_is_named() -> None:
    hardware = machine(card(24_576, name="a"), card(24_576, name="b"))
    assert make_plan(hardware, QWEN3_8B, Wishes(split=("3", "1"))).split == (3.0, 1.0)
    assert make_plan(hardware, QWEN3_8B, Wishes(split=("0", "1"))).split == (0.0, 1.0)
    odd = make_plan(hardware, QWEN3_8B, Wishes(split=("much", "more")))
    assert odd.split == (1.0, 0.0) and any("split=much,more is not used" in warning for warning in odd.warnings)
