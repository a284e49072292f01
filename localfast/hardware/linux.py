"""GPUs that the Linux kernel shows in sysfs: memory of AMD and Intel cards without any driver library, screens, and WSL.

Also finds NVIDIA cards that no driver drives. Reads small text files only.
"""

from __future__ import annotations

import platform
from pathlib import Path

from localfast.cgroups import read_number, read_text
from localfast.hardware.facts import Device

GIB = 2**30
_DRM = Path("/sys/class/drm")
_PCI = Path("/sys/bus/pci/devices")
PCI_SOURCE = "the PCI bus"
"""Source of a card that no driver drives."""
_DISPLAY_CLASS = "0x03"
_APU_REVISIONS = (2, 3)
"""Of the table `gpu_metrics` (kgd_pp_interface.h of the kernel): 1 is written for cards, 2 and 3 for APUs."""


def is_wsl(release: str = "") -> bool:
    """Whether this Linux runs inside Windows: its kernel says so."""
    return "microsoft" in (release or platform.release()).lower()


def kernel_gpus(drm: Path = _DRM) -> tuple[Device, ...]:
    """AMD and Intel GPUs that a kernel driver drives."""
    makers = {"0x1002": _amd, "0x8086": _intel}
    cards = sorted(card for card in drm.glob("card[0-9]*") if "-" not in card.name) if drm.is_dir() else []
    found = [(makers.get(read_text(card / "device/vendor")), card) for card in cards]
    return tuple(read(card) for read, card in found if read)


def driverless_nvidia(pci: Path = _PCI) -> tuple[Device, ...]:
    """NVIDIA cards on the PCI bus: asked for when the driver showed none. A container sees the bus of the whole machine."""
    slots = sorted(pci.iterdir()) if pci.is_dir() else []
    return tuple(
        Device(
            backend="NVIDIA",
            name=f"NVIDIA GPU {slot.name.lower()}",
            kind="gpu",
            pci_id=slot.name.lower(),
            warning="no NVIDIA driver answers here: install it, or start the container with --gpus all",
            source=PCI_SOURCE,
        )
        for slot in slots
        if read_text(slot / "vendor") == "0x10de" and read_text(slot / "class").startswith(_DISPLAY_CLASS)
    )


def _amd(card: Path) -> Device:
    """A card has its VRAM. An APU has one pool: the carve-out of the firmware and the RAM that the kernel maps for it (GTT)."""
    folder = card / "device"
    total, used, mapped, mapped_used = (
        read_number(folder / f"mem_info_{name}") or 0 for name in ("vram_total", "vram_used", "gtt_total", "gtt_used")
    )
    free, mapped_free = max(0, total - used), max(0, mapped - mapped_used)
    integrated = _is_apu(folder, total)
    pci_id = folder.resolve().name.lower()
    return Device(
        backend="AMD",
        name=read_text(folder / "product_name") or f"AMD GPU {pci_id}",
        kind="igpu" if integrated else "gpu",
        pci_id=pci_id,
        total_bytes=total + mapped if integrated else total,
        free_bytes=free + mapped_free if integrated else free,
        carve_out_bytes=free if integrated else 0,
        unified=integrated,
        display=_has_screen(card),
        source="the kernel (VRAM and GTT)" if integrated else "the kernel",
    )


def _is_apu(folder: Path, vram_bytes: int) -> bool:
    try:
        with (folder / "gpu_metrics").open("rb") as file:
            head = file.read(4)
    except OSError:
        head = b""
    if len(head) == 4:
        return head[2] in _APU_REVISIONS
    return vram_bytes < 2 * GIB


def _intel(card: Path) -> Device:
    """A card has local memory (i915: lmem, xe: a size for each tile); without it the GPU is part of the processor."""
    folder = card / "device"
    places = [card / "lmem_total_bytes", folder / "lmem_total_bytes"]
    total = next(filter(None, map(read_number, places)), 0) or sum(
        read_number(tile) or 0 for tile in folder.glob("tile*/physical_vram_size_bytes")
    )
    free = next(filter(None, (read_number(place.with_name("lmem_avail_bytes")) for place in places)), None)
    pci_id = folder.resolve().name.lower()
    return Device(
        backend="Intel",
        name=f"Intel GPU {pci_id}",
        kind="gpu" if total else "igpu",
        pci_id=pci_id,
        total_bytes=total,
        free_bytes=total if free is None else min(free, total),
        unified=not total,
        trusted=not total or free is not None,
        display=_has_screen(card),
        source="the kernel",
    )


def _has_screen(card: Path) -> bool | None:
    """None without connectors: the kernel does not know the screens of this card."""
    states = [read_text(path) for path in card.parent.glob(f"{card.name}-*/status")]
    return any(state == "connected" for state in states) if states else None
