"""Every kind of architecture on every machine: where its weights go, and that no plan breaks its promises."""

from __future__ import annotations

import pytest
from machines import MACHINES
from synthetic_models import model, names, quant

from localfast.plan import make_plan, scaled_facts
from localfast.plan.verdicts import stage_of

# A file of some size, then where its weights go on 8, 12, 16 and 24 GB, and on a mini PC with 32 GB for everything.
PLACES = """
gemma3-12b, Q4_K_M 7.29: LAYERS GPU GPU GPU GPU
gemma4, Q4_K_M 7.3: LAYERS GPU GPU GPU GPU
gemma3n, Q4_K_M 4.5: GPU GPU GPU GPU GPU
deepseek2-lite, Q4_K_M 10.4: EXPERTS GPU GPU GPU GPU
hybrid-27b, Q4_K_M 16.5: LAYERS LAYERS LAYERS GPU GPU
gpt-oss-20b, MXFP4 12.1: EXPERTS EXPERTS GPU GPU GPU
nemotron-h, Q4_K_M 5: GPU GPU GPU GPU GPU
"""


@pytest.mark.parametrize("line", PLACES.strip().splitlines())
def test_architectures_go_where_their_bytes_fit(line: str) -> None:
    left, _, places = line.partition(": ")
    name, _, file = left.partition(", ")
    label, gigabytes = file.split()
    facts = quant(name, label, float(gigabytes)).facts
    plans = [make_plan(MACHINES[machine], facts) for machine in ("8 GB", "12 GB", "16 GB", "24 GB", "32 GB unified")]
    assert [stage_of(plan).name for plan in plans] == places.split()
    assert all(plan.fits and plan.context_tokens >= 16_384 and plan.slots == 4 for plan in plans)


@pytest.mark.parametrize("machine_name", MACHINES)
def test_architectures_all_models_on_all_machines(machine_name: str) -> None:
    hardware = MACHINES[machine_name]
    for name in names():
        facts = model(name)
        facts = scaled_facts(facts, facts.size_bytes // 3, "Q4_K_M")
        plan = make_plan(hardware, facts)
        assert plan.fits or any("GiB needed" in warning for warning in plan.warnings)
        assert 0 < plan.context_tokens <= plan.cells and plan.ubatch_tokens <= plan.batch_tokens
        assert plan.context_tokens <= facts.train_context and len(plan.shares) == len(hardware.engine_gpus)
        assert plan.on_gpu or plan.gpu_layers == 0 or any("not fit on the GPU" in warning for warning in plan.warnings)
