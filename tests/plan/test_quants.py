"""plan_quants: the worked examples of known cards and models, and how a choice is explained."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import MACHINES, NVIDIA_SIZES, card, cpu_16, machine, nvidia
from synthetic_models import model, quant, quants

from localfast.footprint import MIB
from localfast.hardware import Hardware
from localfast.plan import Quant, QuantTable, Wishes, make_plan, plan_quants, scaled_facts
from localfast.plan.policy import WANTED_CONTEXTS
from localfast.plan.quality import LOSS, acceptable, loss_words, quant_loss
from localfast.plan.verdicts import Stage

# machine, model: class, quant, cache, context (at least), then what is better than or differs from the published table, and why.
# Everywhere: 36 rows of logits and 4 slots instead of one cost 20 MiB; contexts grow into what is left.
WORKED_EXAMPLES = """
4 GB, 1B: GPU Q8_0 f16 32768
4 GB, 3B: GPU Q4_K_M q8_0 8192
4 GB, 8B: LAYERS Q4_K_M q8_0 16384 | 13 layers instead of 14, for 16k of context; the 3B is advised
4 GB, 14B: no
4 GB, 32B: no
4 GB, 30B-A3B: EXPERTS Q4_K_M q8_0 16384 n=47
6 GB, 1B: GPU Q8_0 f16 32768
6 GB, 3B: GPU Q6_K q8_0 30000 | 32k with q8_0 instead of 18k with f16
6 GB, 8B: GPU IQ4_XS q8_0 4096
6 GB, 14B: LAYERS Q4_K_M q8_0 16384 | the table says no at 6 tokens/s, its rule says "offer, slow" from 5 on
6 GB, 32B: no
6 GB, 30B-A3B: EXPERTS Q4_K_M q8_0 16384 n=42 | one layer of experts passes through the GPU: 42 instead of 41
8 GB, 1B: GPU Q8_0 f16 32768
8 GB, 3B: GPU Q8_0 q8_0 32768
8 GB, 8B: GPU Q5_K_M q8_0 16384
8 GB, 14B: LAYERS Q4_K_M q8_0 16384 | 26 layers instead of 27, for 17k of context; offered as slow
8 GB, 32B: no
8 GB, 30B-A3B: EXPERTS Q4_K_M q8_0 16384 n=36
12 GB, 1B: GPU Q8_0 f16 32768
12 GB, 3B: GPU Q8_0 f16 32768
12 GB, 8B: GPU Q8_0 q8_0 32768
12 GB, 14B: GPU Q4_K_M q8_0 16384
12 GB, 32B: no
12 GB, 30B-A3B: EXPERTS Q4_K_M q8_0 16384 n=25
16 GB, 1B: GPU Q8_0 f16 32768
16 GB, 3B: GPU Q8_0 f16 32768
16 GB, 8B: GPU Q8_0 f16 32768
16 GB, 14B: GPU Q5_K_M q8_0 32768 | 32k with q8_0 instead of 29k with f16
16 GB, 32B: no
16 GB, 30B-A3B: EXPERTS Q4_K_M q8_0 16384 n=14
24 GB, 1B: GPU Q8_0 f16 32768
24 GB, 3B: GPU Q8_0 f16 32768
24 GB, 8B: GPU Q8_0 f16 32768
24 GB, 14B: GPU Q8_0 f16 32768
24 GB, 32B: GPU Q4_K_M q8_0 16384
24 GB, 30B-A3B: GPU Q5_K_M q8_0 32768 | 32k with q8_0 instead of 19k with f16
2x24 GB, 14B: GPU Q8_0 f16 32768
2x24 GB, 32B: GPU Q8_0 f16 32768
2x24 GB, 30B-A3B: GPU Q8_0 f16 32768
16 GB AMD, 8B: GPU Q8_0 f16 32768
16 GB AMD, 14B: GPU Q6_K q8_0 30000 | its bandwidth makes Q6_K fast enough
16 GB AMD, 32B: no
16 GB AMD, 30B-A3B: EXPERTS Q4_K_M q8_0 16384 n=15
32 GB unified, 3B: GPU Q8_0 f16 32768
32 GB unified, 8B: GPU Q4_K_M f16 32768 | more bits would be slower than reading
32 GB unified, 32B: no
32 GB unified, 30B-A3B: GPU Q4_K_M q8_0 30000
CPU 16 GB, 1B: CPU Q5_K_M f16 32768
CPU 16 GB, 3B: CPU Q4_K_M f16 32768
CPU 16 GB, 8B: CPU Q4_K_M f16 32768
CPU 16 GB, 14B: no
CPU 16 GB, 32B: no
CPU 16 GB, 30B-A3B: no
MIG 10 GB, 3B: GPU Q8_0 f16 32768
MIG 10 GB, 8B: GPU Q6_K q8_0 30000
MIG 10 GB, 14B: GPU IQ4_XS q8_0 16384
MIG 10 GB, 30B-A3B: EXPERTS Q4_K_M q8_0 16384 n=29
"""
EXAMPLES = [line.partition(" | ")[0] for line in WORKED_EXAMPLES.strip().splitlines()]


@pytest.mark.parametrize("example", EXAMPLES)
def test_quants_worked_examples(example: str) -> None:
    where, _, expected = example.partition(": ")
    machine_name, name = where.split(", ")
    table = plan_quants(MACHINES[machine_name], quants(name))
    if expected == "no":
        assert not table.chosen and table.sentences[0].startswith("no quant of this model is a good choice here")
        return
    stage, label, cache, context, *experts = expected.split()
    row = table.row
    assert row is not None
    plan = row.plan
    assert (row.stage.name, row.label, plan.kv_type, plan.slots) == (stage, label, cache, 4) and plan.fits
    assert plan.context_tokens >= int(context)
    assert plan.cpu_experts == (int(experts[0][2:]) if experts else 0)


def test_quants_two_cards_carry_what_one_cannot() -> None:
    row = plan_quants(MACHINES["2x24 GB"], quants("32B")).row
    assert row is not None and row.plan.split and min(row.plan.split) > 25 and sum(row.plan.split) == 65
    assert [memory.device for memory in row.plan.memory] == ["RAM", "NVIDIA 24 GB (1)", "NVIDIA 24 GB (2)"]
    small = plan_quants(MACHINES["2x24 GB"], quants("14B")).row
    assert small is not None and small.plan.split == (1.0, 0.0)


def test_quants_choice_is_explained_against_its_neighbours() -> None:
    table = plan_quants(nvidia(8), quants("8B"))
    assert [row.label for row in table.rows[:4]] == ["F16", "Q8_0", "Q6_K", "Q5_K_M"]
    first, better, smaller = table.sentences
    assert first.startswith("Q5_K_M: all on the GPU, ") and "(q8_0)" in first and "about 28 tokens/s" in first
    assert better.startswith("not Q6_K: ") and smaller.startswith("not Q4_K_M: Q5_K_M keeps more of the quality (0.011 instead")
    assert [row.verdict.startswith("chosen, ") for row in table.rows].count(True) == 1
    assert table.rows[0].verdict.endswith("larger than it is worth") and table.rows[-1].verdict.endswith("loses too much")


def test_quants_pinned_one_is_kept_whatever_it_costs_and_the_numbers_are_given() -> None:
    table = plan_quants(nvidia(4), quants("14B"), pinned="q2_k")
    assert table.chosen == "Q2_K" and any("loses more than a model of this size should" in line for line in table.sentences)
    never = plan_quants(nvidia(4), quants("32B"), pinned="Q8_0")
    assert never.chosen == "Q8_0" and any("does not fit: " in line and "GiB too much on RAM" in line for line in never.sentences)


def test_quants_refusal_names_a_size_that_would_be_good() -> None:
    table = plan_quants(nvidia(16), quants("32B"))
    assert table.row is None and "Q4_K_M" in table.sentences[0] and "a file of up to 1" in table.sentences[1]


def test_quants_pinned_layers_and_context_hold_for_every_row() -> None:
    table = plan_quants(nvidia(24), quants("8B"), Wishes(ctx=20_000, gpu_layers=20))
    assert {(row.plan.context_tokens, row.plan.gpu_layers) for row in table.rows} == {(20_000, 20)}


def test_quants_only_one_on_offer_is_chosen_even_beyond_the_limits() -> None:
    starter = quant("1B", "Q4_1", 0.83)
    table = plan_quants(cpu_16(), [starter])
    assert table.chosen == "Q4_1" and table.rows[0].loss == LOSS["Q4_0"]
    assert plan_quants(nvidia(24), [quant("8B", "F16")]).chosen == "F16"


def test_quants_unknown_bandwidth_gives_no_speed_and_still_a_choice() -> None:
    hardware = machine(card(8192), ram_bandwidth_bytes_s=0.0)
    table = plan_quants(hardware, quants("8B"))
    assert table.chosen == "Q5_K_M" and all(row.plan.tokens_per_s == 0 for row in table.rows)
    assert "tokens/s" not in " ".join(table.sentences)


def test_quants_generic_engine_builds_are_predicted_slower() -> None:
    native = cpu_16()
    assert native.engine is not None
    generic = replace(native, engine=replace(native.engine, cpu_features=("SSE3", "AVX")))
    silent = replace(native, engine=replace(native.engine, cpu_features=()))
    facts = quant("3B", "Q4_K_M").facts
    speeds = [make_plan(hardware, facts).tokens_per_s for hardware in (native, generic, silent)]
    assert 0.5 < speeds[1] / speeds[0] < 0.52 and speeds[2] == speeds[0]


@pytest.mark.parametrize(
    ("label", "loss"),
    [
        ("Q4_K_M", 0.028),
        ("UD-Q4_K_XL", 0.028),
        ("q4_k", 0.028),
        ("Q6_K_L", 0.0055),
        ("UD-IQ2_M", 0.326),
        ("Q3_K_XL", 0.084),
        ("BF16", 0.0),
        ("TURBO4", 0.028),
    ],
)
def test_quality_of_a_name_is_the_measured_one_or_that_of_as_many_bits(label: str, loss: float) -> None:
    assert quant_loss(label, quant("8B", "Q4_K_M").facts) == loss


def test_quality_small_models_notice_what_large_ones_do_not() -> None:
    assert [loss_words(LOSS["Q4_K_M"], count) for count in (1e9, 8 * 10**9, 32 * 10**9)] == ["visible", "small", "small"]
    assert loss_words(LOSS["IQ3_M"], 8 * 10**9) == "visible" and loss_words(0, 1) == "none"


def test_quality_native_type_is_the_best_there_is() -> None:
    facts = model("gpt-oss-20b")
    assert quant_loss("MXFP4_MOE", facts) == 0 < quant_loss("MXFP4_MOE", model("30B-A3B"))
    offered = [
        Quant(label, size, scaled_facts(facts, size, label)) for label, size in (("MXFP4", 12 * 10**9), ("Q8_0", 22 * 10**9))
    ]
    assert plan_quants(nvidia(24), offered).chosen == "MXFP4"


def test_quality_floor_rises_as_models_shrink() -> None:
    worst = {
        name: acceptable([(entry.label, entry.facts) for entry in quants(name)])[-1]
        for name in ("1B", "3B", "8B", "32B", "30B-A3B")
    }
    assert worst == {"1B": "Q5_K_M", "3B": "Q4_K_M", "8B": "IQ4_XS", "32B": "IQ3_M", "30B-A3B": "IQ4_XS"}


@pytest.mark.parametrize("name", ["1B", "8B", "30B-A3B", "gemma3-12b"])
def test_scaled_facts_have_the_bytes_of_the_other_file(name: str) -> None:
    facts = model(name)
    for entry in quants(name):
        header = facts.size_bytes - facts.weight_bytes
        assert entry.facts.weight_bytes == pytest.approx(entry.size_bytes - header, rel=1e-4)
        assert entry.facts.parameters == facts.parameters and entry.facts.quant == entry.label
    q5 = quant("8B", "Q5_K_M").facts
    gpu_mib = (q5.weight_bytes - q5.input_bytes) / MIB
    assert gpu_mib == pytest.approx(5171, rel=0.005)  # the published number for this file


def rank(table: QuantTable) -> tuple[int, ...]:
    row = table.row
    if row is None:
        return (0,)
    context = max(context for context in (0, *WANTED_CONTEXTS) if context <= row.plan.context_tokens)
    stage = {Stage.GPU: 4, Stage.EXPERTS: 3, Stage.LAYERS: 2, Stage.CPU: 1, Stage.NONE: 0}[row.stage]
    if stage != 4:
        return stage, 0, 0
    return stage, context, -round(row.loss * 10_000)


@settings(max_examples=8, deadline=None)
@given(name=st.sampled_from(["3B", "8B", "30B-A3B"]), free=st.integers(1500, 22_000), more=st.integers(0, 4000))
def test_quants_more_memory_never_chooses_worse(name: str, free: int, more: int) -> None:
    def at(free_mib: int) -> Hardware:
        return machine(card(30_000, free_mib, bandwidth_bytes_s=500e9), ram_gib=64)

    assert rank(plan_quants(at(free + more), quants(name))) >= rank(plan_quants(at(free), quants(name)))


def test_machines_of_the_worked_examples_are_all_tried() -> None:
    tried = {line.split(",")[0] for line in EXAMPLES}
    assert tried == set(MACHINES) and {f"{gib} GB" for gib in NVIDIA_SIZES} <= tried
