"""The package as it is built: the catalog is inside the wheel, and an editable install finds it too."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1]
ASK = (
    "from localfast.models.catalog import load_catalog; import localfast; print(localfast.__file__, len(load_catalog().entries))"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(SOURCE),
    ]
    subprocess.run(command, check=True, timeout=120)
    (built,) = folder.glob("localfast-*.whl")
    return built


def catalog_seen_from(folder: Path, *paths: str) -> tuple[Path, int]:
    code = f"import sys; sys.path[:0] = {list(paths)!r}; {ASK}"
    found = subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, check=True, capture_output=True, text=True, timeout=60)
    where, count = found.stdout.split()
    return Path(where), int(count)


def test_wheel_holds_the_catalog_and_the_types(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
        metadata = next(archive.read(name).decode() for name in names if name.endswith("METADATA"))
    assert {"localfast/models.toml", "localfast/py.typed"} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]
    assert "@ http" not in metadata, "a package index refuses dependencies by address"
    assert "Requires-Dist: llama-cpp-python==" in metadata and metadata.count("extra == 'engine'") == 2
    where, count = catalog_seen_from(tmp_path, str(tmp_path))
    assert where.is_relative_to(tmp_path) and count > 15


def test_source_tree_finds_the_catalog_beside_it(tmp_path: Path) -> None:
    """What an editable install puts on the path is this folder, where models.toml lies one level up."""
    assert not (SOURCE / "localfast" / "models.toml").exists()
    where, count = catalog_seen_from(tmp_path, str(SOURCE))
    assert where.is_relative_to(SOURCE) and count > 15
