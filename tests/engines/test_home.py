"""What an engine process does before it imports a build from a folder."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from localfast.engine import home


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the libraries that were opened for everybody, in order."""
    names: list[str] = []

    def open_library(path: str, mode: int = 0) -> None:
        assert mode == ctypes.RTLD_GLOBAL
        if "broken" in Path(path).read_text():
            raise OSError("not an ELF file")
        names.append(Path(path).name)

    monkeypatch.setattr(home.ctypes, "CDLL", open_library)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return names


def put(folder: Path, *names: str, content: str = "") -> None:
    for name in names:
        path = folder / "nvidia" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_home_of_the_environment_changes_nothing(opened: list[str]) -> None:
    before = [*sys.path]
    home.use("")
    assert sys.path == before and not opened


@pytest.mark.skipif(sys.platform != "linux", reason="names of Linux libraries")
@pytest.mark.parametrize(
    ("names", "order"),
    [
        (
            ("cublas/lib/libcublas.so.12", "cublas/lib/libcublasLt.so.12", "cuda_runtime/lib/libcudart.so.12"),
            ["libcudart.so.12", "libcublasLt.so.12", "libcublas.so.12"],
        ),
        (
            tuple(f"cu13/lib/lib{name}.so.13" for name in ("cublas", "cublasLt", "cudart", "nvrtc", "nvblas")),
            ["libnvrtc.so.13", "libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13"],
        ),
    ],
)
def test_home_opens_cudas_libraries_in_the_order_of_need(
    tmp_path: Path, opened: list[str], names: tuple[str, ...], order: list[str]
) -> None:
    put(tmp_path, *names)
    home.use(str(tmp_path))
    assert opened == order and sys.path[0] == str(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="names of Linux libraries")
def test_home_leaves_a_library_that_does_not_open_to_the_engine(
    tmp_path: Path, opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, "cuda_runtime/lib/libcudart.so.12", content="broken")
    put(tmp_path, "cublas/lib/libcublas.so.12")
    home.use(str(tmp_path))
    assert opened == ["libcublas.so.12"] and "libcudart.so.12 does not open: not an ELF file" in capsys.readouterr().err
