"""Which builds of the engine there are, and which of them suit a machine: pure rules, each verdict with its reason in words.

The rules are a guess until a build has been probed on the machine; they keep a download of gigabytes from being in vain.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from localfast.hardware import Hardware

INDEX_URL = "https://abetlen.github.io/llama-cpp-python/whl"
"""Prebuilt wheels by variant (cpu, cu124, vulkan, ...), kept by llama-cpp-python itself. PyPI has its source only."""

SOURCE = "source-"
_X86 = ("x86_64", "amd64")
_SLOW_CPU = "layers that stay on the CPU are slow in it (built without AVX2)"


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A build and what speaks for it on this machine, or against it."""

    variant: str
    """Last part of a prebuilt wheel's index, or what `--from-source` builds: cu124, vulkan, cpu, source-cuda."""
    backend: str
    """Part of ggml that must show up when it is probed."""
    reason: str
    suits: bool = True


@dataclass(frozen=True, slots=True)
class _Cuda:
    """A CUDA wheel: GPUs it has code for, the oldest driver, and NVIDIA's packages with its libraries.

    Architectures and systems: build-wheels-cuda.yaml of llama-cpp-python. Drivers: NVIDIA's minor version compatibility, and 550
    from 12.4 on, where device code is compressed. For newer GPUs the driver compiles PTX, so it must know that version of it.
    """

    variant: str
    oldest_gpu: tuple[int, int]
    newest_gpu: tuple[int, int] | None
    """None: newer ones by PTX."""
    driver: tuple[int, int]
    windows_driver: tuple[int, int] | None
    """None: not built for Windows."""
    libraries: tuple[str, ...]


def _cuda12(minor: int) -> tuple[str, ...]:
    return f"nvidia-cuda-runtime-cu12==12.{minor}.*", f"nvidia-cublas-cu12==12.{minor}.*"


# Since CUDA 13 the packages have no suffix, count by themselves, and cuBLAS asks for NVRTC.
_CUDA = (
    _Cuda("cu132", (7, 5), None, (580, 0), (580, 0),
          ("nvidia-cuda-runtime==13.2.*", "nvidia-cublas==13.3.*", "nvidia-cuda-nvrtc==13.2.*")),
    _Cuda("cu130", (7, 5), None, (580, 0), (580, 0),
          ("nvidia-cuda-runtime==13.0.*", "nvidia-cublas==13.1.*", "nvidia-cuda-nvrtc==13.0.*")),
    _Cuda("cu125", (6, 0), None, (550, 0), (550, 0), _cuda12(5)),
    _Cuda("cu124", (6, 0), None, (550, 0), (550, 0), _cuda12(4)),
    _Cuda("cu123", (6, 0), None, (525, 0), None, _cuda12(3)),
    _Cuda("cu122", (6, 0), None, (525, 0), None, _cuda12(2)),
    _Cuda("cu121", (6, 0), None, (525, 0), None, _cuda12(1)),
    _Cuda("cu118", (6, 0), (8, 9), (450, 80), (452, 39),
          ("nvidia-cuda-runtime-cu11==11.8.*", "nvidia-cublas-cu11==11.11.*")),
)  # fmt: skip
_PREFERRED = ("cu130", "cu124", "cu125", "cu121", "cu118")
# Blackwell and later run on PTX in every wheel: the newest toolkit's is the best one.
_PREFERRED_FOR_PTX = ("cu130", "cu132", "cu125")

BACKENDS = {"vulkan": "Vulkan", "rocm72": "ROCm", "hip-radeon": "ROCm", "metal": "MTL", "cpu": "CPU"}
SOURCE_BACKENDS = {"cuda": "CUDA", "vulkan": "Vulkan", "rocm": "ROCm", "metal": "MTL", "cpu": "CPU"}
VARIANTS = (*(build.variant for build in _CUDA), *BACKENDS)

_CMAKE_SWITCHES = {"cuda": "-DGGML_CUDA=on", "vulkan": "-DGGML_VULKAN=on", "rocm": "-DGGML_HIP=on", "metal": "-DGGML_METAL=on"}
COMPILERS = {"cuda": "nvcc", "vulkan": "glslc", "rocm": "hipcc"}
"""What a backend needs beside a C++ compiler."""


def backend_of(variant: str) -> str:
    """The name that ggml gives the backend of a build; empty for a variant that does not exist."""
    if variant.startswith(SOURCE):
        return SOURCE_BACKENDS.get(variant.removeprefix(SOURCE), "")
    return "CUDA" if any(build.variant == variant for build in _CUDA) else BACKENDS.get(variant, "")


def libraries_of(variant: str) -> tuple[str, ...]:
    """NVIDIA's packages that a CUDA wheel needs: it holds none of CUDA's libraries itself."""
    return next((build.libraries for build in _CUDA if build.variant == variant), ())


def cmake_args(variant: str, more: str = "") -> tuple[str, ...]:
    """Arguments of cmake for a source build; `more` is what the user adds, separated by blanks."""
    return (*_CMAKE_SWITCHES.get(variant.removeprefix(SOURCE), "").split(), *more.split())


def suitable(hardware: Hardware, machine: str = "x86_64") -> tuple[Suggestion, ...]:
    """The prebuilt ones that should run here, best first; the CPU build comes last and is always one of them."""
    return tuple(suggestion for suggestion in judge(hardware, machine) if suggestion.suits)


def judge(hardware: Hardware, machine: str = "x86_64") -> tuple[Suggestion, ...]:
    """Every prebuilt build that concerns this machine's processors: those that suit, best first, then the others with why not."""
    if hardware.system == "darwin":
        metal = machine.lower() not in _X86
        return (*((Suggestion("metal", "MTL", "for the GPU of an Apple chip"),) if metal else ()), _cpu(hardware))
    makers = _makers(hardware)
    if machine.lower() not in _X86:
        reason = f"prebuilt for x86-64 only; here ({machine}) it can be built: localfast engine install --from-source"
        backend = "CUDA" if "NVIDIA" in makers else "Vulkan"
        others = (Suggestion("cu130" if backend == "CUDA" else "vulkan", backend, reason, suits=False),) if makers else ()
        return (_cpu(hardware), *others)
    cuda = _judge_cuda(hardware) if "NVIDIA" in makers else ()
    found = [*(suggestion for suggestion in cuda if suggestion.suits), *_judge_vulkan(hardware, makers), _cpu(hardware)]
    if "AMD" in makers:
        found.insert(-1, _rocm(hardware))
    found += [suggestion for suggestion in cuda if not suggestion.suits]
    return tuple(sorted(found, key=lambda suggestion: not suggestion.suits))


def source_variant(hardware: Hardware) -> str:
    """What `--from-source` builds when nothing is named."""
    if hardware.system == "darwin":
        return f"{SOURCE}metal"
    makers = _makers(hardware)
    return SOURCE + ("cuda" if "NVIDIA" in makers else "vulkan" if makers else "cpu")


def offer_engine(hardware: Hardware, machine: str = "x86_64") -> str:
    """What to say to somebody who has no engine: the command, and what it would bring."""
    best, *rest = suitable(hardware, machine)
    otherwise = f"; if it does not start here: {rest[0].variant}" if rest else ""
    return f"run: localfast engine install  (fetches {best.variant}: {best.reason}{otherwise})"


# --- makers -------------------------------------------------------------------------------------------------------------------


def _makers(hardware: Hardware) -> set[str]:
    """Makers of the GPUs; one that only a Vulkan engine names is `other`."""
    makers = set()
    for device in hardware.devices:
        if device.kind in ("gpu", "igpu") and device.backend != "RPC":
            words = f"{device.backend} {device.name}".lower()
            known = {"nvidia": "NVIDIA", "cuda": "NVIDIA", "amd": "AMD", "radeon": "AMD", "rocm": "AMD", "intel": "Intel"}
            makers.add(next((maker for word, maker in known.items() if word in words), "other"))
    return makers | ({"NVIDIA"} if hardware.compute_capability > (0, 0) else set())


def _cpu(hardware: Hardware) -> Suggestion:
    needs = "; a CPU of 2013 or later (AVX2)" if hardware.system == "linux" else ""
    return Suggestion("cpu", "CPU", f"runs without a GPU{needs}")


def _rocm(hardware: Hardware) -> Suggestion:
    if hardware.system == "win32":
        return Suggestion("hip-radeon", "ROCm", f"AMD's own libraries, for Radeon cards they know; {_SLOW_CPU}")
    return Suggestion("rocm72", "ROCm", f"needs ROCm 7.2 installed on this machine; {_SLOW_CPU}")


def _judge_vulkan(hardware: Hardware, makers: set[str]) -> tuple[Suggestion, ...]:
    if not makers:
        return (Suggestion("vulkan", "Vulkan", "no GPU was found here", suits=False),)
    loader = "the Vulkan loader (package libvulkan1 or vulkan-loader)" if hardware.system == "linux" else "nothing but its driver"
    return (Suggestion("vulkan", "Vulkan", f"for GPUs of every maker ({', '.join(sorted(makers))} here); needs {loader}"),)


# --- CUDA ---------------------------------------------------------------------------------------------------------------------


def _judge_cuda(hardware: Hardware) -> tuple[Suggestion, ...]:
    """All CUDA wheels, those that suit in the order of preference."""
    known = {device.compute_capability for device in hardware.devices if device.compute_capability > (0, 0)}
    known |= {hardware.compute_capability} - {(0, 0)}
    if not known:
        return (Suggestion("cu124", "CUDA", "the NVIDIA driver is not installed, or hidden from this container", suits=False),)
    oldest, newest = min(known), max(known)
    preferred = _PREFERRED_FOR_PTX if newest >= (10, 0) else _PREFERRED
    order = {variant: place for place, variant in enumerate(preferred)}
    verdicts = []
    for build in sorted(_CUDA, key=lambda build: order.get(build.variant, len(order))):
        against = _against(build, hardware, oldest, newest)
        if not against and build.variant not in order:
            against = f"would run too, but {preferred[0]} and its like are the better choice"
        verdicts.append(Suggestion(build.variant, "CUDA", against or _for_cuda(build, hardware, newest), suits=not against))
    return tuple(verdicts)


def _against(build: _Cuda, hardware: Hardware, oldest: tuple[int, int], newest: tuple[int, int]) -> str:
    """Why this wheel would not run on these GPUs with this driver; empty when it should."""
    windows = hardware.system == "win32"
    minimum = build.windows_driver if windows else build.driver
    toolkit = _toolkit(build)
    if minimum is None:
        return "not built for Windows"
    if oldest < build.oldest_gpu:
        return f"has no code for compute capability {_dotted(oldest)} (only {_dotted(build.oldest_gpu)} and later)"
    if build.newest_gpu and newest > build.newest_gpu:
        return f"has no code for compute capability {_dotted(newest)} (only up to {_dotted(build.newest_gpu)})"
    driver = _version(hardware.driver_version)
    if driver and driver < minimum:
        return f"needs driver {minimum[0]} or later, installed is {hardware.driver_version}: update the driver to use it"
    runs = _version(hardware.cuda_version)
    if runs and runs[0] < toolkit[0]:
        return f"needs a driver for CUDA {toolkit[0]}, this one runs CUDA {hardware.cuda_version}: update the driver to use it"
    if newest >= (10, 0) and runs and runs < toolkit:
        words = (
            f"compiled by the driver for compute capability {_dotted(newest)}, which needs a driver for CUDA {_dotted(toolkit)}"
        )
        return f"{words}; this one runs CUDA {hardware.cuda_version}"
    if not driver and not runs:
        return "the version of the NVIDIA driver is unknown"
    return ""


def _for_cuda(build: _Cuda, hardware: Hardware, newest: tuple[int, int]) -> str:
    driver = f" and driver {hardware.driver_version}" if hardware.driver_version else ""
    slow_start = "; the first start takes minutes, because the driver compiles it for this GPU" if newest >= (10, 0) else ""
    return f"CUDA {_dotted(_toolkit(build))}, for compute capability {_dotted(newest)}{driver}{slow_start}; {_SLOW_CPU}"


def _toolkit(build: _Cuda) -> tuple[int, int]:
    return int(build.variant[2:4]), int(build.variant[4:])


def _version(text: str) -> tuple[int, ...]:
    """The first two numbers of it."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
