"""The models folder, and how it and what others have are one list of models."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localfast.errors import BadModelFile, InvalidRequest, LocalfastError
from localfast.models.catalog import InstalledModel, ModelFile, Store, load_catalog, model_at, parse_size, shard_names
from localfast.models.store import using
from localfast.settings import Settings


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Settings(home=str(tmp_path / "home")))


def put(store: Store, name: str, quant: str, pulled_at: str = "2026-01-01") -> InstalledModel:
    folder = store.partial(name, quant)
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(b"GGUF" + quant.encode())
    files = (ModelFile("m.gguf", 4 + len(quant), "00"),)
    return store.add(InstalledModel(name=name, quant=quant, source="x", files=files, folder=folder, pulled_at=pulled_at))


def test_store_finds_what_was_added(store: Store) -> None:
    assert store.installed() == [] and store.find("qwen3-8b") is None
    small, large = put(store, "qwen3-8b", "Q4_K_M", "2026-01-01"), put(store, "qwen3-8b", "UD-Q6_K", "2026-02-01")
    other = put(store, "Org/Repo-GGUF", "F16")

    assert store.installed() == [other, large, small]
    assert store.find("QWEN3-8b:latest") == large, "without a quant: the newest"
    assert store.find("qwen3-8b:q4_k_m") == small and store.find("qwen3-8b:Q8_0") is None
    assert store.find("qwen3-8b:q6_k") == large, "a dynamic quant answers to its plain name"
    assert store.find("org/repo-gguf") == store.find(str(other)) == other
    assert store.find(str(small.path)) == small and store.find("m.gguf") is not None
    assert small.path.read_bytes() == b"GGUFQ4_K_M"


def test_store_add_replaces_an_older_one(store: Store) -> None:
    put(store, "qwen3-8b", "Q8_0", "2026-01-01")
    assert put(store, "qwen3-8b", "Q8_0", "2026-02-01").pulled_at == "2026-02-01"
    assert len(store.installed()) == 1


def test_store_remove_deletes_only_that_model(store: Store) -> None:
    first, second = put(store, "qwen3-8b", "Q8_0"), put(store, "qwen3-8b", "F16")
    store.remove(first)
    assert store.installed() == [second]
    store.remove(second)
    assert list(store.root.glob("[!.]*")) == [] and list(store.root.glob(".partial/*")) == []


def test_store_remove_leaves_foreign_files_alone(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "mine-Q4_0.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(InvalidRequest):
        store.remove(model_at(path))
    assert path.exists()


@pytest.mark.parametrize(
    "damage",
    [
        {},
        [],
        "text",
        {"files": [{"name": "m.gguf", "size_bytes": 5}]},
        {"files": []},
        {"files": [{"name": "../m.gguf", "size_bytes": 8}]},
        {"name": "../../x"},
        {"name": 7},
        {"surprise": 1},
    ],
)
def test_store_leaves_damaged_models_out(store: Store, damage: object) -> None:
    whole, broken = put(store, "qwen3-8b", "Q8_0"), put(store, "broken", "Q8_0")
    record = broken.folder / "model.json"
    content = json.loads(record.read_text()) | damage if isinstance(damage, dict) and damage else damage
    record.write_text(json.dumps(content))
    assert store.installed() == [whole]


def test_store_leaves_half_made_models_out(store: Store) -> None:
    whole, cut, empty = (put(store, name, "Q8_0") for name in ("whole", "cut", "empty"))
    cut.path.write_bytes(b"GG")
    empty.path.unlink()
    (store.root / "nothing" / "Q8_0").mkdir(parents=True)
    (store.root / "stray.txt").write_text("?")
    (whole.folder.parent / "Q4_0").mkdir()
    (whole.folder.parent / "Q4_0" / "model.json").write_bytes(b"\xff{")
    assert store.installed() == [whole]


@pytest.mark.parametrize("text", ["../secret.gguf", "/etc/secret.gguf", "nobody"])
def test_store_find_never_leaves_the_store(store: Store, text: str) -> None:
    put(store, "qwen3-8b", "Q8_0")
    (store.root / "secret.gguf").write_bytes(b"GGUF")
    assert store.find(text) is None


def test_installed_model_at_takes_all_shards_and_misses_none(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in shard_names("big-Q4_K_M-00001-of-00002.gguf")]
    paths[1].write_bytes(b"GGUF....")
    with pytest.raises(BadModelFile, match="1 of 2 shards"):
        model_at(paths[1])
    paths[0].write_bytes(b"GGUF")

    model = model_at(paths[1])
    assert (model.path, model.size_bytes, model.quant) == (paths[0], 12, "Q4_K_M")
    with pytest.raises(LocalfastError):
        model_at(tmp_path / "none.gguf")


# --- what others have ---------------------------------------------------------------------------------------------------------

REPOSITORY = "bartowski/Llama-3.2-1B-Instruct-GGUF"


@pytest.fixture
def shared(tmp_path: Path) -> Store:
    """A store whose user has other programs."""
    return Store(Settings(home=str(tmp_path / "home")), tmp_path / "user")


def cached(tmp_path: Path, repository: str, file: str, content: bytes = b"GGUF") -> Path:
    """A file in the Hugging Face cache; the link that programs open."""
    folder = tmp_path / "user" / ".cache" / "huggingface" / "hub" / f"models--{repository.replace('/', '--')}"
    blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
    link = folder / "snapshots" / "c0ffee" / file
    for path in (blob, link):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    link.symlink_to(blob)
    return link


def ollama(tmp_path: Path, name: str, tag: str, content: bytes = b"GGUF") -> Path:
    root = tmp_path / "user" / ".ollama" / "models"
    digest = hashlib.sha256(content).hexdigest()
    manifest = root / "manifests" / "registry" / "library" / name / tag
    blob = root / "blobs" / f"sha256-{digest}"
    for path in (manifest, blob):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": len(content)}
    manifest.write_text(json.dumps({"layers": [layer]}))
    return blob


def test_store_lists_its_own_first_then_what_others_have(shared: Store, tmp_path: Path) -> None:
    link = cached(tmp_path, REPOSITORY, "Llama-3.2-1B-Instruct-Q4_K_M.gguf")
    own = put(shared, "smollm2-135m", "Q4_1")

    assert [str(model) for model in shared.installed()] == [str(own), f"{REPOSITORY}:Q4_K_M"]
    found = shared.installed()[1]
    assert (found.path, found.removable, found.source) == (link, False, f"huggingface-cache:{REPOSITORY}")


def test_store_finds_a_catalog_model_that_another_program_has(shared: Store, tmp_path: Path) -> None:
    cached(tmp_path, REPOSITORY, "Llama-3.2-1B-Instruct-Q8_0.gguf", b"GGUF8")
    entry = load_catalog().find("llama3.2-1b")
    assert entry is not None

    eight = shared.find("llama3.2-1b")
    assert eight is not None and eight.quant == "Q8_0" and eight.licence == entry.licence
    assert eight in shared.installed()
    cached(tmp_path, REPOSITORY, f"Llama-3.2-1B-Instruct-{entry.default_quant}.gguf", b"GGUF4")
    four = shared.find("llama3.2-1b")
    assert four is not None and four.quant == entry.default_quant, "the quant that a pull would fetch goes first"
    assert shared.find("llama3.2-1b:Q8_0") == shared.find(f"{REPOSITORY}:Q8_0") == eight


def test_store_model_is_never_hidden_by_a_found_one(shared: Store, tmp_path: Path) -> None:
    own = put(shared, REPOSITORY, "Q4_K_M")
    cached(tmp_path, REPOSITORY, "Llama-3.2-1B-Instruct-Q4_K_M.gguf", b"GGUF, another revision")

    assert shared.installed() == [own]
    assert shared.find(REPOSITORY) == shared.find("llama3.2-1b") == own


def test_store_lists_content_once_and_finds_it_by_every_name(shared: Store, tmp_path: Path) -> None:
    content = b"GGUF the same"
    folder = shared.partial("llama3.2-1b", "Q4_K_M")
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(content)
    files = (ModelFile("m.gguf", len(content), hashlib.sha256(content).hexdigest()),)
    own = shared.add(InstalledModel(name="llama3.2-1b", quant="Q4_K_M", source="hf:x/y", files=files, folder=folder))
    cached(tmp_path, "someone/else-GGUF", "m-Q4_K_M.gguf", content)
    ollama(tmp_path, "llama", "1b", content)

    assert shared.installed() == [own]
    assert shared.find("someone/else-GGUF") == shared.find("llama:1b") == shared.find("llama3.2-1b") == own


def test_store_finds_ollamas_models_by_the_names_they_have_there(shared: Store, tmp_path: Path) -> None:
    ollama(tmp_path, "qwen3", "0.6b", b"GGUF small")
    ollama(tmp_path, "tiny", "latest", b"GGUF tiny")

    assert [str(model) for model in shared.installed()] == ["ollama/qwen3-0.6b", "tiny"], "the catalog's qwen3-0.6b is another"
    assert shared.find("qwen3:0.6b") == shared.find("ollama/qwen3-0.6b") == shared.installed()[0]
    assert shared.find("qwen3-0.6b") is None
    assert shared.find("tiny") == shared.find("tiny:latest") == shared.installed()[1]


def test_store_takes_a_file_of_the_users_for_the_catalogs_only_if_it_is_that_file(tmp_path: Path) -> None:
    entry = next(entry for entry in load_catalog().entries if entry.repo and entry.quants[entry.default_quant].size_bytes)
    size_bytes = entry.quants[entry.default_quant].size_bytes
    assert size_bytes is not None
    folder = tmp_path / "mine"
    folder.mkdir()
    path = folder / f"{entry.name}-{entry.default_quant}.gguf"
    path.write_bytes(b"GGUF")
    store = Store(Settings(home=str(tmp_path / "home"), models_dir=(str(folder),), reuse=False))

    assert store.find(entry.name) is None and store.find(f"folder/{entry.name}") is not None
    with path.open("r+b") as file:
        file.truncate(size_bytes)
    found = store.find(entry.name)
    assert found is not None and (found.name, found.path) == (entry.name, path)


def test_store_find_takes_a_bare_file_name_for_its_own_only(shared: Store, tmp_path: Path) -> None:
    link = cached(tmp_path, REPOSITORY, "foreign-Q4_0.gguf")

    assert shared.find("foreign-Q4_0.gguf") is None, "the user may mean a file in the folder they stand in"
    assert shared.find(str(link)) is not None


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda path: cached(path, "a/b", "m.gguf"), "Hugging Face cache"), (lambda path: ollama(path, "m", "1b"), "Ollama")],
)
def test_store_refuses_to_remove_what_others_have(shared: Store, tmp_path: Path, make: object, words: str) -> None:
    path = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(InvalidRequest, match=words):
        shared.remove(shared.installed()[0])
    assert path.exists()


# --- in use, and in order -----------------------------------------------------------------------------------------------------


def test_store_refuses_to_remove_what_a_program_has_loaded(store: Store) -> None:
    model = put(store, "qwen3-8b", "Q8_0")
    code = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); f.close()"
    command = [sys.executable, "-c", f"{code}; print(1, flush=True); input()", str(model.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stdout.readline()
        with pytest.raises(InvalidRequest, match=r"is loaded by|something is using it"):
            store.remove(model)
        assert store.installed() == [model]
        program.communicate(b"\n")
    store.remove(model)
    assert store.installed() == []


def test_store_using_does_not_mean_this_very_process(store: Store) -> None:
    model = put(store, "qwen3-8b", "Q8_0")
    with model.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert using(model) is None


def test_store_orders_models_by_last_use(store: Store) -> None:
    old, new = put(store, "old", "Q8_0", "2026-01-01T00:00:00+00:00"), put(store, "new", "Q8_0", "2026-01-02T00:00:00+00:00")
    for model in (old, new):
        os.utime(model.path, (1, 1))
    assert store.last_used(old) < store.last_used(new)
    store.touch(old)
    assert store.last_used(old) > store.last_used(new)
    assert store.installed() == [new, old], "a note of use is no damage"


def test_store_touch_writes_nothing_for_others(shared: Store, tmp_path: Path) -> None:
    link = cached(tmp_path, REPOSITORY, "m-Q4_0.gguf")
    shared.touch(shared.installed()[0])
    assert [path.name for path in link.parent.iterdir()] == [link.name]


def test_store_takes_a_damaged_model_out_until_it_is_replaced_or_sound(store: Store) -> None:
    model = put(store, "qwen3-8b", "Q8_0")
    store.mark(model, damaged=True)
    assert store.installed() == [] and store.find("qwen3-8b") is None and store.recorded() == [model]
    store.mark(model, damaged=False)
    assert store.installed() == [model]
    store.mark(model, damaged=True)
    put(store, "qwen3-8b", "Q8_0")
    assert store.installed() == [model]


def test_store_add_keeps_the_old_one_when_the_new_one_cannot_be_moved(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    old = put(store, "qwen3-8b", "Q8_0", "2026-01-01")
    move = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "qwen3-8b--Q8_0":
            raise OSError("no")
        return move(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        put(store, "qwen3-8b", "Q8_0", "2026-02-01")
    assert store.installed() == [old]


def test_store_sweeps_trash_and_old_parts_but_not_what_is_being_made(store: Store) -> None:
    put(store, "qwen3-8b", "Q8_0")
    partial = store.root / ".partial"
    for name in ("trash-a-b-1", "old--Q8_0", "new--Q8_0", "busy--Q8_0"):
        (partial / name).mkdir(parents=True)
        (partial / name / "part").write_bytes(b"GGUF")
    for name in ("old--Q8_0", "busy--Q8_0"):
        for path in (partial / name / "part", partial / name):
            os.utime(path, (1, 1))
    lock = store.lock("busy", "Q8_0")
    lock.parent.mkdir(parents=True)
    code = "import sys, filelock\nwith filelock.FileLock(sys.argv[1]):\n print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stdout.readline()
        leftovers = list(store.leftovers(3600))
        assert [path.name for path in leftovers] == ["busy--Q8_0", "old--Q8_0", "trash-a-b-1"]
        assert [store.sweep(path) for path in leftovers] == [False, True, True]
        program.communicate(b"\n")
    assert sorted(path.name for path in partial.iterdir()) == ["busy--Q8_0", "new--Q8_0"]


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("50GB", 50 * 10**9), ("1.5 tb", 1_500 * 10**9), ("512MiB", 512 * 2**20), (" 3KiB ", 3072), ("0GB", 0), ("2kb", 2000)],
)
def test_parse_size_reads_what_people_write(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "50", "GB", "-1GB", "1e3GB", "50 G B", "nanGB", "1,5GB", "9" * 400 + "GB", "50PB", "５GB"])
def test_parse_size_refuses_in_words(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a size; write it as 50GB"):
        parse_size(text)


@given(st.text(max_size=20))
def test_parse_size_never_crashes(text: str) -> None:
    with contextlib.suppress(InvalidRequest):
        assert parse_size(text) >= 0
