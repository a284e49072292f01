from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf_writer import llama_tensors, llama_values, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localfast.errors import BadModelFile
from localfast.models.gguf import read_facts, read_header, shard_paths


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    tokens = {
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "hello", "<|im_start|>"],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "main",
        "tokenizer.chat_template.tool_use": "tools",
    }
    return write_gguf(tmp_path / "tiny.gguf", {**llama_values(), **tokens}, llama_tensors())


def reason(path: Path) -> str:
    with pytest.raises(BadModelFile) as caught:
        read_facts(path)
    return caught.value.reason


def test_facts_count_weights_per_layer_input_and_tied_output(tiny: Path) -> None:
    facts = read_facts(tiny)
    embeddings, norm = 256 * 1000 // 32 * 34, 256 * 4
    assert facts.layers == 2 and facts.quant == "Q4_K" and facts.parameters == 256 * 1000 + 256 + 2 * (256 * 256 + 256 * 512)
    assert [layer.weight_bytes for layer in facts.per_layer] == [(256 * 256 + 256 * 512) // 256 * 144] * 2
    assert facts.input_bytes == embeddings and facts.output_bytes == embeddings + norm and facts.tied_embeddings
    assert facts.weight_bytes == embeddings + norm + sum(layer.weight_bytes for layer in facts.per_layer)
    assert facts.size_bytes == tiny.stat().st_size and facts.vocabulary == 1000


def test_facts_know_what_a_chat_template_needs(tiny: Path) -> None:
    facts = read_facts(tiny)
    assert facts.has_chat_template and facts.chat_template == "main" and facts.chat_template_variants == (("tool_use", "tools"),)
    assert (facts.bos_token, facts.eos_token, facts.bos_id, facts.eos_id, facts.add_bos) == ("<s>", "</s>", 1, 2, True)
    assert facts.control_tokens == {"<s>", "</s>", "<|im_start|>"}


def test_header_keeps_no_vocabulary(tiny: Path) -> None:
    header = read_header(tiny)
    assert "tokenizer.ggml.tokens" not in header.values and header.token_count == 5
    assert header.token_text(1) == "<s>" and header.token_text(3) == "" and header.token_text(None) == ""


def test_quant_label_is_the_files_only_where_tensors_agree(tmp_path: Path) -> None:
    for number, (type_name, expected) in enumerate([("Q4_K", "Q4_K_M"), ("Q8_0", "Q8_0")]):
        values = llama_values(general__file_type=15)
        assert read_facts(write_gguf(tmp_path / f"{number}.gguf", values, llama_tensors(type_name=type_name))).quant == expected


@pytest.mark.parametrize(
    ("arch", "more", "windowed"),
    [
        ("gemma3", {}, [True] * 5 + [False]),
        ("gemma3", {"attention.sliding_window_pattern": 2}, [True, False] * 3),
        (
            "gemma3",
            {"attention.sliding_window_pattern": [True, True, False, True, False, False]},
            [True, True, False, True, False, False],
        ),
        ("smallthinker", {}, [False, True, True, True, False, True]),
        ("phi3", {}, [False] * 6),
        ("unheard-of", {}, [False] * 6),
    ],
)
def test_facts_windowed_layers_follow_the_architecture(
    tmp_path: Path, arch: str, more: dict[str, object], windowed: list[bool]
) -> None:
    values = {key.replace("llama.", f"{arch}."): value for key, value in llama_values(6).items()}
    values |= {"general.architecture": arch, f"{arch}.attention.sliding_window": 512}
    values |= {f"{arch}.{key}": value for key, value in more.items()}
    facts = read_facts(write_gguf(tmp_path / "m.gguf", values, llama_tensors(6)))
    assert [layer.windowed for layer in facts.per_layer] == windowed
    assert facts.sliding_window == (512 if any(windowed) else 0)


@pytest.mark.parametrize(
    ("arch", "more", "cached", "stateful"),
    [
        ("qwen3next", {}, [0, 0, 0, 1], [1, 1, 1, 0]),
        ("jamba", {"attention.head_count_kv": [0, 0, 2, 0]}, [0, 0, 1, 0], [1, 1, 0, 1]),
        ("mamba2", {}, [0] * 4, [1] * 4),
        ("gemma4", {"attention.shared_kv_layers": 2}, [1, 1, 0, 0], [0] * 4),
        ("deepseek2", {"nextn_predict_layers": 1}, [1, 1, 1, 0], [0] * 4),
        ("bert", {}, [0] * 4, [0] * 4),
    ],
)
def test_facts_only_layers_with_own_attention_cache(
    tmp_path: Path, arch: str, more: dict[str, object], cached: list[int], stateful: list[int]
) -> None:
    values = {key.replace("llama.", f"{arch}."): value for key, value in llama_values(4).items()}
    values["general.architecture"] = arch
    if any(stateful):
        values |= {f"{arch}.ssm.conv_kernel": 4, f"{arch}.ssm.inner_size": 512, f"{arch}.ssm.state_size": 16}
    values |= {f"{arch}.{key}": value for key, value in more.items()}
    facts = read_facts(write_gguf(tmp_path / "m.gguf", values, llama_tensors(4)))
    assert [int(layer.key_width > 0) for layer in facts.per_layer] == cached
    assert [int(layer.state_elements > 0) for layer in facts.per_layer] == stateful
    assert {layer.state_elements for layer in facts.per_layer} <= {0, 3 * 512 + 16 * 512}


def test_facts_latent_attention_caches_keys_only(tmp_path: Path) -> None:
    latent = {
        "attention.head_count_kv": 1,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "attention.key_length_mla": 192,
    }
    values = {key.replace("llama.", "deepseek2."): value for key, value in llama_values().items()}
    values |= {"general.architecture": "deepseek2", **{f"deepseek2.{key}": value for key, value in latent.items()}}
    layer = read_facts(write_gguf(tmp_path / "m.gguf", values, llama_tensors())).per_layer[0]
    assert (layer.key_width, layer.value_width) == (576, 0)


def test_facts_of_a_split_model_count_all_parts(tmp_path: Path) -> None:
    tensors = llama_tensors()
    for number, part in enumerate((tensors[:3], tensors[3:])):
        values = {
            **(llama_values() if number == 0 else {}),
            "split.no": number,
            "split.count": 2,
            "split.tensors.count": len(tensors),
        }
        write_gguf(tmp_path / f"m-0000{number + 1}-of-00002.gguf", values, part)
    whole = read_facts(write_gguf(tmp_path / "whole.gguf", llama_values(), tensors))
    facts = read_facts(tmp_path / "m-00002-of-00002.gguf")
    assert facts.per_layer == whole.per_layer and facts.parameters == whole.parameters
    assert [path.name for path in shard_paths(facts.path)] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    assert "part 2 of 2 is missing" in reason(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"PK\x03\x04" + bytes(40), "letters GGUF"),
        (b"GG", "letters GGUF"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version 1"),
        (struct.pack("<4sIQQ", b"GGUF", 9, 0, 0), "version 9"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 0), "tensors"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1), "truncated"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**62), "claims"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 4000), "truncated"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"a", 9, 4, 2**50), "items"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"a", 9, 9, 4), "item type 9"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"a", 77), "type 77"),
        (struct.pack("<4sIQQQ1sI4Q", b"GGUF", 3, 1, 0, 1, b"t", 9, 1, 1, 1, 1), "9 dimensions"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 2**40, 0, 0), "impossible dimensions"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 32, 31, 0), "removed"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 32, 0, 2**50), "truncated"),
    ],
)
def test_header_hostile_or_foreign_file_is_refused_in_plain_words(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    assert words in reason(path)


def test_header_missing_file_is_a_bad_model_file(tmp_path: Path) -> None:
    assert "No such file" in reason(tmp_path / "none.gguf")


def test_header_cut_weights_are_truncated(tiny: Path) -> None:
    with tiny.open("r+b") as file:
        file.truncate(tiny.stat().st_size - 64)
    assert "truncated" in reason(tiny)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"general.architecture": "clip"}, "projector"),
        ({"general.architecture": "llama", "general.type": "adapter"}, "LoRA"),
        ({}, "architecture"),
        ({"general.architecture": "llama"}, "0 layers"),
        (llama_values(2**31), "layers"),
        (llama_values(llama__embedding_length="wide"), "sensible count"),
    ],
)
def test_facts_of_what_is_no_model_are_refused(tmp_path: Path, values: dict[str, object], words: str) -> None:
    assert words in reason(write_gguf(tmp_path / "m.gguf", values, llama_tensors()))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(at=st.integers(0, 900), byte=st.integers(0, 255), cut=st.none() | st.integers(0, 900))
def test_header_any_damage_ends_in_facts_or_a_bad_model_file(tiny: Path, at: int, byte: int, cut: int | None) -> None:
    content = bytearray(tiny.read_bytes())
    content[at] = byte
    damaged = tiny.with_name("damaged.gguf")
    damaged.write_bytes(content[:cut])
    try:
        assert read_facts(damaged).layers >= 1
    except BadModelFile as error:
        assert error.reason
