"""Which build a load uses: the setting, the user's choice, the best one, and what is not used because it cannot be."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from localfast.engines import installed
from localfast.engines.installed import Probe, Record, active, choose, find, remove
from localfast.errors import EngineMissing, InvalidRequest, InvalidSetting
from localfast.settings import Settings

PINNED = installed.pinned_version()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=str(tmp_path))


def put(settings: Settings, variant: str, backend: str, gpu: str = "", error: str = "", version: str = PINNED) -> str:
    name = f"{version}-{variant}"
    folder = settings.engines_dir / name
    (folder / "llama_cpp").mkdir(parents=True)
    probe = Probe(works=not error, error=error, backends=(backend,), devices=(gpu,) if gpu else ())
    record = Record(
        name=name, version=version, variant=variant, backend=backend, source="a test", wheel="x.whl", sha256="0" * 64,
        installed_at="2026-01-01T00:00:00+00:00", size_bytes=1, probe=probe,
    )  # fmt: skip
    (folder / "engine.json").write_bytes(msgspec.json.encode(record))
    return name


def named(settings: Settings, engine: str) -> Settings:
    return Settings(home=settings.home, engine=engine, sources={"engine": "flag --engine"})


def test_installed_pin_is_an_exact_version() -> None:
    assert PINNED and PINNED[0].isdecimal() and installed.engine_requirements()[0] == f"llama-cpp-python=={PINNED}"
    assert any(row.startswith("llguidance") for row in installed.engine_requirements())


def test_installed_nothing_means_the_environment(settings: Settings) -> None:
    found = active(settings)
    assert (found.name, found.path) == ("environment", "") and found.reason


def test_installed_best_is_the_one_that_sees_a_gpu_and_drives_it_best(settings: Settings) -> None:
    cpu = put(settings, "cpu", "CPU")
    assert active(settings).name == cpu and active(settings).path == str(settings.engines_dir / cpu)
    blind = put(settings, "cu124", "CUDA")
    vulkan = put(settings, "vulkan", "Vulkan", gpu="Test")
    assert active(settings).name == vulkan
    cuda = put(settings, "cu121", "CUDA", gpu="Test")
    assert active(settings).name == cuda and blind != cuda


def test_installed_choice_holds_until_it_cannot(settings: Settings) -> None:
    cpu, vulkan = put(settings, "cpu", "CPU"), put(settings, "vulkan", "Vulkan", gpu="Test")
    choose(settings, cpu)
    assert active(settings).name == cpu and "engine use" in active(settings).reason
    (settings.engines_dir / cpu / "llama_cpp").rmdir()
    assert active(settings).name == vulkan and cpu in active(settings).reason and "lost its files" in active(settings).reason
    choose(settings, "environment")
    assert active(settings).path == ""
    choose(settings, "")
    assert active(settings).name == vulkan


def test_installed_setting_is_stronger_than_the_choice(settings: Settings) -> None:
    cpu, vulkan = put(settings, "cpu", "CPU"), put(settings, "vulkan", "Vulkan", gpu="Test")
    choose(settings, vulkan)
    assert active(named(settings, cpu)).name == active(named(settings, "cpu")).name == cpu
    assert active(named(settings, "environment")).path == ""


def test_installed_setting_names_what_is_not_there(settings: Settings) -> None:
    put(settings, "cpu", "CPU")
    with pytest.raises(InvalidSetting, match=rf"flag --engine.*cu999.*{PINNED}-cpu"):
        active(named(settings, "cu999"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "engine.json").write_text('{"name": 3}'), "no readable record"),
        (lambda folder: (folder / "engine.json").unlink(), "no readable record"),
        (lambda folder: (folder / "llama_cpp").rmdir(), "lost its files"),
    ],
)
def test_installed_damaged_one_is_never_used(settings: Settings, damage: object, words: str) -> None:
    name = put(settings, "cpu", "CPU")
    damage(settings.engines_dir / name)  # type: ignore[operator]
    assert active(settings).path == ""
    with pytest.raises(EngineMissing, match=words):
        active(named(settings, name))


def test_installed_other_version_and_failed_probe_are_never_used(settings: Settings) -> None:
    old, broken = put(settings, "cpu", "CPU", version="0.1.0"), put(settings, "cu124", "CUDA", error="libcudart.so.12")
    assert active(settings).path == ""
    for name, words in ((old, f"{PINNED} only"), (broken, "libcudart")):
        with pytest.raises(EngineMissing, match=words):
            active(named(settings, name))


def test_installed_remove_takes_the_choice_with_it(settings: Settings) -> None:
    name = put(settings, "cpu", "CPU")
    choose(settings, name)
    build = find(settings, "cpu")
    assert build is not None
    remove(settings, build)
    assert not installed.installed(settings) and not installed.choice(settings)
    assert not [path for path in settings.engines_dir.iterdir() if path.is_dir()]
    with pytest.raises(InvalidRequest, match="there are: none"):
        installed.require(settings, name)


def test_installed_size_counts_two_names_of_a_file_once(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"x" * 1000)
    (tmp_path / "two").hardlink_to(tmp_path / "one")
    assert installed.size_of(tmp_path) == 1000
