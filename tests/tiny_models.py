"""Models of a few hundred kilobytes with random weights, one for each kind of memory that llama.cpp has.

They stand in for models that no package index offers: what they say is noise, but the same noise every time, and it depends on
tokens from long ago, so a lost or mixed-up cache shows in the text. They must not be used to judge speed or quality.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from gguf_writer import write_gguf

Kind = Literal["recurrent", "hybrid", "window", "full"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SEEDS: dict[Kind, int] = {"recurrent": 0, "hybrid": 1, "window": 9, "full": 4}
"""Chosen: the most likely token is clearly the most likely, and 400 tokens of greedy text do not run in circles."""
ARCHITECTURES: dict[Kind, str] = {"recurrent": "mamba", "hybrid": "jamba", "window": "gemma3", "full": "llama"}
WINDOW = 32
EXACT_KV_TYPE = "bf16"
"""For tests that compare texts. The CPU adds up a cache of f16 values in f16: logits then move by 0.1 with the way in which a
prompt of 1,000 tokens was cut into batches, and only by 0.003 with this type."""
CONTEXT_TOKENS = 2048
BOS, EOS = 0, 1

WIDTH, HEADS, KEY, FEED = 64, 2, 32, 128
INNER, STATE, RANK, KERNEL = 2 * WIDTH, 16, 8, 4  # INNER: llama.cpp takes no other expansion than 2
WORDS = (" the", " and", " fox", " dog", " over", " jump", " lazy", " quick", " brown", "ing", "er", " in", " on", " of")

Weight = npt.NDArray[np.float32]
Weights = dict[str, Weight]
"""Tensors by name; numpy's last axis is the file's first dimension. Each is a multiple of 32 bytes, so none needs padding."""


def tiny_model(kind: Kind, folder: Path) -> Path:
    """The file in the folder, written if it is not there yet. Same kind: same bytes, on every machine."""
    path = folder / f"tiny-{kind}.gguf"
    if not path.exists():
        weights = _weights(kind)
        sizes = [(name, array.shape[::-1], "F32") for name, array in weights.items()]
        write_gguf(path, _values(kind) | _vocabulary(), sizes)
        with path.open("r+b") as file:
            file.seek(-sum(array.nbytes for array in weights.values()), os.SEEK_END)
            file.writelines(array.tobytes() for array in weights.values())
    return path


def _layers(kind: Kind) -> str:
    """One letter per layer: s(tate space), a(ttention), w(indow of attention)."""
    return {"recurrent": "ss", "hybrid": "sas", "window": "waw", "full": "aa"}[kind]


def _values(kind: Kind) -> dict[str, object]:
    layers, architecture = _layers(kind), ARCHITECTURES[kind]
    values: dict[str, object] = {
        "block_count": len(layers),
        "context_length": CONTEXT_TOKENS,
        "embedding_length": WIDTH,
        "feed_forward_length": 0 if kind == "recurrent" else FEED,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.head_count": 0 if kind == "recurrent" else HEADS,
        "attention.head_count_kv": [0 if layer == "s" else 1 for layer in layers],
    }
    if "a" in layers:
        values |= {"attention.key_length": KEY, "attention.value_length": KEY}
    if "s" in layers:
        values |= {"ssm.conv_kernel": KERNEL, "ssm.inner_size": INNER, "ssm.state_size": STATE, "ssm.time_step_rank": RANK}
    if "w" in layers:
        values |= {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [layer == "w" for layer in layers]}
    names = {"general.architecture": architecture, "general.name": f"Tiny {kind}"}
    return names | {f"{architecture}.{key}": value for key, value in values.items()}


def _characters() -> list[str]:
    """GPT-2's printable character for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def _vocabulary() -> dict[str, object]:
    merges: dict[str, str] = {}
    for word in (word.replace(" ", "Ġ") for word in WORDS):
        merges |= {word[:end]: f"{word[: end - 1]} {word[end - 1]}" for end in range(2, len(word) + 1)}
    tokens = ["<|begin|>", "<|end|>", *_characters(), *merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),  # control, normal
        "tokenizer.ggml.merges": list(merges.values()),
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": True,
    }


def _weights(kind: Kind) -> Weights:
    draw = _Draw(SEEDS[kind])
    tokens = _vocabulary()["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    output = draw.matrix(len(tokens), WIDTH, 4)
    # Neither control tokens nor halves of characters: a text ends where the test says, and is readable.
    output[[number for number, token in enumerate(tokens) if number in (BOS, EOS) or not token.replace("Ġ", "").isascii()]] = 0
    embedding = draw.matrix(len(tokens), WIDTH, 2 if kind != "window" else 2 / WIDTH**0.5)  # Gemma multiplies it by that root
    weights = {"token_embd.weight": embedding, "output.weight": output, "output_norm.weight": _ones(WIDTH)}
    for number, layer in enumerate(_layers(kind)):
        parts = _state_space(draw, kind) if layer == "s" else _attention(draw, kind)
        if kind != "recurrent":
            parts |= _feed_forward(draw, kind)
        weights |= {f"blk.{number}.{name}": array for name, array in parts.items()}
    return weights


class _Draw:
    def __init__(self, seed: int) -> None:
        self._random = np.random.RandomState(seed)  # the old generator: the only one whose numbers are promised for ever

    def matrix(self, outputs: int, inputs: int, gain: float = 1.0) -> Weight:
        """Keeps the size of a vector of ones' size, times the gain."""
        return (self._random.standard_normal((outputs, inputs)) * gain / inputs**0.5).astype(np.float32)


def _attention(draw: _Draw, kind: Kind) -> Weights:
    parts = {
        "attn_norm.weight": _ones(WIDTH),
        "attn_q.weight": draw.matrix(HEADS * KEY, WIDTH, 2),
        "attn_k.weight": draw.matrix(KEY, WIDTH, 2),
        "attn_v.weight": draw.matrix(KEY, WIDTH),
        "attn_output.weight": draw.matrix(WIDTH, HEADS * KEY, 1.5),
    }
    if kind == "window":
        parts |= {"attn_q_norm.weight": _ones(KEY, 1.7), "attn_k_norm.weight": _ones(KEY, 1.7)}
        parts |= {"post_attention_norm.weight": _ones(WIDTH, 0.4)}
    return parts


def _feed_forward(draw: _Draw, kind: Kind) -> Weights:
    parts = {
        "ffn_norm.weight": _ones(WIDTH),
        "ffn_gate.weight": draw.matrix(FEED, WIDTH),
        "ffn_up.weight": draw.matrix(FEED, WIDTH),
        "ffn_down.weight": draw.matrix(WIDTH, FEED, 3),
    }
    return parts | ({"post_ffw_norm.weight": _ones(WIDTH, 0.4)} if kind == "window" else {})


def _state_space(draw: _Draw, kind: Kind) -> Weights:
    """A Mamba layer that forgets slowly: half of its state's cells still hold something of 100 tokens ago."""
    parts = {
        "attn_norm.weight": _ones(WIDTH),
        "ssm_in.weight": draw.matrix(2 * INNER, WIDTH),
        "ssm_conv1d.weight": draw.matrix(INNER, KERNEL),
        "ssm_conv1d.bias": _ones(INNER, 0),
        "ssm_x.weight": draw.matrix(RANK + 2 * STATE, INNER, 4),
        "ssm_dt.weight": draw.matrix(INNER, RANK, 0.5),
        "ssm_dt.bias": _ones(INNER, -2),
        "ssm_a": np.tile(-np.linspace(0.01, 1, STATE, dtype=np.float32), (INNER, 1)),
        "ssm_d": _ones(INNER, 0.2),
        "ssm_out.weight": draw.matrix(WIDTH, INNER, 2),
    }
    if kind == "hybrid":
        parts |= {"ssm_dt_norm.weight": _ones(RANK), "ssm_b_norm.weight": _ones(STATE), "ssm_c_norm.weight": _ones(STATE)}
    return parts


def _ones(count: int, times: float = 1.0) -> Weight:
    return np.full(count, times, np.float32)
