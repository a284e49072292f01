"""Writes GGUF files that have a whole header and, instead of weights, a hole of the right size. For tests."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from localfast.models.gguf_header import BLOCKS

_NUMBERS = {name: (number, weights, size) for number, (name, weights, size) in BLOCKS.items()}
Tensor = tuple[str, tuple[int, ...], str]


def write_gguf(path: Path, values: Mapping[str, object], tensors: Sequence[Tensor] = (), version: int = 3) -> Path:
    """`tensors` are (name, dims, type name); the file is sparse and exactly as long as the real one would be."""
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(values))
    head += b"".join(_text(key) + _value(value) for key, value in values.items())
    offset = 0
    for name, dims, type_name in tensors:
        number, weights, size = _NUMBERS[type_name]
        count = 1
        for dim in dims:
            count *= dim
        head += _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, offset)
        offset += -(-(count // weights * size) // 32) * 32
    with path.open("wb") as file:
        file.write(head)
        file.truncate(-(-len(head) // 32) * 32 + offset)
    return path


def llama_values(layers: int = 2, **more: object) -> dict[str, object]:
    """Keys of a small llama: 256 wide, 4 heads of which 2 are kept, trained for 4096 tokens."""
    return {
        "general.architecture": "llama",
        "general.name": "Tiny",
        "llama.block_count": layers,
        "llama.embedding_length": 256,
        "llama.feed_forward_length": 512,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.context_length": 4096,
        **{key.replace("__", "."): value for key, value in more.items()},
    }


def llama_tensors(layers: int = 2, tied: bool = True, type_name: str = "Q4_K") -> list[Tensor]:
    tensors: list[Tensor] = [("token_embd.weight", (256, 1000), "Q8_0"), ("output_norm.weight", (256,), "F32")]
    if not tied:
        tensors.append(("output.weight", (256, 1000), "Q6_K"))
    for number in range(layers):
        tensors.append((f"blk.{number}.attn_q.weight", (256, 256), type_name))
        tensors.append((f"blk.{number}.ffn_up.weight", (256, 512), type_name))
    return tensors


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    assert isinstance(value, list), value
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_text(item) for item in value)
    kind, form = (7, "?") if value and isinstance(value[0], bool) else (5, "i")
    return struct.pack(f"<IIQ{len(value)}{form}", 9, kind, len(value), *value)
