"""Fetching, building and trying a build: with pip, an index on 127.0.0.1, and wheels of a made-up engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import filelock
import pytest
from engines.fake_wheels import VERSION, Index, engine_files, serve_index, write_source_package, write_wheel

from localfast.engines import install as installing
from localfast.engines.install import Order, check_again, install, install_best
from localfast.engines.installed import Probe, Record, active, installed, pinned_version, write_json
from localfast.errors import EngineInstallFailed
from localfast.hardware import Device, Hardware
from localfast.settings import Settings

AMD = Hardware(devices=(Device(backend="AMD", name="AMD Test", kind="gpu"),), system="linux")
GPU = (("Test GPU", "Vulkan"),)

pytestmark = pytest.mark.skipif(pinned_version() != VERSION, reason="the made-up engine has another version")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=str(tmp_path / "home"))


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with serve_index(tmp_path / "index") as served:
        yield served


def folders(settings: Settings) -> list[str]:
    return sorted(path.name for path in settings.engines_dir.iterdir() if path.is_dir())


def failure(settings: Settings, order: Order) -> str:
    with pytest.raises(EngineInstallFailed) as caught:
        install(settings, order, lambda words: None)
    return str(caught.value)


def test_install_keeps_what_was_fetched_and_what_it_can(settings: Settings, index: Index) -> None:
    wheel = index.add("vulkan", requires=("numpy>=1.20", "pytest; extra == 'test'"), backends=("Vulkan", "CPU"), gpus=GPU)
    said: list[str] = []
    build = install(settings, Order(variant="vulkan", index_url=index.url), said.append)

    record = build.record
    assert record is not None and not build.problem and folders(settings) == [f"{VERSION}-vulkan"]
    assert record.sha256 == hashlib.sha256(wheel.read_bytes()).hexdigest() and record.wheel == wheel.name
    assert record.source.startswith(f"{index.url}/vulkan/") and record.packages == ()
    assert record.probe.backends == ("Vulkan", "CPU") and record.probe.devices == ("Test GPU (Vulkan)",)
    assert active(settings).path == str(build.path) and "trying it" in said
    assert not list(settings.logs_dir.glob("*")), "a log is kept of failures only"

    wheel.unlink()  # so it cannot be fetched again
    assert install(settings, Order(variant="vulkan", index_url=index.url), said.append) == build
    assert VERSION in failure(settings, Order(variant="vulkan", index_url=index.url, again=True))
    assert active(settings).path == str(build.path), "a failed attempt must leave the old one"


def test_install_best_goes_on_to_what_works(settings: Settings, index: Index) -> None:
    index.add("vulkan", crash="os.kill(os.getpid(), signal.SIGILL)", backends=("Vulkan", "CPU"))
    index.add("cpu")
    said: list[str] = []
    build = install_best(settings, AMD, "x86_64", Order(index_url=index.url), said.append)

    assert build.name == f"{VERSION}-cpu" and folders(settings) == [build.name]
    refused = [words for words in said if words.startswith("not installed")]
    assert "vulkan" in refused[0] and "this CPU lacks an instruction" in refused[0]
    assert "rocm72" in refused[1] and f"llama-cpp-python=={VERSION}" in refused[1]


def test_install_best_says_all_that_was_tried(settings: Settings, index: Index) -> None:
    index.add("vulkan", backends=("Vulkan", "CPU"))
    index.add("rocm72")
    index.add("cpu", crash='raise OSError("libgomp.so.1: cannot open shared object file")')
    with pytest.raises(EngineInstallFailed) as caught:
        install_best(settings, AMD, "x86_64", Order(index_url=index.url), lambda words: None)

    words = str(caught.value)
    assert "vulkan: it does not work here: it starts, but finds no GPU" in words and "libgomp.so.1" in words
    assert "rocm72: it does not work here: it is built for CPU and not for ROCm" in words and "--from-source" in words
    assert folders(settings) == []


def test_install_names_an_index_that_is_not_there(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_RETRIES", "1")
    words = failure(settings, Order(variant="cpu", index_url="http://127.0.0.1:9"))
    assert "could not be reached" in words and folders(settings) == []


@pytest.mark.parametrize(
    ("order", "offline", "words"),
    [
        (Order(variant="cu999"), False, "no such build; there are cu132"),
        (Order(variant="source-quux"), False, "no such build"),
        (Order(variant="cpu"), True, "offline setting"),
        (Order(variant="source-cpu"), True, "offline setting"),
        (Order(variant="cpu", find_links="/no/such/folder"), True, "there is no folder"),
        (Order(variant="cpu", cmake_args="-DX=1"), False, "--from-source only"),
    ],
)
def test_install_refuses_before_it_begins(settings: Settings, order: Order, offline: bool, words: str) -> None:
    assert words in failure(replace(settings, offline=offline), order)
    assert not settings.engines_dir.exists()


def test_install_does_not_disturb_another_one(settings: Settings) -> None:
    settings.engines_dir.mkdir(parents=True)
    with filelock.FileLock(settings.engines_dir / ".lock"):
        assert "another installation is running" in failure(settings, Order(variant="cpu"))


def test_install_offline_takes_a_folder_and_cudas_libraries_from_it(settings: Settings, tmp_path: Path) -> None:
    links = tmp_path / "wheels"
    write_wheel(links, engine_files(backends=("CUDA", "CPU"), gpus=(("Test GPU", "CUDA"),)))
    for name, version, library in (
        ("nvidia_cuda_runtime_cu12", "12.4.127", "cuda_runtime/lib/libcudart.so.12"),
        ("nvidia_cublas_cu12", "12.4.5.8", "cublas/lib/libcublas.so.12"),
        ("nvidia_cublas_cu12", "12.9.1.4", "cublas/lib/libcublas.so.12"),
    ):
        write_wheel(links, {f"nvidia/{library}": version}, name=name, version=version)
    (settings.engines_dir / ".install-killed").mkdir(parents=True)
    build = install(replace(settings, offline=True), Order(variant="cu124", find_links=str(links)), lambda words: None)

    assert build.record is not None and len(build.record.packages) == 2
    assert (build.path / "nvidia/cublas/lib/libcublas.so.12").read_text() == "12.4.5.8"
    assert (build.path / "nvidia/cuda_runtime/lib/libcudart.so.12").is_file()
    assert folders(settings) == [build.name], "what a killed installation left goes too"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if one were here: the source package of the tests compiles nothing."""
    monkeypatch.setattr(installing, "missing_compiler", lambda variant: "")


@pytest.mark.usefixtures("compiler")
def test_install_from_source_passes_cmake_arguments_and_counts_steps(settings: Settings, tmp_path: Path) -> None:
    write_source_package(tmp_path / "source")
    order = Order(variant="source-cpu", find_links=str(tmp_path / "source"), cmake_args="-DGGML_RPC=ON -DX=1")
    said: list[str] = []
    build = install(replace(settings, offline=True), order, said.append)

    assert build.record is not None and "built here" in build.record.source and "-DGGML_RPC=ON" in build.record.source
    assert (build.path / "llama_cpp/cmake_args.txt").read_text() == "-DGGML_RPC=ON;-DX=1"
    assert any("step 1 of 2" in words for words in said)


@pytest.mark.usefixtures("compiler")
def test_install_from_source_keeps_the_log_of_a_failure(settings: Settings, tmp_path: Path) -> None:
    write_source_package(tmp_path / "source")
    order = Order(variant="source-cpu", find_links=str(tmp_path / "source"), cmake_args="-DBREAK=1")
    words = failure(replace(settings, offline=True), order)

    (log,) = settings.logs_dir.glob("*.log")
    assert "no such thing as a quux" in words and str(log) in words and "Building CXX" in log.read_text()
    assert folders(settings) == []


def test_install_from_source_wants_a_compiler_first(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing.shutil, "which", lambda name: None)
    assert "C++ compiler" in failure(settings, Order(variant="source-cpu"))
    monkeypatch.setattr(installing.shutil, "which", lambda name: None if name == "glslc" else name)
    assert "glslc" in failure(settings, Order(variant="source-vulkan"))


def test_install_check_again_sees_what_broke_since(settings: Settings) -> None:
    folder = settings.engines_dir / f"{VERSION}-cpu"
    (folder / "llama_cpp").mkdir(parents=True)
    for name, text in engine_files(crash='raise OSError("gone")').items():
        (folder / name).write_text(text)
    record = Record(
        name=folder.name, version=VERSION, variant="cpu", backend="CPU", source="a test", wheel="x.whl", sha256="0" * 64,
        installed_at="2026-01-01T00:00:00+00:00", size_bytes=1, probe=Probe(works=True),
    )  # fmt: skip
    write_json(folder / "engine.json", record)
    (build,) = installed(settings)

    assert not build.problem and "gone" in check_again(build).problem
    assert "gone" in installed(settings)[0].problem and active(settings).path == ""


@pytest.mark.model
def test_install_real_build_starts_from_its_folder(settings: Settings, tmp_path: Path) -> None:
    """The libraries of this environment's engine, packed as a wheel: equal files become one, and still find each other."""
    packed = metadata.distribution("llama-cpp-python")
    names = [file for file in packed.files or () if file.parts[0] == "llama_cpp" and "__pycache__" not in file.parts]
    write_wheel(tmp_path / "wheels", {str(name): Path(str(packed.locate_file(name))).read_bytes() for name in names})
    build = install(settings, Order(variant="cpu", find_links=str(tmp_path / "wheels")), lambda words: None)

    assert build.record is not None and "CPU" in build.record.probe.backends
    libraries = [path.stat() for path in build.path.rglob("libggml-base.so*")]
    assert len({about.st_ino for about in libraries}) <= 1
