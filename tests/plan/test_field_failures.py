"""What went wrong elsewhere, as cases: each failure that users of other servers reported, and what the plan does instead.

Some belong to detection, downloads or the engine; here is the part of them that facts, footprint and plan decide.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from machines import GIB, MACHINES, card, machine, nvidia
from synthetic_models import model, quant

from localfast.footprint import MIB, RAM, Shape, cache_bytes, footprint, window_cells
from localfast.hardware import Device, EngineBuild
from localfast.models.gguf import ModelFacts
from localfast.models.ladder import Attempt, may_be_memory, steps_down
from localfast.plan import Wishes, make_plan


def chat_memory(facts: ModelFacts, tokens: int, slots: int = 1, kv_type: str = "f16", ubatch: int = 512) -> int:
    shape = Shape(gpu_layers=0, cells=tokens, slots=slots, ubatch_tokens=ubatch, kv_type=kv_type)
    return sum(cache_bytes(facts.per_layer, facts, shape))


def sizes(facts: ModelFacts, shape: Shape) -> dict[tuple[int, str], int]:
    return {(part.device, part.label): part.size_bytes for part in footprint(facts, shape)}


def whole(facts: ModelFacts, tokens: int, **more: object) -> Shape:
    shape = Shape(gpu_layers=facts.layers + 1, cells=tokens, slots=1, ubatch_tokens=512)
    return replace(shape, **more)  # type: ignore[arg-type]


def test_failure_01_windows_of_gemma4_are_not_counted_as_full_attention() -> None:
    facts = quant("gemma4", "Q4_K_M", 7.3).facts
    assert chat_memory(facts, 32_768) < 1.3 * GIB
    plan = make_plan(nvidia(12), facts)
    assert plan.on_gpu and plan.context_tokens == 32_768


def test_failure_02_gemma3_without_a_pattern_in_the_file_has_its_period() -> None:
    facts = quant("gemma3-27b", "Q4_K_M", 16.5).facts
    assert sum(layer.windowed for layer in facts.per_layer) == 52
    assert sum(part.size_bytes for part in footprint(facts, whole(facts, 131_072))) < 32e9


def test_failure_03_mxfp4_per_layer_embeddings_and_shared_caches_are_read_from_the_file() -> None:
    gpt_oss, gemma3n = model("gpt-oss-20b"), model("gemma3n")
    assert gpt_oss.per_layer[0].expert_bytes == 3 * 32 * 2880 * 2880 * 17 // 32
    embeddings = 256 * 35 * 262_144 * 34 // 32
    weights = {device: size for (device, label), size in sizes(gemma3n, whole(gemma3n, 4096)).items() if label == "model"}
    assert weights[RAM] > embeddings and weights[0] < gemma3n.weight_bytes - embeddings + 20 * MIB + gemma3n.weight_bytes // 100
    assert [layer.key_width > 0 for layer in gemma3n.per_layer] == [True] * 20 + [False] * 15


def test_failure_04_latent_attention_caches_one_narrow_key_and_no_value() -> None:
    assert chat_memory(model("deepseek2-lite"), 1024) == 1024 * 27 * 576 * 2


def test_failure_05_hybrids_keep_a_state_and_a_quarter_of_the_cache() -> None:
    facts = model("hybrid-27b")
    assert chat_memory(facts, 65_536) == 4 * GIB and chat_memory(facts, 262_144) == 16 * GIB
    state = sizes(facts, whole(facts, 65_536, slots=4))[0, "recurrent state"]
    assert state / MIB == pytest.approx(598.5, abs=0.5)


def test_failure_06_width_of_a_head_is_the_files_and_not_a_quotient() -> None:
    assert chat_memory(model("0.6B"), 40_960) / GIB == pytest.approx(4.375)
    assert chat_memory(model("gemma3-27b"), 131_072) / GIB < 10.9


def test_failure_07_flash_attention_needs_no_quadratic_scratch() -> None:
    facts = quant("24B", "Q4_K_M", 14.3).facts
    work = [sizes(facts, whole(facts, tokens))[0, "work space"] for tokens in (32_768, 131_072)]
    assert work[1] - work[0] == 2 * 512 * (131_072 - 32_768) and work[1] < GIB


def test_failure_08_a_million_trained_tokens_are_not_a_default() -> None:
    plan = make_plan(nvidia(24), replace(quant("3B", "Q4_K_M").facts, train_context=1_048_576))
    assert plan.context_tokens == 32_768 and plan.cells <= 65_536


def test_failure_09_without_a_gpu_the_memory_that_is_available_counts() -> None:
    facts = quant("3B", "Q4_K_M").facts
    plan = make_plan(machine(ram_gib=64, available_gib=12), facts)
    assert plan.fits and plan.context_tokens <= 32_768 and plan.memory[0].needed_bytes <= (12 - 6.4) * GIB


def test_failure_10_rerankers_have_no_cache() -> None:
    facts = model("bert")
    plan = make_plan(nvidia(8), facts)
    assert chat_memory(facts, 8192) == 0 and plan.on_gpu and plan.total_bytes < 3 * GIB
    assert plan.ubatch_tokens == plan.batch_tokens == plan.context_tokens == 8192


@pytest.mark.parametrize("name", ["rwkv7", "mamba2", "nemotron-h", "arrays"])
def test_failure_11_models_without_heads_divide_by_nothing(name: str) -> None:
    facts = model(name)
    plan = make_plan(nvidia(24), facts)
    assert plan.fits and plan.on_gpu and (chat_memory(facts, 4096) == 0) == (name in ("rwkv7", "mamba2"))
    assert any(layer.state_elements for layer in facts.per_layer) == (name != "arrays")


def test_failure_12_a_small_card_gets_layers_and_the_projector_counts_once() -> None:
    plan = make_plan(machine(card(4096, 3277)), quant("gemma3-12b", "Q4_K_M").facts, Wishes(mmproj_bytes=850 * MIB))
    assert plan.fits and plan.gpu_layers > 0
    projector = [size for memory in plan.memory for label, size in memory.parts if label == "projector"]
    assert len(projector) == 1 and 850 * MIB <= projector[0] < 1500 * MIB


def test_failure_13_projector_that_does_not_fit_works_on_the_cpu_and_says_so() -> None:
    facts = quant("8B", "Q5_K_M").facts
    plan = make_plan(nvidia(8), facts, Wishes(mmproj_bytes=800 * MIB))
    assert plan.on_gpu and not plan.projector_on_gpu and any("projector works on the CPU" in line for line in plan.reasons)


def test_failure_14_two_cards_hold_what_fits_on_them_together() -> None:
    plan = make_plan(MACHINES["2x24 GB"], quant("32B", "Q8_0").facts)
    assert plan.on_gpu and plan.fits and all(memory.parts for memory in plan.memory[1:])


def test_failure_15_pinned_experts_do_not_switch_the_check_off() -> None:
    facts = quant("30B-A3B", "Q4_K_M").facts
    plan = make_plan(nvidia(24), facts, Wishes(cpu_experts=48))
    assert plan.cpu_experts == 48 and plan.fits
    small = make_plan(machine(card(2048, 1500)), facts, Wishes(cpu_experts=48, gpu_layers=49))
    assert not small.fits and any("GiB needed" in warning for warning in small.warnings)


def test_failure_16_experts_in_ram_pass_through_the_gpu_one_layer_at_a_time() -> None:
    facts = quant("30B-A3B", "Q4_K_M").facts
    staged = [sizes(facts, whole(facts, 4096, cpu_experts=count))[0, "work space"] for count in (0, 48)]
    assert staged[1] - staged[0] == pytest.approx(facts.per_layer[0].expert_bytes, rel=0.02)
    small_steps = sizes(facts, whole(facts, 4096, cpu_experts=48, ubatch_tokens=16))[0, "work space"]
    assert small_steps < staged[1] - facts.per_layer[0].expert_bytes


@pytest.mark.parametrize("system", ["linux", "win32"])
def test_failure_17_a_card_with_a_desktop_is_never_filled_to_the_brim(system: str) -> None:
    hardware = machine(card(16_384), system=system)
    plan = make_plan(hardware, quant("14B", "Q6_K").facts)
    card_memory = plan.memory[1]
    assert card_memory.kept_free_bytes >= 1024 * MIB and card_memory.driver_bytes == 300 * MIB
    assert card_memory.needed_bytes <= hardware.devices[0].free_bytes - 1324 * MIB


def test_failure_18_a_card_of_24_gb_is_used_as_one() -> None:
    """Its size is detection's business; the plan believes what it is told."""
    amd = card(24_560, name="AMD RX 7900 XTX", backend="Vulkan")
    facts = quant("14B", "Q8_0").facts
    assert make_plan(machine(amd), facts).on_gpu
    assert not make_plan(machine(replace(amd, total_bytes=4_293_918_720, free_bytes=4_000_000_000)), facts).on_gpu


def test_failure_19_memory_of_an_integrated_gpu_is_not_added_to_a_cards() -> None:
    shared = card(20_000, name="Intel UHD", kind="igpu", backend="Vulkan", unified=True)
    plan = make_plan(machine(card(12_288, name="RTX A2000"), shared), quant("14B", "Q4_K_M").facts)
    assert [memory.device for memory in plan.memory] == ["RAM", "RTX A2000"] and plan.memory[1].total_bytes == 12 * GIB


def test_failure_20_a_claim_that_nothing_confirms_gets_a_larger_margin() -> None:
    facts = quant("8B", "Q4_K_M").facts
    kept = [make_plan(machine(card(8192, trusted=trusted)), facts).memory[1].kept_free_bytes for trusted in (True, False)]
    assert kept[1] == kept[0] * 3 // 2


def strix_halo(carve_out_gib: int) -> Device:
    total = (carve_out_gib + 16) * 1024
    gpu = card(total, total - 1024, name="Radeon 8060S", kind="igpu", backend="Vulkan", unified=True)
    return replace(gpu, carve_out_bytes=carve_out_gib * GIB)


def test_failure_21_memory_that_firmware_gave_to_the_gpu_is_not_ram() -> None:
    hardware = machine(strix_halo(96), ram_gib=32, available_gib=28)
    plan = make_plan(hardware, quant("32B", "Q8_0").facts)
    assert plan.on_gpu and plan.fits and not plan.use_mmap and plan.memory[0].needed_bytes < 4 * GIB


def test_failure_22_an_apu_with_a_small_carve_out_is_no_cpu() -> None:
    pool = card(16_896, 16_000, name="Radeon 780M", kind="igpu", backend="Vulkan", unified=True)
    plan = make_plan(machine(replace(pool, carve_out_bytes=512 * MIB), ram_gib=32, available_gib=27), quant("8B", "Q4_K_M").facts)
    assert plan.on_gpu and plan.fits
    shared = dict(plan.memory[0].parts)["integrated GPU"]
    assert shared == plan.memory[1].needed_bytes - 512 * MIB
    assert plan.total_bytes == sum(memory.needed_bytes for memory in plan.memory) - shared


def test_failure_23_available_ram_is_taken_as_told() -> None:
    """That page cache is no use of a container is settled in cgroups.py."""
    facts = quant("8B", "Q4_K_M").facts
    assert make_plan(machine(ram_gib=16, available_gib=14), facts).fits
    assert not make_plan(machine(ram_gib=16, available_gib=4), facts).fits


def test_failure_24_what_others_and_our_own_models_hold_is_not_there() -> None:
    facts = quant("8B", "Q8_0").facts
    alone, beside = (make_plan(machine(card(16_384, free)), facts) for free in (15_600, 9_000))
    assert alone.on_gpu and not beside.on_gpu and beside.fits
    limited = make_plan(machine(card(24_576)), facts, Wishes(vram_limit="16GiB"), residents_bytes=(0, 8 * GIB))
    assert limited.memory[1].needed_bytes <= 8 * GIB


def test_failure_25_other_backends_keep_half_as_much_again_free() -> None:
    facts = quant("8B", "Q4_K_M").facts
    kept = [make_plan(machine(card(32_768, backend=name)), facts).memory[1].kept_free_bytes for name in ("CUDA", "Vulkan")]
    assert kept[1] == kept[0] * 3 // 2


def test_failure_26_rocm_is_no_better_trusted_than_vulkan() -> None:
    """The smaller of the driver's and the kernel's number is taken by detection."""
    plan = make_plan(machine(card(16_384, 12_000, backend="ROCm")), quant("8B", "Q4_K_M").facts)
    assert plan.memory[1].kept_free_bytes == 1536 * MIB and plan.memory[1].driver_bytes == 300 * MIB


def test_failure_27_memory_outside_of_the_drivers_counters_is_not_free() -> None:
    facts = quant("14B", "Q6_K").facts
    reserved = 2500 * MIB
    free, taken = (make_plan(machine(card(16_384, reserved_bytes=size)), facts).memory[1] for size in (0, reserved))
    assert taken.used_bytes - free.used_bytes == reserved and taken.needed_bytes <= taken.usable_bytes


def test_failure_28_a_slice_of_a_card_is_what_may_be_used() -> None:
    plan = make_plan(MACHINES["MIG 10 GB"], quant("8B", "Q6_K").facts)
    assert plan.on_gpu and plan.memory[1].total_bytes == 9856 * MIB and plan.memory[1].kept_free_bytes < 300 * MIB


def test_failure_29_no_layer_stays_back_when_all_of_them_fit() -> None:
    facts = quant("14B", "Q5_K_M").facts
    plan = make_plan(machine(card(24_576, 24_200, name="Tesla P40", display=False)), facts)
    assert plan.gpu_layers == plan.layers == 41 and not plan.warnings


def test_failure_30_windowed_layers_have_the_cells_of_their_window() -> None:
    """engine/llama.py asks for it: swa_full is off."""
    facts = replace(model("gemma3-12b"), sliding_window=512)
    assert window_cells(facts, Shape(gpu_layers=0, cells=4096, slots=1, ubatch_tokens=1024)) == 1536
    assert chat_memory(model("gemma3-12b"), 32_768) == 2528 * MIB and chat_memory(model("gpt-oss-20b"), 32_768) == 786 * MIB


def test_failure_31_weights_on_the_cpu_need_ram_although_the_file_is_mapped() -> None:
    facts = quant("30B-A3B", "Q4_K_M").facts
    plan = make_plan(machine(ram_gib=64), facts)
    assert plan.use_mmap and dict(plan.memory[0].parts)["model"] >= facts.weight_bytes
    assert not make_plan(machine(ram_gib=16), facts).fits


def test_failure_32_after_a_failure_each_step_is_smaller() -> None:
    """That the engine's log is read for failed allocations is the engine's business."""
    facts = quant("hybrid-27b", "Q4_K_M", 16.5).facts
    first = make_plan(nvidia(24), facts)
    assert first.on_gpu and may_be_memory("SIGABRT: a native library gave up, often for lack of GPU memory")

    def on_gpus(shape: Shape) -> int:
        return sum(part.size_bytes for part in footprint(facts, shape) if part.device != RAM)

    steps = [on_gpus(step.attempt.shape) for step in steps_down(Attempt(first.shape, first.context_tokens), facts, ())]
    assert steps[3] <= 0.95 * on_gpus(first.shape) and steps == sorted(steps, reverse=True) and steps[-1] == 0


def test_failure_33_context_follows_the_free_bytes_without_a_cliff() -> None:
    facts = quant("32B", "Q4_K_M").facts
    cards = [machine(card(25_600, free, display=False)) for free in range(21_000, 25_600, 250)]
    contexts = [make_plan(hardware, facts).context_tokens for hardware in cards]
    assert all(0 <= after - before <= 4096 for before, after in pairwise(contexts)) and contexts[-1] == 32_768
    much_ram = make_plan(machine(card(12_288), ram_gib=256), quant("14B", "Q4_K_M").facts)
    assert much_ram.context_tokens == make_plan(machine(card(12_288), ram_gib=32), quant("14B", "Q4_K_M").facts).context_tokens


def test_failure_34_layers_for_a_build_without_gpus_are_a_loud_warning() -> None:
    hardware = replace(machine(), devices=(card(24_576, in_engine=False),))
    plan = make_plan(hardware, quant("8B", "Q4_K_M").facts, Wishes(gpu_layers=99))
    assert any("has no effect" in line and "CPU build" in line for line in plan.warnings)
    assert any("localfast engine install" in line for line in plan.warnings)


def test_failure_35_an_engine_that_has_no_code_for_the_card_is_named() -> None:
    """Which build fits which card is settled in engines/."""
    broken = EngineBuild(installed=True, error="CUDA error: no kernel image is available for execution on the device")
    plan = make_plan(replace(machine(), devices=(card(24_576, in_engine=False),), engine=broken), quant("8B", "Q4_K_M").facts)
    assert "no kernel image" in plan.summary and any("NVIDIA Test is not used" in line for line in plan.warnings)


def test_failure_36_an_estimate_warns_and_never_refuses_what_was_pinned() -> None:
    facts = quant("gemma4", "Q4_K_M", 7.3).facts
    assert make_plan(nvidia(24), facts, Wishes(ctx=131_072, kv_type="q8_0", slots=1)).fits
    plan = make_plan(nvidia(4), quant("14B", "Q4_K_M").facts, Wishes(gpu_layers=41, ctx=32_768))
    assert (plan.gpu_layers, plan.context_tokens) == (41, 32_768) and any("GiB needed" in line for line in plan.warnings)


GOLDEN = {"1B": 72, "3B": 80, "8B": 112, "14B": 150, "32B": 204, "30B-A3B": 96, "gemma3-12b": 130, "gpt-oss-20b": 101}
CACHED = {"1B": 32_768, "3B": 114_688, "8B": 147_456, "14B": 163_840, "32B": 262_144, "30B-A3B": 98_304}


@pytest.mark.parametrize(("name", "mib"), GOLDEN.items())
def test_failure_37_work_space_is_that_of_the_engines_own_dry_run(name: str, mib: int) -> None:
    facts = model(name)
    work = sizes(facts, whole(facts, 8192))[0, "work space"] / MIB
    assert work == pytest.approx(mib, rel=0.23 if name == "gpt-oss-20b" else 0.06)
    if name in CACHED:
        assert chat_memory(facts, 8192) == 8192 * CACHED[name]


def test_failure_38_what_is_beyond_the_cards_own_memory_is_never_counted() -> None:
    for gib in (4, 8, 24):
        plan = make_plan(nvidia(gib), quant("32B", "Q4_K_M").facts)
        free = nvidia(gib).devices[0].free_bytes
        assert plan.memory[1].needed_bytes <= plan.memory[1].usable_bytes < free
