"""Which build is offered to whom: the rule of compute capability, driver and system, and the failures it is there to prevent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localfast.engines.builds import VARIANTS, backend_of, cmake_args, judge, libraries_of, offer_engine, source_variant, suitable
from localfast.hardware import Device, Hardware

GIB = 2**30


def machine(capability: tuple[int, int], driver: str, system: str = "linux", cuda: str = "") -> Hardware:
    gpu = Device(backend="NVIDIA", name="NVIDIA Test", kind="gpu", total_bytes=8 * GIB, compute_capability=capability)
    return Hardware(devices=(gpu,), driver_version=driver, cuda_version=cuda, compute_capability=capability, system=system)


def with_gpu(maker: str, system: str = "linux") -> Hardware:
    return Hardware(devices=(Device(backend=maker, name=f"{maker} Test", kind="gpu"),), system=system)


@pytest.mark.parametrize(
    ("capability", "driver", "system", "best"),
    [
        ((5, 2), "580.95", "linux", "vulkan"),  # Maxwell
        ((6, 1), "580.95", "linux", "cu124"),  # Pascal: CUDA 13 has no code for it
        ((6, 1), "535.104.05", "linux", "cu121"),
        ((6, 1), "535.98", "win32", "cu118"),
        ((7, 0), "550.54", "linux", "cu124"),
        ((7, 5), "535.104", "linux", "cu121"),
        ((8, 6), "580.65.06", "linux", "cu130"),
        ((8, 6), "552.22", "win32", "cu124"),
        ((8, 9), "528.49", "win32", "cu118"),
        ((8, 6), "470.256", "linux", "cu118"),
        ((8, 6), "450.51", "linux", "vulkan"),
        ((8, 6), "452.39", "win32", "cu118"),
        ((9, 0), "535.104", "linux", "cu121"),
        ((9, 0), "535.98", "win32", "vulkan"),  # nothing for Hopper in CUDA 11.8
        ((12, 0), "572.16", "win32", "cu125"),
        ((12, 0), "580.95", "linux", "cu130"),
    ],
)
def test_builds_for_nvidia(capability: tuple[int, int], driver: str, system: str, best: str) -> None:
    found = suitable(machine(capability, driver, system))
    assert found[0].variant == best
    assert [one.variant for one in found][-1] == "cpu" and "vulkan" in [one.variant for one in found]


@pytest.mark.parametrize(
    ("hardware", "variants"),
    [
        (Hardware(system="linux"), ["cpu"]),
        (with_gpu("AMD"), ["vulkan", "rocm72", "cpu"]),
        (with_gpu("AMD", "win32"), ["vulkan", "hip-radeon", "cpu"]),
        (with_gpu("Intel"), ["vulkan", "cpu"]),
        (with_gpu("NVIDIA"), ["vulkan", "cpu"]),  # a card without a driver that says what it is
        (Hardware(system="darwin"), ["cpu"]),
        (Hardware(devices=(Device(backend="RPC", name="far away", kind="gpu"),), system="linux"), ["cpu"]),
    ],
)
def test_builds_for_other_machines(hardware: Hardware, variants: list[str]) -> None:
    assert [one.variant for one in suitable(hardware)] == variants


def test_builds_for_other_processors() -> None:
    assert [one.variant for one in suitable(Hardware(system="darwin"), "arm64")] == ["metal", "cpu"]
    jetson = judge(machine((8, 7), "540.3"), "aarch64")
    assert [one.variant for one in jetson if one.suits] == ["cpu"]
    assert any("--from-source" in one.reason for one in jetson if not one.suits)


@pytest.mark.parametrize(
    ("hardware", "variant", "words"),
    [
        (machine((7, 5), "535.104"), "cu130", "needs driver 580 or later, installed is 535.104"),
        (machine((12, 0), "580.95"), "cu118", "no code for compute capability 12.0"),
        (machine((6, 1), "580.95"), "cu130", "no code for compute capability 6.1"),
        (machine((8, 6), "580.95", "win32"), "cu121", "not built for Windows"),
        (machine((8, 6), "", cuda="12.2"), "cu130", "this one runs CUDA 12.2"),
        (machine((12, 0), "", cuda="12.2"), "cu125", "this one runs CUDA 12.2"),
        (with_gpu("NVIDIA"), "cu124", "driver is not installed"),
        (Hardware(system="linux"), "vulkan", "no GPU"),
    ],
)
def test_builds_say_why_not(hardware: Hardware, variant: str, words: str) -> None:
    (found,) = (one for one in judge(hardware) if one.variant == variant)
    assert not found.suits and words in found.reason


def test_builds_of_two_cards_suit_both() -> None:
    both = (machine((6, 1), "").devices[0], machine((12, 0), "").devices[0])
    hardware = Hardware(devices=both, driver_version="580.95", compute_capability=(6, 1), system="linux")
    assert suitable(hardware)[0].variant == "cu125"


CAPABILITIES = st.tuples(st.integers(3, 13), st.integers(0, 9))


@given(CAPABILITIES, CAPABILITIES, st.integers(300, 700), st.sampled_from(["linux", "win32"]))
def test_builds_never_offer_what_cannot_run(one: tuple[int, int], two: tuple[int, int], driver: int, system: str) -> None:
    devices = (machine(one, "").devices[0], machine(two, "").devices[0])
    hardware = Hardware(devices=devices, driver_version=f"{driver}.12", compute_capability=min(one, two), system=system)
    for found in suitable(hardware):
        if found.variant.startswith("cu13"):
            assert driver >= 580 and min(one, two) >= (7, 5)
        elif found.variant.startswith("cu12"):
            assert driver >= (550 if found.variant >= "cu124" else 525) and min(one, two) >= (6, 0)
            assert system == "linux" or found.variant in ("cu124", "cu125")
        elif found.variant == "cu118":
            assert driver >= 450 and min(one, two) >= (6, 0) and max(one, two) <= (8, 9)
    assert all(one.reason for one in judge(hardware))


def test_builds_know_cudas_libraries() -> None:
    assert libraries_of("cu124") == ("nvidia-cuda-runtime-cu12==12.4.*", "nvidia-cublas-cu12==12.4.*")
    assert "nvidia-cublas==13.1.*" in libraries_of("cu130")
    assert not libraries_of("vulkan") and not libraries_of("source-cuda")
    assert all(libraries_of(variant) for variant in VARIANTS if backend_of(variant) == "CUDA")


def test_builds_from_source() -> None:
    assert cmake_args("source-cuda", "-DGGML_RPC=ON  -DX=1") == ("-DGGML_CUDA=on", "-DGGML_RPC=ON", "-DX=1")
    assert cmake_args("source-cpu") == ()
    assert backend_of("source-vulkan") == "Vulkan" and backend_of("source-nothing") == backend_of("cu999") == ""
    assert source_variant(machine((8, 6), "580.95")) == "source-cuda"
    assert source_variant(with_gpu("AMD")) == "source-vulkan" and source_variant(Hardware(system="linux")) == "source-cpu"


def test_builds_are_offered_in_words() -> None:
    words = offer_engine(machine((8, 6), "535.104"))
    assert "localfast engine install" in words and "cu121" in words
    assert "fetches cpu" in offer_engine(Hardware(system="linux"))
