"""Machines that are not here: plain hardware for the plan, with the memory and bandwidth of real cards. For tests."""

from __future__ import annotations

from dataclasses import replace

from localfast.footprint import MIB
from localfast.hardware import Device, EngineBuild, Hardware

GIB = 2**30
CPU_BUILD = EngineBuild(installed=True, version="1", backends=("CPU",), cpu_features=("AVX2", "FMA"))
GPU_BUILD = replace(CPU_BUILD, backends=("CUDA", "CPU"), supports_gpu_offload=True)
DDR4_BYTES_S = 51e9
# GB/s of a card of that size, as in the worked examples.
BANDWIDTHS = {4: 128, 6: 336, 8: 272, 12: 360, 16: 288, 24: 936}
NVIDIA_SIZES = tuple(BANDWIDTHS)


def card(total_mib: int, free_mib: int | None = None, name: str = "NVIDIA Test", **more: object) -> Device:
    """A card with a desktop on it, 700 MiB in use unless told otherwise."""
    free = total_mib - 700 if free_mib is None else free_mib
    device = Device(
        backend="CUDA", name=name, kind="gpu", total_bytes=total_mib * MIB, free_bytes=free * MIB, in_engine=True, display=True
    )
    return replace(device, **more)  # type: ignore[arg-type]


def machine(*gpus: Device, ram_gib: float = 32, available_gib: float | None = None, **more: object) -> Hardware:
    hardware = Hardware(
        devices=gpus,
        ram_total_bytes=int(ram_gib * GIB),
        ram_available_bytes=int((available_gib if available_gib is not None else ram_gib - 2) * GIB),
        physical_cores=6,
        engine=GPU_BUILD if gpus else CPU_BUILD,
        system="linux",
        ram_bandwidth_bytes_s=DDR4_BYTES_S,
    )
    return replace(hardware, **more)  # type: ignore[arg-type]


def nvidia(gib: int, count: int = 1) -> Hardware:
    """A desktop with NVIDIA cards of a common size, 32 GiB of RAM for each."""
    gpu = card(gib * 1024, name=f"NVIDIA {gib} GB", bandwidth_bytes_s=BANDWIDTHS[gib] * 1e9)
    return machine(*[gpu] * count, ram_gib=32 * count)


def amd_16() -> Hardware:
    """A desktop card behind Vulkan."""
    return machine(card(16_368, name="AMD RX 9070 XT", backend="Vulkan", bandwidth_bytes_s=640e9))


def unified_32() -> Hardware:
    """A mini PC whose GPU uses the RAM."""
    pool = card(24_576, 22_000, name="Radeon 890M", kind="igpu", backend="Vulkan", unified=True, bandwidth_bytes_s=120e9)
    return machine(pool, ram_gib=32, available_gib=28, ram_bandwidth_bytes_s=90e9)


def cpu_16() -> Hardware:
    return machine(ram_gib=16, available_gib=13)


def mig_10() -> Hardware:
    """A seventh of an A100 80 GB, without a desktop."""
    return machine(
        card(9_856, 9_800, name="NVIDIA A100 MIG 1g.10gb", mig=True, display=None, bandwidth_bytes_s=240e9), ram_gib=64
    )


MACHINES = {f"{gib} GB": nvidia(gib) for gib in BANDWIDTHS} | {
    "2x24 GB": nvidia(24, 2),
    "16 GB AMD": amd_16(),
    "32 GB unified": unified_32(),
    "CPU 16 GB": cpu_16(),
    "MIG 10 GB": mig_10(),
}
