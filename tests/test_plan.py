from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localfast.engine.messages import SPARE_OUTPUT_ROWS
from localfast.footprint import MIB, RAM, Shape, footprint, layer_places
from localfast.hardware import Device, EngineBuild, Hardware
from localfast.models.gguf import LayerFacts, ModelFacts, read_facts
from localfast.plan import Plan, Wishes, make_plan

GIB = 2**30
CPU_BUILD = EngineBuild(installed=True, version="1", backends=("CPU",))


def model(
    layers: int,
    embedding: int,
    feed_forward: int,
    heads: int,
    *,
    layer_mib: float,
    output_mib: float = 400,
    input_mib: float = 400,
) -> ModelFacts:
    """A dense model with 8 key-value heads of width 128, like Qwen3."""
    layer = LayerFacts(int(layer_mib * MIB), 0, int(layer_mib * MIB / 4), 8, 1024, 1024)
    return ModelFacts(
        path="m.gguf",
        architecture="qwen3",
        name="m",
        quant="Q4_K",
        parameters=1,
        size_bytes=1,
        train_context=40_960,
        vocabulary=151_936,
        embedding=embedding,
        feed_forward=feed_forward,
        heads=heads,
        head_width=128,
        per_layer=(layer,) * layers,
        input_bytes=int(input_mib * MIB),
        output_bytes=int(output_mib * MIB),
        tied_embeddings=False,
    )


# Weights on the GPU with everything offloaded: 5171 MiB (Q5_K_M) and 8166 MiB (Q4_K_M).
QWEN3_8B = model(36, 4096, 12_288, 32, layer_mib=(5171 - 487) / 36, output_mib=487)
QWEN3_14B = model(40, 5120, 17_408, 40, layer_mib=(8166 - 608) / 40, output_mib=608)
SMALL = model(12, 1024, 4096, 8, layer_mib=20, output_mib=60, input_mib=60)
WINDOWED = replace(
    SMALL, sliding_window=512, per_layer=tuple(replace(layer, windowed=n % 6 != 5) for n, layer in enumerate(SMALL.per_layer))
)
HYBRID = replace(
    SMALL,
    per_layer=tuple(
        layer if n % 4 == 3 else replace(layer, key_width=0, value_width=0, state_elements=2**20)
        for n, layer in enumerate(SMALL.per_layer)
    ),
)
MODELS = [SMALL, WINDOWED, HYBRID, QWEN3_8B]


def card(total_mib: int, free_mib: int | None = None, name: str = "NVIDIA Test", **more: object) -> Device:
    """A card with a desktop on it, 700 MiB in use unless told otherwise."""
    free = total_mib - 700 if free_mib is None else free_mib
    device = Device(
        backend="CUDA", name=name, kind="gpu", total_bytes=total_mib * MIB, free_bytes=free * MIB, in_engine=True, display=True
    )
    return replace(device, **more)  # type: ignore[arg-type]


def machine(*gpus: Device, ram_gib: float = 32, available_gib: float | None = None) -> Hardware:
    return Hardware(
        devices=gpus,
        ram_total_bytes=int(ram_gib * GIB),
        ram_available_bytes=int((available_gib if available_gib is not None else ram_gib - 2) * GIB),
        physical_cores=6,
        engine=CPU_BUILD
        if not gpus
        else EngineBuild(installed=True, version="1", backends=("CUDA", "CPU"), supports_gpu_offload=True),
        system="linux",
    )


@pytest.mark.parametrize(
    ("facts", "total_mib", "kv_type", "context", "layers"),
    [
        (QWEN3_8B, 8192, "q8_0", 16_384, 37),
        (QWEN3_8B, 8192, "f16", 8_192, 37),
        (QWEN3_8B, 12_288, "f16", 16_384, 37),
        (QWEN3_14B, 12_288, "q8_0", 16_384, 41),
        (QWEN3_14B, 24_576, "f16", 16_384, 41),
    ],
)
def test_plan_cards_of_known_size(facts: ModelFacts, total_mib: int, kv_type: str, context: int, layers: int) -> None:
    plan = make_plan(machine(card(total_mib)), facts, Wishes(kv_type=kv_type))
    assert (plan.gpu_layers, plan.context_tokens) == (layers, context)
    assert plan.fits and not plan.warnings


def test_plan_partial_offload_takes_as_many_layers_as_fit() -> None:
    hardware = machine(card(8192))
    plan = make_plan(hardware, QWEN3_14B)
    assert (
        20 <= plan.gpu_layers <= 30
        and plan.summary == f"{plan.gpu_layers}/41 layers on NVIDIA Test, {41 - plan.gpu_layers} on CPU"
    )
    one_more = make_plan(hardware, QWEN3_14B, Wishes(gpu_layers=plan.gpu_layers + 1, ctx=plan.context_tokens, slots=plan.slots))
    assert not one_more.fits and any("NVIDIA Test" in warning for warning in one_more.warnings)


def test_plan_memory_of_known_model_matches_the_published_sums() -> None:
    parts = footprint(QWEN3_8B, Shape(gpu_layers=37, cells=8192, slots=1, ubatch_tokens=512))
    sizes = {(part.device, part.label): part.size_bytes / MIB for part in parts}
    assert sizes[0, "chat memory"] == 1152 and abs(sizes[0, "work space"] - 112) < 1
    assert 5171 <= sizes[0, "model"] <= 5171 * 1.006 and sizes[RAM, "model"] == pytest.approx(400)


def test_plan_windowed_layers_keep_only_their_window() -> None:
    shape = Shape(gpu_layers=0, cells=32_768, slots=4, ubatch_tokens=128)
    sizes = {part.label: part.size_bytes for part in footprint(WINDOWED, shape)}
    assert sizes["chat memory"] == 2048 * 2 * (2 * 32_768 + 10 * 2304)  # pad256(4 * 512 + 128) = 2304


def test_plan_recurrent_layers_cost_state_per_slot_and_no_cache() -> None:
    shape = Shape(gpu_layers=0, cells=4096, slots=4, ubatch_tokens=128)
    sizes = {part.label: part.size_bytes for part in footprint(HYBRID, shape)}
    assert sizes["chat memory"] == 2048 * 2 * 3 * 4096 and sizes["recurrent state"] == 9 * 4 * 4 * 2**20


def test_plan_tied_embeddings_are_copied_only_when_the_output_is_offloaded() -> None:
    tied = replace(SMALL, tied_embeddings=True, output_bytes=SMALL.input_bytes)
    for gpu_layers, in_ram, on_gpu in [(0, 60 + 12 * 20, 0), (13, 60, (60 + 12 * 20) * 1.005)]:
        parts = footprint(tied, Shape(gpu_layers=gpu_layers, cells=256, slots=1, ubatch_tokens=32))
        sizes = {part.device: part.size_bytes / MIB for part in parts if part.label == "model"}
        assert sizes[RAM] == pytest.approx(in_ram) and sizes.get(0, 0) == pytest.approx(on_gpu, abs=0.01)


def test_plan_layers_go_back_to_front_and_split_by_free_memory() -> None:
    assert layer_places(4, 0, (1.0,)) == (RAM,) * 5
    assert layer_places(4, 1, (1.0,)) == (RAM, RAM, RAM, RAM, 0)
    assert layer_places(4, 5, (3.0, 2.0)) == (0, 0, 0, 1, 1)
    assert layer_places(4, 99, (1.0, 0.0)) == (0,) * 5


def test_plan_two_cards_share_what_one_cannot_hold() -> None:
    first, second = card(8192, name="first"), card(8192, name="second")
    plan = make_plan(machine(first, second), QWEN3_14B)
    assert plan.gpu_layers == 41 and [memory.device for memory in plan.memory] == ["RAM", "first", "second"]
    assert all(memory.parts and memory.fits for memory in plan.memory)


@pytest.mark.parametrize(
    ("hardware", "words"),
    [
        (machine(), "no GPU that the engine can use"),
        (replace(machine(), engine=None), "did not tell"),
        (replace(machine(), engine=EngineBuild(installed=False)), "not installed"),
        (replace(machine(), engine=EngineBuild(installed=True, error="OSError: libcudart.so.12")), "libcudart"),
        (replace(machine(), devices=(card(24_576, in_engine=False),)), "so NVIDIA Test stays idle"),
    ],
)
def test_plan_without_a_usable_gpu_runs_on_the_cpu_and_says_why(hardware: Hardware, words: str) -> None:
    plan = make_plan(hardware, SMALL)
    assert plan.gpu_layers == 0 and plan.batch_tokens == 128 and plan.threads == 6
    assert plan.summary.startswith("13/13 layers on CPU: ") and words in plan.summary
    pinned = make_plan(hardware, SMALL, Wishes(gpu_layers=5))
    assert pinned.gpu_layers == 5 and any("no effect" in warning and words in warning for warning in pinned.warnings)


def test_plan_gives_every_slot_a_whole_context_when_memory_allows() -> None:
    plan = make_plan(machine(), SMALL)
    assert (plan.context_tokens, plan.slots, plan.cells) == (16_384, 4, 65_536)
    tight = make_plan(machine(ram_gib=5, available_gib=3), SMALL)
    assert tight.context_tokens == 16_384 and 16_384 <= tight.cells < 65_536 and tight.fits


def test_plan_context_never_exceeds_the_training_unless_pinned() -> None:
    short = replace(SMALL, train_context=2048)
    assert make_plan(machine(), short).context_tokens == 2048
    pinned = make_plan(machine(), short, Wishes(ctx=8192))
    assert pinned.context_tokens == 8192 and any("2048 tokens of the training" in warning for warning in pinned.warnings)


def test_plan_nothing_fits_gives_the_smallest_shape_and_the_numbers() -> None:
    plan = make_plan(machine(ram_gib=2, available_gib=1), QWEN3_14B)
    assert (plan.gpu_layers, plan.context_tokens, plan.slots) == (0, 4096, 1)
    assert any(warning.startswith("RAM: ") and "GiB needed" in warning for warning in plan.warnings)


def test_plan_short_ram_does_not_keep_a_model_off_the_gpu() -> None:
    plan = make_plan(machine(card(24_576), ram_gib=2, available_gib=0.5), SMALL)
    assert plan.gpu_layers == 13 and any(warning.startswith("RAM: ") for warning in plan.warnings)


def test_plan_contradicting_pins_keep_the_engine_loadable() -> None:
    plan = make_plan(machine(), SMALL, Wishes(ctx=8192, cells=4096, slots=16, batch=8))
    assert (plan.cells, plan.slots, plan.context_tokens, plan.batch_tokens) == (4096, 16, 4096, 16)
    assert len(plan.warnings) == 2


def test_plan_full_card_gets_no_layer_and_is_not_called_missing() -> None:
    plan = make_plan(machine(card(8192, 0)), SMALL)
    assert plan.gpu_layers == 0 and plan.summary == "13/13 layers on CPU: not one layer fits on NVIDIA Test"


def test_plan_integrated_gpu_counts_as_ram_and_is_not_mapped() -> None:
    shared = card(16_384, 16_384, kind="igpu", backend="Vulkan")
    plan = make_plan(machine(shared, ram_gib=16, available_gib=14), SMALL)
    assert plan.gpu_layers == 13 and not plan.use_mmap
    ram = dict(plan.memory[0].parts)
    assert ram["integrated GPU"] == plan.memory[1].needed_bytes and plan.fits


def test_plan_text_read_both_ways_fits_in_one_batch() -> None:
    plan = make_plan(machine(), replace(SMALL, causal=False, train_context=512))
    assert plan.batch_tokens == plan.ubatch_tokens == plan.context_tokens == 512


def test_plan_sentences_add_up() -> None:
    plan = make_plan(machine(card(8192)), QWEN3_14B)
    for sentence in plan.reasons[:2]:
        left, right = sentence.split("; ")
        total, *less = [
            float(word) for word in left.partition("=")[0].replace(":", " ").split() if word.replace(".", "").isdigit()
        ]
        assert total - sum(less) == pytest.approx(float(left.partition("= ")[2].split()[0]))
        sums, _, needed = right.removesuffix(": fits").partition(" = ")
        assert sum(float(part.split()[-1]) for part in sums.split(" + ")) == pytest.approx(float(needed))
    assert plan.sentences()[0] == plan.summary and set(plan.reasons) <= set(plan.sentences())


def rank(plan: Plan) -> tuple[int, int, int, int, int]:
    """How good a plan is, in the order in which the policy prefers."""
    stage = 2 if plan.gpu_layers == plan.layers else 1 if plan.gpu_layers else 0
    return stage, plan.context_tokens, plan.slots, plan.gpu_layers, plan.cells


mib = st.integers(0, 12_000)


@settings(max_examples=40, deadline=None)
@given(facts=st.sampled_from(MODELS), free=mib, ram=mib, more=st.integers(0, 4000))
@example(facts=SMALL, free=0, ram=2819, more=1)
def test_plan_more_memory_is_never_worse(facts: ModelFacts, free: int, ram: int, more: int) -> None:
    def at(extra: int) -> Plan:
        ram_gib = (ram + extra) / 1024
        return make_plan(machine(card(16_384, free + extra), ram_gib=16 + ram_gib, available_gib=ram_gib), facts)

    before, after = at(0), at(more)
    assert after.fits >= before.fits
    if before.fits:
        assert rank(after) >= rank(before)


@settings(max_examples=60, deadline=None)
@given(
    facts=st.sampled_from(MODELS),
    frees=st.lists(mib, max_size=2),
    ram=mib,
    wishes=st.builds(
        Wishes,
        gpu_layers=st.integers(-1, 13),
        ctx=st.sampled_from([0, 100, 4096, 20_000]),
        slots=st.sampled_from([0, 1, 8, 32]),
        threads=st.sampled_from([0, 3]),
        batch=st.sampled_from([0, 64, 2048]),
        kv_type=st.sampled_from(["f16", "q8_0"]),
    ),
)
def test_plan_keeps_pins_and_budgets_and_is_reproducible(facts: ModelFacts, frees: list[int], ram: int, wishes: Wishes) -> None:
    hardware = machine(*(card(16_384, free) for free in frees), ram_gib=16, available_gib=ram / 1024)
    plan = make_plan(hardware, facts, wishes)
    assert plan == make_plan(hardware, facts, wishes)
    pins = {"gpu_layers": (wishes.gpu_layers, -1), "context_tokens": (wishes.ctx, 0), "slots": (wishes.slots, 0)}
    pins |= {"threads": (wishes.threads, 0), "batch_tokens": (wishes.batch, 0)}
    assert all(getattr(plan, name) == value for name, (value, automatic) in pins.items() if value != automatic)
    assert 0 <= plan.gpu_layers <= plan.layers and plan.context_tokens <= plan.cells and plan.slots <= plan.batch_tokens
    shape = Shape(
        gpu_layers=plan.gpu_layers, cells=plan.cells, slots=plan.slots, ubatch_tokens=plan.ubatch_tokens, kv_type=plan.kv_type
    )
    parts = footprint(facts, shape, [max(1, device.free_bytes) for device in hardware.engine_gpus])
    assert sum(memory.needed_bytes for memory in plan.memory) == sum(part.size_bytes for part in parts)
    assert plan.fits or any("GiB needed" in warning for warning in plan.warnings)


@pytest.mark.model
def test_plan_predicts_the_starter_models_real_memory(starter_path: Path) -> None:
    script = (
        "import ctypes, sys\n"
        "from localfast.engine.llama import bindings as b\n"
        "log = b.llama_log_callback(lambda level, text, user: sys.stdout.write(text.decode('utf-8', 'replace')) and None)\n"
        "b.llama_log_set(log, ctypes.c_void_p(0))\n"
        "b.llama_backend_init()\n"
        "model = b.llama_model_load_from_file(sys.argv[1].encode(), b.llama_model_default_params())\n"
        "p = b.llama_context_default_params()\n"
        "p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max, p.n_outputs_max = 4096, 128, 128, 4, 4 + int(sys.argv[2])\n"
        "p.kv_unified, p.swa_full, p.flash_attn_type = True, False, b.LLAMA_FLASH_ATTN_TYPE_AUTO\n"
        "b.llama_free(b.llama_init_from_model(model, p))\n"
    )
    log = subprocess.run(
        [sys.executable, "-c", script, str(starter_path), str(SPARE_OUTPUT_ROWS)], capture_output=True, text=True, check=True
    ).stdout
    real = {use: float(size) for use, size in re.findall(r"(model|KV|compute) buffer size =\s+([\d.]+) MiB", log)}
    parts = footprint(read_facts(starter_path), Shape(gpu_layers=0, cells=4096, slots=4, ubatch_tokens=128))
    planned = {part.label: part.size_bytes / MIB for part in parts}
    assert planned["chat memory"] == real["KV"]
    assert planned["model"] == pytest.approx(real["model"], rel=0.01)
    assert planned["work space"] == pytest.approx(real["compute"], rel=0.1)
