"""verify, prune and update, through the command line, against a real folder and a hub of our own."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_hub import FakeHub, HubFile
from gguf_writer import llama_tensors, llama_values, write_gguf

from localfast.cli import cli
from localfast.cli.prune import surplus
from localfast.models.catalog import InstalledModel, ModelFile, Store, load_catalog
from localfast.settings import load_settings

STARTER = "smollm2-135m"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def answer(*arguments: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return content


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    return write_gguf(tmp_path / "tiny.gguf", llama_values(), llama_tensors()).read_bytes()


@pytest.fixture
def hub(fake_hub: FakeHub, content: bytes, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """Offers org/tiny in two quants; both are pulled."""
    fake_hub.add("org/tiny", **{"tiny-Q4_K_M": content, "tiny-Q8_0": content + b"\0"})
    monkeypatch.setenv("LOCALFAST_HF_ENDPOINT", fake_hub.endpoint)
    assert run("pull", "org/tiny:Q4_K_M").exit_code == run("pull", "org/tiny:Q8_0").exit_code == 0
    return fake_hub


def stored(name: str) -> InstalledModel:
    model = Store(load_settings()).find(name)
    assert model is not None
    return model


def put(name: str, size_bytes: int, used_at: int) -> InstalledModel:
    store = Store(load_settings())
    folder = store.partial(name, "Q8_0")
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(bytes(size_bytes))
    files = (ModelFile("m.gguf", size_bytes),)
    model = store.add(InstalledModel(name=name, quant="Q8_0", source="x", files=files, folder=folder))
    os.utime(model.path, (used_at, used_at))
    return model


def installed() -> list[str]:
    return [str(model) for model in Store(load_settings()).installed()]


# --- verify -------------------------------------------------------------------------------------------------------------------


def test_verify_says_that_all_is_well(hub: FakeHub) -> None:
    result = run("verify")

    assert result.exit_code == 0
    assert [line.split() for line in result.stdout.splitlines()] == [["ok", "org/tiny:Q8_0"], ["ok", "org/tiny:Q4_K_M"]]


def test_verify_finds_one_flipped_bit_and_a_pull_makes_it_well(hub: FakeHub) -> None:
    path = stored("org/tiny:Q8_0").path
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)

    result = run("verify", "org/tiny:Q8_0")

    assert result.exit_code == 1
    assert "damaged  org/tiny:Q8_0: tiny-Q8_0.gguf has sha256" in result.stdout
    assert "fetch it again: localfast pull org/tiny:Q8_0" in result.stdout
    assert installed() == ["org/tiny:Q4_K_M"], "nobody is served a damaged model"
    assert run("verify").exit_code == 1, "it is still named"
    assert run("pull", "org/tiny:Q8_0").exit_code == 0
    assert run("verify").exit_code == 0 and len(installed()) == 2


def test_verify_names_what_is_missing_or_cut(hub: FakeHub) -> None:
    stored("org/tiny:Q8_0").path.unlink()
    cut = stored("org/tiny:Q4_K_M").path
    cut.write_bytes(cut.read_bytes()[:-1])

    models = {model["quant"]: model for model in answer("verify")["models"]}

    assert {model["status"] for model in models.values()} == {"damaged"}
    assert "cannot be read" in models["Q8_0"]["reason"] and "bytes instead of" in models["Q4_K_M"]["reason"]
    assert models["Q8_0"]["next_step"].endswith("localfast pull org/tiny:Q8_0")


def test_verify_puts_a_model_back_that_is_sound_again(hub: FakeHub) -> None:
    model = stored("org/tiny:Q8_0")
    whole = model.path.read_bytes()
    model.path.write_bytes(b"GGUF" + bytes(len(whole) - 4))
    run("verify")
    model.path.write_bytes(whole)

    assert run("verify", "org/tiny:Q8_0").exit_code == 0
    assert str(model) in installed()


def test_verify_knows_the_hash_of_what_ollama_has_and_says_where_none_is_known(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, digest = tmp_path / "ollama", hashlib.sha256(content).hexdigest()
    manifest, blob = root / "manifests" / "r" / "library" / "m" / "1b", root / "blobs" / f"sha256-{digest}"
    for path in (manifest, blob):
        path.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    blob.write_bytes(content[:-1] + b"!")
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "own-Q8_0.gguf").write_bytes(content)
    monkeypatch.setenv("LOCALFAST_MODELS_DIR", f"{root},{plain}")

    result = run("verify")

    assert result.exit_code == 1
    assert "damaged  m-1b: " in result.stdout and "belongs to Ollama: fetch it again there" in result.stdout
    assert "unknown  own:Q8_0: no hash is known" in result.stdout
    assert installed() == ["m-1b", "own:Q8_0"], "what is not ours is not marked"
    assert run("verify", "own").exit_code == 0


def test_verify_without_models_says_so() -> None:
    assert run("verify").stdout == "there is no model to verify\n"
    assert run("verify", "nobody").exit_code == 1


# --- prune --------------------------------------------------------------------------------------------------------------------


def test_prune_removes_what_was_unused_for_longest_until_the_rest_fits() -> None:
    for number, name in enumerate(("b", "a", "d", "c")):
        put(name, 1000, 1_000_000 + number)
    Store(load_settings()).touch(stored("b"))

    planned = answer("prune", "--keep", "2.5kB", "--dry-run")
    assert [model["name"] for model in planned["removed"]] == ["a", "d"] and len(installed()) == 4
    result = run("prune", "--keep", "2.5kB")

    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "removed a:Q8_0: 1 kB"
    assert result.stdout.splitlines()[-1] == "2 kB freed; the models take 2 kB"
    assert installed() == ["b:Q8_0", "c:Q8_0"]
    assert planned["freed_bytes"] == planned["models_bytes"] == 2000


def test_prune_keeps_the_model_used_last_whatever_its_size() -> None:
    put("old", 1000, 1_000_000)
    put("new", 5000, 2_000_000)

    assert answer("prune", "--keep", "0GB")["models_bytes"] == 5000
    assert installed() == ["new:Q8_0"]


def test_prune_without_a_size_clears_leftovers_only() -> None:
    model = put("a", 1000, 1_000_000)
    partial = model.folder.parents[1] / ".partial"
    for name in ("trash-b-Q8_0-1", "c--Q8_0", "fresh--Q8_0"):
        (partial / name).mkdir(parents=True)
        (partial / name / "part").write_bytes(bytes(500))
    for path in (partial / "c--Q8_0" / "part", partial / "c--Q8_0"):
        os.utime(path, (1_000_000, 1_000_000))

    assert "would remove what unfinished downloads left: 1 kB" in run("prune", "--dry-run").stdout
    assert "1 kB freed" in run("prune").stdout
    assert installed() == ["a:Q8_0"] and [path.name for path in partial.iterdir()] == ["fresh--Q8_0"]
    assert answer("prune")["freed_bytes"] == 0


def test_prune_counts_and_removes_only_what_localfast_fetched(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALFAST_MODELS_DIR", str(tmp_path))
    assert installed() == ["tiny"]

    assert answer("prune", "--keep", "0GB")["removed"] == []
    assert installed() == ["tiny"]


def test_prune_refuses_what_is_no_size() -> None:
    put("a", 1000, 1_000_000)
    put("b", 1000, 2_000_000)
    for text in ("50", "-1GB", "half", "1e9GB"):
        result = run("prune", "--keep", text)
        assert result.exit_code == 1 and "is not a size; write it as 50GB" in result.stderr
    assert len(installed()) == 2


@pytest.mark.parametrize(
    ("keep_bytes", "names"), [(600, []), (599, ["a"]), (500, ["a"]), (499, ["a", "b"]), (300, ["a", "b"]), (0, ["a", "b"])]
)
def test_prune_surplus_is_as_little_as_needed(keep_bytes: int, names: list[str]) -> None:
    models = [
        InstalledModel(name=name, quant="", source="x", files=(ModelFile("m", size_bytes),), folder=Path())
        for name, size_bytes in (("a", 100), ("b", 200), ("c", 300))
    ]
    assert [model.name for model in surplus(models, keep_bytes)] == names
    assert surplus([], keep_bytes) == []


# --- update -------------------------------------------------------------------------------------------------------------------


def test_update_fetches_what_changed_and_leaves_the_rest(hub: FakeHub, content: bytes) -> None:
    hub.repos["org/tiny"].files["tiny-Q8_0.gguf"] = HubFile(content + b"\1")

    planned = run("update", "--dry-run")
    assert planned.exit_code == 0
    assert "changed  org/tiny:Q8_0: tiny-Q8_0.gguf changed, sha256" in planned.stdout
    assert "current  org/tiny:Q4_K_M: nothing has changed" in planned.stdout
    assert stored("org/tiny:Q8_0").path.read_bytes()[-1:] == b"\0", "a model stays as it is until it is updated"
    result = run("update")

    assert result.exit_code == 0 and "updated  org/tiny:Q8_0" in result.stdout
    assert stored("org/tiny:Q8_0").path.read_bytes() == content + b"\1"
    assert stored("org/tiny:Q8_0").sha256 == hashlib.sha256(content + b"\1").hexdigest()
    assert not list(stored("org/tiny").folder.parents[1].glob(".partial/*"))
    assert {model["status"] for model in answer("update")["models"]} == {"current"}


def test_update_that_fails_leaves_the_old_one_and_goes_on_with_the_others(hub: FakeHub, content: bytes) -> None:
    hub.repos["org/tiny"].files["tiny-Q8_0.gguf"] = HubFile(content + b"\1", served=content + b"\2")
    hub.repos["org/tiny"].files["tiny-Q4_K_M.gguf"] = HubFile(content + b"\3")

    result = run("update")

    assert result.exit_code == 1
    assert "failed   org/tiny:Q8_0" in result.stdout and "what is here stays" in result.stdout
    assert stored("org/tiny:Q8_0").path.read_bytes() == content + b"\0"
    assert stored("org/tiny:Q4_K_M").path.read_bytes() == content + b"\3"
    assert run("verify").exit_code == 0


def test_update_keeps_what_its_source_no_longer_has(hub: FakeHub) -> None:
    del hub.repos["org/tiny"].files["tiny-Q8_0.gguf"]

    result = run("update", "org/tiny:Q8_0")

    assert result.exit_code == 0 and "gone     org/tiny:Q8_0" in result.stdout
    assert "org/tiny:Q8_0" in installed()


def test_update_of_a_pinned_model_asks_nobody(clean_environ: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALFAST_HF_ENDPOINT", "http://127.0.0.1:9")
    entry = load_catalog().find(STARTER)
    assert entry is not None
    folder = clean_environ / "models" / STARTER / "Q4_1"
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(b"GGUF")
    files = [{"name": "m.gguf", "size_bytes": 4, "sha256": entry.quants["Q4_1"].sha256}]
    record = {"name": STARTER, "quant": "Q4_1", "source": entry.source, "files": files}
    (folder / "model.json").write_text(json.dumps(record))

    result = run("update")

    assert result.exit_code == 0
    assert result.stdout == f"pinned   {STARTER}:Q4_1: the catalog names this very file, nothing to do\n"


def test_update_refuses_what_another_program_has(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALFAST_MODELS_DIR", str(tmp_path))

    result = run("update", "tiny")

    assert result.exit_code == 1 and "belongs to a folder of yours, which must update it" in result.stderr
    assert run("update").stdout == "no model was pulled yet, so there is nothing to update\n"


def test_update_offline_fails_with_the_way_out(hub: FakeHub) -> None:
    result = run("update", "--offline")

    assert result.exit_code == 1 and "LOCALFAST_OFFLINE=0" in result.stderr
