"""One list of devices from several sources: who is the same card, and whose numbers hold.

Pure. Free memory is the smallest number of the trusted sources, never more than the card has.
"""

from __future__ import annotations

from dataclasses import replace

from localfast.hardware.facts import Device

_OWN_CONTEXT = ("CUDA", "ROCm", "HIP")
"""Backends whose context takes its share before they tell what is free."""
_WSL_RESERVED_BYTES = 2_500_000_000
"""ROCm under WSL keeps this outside of every counter (llama.cpp#23999)."""


def join(first: tuple[Device, ...], second: tuple[Device, ...]) -> tuple[Device, ...]:
    """Two sources of the operating system: the first one's names and totals hold, the second adds what it alone knows."""
    rest, joined = list(second), []
    for device in first:
        twin = _twin(device, rest)
        if twin is None:
            joined.append(device)
            continue
        rest.remove(twin)
        total = device.total_bytes or (0 if device.mig else twin.total_bytes)
        joined.append(
            replace(
                device,
                total_bytes=total,
                free_bytes=_free(total, device, twin),
                pci_id=device.pci_id or twin.pci_id,
                display=twin.display if device.display is None else device.display or bool(twin.display),
                trusted=_trusted(device, twin),
                source=f"{device.source} and {twin.source}",
            )
        )
    slices = {device.pci_id for device in first if device.mig}
    return (*joined, *(device for device in rest if device.pci_id not in slices or not device.pci_id))


def merge(driver_devices: tuple[Device, ...], engine_devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Devices of the engine, with what the drivers know of them, then those that only a driver sees.

    The engine's order comes first, because its indices count in that order. Two backends of one build may drive the same card:
    the first is kept, as llama.cpp does.
    """
    rest = list(driver_devices)
    merged: list[Device] = []
    for device in engine_devices:
        if device.pci_id and any(device.pci_id == other.pci_id for other in merged):
            continue
        twin = _twin(device, rest)
        if twin is not None:
            # One process sees one slice of a split card, so the others are nobody's.
            rest = [other for other in rest if other is not twin and not (twin.mig and other.pci_id == twin.pci_id)]
        merged.append(_with_driver(device, twin) if twin else replace(device, context_counted=device.backend in _OWN_CONTEXT))
    return (*merged, *rest)


def _with_driver(device: Device, twin: Device) -> Device:
    if twin.mig:  # the engine tells the slice it was given; the driver's slices may be others
        numbers = replace(device, context_counted=device.backend in _OWN_CONTEXT)
    elif device.unified and twin.unified and device.backend in ("ROCm", "HIP") and twin.total_bytes > device.total_bytes:
        # HIP tells the carve-out of an APU, and allocates from the whole pool.
        numbers = replace(device, total_bytes=twin.total_bytes, free_bytes=twin.free_bytes, trusted=twin.trusted)
    else:
        total = min((size for size in (device.total_bytes, twin.total_bytes) if size), default=0)
        free = _free(total, device, twin)
        own_context = device.backend in _OWN_CONTEXT and device.trusted and device.free_bytes == free
        numbers = replace(device, total_bytes=total, free_bytes=free, trusted=_trusted(device, twin), context_counted=own_context)
    return replace(
        numbers,
        name=twin.name if twin.backend == "NVIDIA" else device.name,
        pci_id=device.pci_id or twin.pci_id,
        display=twin.display,
        unified=device.unified or twin.unified,
        carve_out_bytes=min(twin.carve_out_bytes, numbers.free_bytes),
        compute_capability=twin.compute_capability,
        mig=twin.mig,
        bandwidth_bytes_s=twin.bandwidth_bytes_s,
        warning=device.warning or ("" if numbers.total_bytes else twin.warning),
        source=f"{device.source} and {twin.source}",
    )


def _twin(device: Device, others: list[Device]) -> Device | None:
    """The same card by its PCI id; by its name only where one side has no id and just one card has that name."""
    same = [other for other in others if device.pci_id and other.pci_id == device.pci_id]
    if same:
        return min(same, key=lambda other: abs(other.total_bytes - device.total_bytes))
    named = [other for other in others if other.name == device.name and not (device.pci_id and other.pci_id)]
    return named[0] if len(named) == 1 else None


def _free(total_bytes: int, first: Device, second: Device) -> int:
    telling = [device for device in (first, second) if device.total_bytes]
    frees = [device.free_bytes for device in telling if device.trusted] or [device.free_bytes for device in telling]
    return min((*frees, total_bytes))


def _trusted(first: Device, second: Device) -> bool:
    return any(device.trusted for device in (first, second) if device.total_bytes) or not (
        first.total_bytes or second.total_bytes
    )


def finish(device: Device, ram_total_bytes: int, ram_available_bytes: int, wsl: bool) -> Device:
    """A device with what follows from the machine around it."""
    if device.unified:
        if not device.total_bytes and device.backend in ("NVIDIA", "CUDA"):
            device = replace(
                device,
                total_bytes=ram_total_bytes,
                free_bytes=ram_available_bytes,
                source=f"{device.source}; memory: the machine's RAM",
            )
        # The kernel's limit for the GPU is no promise of RAM that is free.
        free = min(device.free_bytes, ram_available_bytes + device.carve_out_bytes)
        device = replace(device, free_bytes=free)
    if wsl and device.backend in ("ROCm", "HIP"):
        device = replace(device, reserved_bytes=_WSL_RESERVED_BYTES)
    if not device.trusted and not device.warning:
        device = replace(device, warning="how much of its memory is free is a claim that nothing confirms")
    return device
