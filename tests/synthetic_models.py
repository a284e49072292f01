"""Real models as headers without weights: their keys, and tensors of the right shapes in files that are all hole. For tests.

Dimensions are those of the published models; sizes of their quants are those of the published files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from gguf_writer import Tensor, write_gguf

from localfast.models.gguf import ModelFacts, read_facts
from localfast.plan import Quant, scaled_facts

# GB of each file, where the worked examples name them.
SIZES = {
    "1B": "Q8_0 1.31, Q6_K 1.01, Q5_K_M .90, Q4_K_M .80, IQ4_XS .74, Q3_K_M .68, Q2_K .57",
    "3B": "Q8_0 3.41, Q6_K 2.64, Q5_K_M 2.31, Q4_K_M 2.01, IQ4_XS 1.83, Q3_K_M 1.68, IQ3_M 1.59, Q2_K 1.36",
    "8B": "F16 16.39, Q8_0 8.70, Q6_K 6.72, Q5_K_M 5.85, Q4_K_M 5.02, IQ4_XS 4.59, Q3_K_M 4.12, IQ3_M 3.89, Q2_K 3.28",
    "14B": "Q8_0 15.69, Q6_K 12.12, Q5_K_M 10.51, Q4_K_M 9.00, IQ4_XS 8.17, Q3_K_M 7.32, IQ3_M 6.88, Q2_K 5.75",
    "32B": "Q8_0 34.81, Q6_K 26.88, Q5_K_M 23.21, Q4_K_M 19.76, IQ4_XS 17.85, Q3_K_M 15.97, IQ3_M 14.92, Q2_K 12.34",
    "30B-A3B": "Q8_0 32.48, Q6_K 25.09, Q5_K_M 21.72, Q4_K_M 18.55, IQ4_XS 16.55, Q3_K_M 14.71, IQ3_M 13.51, Q2_K 11.25",
    "gemma3-12b": "Q8_0 12.5, Q6_K 9.65, Q5_K_M 8.44, Q4_K_M 7.29, IQ4_XS 6.60, Q3_K_M 6.00",
}


def values(arch: str, layers: int, embedding: int, feed_forward: object, vocabulary: int, **more: object) -> dict[str, object]:
    """Keys of one architecture; `__` in a name stands for a dot."""
    known = {"block_count": layers, "embedding_length": embedding, "feed_forward_length": feed_forward, "vocab_size": vocabulary}
    known |= {key.replace("__", "."): value for key, value in more.items()}
    return {"general.architecture": arch, "general.name": arch} | {f"{arch}.{key}": value for key, value in known.items()}


def attention(heads: object, kv_heads: object, width: int, context: int, **more: object) -> dict[str, object]:
    known = {"head_count": heads, "head_count_kv": kv_heads, "key_length": width, "value_length": width} | more
    return {f"attention__{key}": value for key, value in known.items()} | {"context_length": context}


def tensors(layers: int, embedding: int, vocabulary: int, per_layer: Sequence[Tensor], tied: bool = False) -> list[Tensor]:
    """`per_layer` names are without `blk.N.`."""
    found: list[Tensor] = [("token_embd.weight", (embedding, vocabulary), "F16"), ("output_norm.weight", (embedding,), "F32")]
    if not tied:
        found.append(("output.weight", (embedding, vocabulary), "F16"))
    return found + [(f"blk.{n}.{name}", dims, kind) for n in range(layers) for name, dims, kind in per_layer]


def attention_tensors(embedding: int, heads: int, kv_heads: int, width: int) -> list[Tensor]:
    rows = {"attn_q": heads * width, "attn_k": kv_heads * width, "attn_v": kv_heads * width}
    found: list[Tensor] = [(f"{name}.weight", (embedding, count), "F16") for name, count in rows.items()]
    return [*found, ("attn_output.weight", (heads * width, embedding), "F16"), ("attn_norm.weight", (embedding,), "F32")]


def feed_forward_tensors(embedding: int, width: int) -> list[Tensor]:
    dims = {"ffn_gate": (embedding, width), "ffn_up": (embedding, width), "ffn_down": (width, embedding)}
    return [(f"{name}.weight", shape, "F16") for name, shape in dims.items()]


def expert_tensors(embedding: int, width: int, experts: int, kind: str = "F16") -> list[Tensor]:
    dims = {"ffn_gate_exps": (embedding, width, experts), "ffn_up_exps": (embedding, width, experts)}
    dims["ffn_down_exps"] = (width, embedding, experts)
    return [(f"{name}.weight", shape, kind) for name, shape in dims.items()]


def _dense(
    arch: str, layers: int, embedding: int, feed_forward: int, heads: tuple[int, int, int], vocabulary: int, context: int,
    tied: bool = False, **more: object,
) -> ModelFacts:  # fmt: skip
    keys = values(arch, layers, embedding, feed_forward, vocabulary, **attention(*heads, context), **more)
    body = attention_tensors(embedding, *heads) + feed_forward_tensors(embedding, feed_forward)
    return facts(keys, tensors(layers, embedding, vocabulary, body, tied))


def facts(keys: dict[str, object], found: Sequence[Tensor]) -> ModelFacts:
    with tempfile.TemporaryDirectory() as folder:
        return read_facts(write_gguf(Path(folder) / "model.gguf", keys, found))


@cache
def model(name: str) -> ModelFacts:
    """Facts in F16 of one of the models below."""
    return _MODELS[name]()


def quants(name: str) -> tuple[Quant, ...]:
    """All published quants of a model."""
    pairs = (entry.split() for entry in SIZES[name].split(","))
    return tuple(quant(name, label, float(size)) for label, size in pairs)


def quant(name: str, label: str, gigabytes: float = 0) -> Quant:
    sizes = dict(entry.split() for entry in SIZES.get(name, "").split(",") if entry)
    size_bytes = int((gigabytes or float(sizes[label])) * 1e9)
    return Quant(label, size_bytes, scaled_facts(model(name), size_bytes, label))


def _moe() -> ModelFacts:
    keys = values("qwen3moe", 48, 2048, 6144, 151_936, **attention(32, 4, 128, 40_960))
    keys |= {"qwen3moe.expert_count": 128, "qwen3moe.expert_used_count": 8, "qwen3moe.expert_feed_forward_length": 768}
    return facts(keys, tensors(48, 2048, 151_936, attention_tensors(2048, 32, 4, 128) + expert_tensors(2048, 768, 128)))


def _gpt_oss() -> ModelFacts:
    """20B: every other layer looks back 128 tokens; the file does not say which."""
    keys = values("gpt-oss", 24, 2880, 2880, 201_088, **attention(64, 8, 64, 131_072, sliding_window=128))
    keys |= {"gpt-oss.expert_count": 32, "gpt-oss.expert_used_count": 4, "gpt-oss.expert_feed_forward_length": 2880}
    return facts(keys, tensors(24, 2880, 201_088, attention_tensors(2880, 64, 8, 64) + expert_tensors(2880, 2880, 32, "MXFP4")))


def _mla() -> ModelFacts:
    """DeepSeek-V2-Lite: 27 layers that cache 576 numbers per token."""
    keys = values("deepseek2", 27, 2048, 10_944, 102_400, **attention(16, 1, 576, 163_840))
    mla = {"attention.kv_lora_rank": 512, "attention.value_length": 512, "attention.key_length_mla": 192}
    mla |= {"attention.value_length_mla": 128, "expert_count": 64, "expert_used_count": 6, "expert_feed_forward_length": 1408}
    keys |= {f"deepseek2.{key}": value for key, value in mla.items()}
    return facts(keys, tensors(27, 2048, 102_400, attention_tensors(2048, 16, 1, 576) + expert_tensors(2048, 1408, 64)))


def _hybrid() -> ModelFacts:
    """Like Qwen3.6-27B: 64 layers, every fourth with attention, the others with a state of about 150 MiB in all."""
    keys = values("qwen35", 64, 5120, 17_408, 248_320, **attention(24, 4, 256, 262_144))
    ssm = {"conv_kernel": 4, "inner_size": 6144, "state_size": 128, "time_step_rank": 48, "group_count": 16}
    keys |= {"qwen35.full_attention_interval": 4} | {f"qwen35.ssm.{key}": value for key, value in ssm.items()}
    return facts(keys, tensors(64, 5120, 248_320, attention_tensors(5120, 24, 4, 256) + feed_forward_tensors(5120, 17_408)))


def _mamba2() -> ModelFacts:
    ssm = {"conv_kernel": 4, "inner_size": 5120, "state_size": 128, "time_step_rank": 80, "group_count": 1}
    keys = values("mamba2", 64, 2560, 0, 50_288, context_length=1_048_576, **{f"ssm__{key}": n for key, n in ssm.items()})
    return facts(keys, tensors(64, 2560, 50_288, feed_forward_tensors(2560, 5120), tied=True))


def _rwkv7() -> ModelFacts:
    keys = values("rwkv7", 32, 2560, 10_240, 65_536, context_length=1_048_576, attention__head_count=0, wkv__head_size=64)
    return facts(keys, tensors(32, 2560, 65_536, feed_forward_tensors(2560, 10_240)))


def _gemma3n() -> ModelFacts:
    """E4B: 35 layers of which 15 share the cache of others, and gigabytes of embeddings per layer that stay in RAM."""
    keys = values("gemma3n", 35, 2048, 16_384, 262_144, **attention(8, 2, 256, 32_768, sliding_window=512))
    keys |= {"gemma3n.attention.shared_kv_layers": 15}
    extra: list[Tensor] = [("per_layer_token_embd.weight", (256 * 35, 262_144), "Q8_0")]
    body = attention_tensors(2048, 8, 2, 256) + feed_forward_tensors(2048, 16_384)
    return facts(keys, tensors(35, 2048, 262_144, body, tied=True) + extra)


def _gemma4() -> ModelFacts:
    """12B-like: five of six layers look back 1,024 tokens, heads of both kinds have widths of their own, the last 8 share."""
    pattern = [number % 6 != 5 for number in range(48)]
    kv_heads = [8 if windowed else 1 for windowed in pattern]
    keys = values("gemma4", 48, 3840, 15_360, 262_144, **attention(16, kv_heads, 512, 131_072, sliding_window=1024))
    swa = {"key_length_swa": 256, "value_length_swa": 256, "shared_kv_layers": 8, "sliding_window_pattern": pattern}
    keys |= {f"gemma4.attention.{key}": value for key, value in swa.items()}
    body = attention_tensors(3840, 16, 8, 256) + feed_forward_tensors(3840, 15_360)
    return facts(keys, tensors(48, 3840, 262_144, body, tied=True))


def _bert() -> ModelFacts:
    """A reranker: reads both ways, caches nothing."""
    keys = values("bert", 24, 1024, 4096, 250_002, context_length=8192, attention__head_count=16)
    keys |= {"bert.attention.causal": False, "bert.pooling_type": 4}
    return facts(
        keys, tensors(24, 1024, 250_002, attention_tensors(1024, 16, 16, 64) + feed_forward_tensors(1024, 4096), tied=True)
    )


def _nemotron_h() -> ModelFacts:
    """Three kinds of layers by arrays: attention, feed-forward, state."""
    kinds = [("attention", "dense", "state", "state")[number % 4] for number in range(52)]
    kv_heads, widths = [8 * (k == "attention") for k in kinds], [21_504 * (k == "dense") for k in kinds]
    keys = values("nemotron_h", 52, 4480, widths, 131_072, **attention(40, kv_heads, 128, 131_072))
    ssm = {"conv_kernel": 4, "inner_size": 10_240, "state_size": 128, "time_step_rank": 128, "group_count": 8}
    keys |= {f"nemotron_h.ssm.{key}": value for key, value in ssm.items()}
    return facts(keys, tensors(52, 4480, 131_072, feed_forward_tensors(4480, 10_000)))


def _arrays() -> ModelFacts:
    """OpenELM-like: heads and widths differ from layer to layer."""
    kv_heads = [3 + number // 7 for number in range(28)]
    keys = values("openelm", 28, 2048, [1024 + 256 * n for n in range(28)], 32_000, **attention(16, kv_heads, 64, 8192))
    return facts(keys, tensors(28, 2048, 32_000, attention_tensors(2048, 16, 5, 64) + feed_forward_tensors(2048, 5000)))


_GEMMA3 = {"attention__sliding_window": 1024}
_MODELS = {
    "0.6B": lambda: _dense("qwen3", 28, 1024, 3072, (16, 8, 128), 151_936, 40_960, tied=True),
    "1B": lambda: _dense("llama", 16, 2048, 8192, (32, 8, 64), 128_256, 131_072, tied=True),
    "3B": lambda: _dense("llama", 28, 3072, 8192, (24, 8, 128), 128_256, 131_072, tied=True),
    "8B": lambda: _dense("qwen3", 36, 4096, 12_288, (32, 8, 128), 151_936, 40_960),
    "14B": lambda: _dense("qwen3", 40, 5120, 17_408, (40, 8, 128), 151_936, 40_960),
    "24B": lambda: _dense("llama", 40, 5120, 32_768, (32, 8, 128), 131_072, 131_072),
    "32B": lambda: _dense("qwen3", 64, 5120, 25_600, (64, 8, 128), 151_936, 40_960),
    "30B-A3B": _moe,
    "gemma3-12b": lambda: _dense("gemma3", 48, 3840, 15_360, (16, 8, 256), 262_208, 131_072, tied=True, **_GEMMA3),
    "gemma3-27b": lambda: _dense("gemma3", 62, 5376, 21_504, (32, 16, 128), 262_208, 131_072, tied=True, **_GEMMA3),
    "gpt-oss-20b": _gpt_oss,
    "deepseek2-lite": _mla,
    "hybrid-27b": _hybrid,
    "mamba2": _mamba2,
    "rwkv7": _rwkv7,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "bert": _bert,
    "nemotron-h": _nemotron_h,
    "arrays": _arrays,
}


def names() -> Iterator[str]:
    yield from _MODELS
