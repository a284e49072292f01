"""Decides how a model runs on this machine, and says why in sentences that add up.

Pure: same hardware, facts and wishes, same plan; what fits is the answer of a measure (a formula, or the engine's own dry run)
against the budgets. What the user pinned is never changed: if it does not fit, a warning gives the numbers.
"""

from localfast.plan.budgets import DeviceMemory
from localfast.plan.case import Measure
from localfast.plan.outcome import Plan
from localfast.plan.planner import make_plan
from localfast.plan.quants import Quant, plan_quants, scaled_facts
from localfast.plan.verdicts import QuantRow, QuantTable
from localfast.plan.wishes import Wishes, limit_bytes
from localfast.plan.words import speed_words

__all__ = [
    "DeviceMemory",
    "Measure",
    "Plan",
    "Quant",
    "QuantRow",
    "QuantTable",
    "Wishes",
    "limit_bytes",
    "make_plan",
    "plan_quants",
    "scaled_facts",
    "speed_words",
]
