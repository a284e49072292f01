"""Measured memory instead of computed memory: dry runs of the engine, the plan's oracle made of them, and what real loads taught.

Server side. Never imports the engine: that is asked in a child process (`localfast.engine.dryrun`).
"""

from __future__ import annotations

from localfast.measure.answers import device_number
from localfast.measure.dryruns import DryRuns, HeaderSource, Measurement, Shard, engine_build
from localfast.measure.learned import Comparison, Difference, Failure, Learned, Machine, compare, machine_of
from localfast.measure.oracle import Decided, Key, Measure, Settled, corrected, key_of, settle

__all__ = [
    "Comparison",
    "Decided",
    "Difference",
    "DryRuns",
    "Failure",
    "HeaderSource",
    "Key",
    "Learned",
    "Machine",
    "Measure",
    "Measurement",
    "Settled",
    "Shard",
    "compare",
    "corrected",
    "device_number",
    "engine_build",
    "key_of",
    "machine_of",
    "settle",
]
