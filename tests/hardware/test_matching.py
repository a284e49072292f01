from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localfast.hardware import Device, Hardware, merge
from localfast.hardware.matching import finish, join

GIB = 2**30
PCI = "0000:c1:00.0"


def device(**facts: Any) -> Device:
    return Device(**{"backend": "NVIDIA", "name": "NVIDIA Test", "kind": "gpu", "source": "the driver", **facts})


def engine_device(**facts: Any) -> Device:
    return device(**{"backend": "CUDA", "in_engine": True, "source": "the engine", "pci_id": PCI, **facts})


def test_matching_by_pci_id_takes_the_smaller_numbers() -> None:
    seen = device(pci_id=PCI, total_bytes=24 * GIB, free_bytes=20 * GIB, display=True, bandwidth_bytes_s=9e11)
    (merged,) = merge((seen,), (engine_device(name="Card", total_bytes=23 * GIB, free_bytes=21 * GIB),))
    assert (merged.total_bytes, merged.free_bytes, merged.display, merged.in_engine) == (23 * GIB, 20 * GIB, True, True)
    assert merged.backend == "CUDA" and not merged.context_counted  # the driver's number was taken without a context of ours
    assert merged.source == "the engine and the driver" and merged.bandwidth_bytes_s == 9e11


def test_matching_clamps_free_to_total_and_drops_the_second_backend_of_a_card() -> None:
    cuda = engine_device(total_bytes=8 * GIB, free_bytes=8 * GIB)
    vulkan = replace(cuda, backend="Vulkan", total_bytes=16 * GIB, free_bytes=16 * GIB)
    (merged,) = merge((), (cuda, vulkan))
    assert merged.backend == "CUDA" and merged.free_bytes == 8 * GIB and merged.context_counted


def test_matching_prefers_the_driver_to_a_claim_above_the_card() -> None:
    """llama.cpp#29277, NLC#653."""
    claim = engine_device(backend="Vulkan", total_bytes=8 * GIB, free_bytes=8 * GIB, trusted=False)
    (alone,) = merge((), (claim,))
    (checked,) = merge((device(pci_id=PCI, total_bytes=8 * GIB, free_bytes=3 * GIB),), (claim,))
    assert (alone.free_bytes, alone.trusted) == (8 * GIB, False)
    assert (checked.free_bytes, checked.trusted) == (3 * GIB, True)
    assert finish(alone, 0, 0, wsl=False).warning and not finish(checked, 0, 0, wsl=False).warning


def test_matching_sees_the_desktop_that_hip_does_not() -> None:
    """llama.cpp#24906."""
    kernel = device(backend="AMD", pci_id=PCI, total_bytes=16 * GIB, free_bytes=13 * GIB)
    (merged,) = merge((kernel,), (engine_device(backend="ROCm", total_bytes=16 * GIB, free_bytes=15 * GIB),))
    assert merged.free_bytes == 13 * GIB and not merged.context_counted and merged.name == "NVIDIA Test"


def test_matching_leaves_a_slice_to_the_engine_and_shows_no_other() -> None:
    """vllm#39874, ollama#1500: the slice's size, never the parent's."""
    slices = tuple(
        device(pci_id=PCI, mig=True, total_bytes=size * GIB, free_bytes=size * GIB, name=f"{size}g") for size in (40, 10)
    )
    (merged,) = merge(slices, (engine_device(total_bytes=10 * GIB, free_bytes=9 * GIB),))
    assert (merged.name, merged.total_bytes, merged.free_bytes, merged.mig) == ("10g", 10 * GIB, 9 * GIB, True)
    hidden = device(pci_id=PCI, mig=True, warning="split by MIG")
    (merged,) = merge((hidden,), (engine_device(total_bytes=10 * GIB, free_bytes=9 * GIB),))
    assert (merged.total_bytes, merged.mig, merged.warning) == (10 * GIB, True, "")


def test_matching_gives_hip_the_whole_pool_of_an_apu() -> None:
    """ollama#12062: a carve-out of 512 MiB does not make the machine a CPU."""
    pool = device(
        backend="AMD",
        kind="igpu",
        pci_id=PCI,
        unified=True,
        total_bytes=16 * GIB,
        free_bytes=15 * GIB,
        carve_out_bytes=GIB // 2,
    )
    (merged,) = merge(
        (pool,), (engine_device(backend="ROCm", kind="igpu", unified=True, total_bytes=GIB // 2, free_bytes=GIB // 2),)
    )
    assert (merged.total_bytes, merged.free_bytes, merged.carve_out_bytes) == (16 * GIB, 15 * GIB, GIB // 2)
    assert finish(merged, 32 * GIB, 4 * GIB, wsl=False).free_bytes == 4 * GIB + GIB // 2  # RAM that others use is not there
    assert Hardware(devices=(merged,)).engine_gpus == (merged,)


def test_matching_keeps_a_card_that_only_the_driver_sees() -> None:
    split = device(pci_id="0000:01:00.0", total_bytes=0)
    assert merge((split,), ()) == (split,)
    found = Hardware(devices=merge((split,), ()))
    assert found.unused_gpus == (split,) and found.engine_gpus == ()


def test_matching_by_name_only_where_one_card_has_it() -> None:
    seen = device(total_bytes=8 * GIB, free_bytes=5 * GIB)
    assert [one.free_bytes for one in join((replace(seen, pci_id=PCI, free_bytes=7 * GIB),), (seen,))] == [5 * GIB]
    assert len(join((replace(seen, pci_id=PCI),), (replace(seen, pci_id="0000:02:00.0"),))) == 2
    assert len(join((replace(seen, pci_id=PCI),), (seen, seen))) == 3


def test_matching_fills_what_the_first_source_does_not_know() -> None:
    dxgi = device(pci_id=PCI, total_bytes=8 * GIB, free_bytes=6 * GIB, display=True, source="Windows")
    (joined,) = join((device(pci_id=PCI),), (dxgi,))
    assert (joined.total_bytes, joined.free_bytes, joined.display) == (8 * GIB, 6 * GIB, True)
    assert joined.source == "the driver and Windows"


@pytest.mark.parametrize(("backend", "total"), [("NVIDIA", 64 * GIB), ("CUDA", 64 * GIB), ("Vulkan", 0)])
def test_matching_takes_ram_where_a_unified_nvidia_tells_nothing(backend: str, total: int) -> None:
    found = finish(device(backend=backend, unified=True), 64 * GIB, 50 * GIB, wsl=False)
    assert (found.total_bytes, found.free_bytes) == (total, 50 * GIB if total else 0)


def test_matching_knows_what_rocm_keeps_under_wsl() -> None:
    """llama.cpp#23999."""
    amd = engine_device(backend="ROCm", total_bytes=16 * GIB, free_bytes=15 * GIB)
    assert finish(amd, 0, 0, wsl=True).reserved_bytes == 2_500_000_000
    assert finish(amd, 0, 0, wsl=False).reserved_bytes == 0 == finish(replace(amd, backend="CUDA"), 0, 0, wsl=True).reserved_bytes


def test_matching_prefers_discrete_gpus() -> None:
    small = device(kind="igpu", total_bytes=GIB, in_engine=True)
    large = device(total_bytes=GIB, in_engine=True)
    assert Hardware(devices=(small, large)).engine_gpus == (large,)
    assert Hardware(devices=(small,)).engine_gpus == (small,)


sizes = st.integers(0, 96 * GIB)
cards = st.builds(
    lambda slot, backend, memory, flags: device(
        backend=backend,
        pci_id=slot,
        total_bytes=max(memory),
        free_bytes=min(memory),
        unified=flags[0],
        trusted=flags[1],
        mig=flags[2],
        in_engine=backend != "NVIDIA",
    ),
    st.sampled_from(["", PCI, "0000:01:00.0"]),
    st.sampled_from(["NVIDIA", "CUDA", "ROCm", "Vulkan"]),
    st.tuples(sizes, sizes),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
lists = st.lists(cards, max_size=4).map(tuple)


@given(lists, lists, lists, sizes)
def test_matching_never_promises_more_than_a_card_has(
    first: tuple[Device, ...], second: tuple[Device, ...], engine: tuple[Device, ...], ram: int
) -> None:
    for found in merge(join(first, second), engine):
        finished = finish(found, ram, ram // 2, wsl=True)
        assert 0 <= finished.carve_out_bytes <= finished.free_bytes <= finished.total_bytes
