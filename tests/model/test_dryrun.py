"""Dry runs of the real engine: from a header alone, against what the real engine then takes."""

from __future__ import annotations

import asyncio
import ctypes
import struct
from dataclasses import replace
from pathlib import Path

import gguf_writer
import pytest
from gguf_writer import llama_tensors, llama_values, write_gguf
from real_engine import running, starter_config
from tiny_models import KINDS, Kind, tiny_model

from localfast.engine.messages import EngineConfig
from localfast.footprint import MIB, RAM, Shape
from localfast.measure import DryRuns, HeaderSource, Measurement, Shard, compare, key_of
from localfast.models.gguf import read_facts

pytestmark = pytest.mark.model

SHAPE = Shape(gpu_layers=0, cells=2048, slots=4, ubatch_tokens=128)
SHAPES = (
    SHAPE,
    Shape(gpu_layers=0, cells=16384, slots=1, ubatch_tokens=512, kv_type="q8_0"),
)
FILE_TYPES = {"Q8_0": 7, "Q2_K": 10}
MOE = "qwen3moe"


def measure(path: Path, folder: Path, *shapes: Shape) -> Measurement:
    return DryRuns(folder / "answers", timeout_s=60).measure(HeaderSource.on_disk(path), read_facts(path), shapes)


def header_only(path: Path, folder: Path) -> HeaderSource:
    (shard,) = HeaderSource.on_disk(path).shards
    header = folder / "header"
    with path.open("rb") as file:
        header.write_bytes(file.read(shard.header_bytes))
    return HeaderSource((Shard(path.name, header, shard.header_bytes, shard.size_bytes),))


def real_buffers(path: Path, shape: Shape, folder: Path) -> tuple[tuple[str, str, int], ...]:
    """What the engine says it took. Weights are read, not mapped: of a mapped file the log tells the range only."""
    config = replace(
        starter_config(path, folder),
        context_tokens=shape.cells,
        cells=shape.cells,
        slots=shape.slots,
        batch_tokens=shape.ubatch_tokens,
        ubatch_tokens=shape.ubatch_tokens,
        kv_type=shape.kv_type,
        use_mmap=False,
    )
    return asyncio.run(load_and_ask(config))


async def load_and_ask(config: EngineConfig) -> tuple[tuple[str, str, int], ...]:
    async with running(config) as engine:
        return engine.facts.buffers


def quantized(source: Path, quant: str, folder: Path) -> Path:
    from localfast.engine.llama import bindings

    silent = bindings.llama_log_callback(lambda *_: None)
    bindings.llama_log_set(silent, ctypes.c_void_p(0))
    params = bindings.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = FILE_TYPES[quant], True, 2
    target = folder / f"{quant}.gguf"
    failed = bindings.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    bindings.llama_log_set(ctypes.cast(None, bindings.llama_log_callback), ctypes.c_void_p(0))
    assert not failed
    return target


@pytest.mark.parametrize("quant", ["", *FILE_TYPES])
def test_dryrun_of_a_header_is_what_a_real_load_takes(starter_path: Path, tmp_path: Path, quant: str) -> None:
    path = quantized(starter_path, quant, tmp_path) if quant else starter_path
    facts = read_facts(path)
    found = DryRuns(tmp_path / "answers", timeout_s=60).measure(header_only(path, tmp_path), facts, SHAPES)
    assert found.reason == ""
    for shape in SHAPES[1:] if quant else SHAPES:
        lines = {line.label: line for line in compare(found.parts[key_of(shape, ())], real_buffers(path, shape, tmp_path)).lines}
        assert lines.keys() == {"model", "chat memory", "work space"}
        assert abs(lines["chat memory"].planned_bytes - lines["chat memory"].real_bytes) <= MIB
        assert abs(lines["model"].error) <= 0.02
        assert abs(lines["work space"].error) <= 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_dryrun_of_each_kind_of_memory_is_what_a_real_load_takes(kind: Kind, tmp_path: Path) -> None:
    path = tiny_model(kind, tmp_path)
    found = measure(path, tmp_path, SHAPE)
    assert found.reason == ""
    for line in compare(found.parts[key_of(SHAPE, ())], real_buffers(path, SHAPE, tmp_path)).lines:
        assert abs(line.planned_bytes - line.real_bytes) <= 0.02 * MIB, line.sentence()


def test_dryrun_of_a_whole_file_and_of_its_header_agree(starter_path: Path, tmp_path: Path) -> None:
    facts = read_facts(starter_path)
    whole = measure(starter_path, tmp_path / "a", SHAPE)
    header = DryRuns(tmp_path / "b").measure(header_only(starter_path, tmp_path), facts, [SHAPE])
    assert whole.parts == header.parts
    assert whole.parts


def test_dryrun_loads_once_and_answers_in_the_order_asked(starter_path: Path, tmp_path: Path) -> None:
    shapes = [replace(SHAPE, cells=cells, gpu_layers=layers) for cells in (4096, 1024, 2048) for layers in (31, 0)]
    found = measure(starter_path, tmp_path, *shapes)
    taken = {shape.cells: part.size_bytes for (shape, _), parts in found.parts.items() for part in parts
             if part.label == "chat memory"}  # fmt: skip
    assert len(found.parts) == len(shapes)
    assert taken[4096] == 2 * taken[2048] == 4 * taken[1024]


class Encoded(bytes):
    """A value as the file holds it, of a type that gguf_writer does not write."""


def test_dryrun_of_a_split_model_reads_every_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gguf_writer._value
    monkeypatch.setattr(gguf_writer, "_value", lambda value: value if isinstance(value, Encoded) else plain(value))
    tensors = complete_llama()
    paths = []
    for number, part in enumerate((tensors[:3], tensors[3:])):
        values = llama_values(1, **SMALL) if number == 0 else {}
        split = {"split.no": u16(number), "split.count": u16(2), "split.tensors.count": i32(len(tensors))}
        path = tmp_path / f"small-{number + 1:05}-of-00002.gguf"
        paths.append(write_gguf(path, {"general.architecture": "llama", **values, **split}, part))
    facts = read_facts(paths[0])
    whole = HeaderSource.on_disk(paths[0])
    headers = []
    for shard in whole.shards:
        header = tmp_path / f"{shard.name}.header"
        header.write_bytes(shard.path.read_bytes()[: shard.header_bytes])
        headers.append(replace(shard, path=header))
    found = DryRuns(tmp_path / "answers").measure(HeaderSource(tuple(headers)), facts, [SHAPE])
    assert found.reason == ""
    (parts,) = found.parts.values()
    assert sum(part.size_bytes for part in parts if part.label == "model") == facts.weight_bytes


def u16(value: int) -> Encoded:
    return Encoded(struct.pack("<IH", 2, value))


def i32(value: int) -> Encoded:
    return Encoded(struct.pack("<Ii", 5, value))


SMALL: dict[str, object] = {
    "llama__attention__layer_norm_rms_epsilon": 1e-5,
    "llama__vocab_size": 1000,
    "tokenizer__ggml__model": "no_vocab",
}


def complete_llama() -> list[tuple[str, tuple[int, ...], str]]:
    more = [("attn_k", (256, 128)), ("attn_v", (256, 128)), ("attn_output", (256, 256)), ("ffn_gate", (256, 512))]
    tensors = llama_tensors(1) + [(f"blk.0.{name}.weight", dims, "Q4_K") for name, dims in more]
    tensors += [("blk.0.ffn_down.weight", (512, 256), "Q4_K")]
    return tensors + [(f"blk.0.{name}.weight", (256,), "F32") for name in ("attn_norm", "ffn_norm")]


def test_dryrun_takes_experts_and_shares_without_a_gpu(tmp_path: Path) -> None:
    path = moe(tmp_path)
    facts = read_facts(path)
    shapes = [replace(SHAPE, gpu_layers=3, cpu_experts=count) for count in (0, 1, 2)]
    source = HeaderSource.on_disk(path)
    found = DryRuns(tmp_path / "answers").measure(source, facts, shapes, (3.0, 1.0))
    assert found.reason == ""
    assert len(found.parts) == 3
    for parts in found.parts.values():
        assert sum(part.size_bytes for part in parts if part.label == "model" and part.device == RAM) == facts.weight_bytes


def moe(folder: Path) -> Path:
    values: dict[str, object] = {
        "block_count": 2,
        "embedding_length": 256,
        "feed_forward_length": 256,
        "context_length": 4096,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_feed_forward_length": 256,
        "vocab_size": 1000,
    }
    dims = {"attn_q": (256, 256), "attn_k": (256, 128), "attn_v": (256, 128), "attn_output": (256, 256)}
    dims |= {f"ffn_{name}_exps": (256, 256, 8) for name in ("gate", "up", "down")}
    norms = {"attn_norm": (256,), "ffn_norm": (256,), "attn_k_norm": (64,), "attn_q_norm": (64,), "ffn_gate_inp": (256, 8)}
    tensors = [("token_embd.weight", (256, 1000), "Q8_0"), ("output_norm.weight", (256,), "F32")]
    for number in range(2):
        tensors += [(f"blk.{number}.{name}.weight", size, "Q4_K") for name, size in dims.items()]
        tensors += [(f"blk.{number}.{name}.weight", size, "F32") for name, size in norms.items()]
    named = {f"{MOE}.{key}": value for key, value in values.items()}
    return write_gguf(folder / "moe.gguf", {"general.architecture": MOE, "tokenizer.ggml.model": "no_vocab", **named}, tensors)


def test_dryrun_names_an_architecture_that_the_engine_does_not_know(tmp_path: Path) -> None:
    values = {key.replace("llama.", "nonesuch."): value for key, value in llama_values().items()}
    path = write_gguf(tmp_path / "model.gguf", values | {"general.architecture": "nonesuch"}, llama_tensors())
    found = measure(path, tmp_path, SHAPE, replace(SHAPE, cells=4096))
    assert not found.parts
    assert found.reason == "unknown model architecture: 'nonesuch'"
    assert found.refused is not None and found.reason in str(found.refused)


@pytest.mark.parametrize("kept_bytes", [0, 4, 300, 100_000])
def test_dryrun_of_a_truncated_header_is_refused(starter_path: Path, tmp_path: Path, kept_bytes: int) -> None:
    source = header_only(starter_path, tmp_path)
    path = source.shards[0].path
    path.write_bytes(path.read_bytes()[:kept_bytes])
    found = DryRuns(tmp_path / "answers").measure(source, read_facts(starter_path), [SHAPE])
    assert not found.parts
    assert found.refused is not None


def test_dryrun_of_an_impossible_size_is_a_reason(starter_path: Path, tmp_path: Path) -> None:
    (shard,) = header_only(starter_path, tmp_path).shards
    source = HeaderSource((replace(shard, size_bytes=2**62),))
    found = DryRuns(tmp_path / "answers").measure(source, read_facts(starter_path), [SHAPE])
    assert not found.parts and found.refused is None
    assert "header could not be opened" in found.reason
