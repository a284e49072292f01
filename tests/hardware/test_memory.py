from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localfast.cgroups import MemoryLimit
from localfast.hardware.memory import free_swap, smallest_ram, usable_ram
from localfast.hardware.processor import cpu_features, cpu_model

GIB = 2**30
CONTAINER = MemoryLimit(8 * GIB, 6 * GIB, GIB, "cgroup v2")


@pytest.mark.parametrize(
    ("limit", "commit", "total", "available", "source", "note"),
    [
        (MemoryLimit(), None, 32, 20, "system", None),
        (CONTAINER, None, 8, 6, "container limit, cgroup v2", "8.0 of 32.0 GiB"),
        (MemoryLimit(), 3 * GIB, 32, 3, "commit limit", "page file"),
        (MemoryLimit(), 40 * GIB, 32, 20, "system", None),
        (MemoryLimit(64 * GIB, 60 * GIB), None, 32, 20, "system", None),
    ],
)
def test_memory_is_the_smallest_claim_and_names_it(
    limit: MemoryLimit, commit: int | None, total: int, available: int, source: str, note: str | None
) -> None:
    ram = smallest_ram((32 * GIB, 20 * GIB), limit, commit, 4 * GIB)
    assert (ram.total_bytes, ram.available_bytes) == (total * GIB, available * GIB)
    assert source in ram.source and ram.swap_free_bytes == min(4 * GIB, limit.swap_bytes)
    assert (note in ram.notes[0]) if note else not ram.notes


sizes = st.integers(0, 2**45)


@given(st.tuples(sizes, sizes), st.builds(MemoryLimit, sizes, sizes, sizes), st.none() | sizes, sizes)
def test_memory_never_promises_more_than_any_source(
    system: tuple[int, int], limit: MemoryLimit, commit: int | None, swap: int
) -> None:
    ram = smallest_ram(system, limit, commit, swap)
    claims = [system[1], limit.available_bytes, *([] if commit is None else [commit])]
    assert 0 <= ram.available_bytes <= min(*claims, system[0]) and ram.total_bytes <= min(system[0], limit.total_bytes)


def test_memory_of_this_machine_is_within_what_the_system_tells() -> None:
    assert 0 < usable_ram().available_bytes <= usable_ram().total_bytes <= psutil.virtual_memory().total


def test_memory_swap_is_read_from_the_kernel_or_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "meminfo"
    table.write_text("MemTotal: 9 kB\nSwapTotal:    2048 kB\nSwapFree:       1024 kB\n")
    assert free_swap(table) == 2**20

    def refuse() -> None:
        raise RuntimeError

    monkeypatch.setattr(psutil, "swap_memory", refuse)
    assert free_swap(tmp_path / "none") == 0


def test_memory_processor_features_have_the_engines_names(tmp_path: Path) -> None:
    table = tmp_path / "cpuinfo"
    table.write_text("processor: 0\nmodel name\t: A Fast One\nflags\t\t: fpu avx avx2 fma f16c avx512f\nprocessor: 1\n")
    assert cpu_model(table) == "A Fast One" and cpu_features(table) == ("AVX", "AVX2", "F16C", "FMA", "AVX512F")
    assert cpu_features(tmp_path / "none") == () and cpu_model(tmp_path / "none")
