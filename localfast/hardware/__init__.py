"""What this machine has: GPUs of the driver and of the engine, RAM this process may use, CPU cores, engine build.

`detect` looks at it or reads it from a file. Best effort: a source that fails becomes a note in words, never an error and never
a stop; each number says where it came from.
"""

from __future__ import annotations

from localfast.hardware.bandwidth import cached_ram_bandwidth, gpu_bandwidth, measured_ram_bandwidth
from localfast.hardware.detection import detect
from localfast.hardware.engine_probe import ask_engine_devices, read_engine_report
from localfast.hardware.facts import Device, EngineBuild, Hardware, Kind
from localfast.hardware.inventory import read_inventory, to_json
from localfast.hardware.linux import PCI_SOURCE
from localfast.hardware.matching import merge
from localfast.hardware.meter import GpuReading, GpuUse, nvidia_meter

__all__ = [
    "PCI_SOURCE",
    "Device",
    "EngineBuild",
    "GpuReading",
    "GpuUse",
    "Hardware",
    "Kind",
    "ask_engine_devices",
    "cached_ram_bandwidth",
    "detect",
    "gpu_bandwidth",
    "measured_ram_bandwidth",
    "merge",
    "nvidia_meter",
    "read_engine_report",
    "read_inventory",
    "to_json",
]
