"""Models of other programs, in fake trees of their layouts: what is found, and that nothing there can do harm."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localfast.models import found
from localfast.models.found import Place, find_models, places
from localfast.models.installed import InstalledModel
from localfast.models.names import ModelName, parse_name
from localfast.settings import Settings

SHA = "ab" * 32
OTHER_SHA = "cd" * 32


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    found._looks.clear()


def gguf(path: Path, content: bytes = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def names(models: list[InstalledModel]) -> list[str]:
    return sorted(str(model) for model in models)


def look(kind: str, root: Path) -> list[InstalledModel]:
    return find_models([Place(kind, root)])


# --- the Hugging Face cache ---------------------------------------------------------------------------------------------------


def cached(root: Path, repository: str, file: str, revision: str = "c0ffee", sha: str = SHA) -> Path:
    folder = root / f"models--{repository.replace('/', '--')}"
    blob = gguf(folder / "blobs" / sha, b"GGUF" + sha.encode())
    link = folder / "snapshots" / revision / file
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(blob, link.parent))
    return link


def test_found_in_the_hub_cache_with_repository_quant_hash_and_revision(tmp_path: Path) -> None:
    link = cached(tmp_path, "Org/Repo-GGUF", "Repo-Q4_K_M.gguf")

    (model,) = look("huggingface-cache", tmp_path)

    assert (model.name, model.quant, model.sha256, model.revision) == ("Org/Repo-GGUF", "Q4_K_M", SHA, "c0ffee")
    assert (model.source, model.removable, model.path) == ("huggingface-cache:Org/Repo-GGUF", False, link)
    assert model.size_bytes == link.stat().st_size and model.pulled_at.endswith("+00:00")


def test_found_in_the_hub_cache_is_the_revision_of_main(tmp_path: Path) -> None:
    cached(tmp_path, "o/r", "r-Q4_0.gguf", "aaaa", SHA)
    cached(tmp_path, "o/r", "r-Q4_0.gguf", "bbbb", OTHER_SHA)
    cached(tmp_path, "o/r", "r-Q8_0.gguf", "aaaa", SHA)
    gguf(tmp_path / "models--o--r" / "refs" / "main", b"bbbb\n")

    models = {model.quant: model.revision for model in look("huggingface-cache", tmp_path)}

    assert models == {"Q4_0": "bbbb", "Q8_0": "aaaa"}


def test_found_in_the_hub_cache_are_folders_of_shards_and_no_companions(tmp_path: Path) -> None:
    for number in (1, 2):
        cached(tmp_path, "o/r", f"Q4_K_M/r-0000{number}-of-00002.gguf", sha=f"{number}" * 64)
    cached(tmp_path, "o/r", "Q8_0/r-00001-of-00002.gguf")
    for companion in ("mmproj-r-f16.gguf", "r-imatrix.gguf", "mtp/r-Q4_0.gguf", "ggml-vocab-r.gguf", "README.md"):
        cached(tmp_path, "o/r", companion)

    (model,) = look("huggingface-cache", tmp_path)

    assert model.quant == "Q4_K_M" and [file.sha256[0] for file in model.files] == ["1", "2"]
    assert model.path.name == "r-00001-of-00002.gguf", "the set with a missing shard is left out"


def test_found_hash_is_not_that_of_a_shared_blob_store(tmp_path: Path) -> None:
    """Behind such a link lies a file that is named by another hash."""
    shared = gguf(tmp_path / "blobs" / "ab" / SHA)
    link = tmp_path / "models--o--r" / "snapshots" / "c0ffee" / "r-Q4_0.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to(shared)
    etag = tmp_path / "models--o--r" / "blobs" / "not-a-hash"
    etag.parent.mkdir()
    etag.symlink_to(shared)
    (link.parent / "r-Q8_0.gguf").symlink_to(etag)

    assert [(model.quant, model.sha256) for model in look("huggingface-cache", tmp_path)] == [("Q4_0", ""), ("Q8_0", "")]


# --- LM Studio and plain folders ----------------------------------------------------------------------------------------------


def test_found_in_lm_studio_under_publisher_and_repository(tmp_path: Path) -> None:
    gguf(tmp_path / "lmstudio-community" / "Qwen3-8B-GGUF" / "Qwen3-8B-Q4_K_M.gguf")
    gguf(tmp_path / "lmstudio-community" / "Qwen3-8B-GGUF" / "mmproj-Qwen3-8B-F16.gguf")
    gguf(tmp_path / "stray-Q8_0.gguf")

    models = look("lmstudio", tmp_path)

    assert names(models) == ["lmstudio-community/Qwen3-8B-GGUF:Q4_K_M", "stray:Q8_0"]
    assert {model.source for model in models} == {"lmstudio:lmstudio-community/Qwen3-8B-GGUF", "lmstudio:stray"}


def test_found_in_a_folder_at_any_depth_under_the_files_name(tmp_path: Path) -> None:
    gguf(tmp_path / "My model (v2) Q5_K_M.gguf")
    gguf(tmp_path / "a" / "b" / "c" / "deep-Q4_0.gguf")
    gguf(tmp_path / "one" / "model.gguf")
    gguf(tmp_path / "two" / "model.gguf")
    gguf(tmp_path / ".trash" / "gone-Q4_0.gguf")

    models = look("folder", tmp_path)

    assert names(models) == ["My-model-v2:Q5_K_M", "deep:Q4_0", "model", "two-model"]
    assert all(model.path.is_file() and model.source == f"folder:{tmp_path}" for model in models)


@given(st.text(max_size=120) | st.lists(st.sampled_from([".gguf", "-", "x", "Q4_0", ".", "latest"])).map("".join))
def test_found_name_of_any_file_can_be_typed(stem: str) -> None:
    name = found._plain_name(f"{stem}.gguf")
    assert parse_name(name) == ModelName("catalog", name.lower())


def test_found_folder_of_the_users_may_be_a_cache_of_another_program(tmp_path: Path) -> None:
    cached(tmp_path / "hub", "o/r", "r-Q4_0.gguf")
    manifest(tmp_path / "ollama", "library/m/1b")
    asked = Settings(models_dir=(str(tmp_path / "hub"), str(tmp_path / "ollama")), reuse=False)

    assert [model.source for model in find_models(places(asked, tmp_path))] == ["huggingface-cache:o/r", "ollama:m:1b"]


def test_found_places_are_the_users_own_unless_reuse_is_off(tmp_path: Path) -> None:
    named = tmp_path / "named"
    asked = Settings(models_dir=(str(named),))

    known = [str(place.root.relative_to(tmp_path).as_posix()) for place in places(asked, tmp_path)]

    assert known == [".cache/huggingface/hub", ".lmstudio/models", ".cache/lm-studio/models", ".ollama/models", "named"]
    assert places(Settings(models_dir=(str(named),), reuse=False), tmp_path) == (Place("folder", named),)
    assert find_models(places(asked, tmp_path)) == [], "none of them exists"


# --- Ollama -------------------------------------------------------------------------------------------------------------------


def manifest(root: Path, name: str, sha: str = SHA, registry: str = "registry", content: Any = None, **layer: Any) -> Path:
    """A model as Ollama keeps it; `content` replaces the whole manifest."""
    model = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{sha}", "size": 4} | layer
    others = [{"mediaType": "application/vnd.ollama.image.projector", "digest": f"sha256:{OTHER_SHA}"}]
    gguf(root / "blobs" / f"sha256-{sha}", b"GGUF")
    path = root / "manifests" / registry / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"layers": [*others, model]} if content is None else content))
    return path


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("library/qwen3/8b", "qwen3-8b"),
        ("library/tiny/latest", "tiny"),
        ("library/llama3.2/1b-instruct-q8_0", "llama3.2-1b-instruct:Q8_0"),
        ("someone/their-model/latest", "someone/their-model"),
        ("bartowski/Llama-3.2-1B-Instruct-GGUF/Q4_K_M", "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"),
    ],
)
def test_found_in_ollama_under_a_name_that_can_be_typed(tmp_path: Path, path: str, name: str) -> None:
    manifest(tmp_path, path)

    (model,) = look("ollama", tmp_path)

    assert (str(model), model.sha256, model.removable) == (name, SHA, False)
    assert model.path == tmp_path / "blobs" / f"sha256-{SHA}"


def test_found_in_ollama_has_the_quant_that_its_configuration_tells(tmp_path: Path) -> None:
    told = manifest(tmp_path, "library/qwen3/8b")
    content = json.loads(told.read_text()) | {"config": {"digest": f"sha256:{OTHER_SHA}"}}
    told.write_text(json.dumps(content))
    (tmp_path / "blobs" / f"sha256-{OTHER_SHA}").write_text(json.dumps({"file_type": "Q4_K_M", "model_type": "8.2B"}))

    assert names(look("ollama", tmp_path)) == ["qwen3-8b:Q4_K_M"]


HOSTILE: list[Any] = [
    [],
    "text",
    {},
    {"layers": None},
    {"layers": {"a": 1}},
    {"layers": [7, None, {"mediaType": "application/vnd.ollama.image.model"}]},
    {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../../etc/passwd"}]},
    {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": ["sha256", SHA]}]},
    {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{'9' * 64}"}]},
    {"layers": [{"mediaType": "application/vnd.ollama.image.tensor", "digest": f"sha256:{SHA}"}]},
]


@pytest.mark.parametrize("content", HOSTILE)
def test_found_passes_over_hostile_manifests(tmp_path: Path, content: Any) -> None:
    manifest(tmp_path, "library/bad/1b", content=content)
    manifest(tmp_path, "library/good/1b")

    assert names(look("ollama", tmp_path)) == ["good-1b"]


def test_found_passes_over_manifests_that_are_none(tmp_path: Path) -> None:
    for number, text in enumerate((b"", b"{", b"\xff\xfe", b"[" * 100_000, b" " * 10_000_000)):
        manifest(tmp_path, f"library/bad/{number}").write_bytes(text)
    manifest(tmp_path, "library/good/1b")

    assert names(look("ollama", tmp_path)) == ["good-1b"]


KEYS = st.sampled_from(["layers", "config", "digest", "mediaType", "size"])
ANY_JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=ANY_JSON)
def test_found_survives_any_json(tmp_path: Path, content: Any) -> None:
    manifest(tmp_path, "library/any/1b").write_text(json.dumps(content))
    assert look("ollama", tmp_path) == []


# --- what no disk may do ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["huggingface-cache", "lmstudio", "ollama", "folder"])
def test_found_ends_in_links_that_go_round_or_nowhere(tmp_path: Path, kind: str) -> None:
    for folder in (tmp_path / "models--o--r" / "snapshots" / "c0ffee", tmp_path / "manifests" / "x" / "library" / "m", tmp_path):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "round").symlink_to(tmp_path, target_is_directory=True)
        (folder / "self-Q4_0.gguf").symlink_to(folder / "self-Q4_0.gguf")
        (folder / "nowhere-Q4_0.gguf").symlink_to(tmp_path / "nothing")

    assert look(kind, tmp_path) == []


def test_found_follows_a_linked_folder_once(tmp_path: Path) -> None:
    gguf(tmp_path / "elsewhere" / "m-Q4_0.gguf")
    root = tmp_path / "root"
    root.mkdir()
    for name in ("one", "two"):
        (root / name).symlink_to(tmp_path / "elsewhere", target_is_directory=True)

    assert names(look("folder", root)) == ["m:Q4_0"]


def test_found_takes_only_regular_files_that_begin_as_a_gguf(tmp_path: Path) -> None:
    gguf(tmp_path / "text-Q4_0.gguf", b"<html>")
    gguf(tmp_path / "empty-Q4_0.gguf", b"")
    (tmp_path / "folder-Q4_0.gguf").mkdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe-Q4_0.gguf")
    gguf(tmp_path / "good-Q4_0.gguf")

    assert names(look("folder", tmp_path)) == ["good:Q4_0"]


@pytest.mark.skipif(sys.platform != "linux", reason="such names are possible there only")
def test_found_passes_over_names_that_cannot_be_shown(tmp_path: Path) -> None:
    for name in (b"new\nline-Q4_0.gguf", b"esc\x1b[2J-Q4_0.gguf", b"latin\xe9-Q4_0.gguf"):
        gguf(tmp_path / os.fsdecode(name))
    gguf(tmp_path / "gut-für-alle-Q4_0.gguf")

    assert names(look("folder", tmp_path)) == ["gut-f-r-alle:Q4_0"]


def test_found_passes_over_what_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf(tmp_path / "shut" / "m-Q4_0.gguf")
    gguf(tmp_path / "secret-Q4_0.gguf")
    gguf(tmp_path / "open-Q4_0.gguf")
    scandir, open_file = os.scandir, Path.open

    def scan(folder: Path) -> Any:
        if folder.name == "shut":
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    def open_unless_secret(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name.startswith("secret"):
            raise PermissionError(13, "Permission denied")
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr(Path, "open", open_unless_secret)
    assert names(look("folder", tmp_path)) == ["open:Q4_0"]


def test_found_looks_at_a_bounded_number_of_folders_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "MAX_DEPTH", 2)
    gguf(tmp_path / "a" / "b" / "c" / "too-deep.gguf")
    gguf(tmp_path / "a" / "b" / "deep.gguf")
    assert names(look("folder", tmp_path)) == ["deep"]

    walk = found._Walk(folders_left=2, entries_left=3)
    wide = tmp_path / "wide"
    for number in range(9):
        gguf(wide / f"f{number}" / "m.gguf")
    looked = [files for _, files in walk.tree(wide, depth=3)]
    assert walk.folders_left >= 0 and walk.entries_left >= 0 and sum(len(files) for files in looked) <= 3


def test_found_sees_what_changed_since_the_last_look(tmp_path: Path) -> None:
    first = gguf(tmp_path / "one-Q4_0.gguf", b"....")
    os.utime(tmp_path, (1_000_000, 1_000_000))
    assert look("folder", tmp_path) == []
    first.write_bytes(b"GGUF, whole now")
    os.utime(tmp_path, (1_000_000, 1_000_000))
    assert names(look("folder", tmp_path)) == ["one:Q4_0"], "files that grow do not change their folder"
    gguf(tmp_path / "two-Q4_0.gguf")
    assert names(look("folder", tmp_path)) == ["one:Q4_0", "two:Q4_0"]
    first.unlink()
    assert names(look("folder", tmp_path)) == ["two:Q4_0"]


def test_found_reads_a_place_once_while_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf(tmp_path / "a" / "one-Q4_0.gguf")
    for folder in (tmp_path / "a", tmp_path):
        os.utime(folder, (1_000_000, 1_000_000))
    before = look("folder", tmp_path)

    def refuse(folder: Path) -> None:
        raise AssertionError(f"{folder} is read again")

    monkeypatch.setattr(os, "scandir", refuse)
    assert look("folder", tmp_path) == before and len(before) == 1


def test_found_writes_nothing(tmp_path: Path) -> None:
    cached(tmp_path, "o/r", "r-Q4_0.gguf")
    manifest(tmp_path, "library/m/1b")
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}

    for kind in found.OWNERS:
        look(kind, tmp_path)

    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before
