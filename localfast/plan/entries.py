"""Plans as data for programs: what `localfast plan --json` prints and `GET /v1/localfast/plan` answers. Decides nothing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from localfast.plan.outcome import Plan
from localfast.plan.verdicts import QuantTable


def plan_entry(plan: Plan) -> dict[str, Any]:
    """A plan's numbers, and the memory of each device part by part."""
    entry = asdict(plan)
    for device, memory in zip(entry["memory"], plan.memory, strict=True):
        device["parts"] = [{"label": label, "size_bytes": size_bytes} for label, size_bytes in memory.parts]
        device |= {"needed_bytes": memory.needed_bytes, "usable_bytes": memory.usable_bytes, "fits": memory.fits}
    return entry | {"split": list(plan.split), "fits": plan.fits}


def quant_table_entry(table: QuantTable) -> dict[str, Any]:
    """The whole table for programs: `chosen` is None when a smaller model is the better answer."""
    quants = [
        {
            "quant": row.label,
            "size_bytes": row.size_bytes,
            "installed": row.installed,
            "loss": row.loss,
            "quality_loss": row.loss_words,
            "memory": {memory.device: memory.needed_bytes for memory in row.plan.memory},
            "total_bytes": row.plan.total_bytes,
            "gpu_layers": row.plan.gpu_layers,
            "layers": row.plan.layers,
            "cpu_experts": row.plan.cpu_experts,
            "context_tokens": row.plan.context_tokens,
            "kv_type": row.plan.kv_type,
            "tokens_per_s": round(row.plan.tokens_per_s, 1) or None,
            "fits": row.plan.fits,
            "stage": row.stage.value,
            "verdict": row.verdict,
        }
        for row in table.rows
    ]
    return {"quants": quants, "chosen": table.chosen or None, "why": list(table.sentences)}
