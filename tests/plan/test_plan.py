"""make_plan: what fits, what is chosen, and what is said."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from machines import card, machine
from plain_models import EXPERTS, MODELS, QWEN3_8B, QWEN3_14B, SMALL

from localfast.footprint import MIB, RAM, Part, Shape, footprint
from localfast.hardware import EngineBuild, Hardware
from localfast.models.gguf import ModelFacts
from localfast.plan import Plan, Wishes, make_plan
from localfast.plan.policy import WANTED_CONTEXTS


def wanted(plan: Plan) -> int:
    """The context among those that the policy looks for; what is left makes it longer."""
    return max((context for context in WANTED_CONTEXTS if context <= plan.context_tokens), default=plan.context_tokens)


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
    assert (plan.gpu_layers, wanted(plan)) == (layers, context)
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
    assert (plan.context_tokens, plan.slots, plan.cells) == (32_768, 4, 65_536)
    tight = make_plan(machine(ram_gib=5, available_gib=3), SMALL)
    assert 16_384 <= tight.context_tokens <= tight.cells < 65_536 and tight.fits
    pinned = make_plan(machine(), SMALL, Wishes(ctx=8192))
    assert (pinned.context_tokens, pinned.cells) == (8192, 32_768)


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


def rank(plan: Plan) -> tuple[int, ...]:
    """How good a plan is, in the order in which the policy prefers."""
    stage = 3 if plan.on_gpu else 2 if plan.gpu_layers == plan.layers else 1 if plan.gpu_layers else 0
    spills = stage in (1, 2)
    cache, step = int(plan.kv_type == "f16"), plan.ubatch_tokens
    tail = (plan.gpu_layers, -plan.cpu_experts, cache) if spills else (cache,)
    return stage, wanted(plan), plan.drafts, plan.slots, *tail, step if plan.kv_type == "f16" else 0, plan.cells


mib = st.integers(0, 12_000)


@settings(max_examples=25, deadline=None)
@given(facts=st.sampled_from(MODELS), free=mib, ram=mib, more=st.integers(0, 4000))
@example(facts=SMALL, free=0, ram=2819, more=1)
@example(facts=EXPERTS, free=1500, ram=9000, more=400)
def test_plan_more_memory_is_never_worse(facts: ModelFacts, free: int, ram: int, more: int) -> None:
    def at(extra: int) -> Plan:
        ram_gib = (ram + extra) / 1024
        return make_plan(machine(card(16_384, free + extra), ram_gib=16 + ram_gib, available_gib=ram_gib), facts)

    before, after = at(0), at(more)
    assert after.fits >= before.fits
    if before.fits:
        assert rank(after) >= rank(before)


@settings(max_examples=40, deadline=None)
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
        kv_type=st.sampled_from(["auto", "f16", "q8_0"]),
        cpu_experts=st.sampled_from([-1, 0, 3]),
    ),
)
def test_plan_keeps_pins_and_budgets_and_is_reproducible(facts: ModelFacts, frees: list[int], ram: int, wishes: Wishes) -> None:
    hardware = machine(*(card(16_384, free) for free in frees), ram_gib=16, available_gib=ram / 1024)
    plan = make_plan(hardware, facts, wishes)
    assert plan == make_plan(hardware, facts, wishes)
    pins = {"gpu_layers": (wishes.gpu_layers, -1), "context_tokens": (wishes.ctx, 0), "slots": (wishes.slots, 0)}
    pins |= {"cpu_experts": (wishes.cpu_experts, -1)} if hardware.engine_gpus and wishes.gpu_layers > 0 else {}
    pins |= {"threads": (wishes.threads, 0), "batch_tokens": (wishes.batch, 0)}
    assert all(getattr(plan, name) == value for name, (value, automatic) in pins.items() if value != automatic)
    assert 0 <= plan.gpu_layers <= plan.layers and plan.context_tokens <= plan.cells and plan.slots <= plan.batch_tokens
    parts = footprint(facts, plan.shape, plan.shares)
    assert sum(memory.needed_bytes for memory in plan.memory) == sum(part.size_bytes for part in parts) == plan.total_bytes
    assert plan.fits or any("GiB needed" in warning for warning in plan.warnings)


@settings(max_examples=25, deadline=None)
@given(facts=st.sampled_from(MODELS), frees=st.lists(mib, min_size=1, max_size=3), ram=mib)
def test_plan_leaves_the_gpus_only_when_no_allowed_shape_fits_on_them(facts: ModelFacts, frees: list[int], ram: int) -> None:
    hardware = machine(*(card(16_384, free) for free in frees), ram_gib=16, available_gib=ram / 1024)
    plan = make_plan(hardware, facts)
    if plan.fits and not plan.on_gpu:
        whole = make_plan(hardware, facts, Wishes(gpu_layers=99, cpu_experts=0, ctx=4096, slots=1, kv_type="q8_0", batch=128))
        assert not whole.fits


def test_plan_experts_go_to_the_ram_before_layers_do() -> None:
    hardware = machine(card(4096, 3400))
    plan = make_plan(hardware, EXPERTS)
    assert plan.gpu_layers == 13 and 0 < plan.cpu_experts < 12 and plan.kv_type in ("q8_0", "f16") and plan.fits
    assert f"the experts of {plan.cpu_experts} in RAM" in plan.summary
    fewer = Wishes(gpu_layers=13, cpu_experts=plan.cpu_experts - 1, ctx=16_384, kv_type="q8_0")
    assert not make_plan(hardware, EXPERTS, fewer).fits
    with_all = footprint(EXPERTS, replace(plan.shape, cpu_experts=0), plan.shares)
    with_some = footprint(EXPERTS, plan.shape, plan.shares)
    weights = [{part.device: part.size_bytes for part in parts if part.label == "model"} for parts in (with_all, with_some)]
    assert weights[1][RAM] - weights[0][RAM] == plan.cpu_experts * 300 * MIB
    assert weights[0][0] - weights[1][0] == pytest.approx(plan.cpu_experts * 300 * MIB * 1.005, abs=2)


def test_plan_measured_numbers_go_before_the_formula() -> None:
    def doubled(facts: ModelFacts, shape: Shape, shares: object) -> tuple[Part, ...]:
        return tuple(replace(part, size_bytes=2 * part.size_bytes) for part in footprint(facts, shape, shares))  # type: ignore[arg-type]

    hardware = machine(card(12_288))
    plan = make_plan(hardware, QWEN3_8B, measure=doubled)
    assert plan.gpu_layers < 37 == make_plan(hardware, QWEN3_8B).gpu_layers
    assert plan.total_bytes == sum(part.size_bytes for part in doubled(QWEN3_8B, plan.shape, plan.shares))


def test_plan_projector_leaves_the_gpu_before_a_layer_does() -> None:
    roomy = make_plan(machine(card(12_288)), QWEN3_8B, Wishes(mmproj_bytes=900 * MIB))
    assert roomy.projector_on_gpu and dict(roomy.memory[1].parts)["projector"] > 900 * MIB
    tight = make_plan(machine(card(8192)), QWEN3_8B, Wishes(mmproj_bytes=900 * MIB))
    assert tight.gpu_layers == 37 and not tight.projector_on_gpu and "projector" in dict(tight.memory[0].parts)
    assert any("projector works on the CPU" in reason for reason in tight.reasons)


def test_plan_draft_model_is_counted_where_the_model_is_or_left_out_with_a_word() -> None:
    draft = replace(SMALL, name="tiny")
    both = make_plan(machine(card(12_288)), QWEN3_8B, Wishes(draft="tiny", draft_facts=draft))
    assert both.drafts and dict(both.memory[1].parts)["draft model"] > 12 * 20 * MIB and not both.warnings
    alone = make_plan(machine(card(6144, 5300)), QWEN3_8B, Wishes(draft="tiny", draft_facts=draft, gpu_layers=37, ctx=4096))
    assert not alone.drafts and any("no room for the draft model 'tiny'" in warning for warning in alone.warnings)


def test_plan_spilled_layers_say_what_they_cost() -> None:
    plan = make_plan(machine(card(8192, bandwidth_bytes_s=272e9)), QWEN3_14B)
    warning = next(warning for warning in plan.warnings if "not fit on the GPU" in warning)
    assert re.fullmatch(r"15 of 41 layers do not fit on the GPU: about 7\.\d tokens/s instead of 1\d", warning)
    unknown = make_plan(machine(card(8192)), QWEN3_14B)
    assert unknown.tokens_per_s == 0 and not any("tokens/s" in sentence for sentence in unknown.sentences())


def test_plan_unused_gpu_is_a_warning_with_the_way_out() -> None:
    plan = make_plan(replace(machine(), devices=(card(24_576, in_engine=False),)), SMALL)
    assert any("NVIDIA Test is not used" in warning and "localfast engine install" in warning for warning in plan.warnings)
