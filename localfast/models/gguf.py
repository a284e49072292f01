"""What a model is, in plain facts for the plan and the chat template: derived from the headers of all its shards.

Reads headers only (through `models.gguf_header`), never weights. Key meanings and defaults are llama.cpp's
(`src/llama-hparams.cpp`, `src/models/`); an unknown architecture gets the plain reading: full attention on every layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from localfast.errors import BadModelFile
from localfast.models.gguf_header import GgufHeader, TensorInfo, read_header, read_headers, shard_paths

__all__ = [
    "GgufHeader",
    "LayerFacts",
    "ModelFacts",
    "TensorInfo",
    "facts_of",
    "read_facts",
    "read_header",
    "read_headers",
    "shard_paths",
]

MAX_LAYERS = 1_024
# By general.file_type: labels that say more than the leading tensor type (Q4_K_M is a mix in which Q4_K leads).
_LABELS = {11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K"}
_LABELS |= {19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S"}
_LABELS |= {27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 38: "MXFP4_MOE"}
_QUANT_FAMILY = re.compile(r"Q\d_[01K]|[A-Z]+\d+")
_BLOCK = re.compile(r"(?:^|\.)blk\.(\d+)\.")
_INPUT = re.compile(r"^(token_embd\.weight|per_layer_token_embd\.|position_embd\.|token_types\.)")
_OUTPUT = re.compile(r"^output")
_EXPERTS = re.compile(r"\.ffn_(gate|up|down|gate_up)_exps\.")
_NOT_MODELS = {"adapter": "a LoRA adapter", "mmproj": "a vision or audio projector", "imatrix": "an importance matrix"}

_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_ENCODERS = {"bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe", "neo-bert", "eurobert", "modern-bert"}
_WITHOUT_CACHE = _ENCODERS | {"gemma-embedding", "wavtokenizer-dec", "dream", "llada", "llada-moe", "rnd1"}
# Every n-th layer has full attention, the others are recurrent, unless the file says otherwise.
_FULL_ATTENTION_INTERVAL = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
# Layers per full-attention layer where the file has no window pattern: the last of each period is full, or the first if negative.
_WINDOW_PERIOD = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4, "llama4": 4, "olmo2": 4, "exaone4": 4}
_WINDOW_PERIOD |= {"exaone-moe": 4, "afmoe": 4, "mellum": 4, "plamo3": 8, "smallthinker": -4, "laguna": -4, "cohere2moe": -4}
_WINDOW_TOKENS = {"gemma2": 4096, "llama4": 8192}
_POOLING = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One block. Widths are elements per cached token (0: this layer caches nothing); `state_elements` are f32 per sequence."""

    weight_bytes: int
    expert_bytes: int = 0
    largest_tensor_bytes: int = 0
    kv_heads: int = 0
    key_width: int = 0
    value_width: int = 0
    windowed: bool = False
    state_elements: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as the plan and the template see it. Bytes are those of the file; `per_layer` includes prediction (MTP) layers."""

    path: str
    architecture: str
    name: str
    quant: str
    """Label such as Q4_K_M: the file's own where its tensors agree with it, otherwise the type of most weights."""
    parameters: int
    size_bytes: int
    """Of all shards on disk."""
    train_context: int
    vocabulary: int
    embedding: int
    feed_forward: int
    """Widest dense feed-forward layer; with experts the width of one of them is `expert_feed_forward`."""
    heads: int
    head_width: int
    per_layer: tuple[LayerFacts, ...]
    input_bytes: int
    """Token and position embeddings; they stay in RAM whatever is offloaded."""
    output_bytes: int
    """Output norm and matrix; with tied embeddings this includes the copy of the token embeddings that llama.cpp makes."""
    tied_embeddings: bool
    sliding_window: int = 0
    """Tokens that windowed layers look back; 0: no layer is windowed."""
    experts: int = 0
    experts_used: int = 0
    expert_feed_forward: int = 0
    causal: bool = True
    pooling: str = ""
    """none, mean, cls, last or rank for embedding models and rerankers; empty for the others."""
    chat_template: str | None = None
    chat_template_variants: tuple[tuple[str, str], ...] = ()
    """Other templates in the file, by name, such as tool_use."""
    bos_token: str = ""
    eos_token: str = ""
    bos_id: int | None = None
    eos_id: int | None = None
    add_bos: bool | None = None
    """None: the file does not say, and the tokenizer's kind decides."""
    control_tokens: frozenset[str] = frozenset()

    @property
    def layers(self) -> int:
        return len(self.per_layer)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state instead of a cache: such a sequence cannot be cut back to any earlier token."""
        return any(layer.state_elements for layer in self.per_layer)

    @property
    def copied_bytes(self) -> int:
        """The part of the output that is a copy of the input; embeddings per layer are never copied."""
        return min(self.input_bytes, self.output_bytes) if self.tied_embeddings else 0

    @property
    def weight_bytes(self) -> int:
        """Weights in memory when nothing is duplicated."""
        layers = sum(layer.weight_bytes for layer in self.per_layer)
        return self.input_bytes + self.output_bytes + layers - self.copied_bytes


def read_facts(path: str | Path) -> ModelFacts:
    """Facts of a model on disk, all shards together; `path` is any of them. Raises BadModelFile."""
    return facts_of(read_headers(path))


def facts_of(headers: Sequence[GgufHeader]) -> ModelFacts:
    """Facts from the headers of all shards, first shard first. Raises BadModelFile for files that are no language model."""
    first = headers[0]
    tensors = [tensor for header in headers for tensor in header.tensors]
    arch = _architecture(first, tensors)
    per_layer = _layers(first, arch, tensors)
    embedding = first.number(f"{arch}.embedding_length")
    heads = max(first.numbers(f"{arch}.attention.head_count", len(per_layer)))
    inputs = [tensor for tensor in tensors if _INPUT.search(tensor.name)]
    outputs = [tensor for tensor in tensors if _OUTPUT.search(tensor.name)]
    token_matrix = next((tensor for tensor in inputs if tensor.name == "token_embd.weight"), None)
    tied = not any(tensor.name == "output.weight" for tensor in outputs)
    copied_bytes = token_matrix.size_bytes if tied and token_matrix else 0
    bos_id, eos_id = _token_id(first, "bos"), _token_id(first, "eos")
    add_bos = first.values.get("tokenizer.ggml.add_bos_token")
    causal = first.values.get(f"{arch}.attention.causal", arch not in _WITHOUT_CACHE)
    return ModelFacts(
        path=first.path,
        architecture=arch,
        name=first.text("general.name", Path(first.path).stem),
        quant=_quant(first, tensors),
        parameters=sum(tensor.weights for tensor in tensors),
        size_bytes=sum(header.file_bytes for header in headers),
        train_context=first.number(f"{arch}.context_length"),
        vocabulary=token_matrix.dims[-1] if token_matrix else first.number(f"{arch}.vocab_size", first.token_count),
        embedding=embedding,
        feed_forward=max(first.numbers(f"{arch}.feed_forward_length", len(per_layer))),
        heads=heads,
        head_width=first.number(f"{arch}.attention.key_length", embedding // heads if heads else 0),
        per_layer=per_layer,
        input_bytes=_bytes(inputs),
        output_bytes=_bytes(outputs) + copied_bytes,
        tied_embeddings=tied,
        sliding_window=_window(first, arch) if any(layer.windowed for layer in per_layer) else 0,
        experts=first.number(f"{arch}.expert_count"),
        experts_used=max(first.numbers(f"{arch}.expert_used_count", len(per_layer))),
        expert_feed_forward=max(first.numbers(f"{arch}.expert_feed_forward_length", len(per_layer))),
        causal=bool(causal),
        pooling=_POOLING.get(first.number(f"{arch}.pooling_type"), "") if f"{arch}.pooling_type" in first.values else "",
        chat_template=first.text("tokenizer.chat_template") or None,
        chat_template_variants=tuple(
            (key.removeprefix("tokenizer.chat_template."), str(value))
            for key, value in first.values.items()
            if key.startswith("tokenizer.chat_template.")
        ),
        bos_token=first.token_text(bos_id),
        eos_token=first.token_text(eos_id),
        bos_id=bos_id,
        eos_id=eos_id,
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        control_tokens=first.control_tokens,
    )


def _architecture(header: GgufHeader, tensors: Sequence[TensorInfo]) -> str:
    arch = header.text("general.architecture")
    kind = "mmproj" if arch == "clip" else header.text("general.type", "model")
    if kind in _NOT_MODELS:
        raise BadModelFile(header.path, f"it is {_NOT_MODELS[kind]}, which goes with a model but is none")
    if not arch:
        raise BadModelFile(header.path, "it does not name its architecture")
    if not tensors:
        raise BadModelFile(header.path, "it holds no weights")
    return arch


def _layers(header: GgufHeader, arch: str, tensors: Sequence[TensorInfo]) -> tuple[LayerFacts, ...]:
    count = header.number(f"{arch}.block_count")
    if not 1 <= count <= MAX_LAYERS:
        raise BadModelFile(header.path, f"it claims {count} layers")
    members: list[list[TensorInfo]] = [[] for _ in range(count)]
    for tensor in tensors:
        match = _BLOCK.search(tensor.name)
        if match and int(match[1]) < count:
            members[int(match[1])].append(tensor)
        elif not match and not _INPUT.search(tensor.name) and not _OUTPUT.search(tensor.name):
            members[0].append(tensor)  # norms and projections of the input travel with the first block
    heads = header.numbers(f"{arch}.attention.head_count", count)
    kv_key = f"{arch}.attention.head_count_kv"
    kv_heads = header.numbers(kv_key, count) if kv_key in header.values else heads
    windowed, recurrent = _windowed_layers(header, arch, count), _recurrent_layers(header, arch, kv_heads)
    cached = _cached_layers(header, arch, recurrent)
    state = _state_elements(header, arch, max(heads))
    return tuple(
        LayerFacts(
            weight_bytes=_bytes(members[il]),
            expert_bytes=_bytes(tensor for tensor in members[il] if _EXPERTS.search(tensor.name)),
            largest_tensor_bytes=max((tensor.size_bytes for tensor in members[il]), default=0),
            kv_heads=kv_heads[il],
            key_width=_head_width(header, arch, "key", windowed[il]) * kv_heads[il] if cached[il] else 0,
            value_width=_head_width(header, arch, "value", windowed[il]) * kv_heads[il] if cached[il] else 0,
            windowed=windowed[il],
            state_elements=state if recurrent[il] else 0,
        )
        for il in range(count)
    )


def _head_width(header: GgufHeader, arch: str, part: str, windowed: bool) -> int:
    """Elements of one head's key or value. Latent attention (MLA) caches one latent key per token, and no value."""
    prefix = f"{arch}.attention"
    if part == "value" and f"{prefix}.key_length_mla" in header.values:
        return 0
    heads = next((count for count in header.numbers(f"{prefix}.head_count", MAX_LAYERS) if count), 0)
    full = header.number(f"{prefix}.{part}_length", header.number(f"{arch}.embedding_length") // heads if heads else 0)
    return header.number(f"{prefix}.{part}_length_swa", full) if windowed else full


def _window(header: GgufHeader, arch: str) -> int:
    window = header.number(f"{arch}.attention.sliding_window", _WINDOW_TOKENS.get(arch, 0))
    return _WINDOW_TOKENS[arch] if arch == "llama4" and window else window  # llama.cpp fixes the size of llama4's chunks


def _windowed_layers(header: GgufHeader, arch: str, count: int) -> tuple[bool, ...]:
    """Which layers look back only `sliding_window` tokens; phi3 names a window that llama.cpp does not use."""
    key = f"{arch}.attention.sliding_window_pattern"
    pattern = header.values.get(key)
    if not _window(header, arch) or arch == "phi3" or (arch == "exaone4" and count != 64):
        return (False,) * count
    if isinstance(pattern, tuple):
        return tuple(bool(flag) for flag in header.numbers(key, count))
    default = _WINDOW_PERIOD.get(arch, 0)
    period = header.number(key, abs(default))
    if period == 0:
        return (False,) * count
    return tuple((il % period != 0) if default < 0 else (il % period < period - 1) for il in range(count))


def _recurrent_layers(header: GgufHeader, arch: str, kv_heads: Sequence[int]) -> tuple[bool, ...]:
    count = len(kv_heads)
    trunk = count - header.number(f"{arch}.nextn_predict_layers")
    key = f"{arch}.attention.recurrent_layers"
    if arch in _RECURRENT or arch == "falcon-h1":
        return (True,) * count
    if key in header.values:
        return tuple(bool(flag) for flag in header.numbers(key, count))
    if arch in _FULL_ATTENTION_INTERVAL:
        interval = max(1, header.number(f"{arch}.full_attention_interval", _FULL_ATTENTION_INTERVAL[arch]))
        return tuple(il < trunk and (il + 1) % interval != 0 for il in range(count))
    dense = header.numbers(f"{arch}.feed_forward_length", count) if arch.startswith("nemotron_h") else (0,) * count
    return tuple(il < trunk and kv_heads[il] == 0 and dense[il] == 0 for il in range(count))


def _cached_layers(header: GgufHeader, arch: str, recurrent: Sequence[bool]) -> tuple[bool, ...]:
    """Which layers have a KV cache of their own: not those that share one, predict ahead, are recurrent, or encode at once."""
    count = len(recurrent)
    if arch in _WITHOUT_CACHE or arch in _RECURRENT:
        return (False,) * count
    own = 20 if arch == "gemma3n" else count - header.number(f"{arch}.attention.shared_kv_layers")
    trunk = count - header.number(f"{arch}.nextn_predict_layers")
    return tuple(il < min(own, trunk) and (arch == "falcon-h1" or not recurrent[il]) for il in range(count))


def _state_elements(header: GgufHeader, arch: str, heads: int) -> int:
    """f32 elements of one recurrent layer and sequence: `n_embd_r` + `n_embd_s` of llama.cpp's `llama-hparams.cpp`."""
    embedding, kernel = header.number(f"{arch}.embedding_length"), header.number(f"{arch}.ssm.conv_kernel")
    wkv, kda = header.number(f"{arch}.wkv.head_size"), header.number(f"{arch}.kda.head_dim")
    shortconv = header.number(f"{arch}.shortconv.l_cache")
    if wkv:
        return embedding * (header.number(f"{arch}.token_shift_count", 2) + wkv)
    if shortconv:
        return embedding * (shortconv - 1)
    if kda:
        return 3 * (kernel - 1 if kernel else 3) * heads * kda + kda * kda * heads
    inner, size = header.number(f"{arch}.ssm.inner_size"), header.number(f"{arch}.ssm.state_size")
    return max(0, kernel - 1) * (inner + 2 * header.number(f"{arch}.ssm.group_count") * size) + size * inner


def _quant(header: GgufHeader, tensors: Sequence[TensorInfo]) -> str:
    weights: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.dims) > 1 and _BLOCK.search(tensor.name):
            weights[tensor.type_name] += tensor.weights
    leading = weights.most_common(1)[0][0] if weights else tensors[0].type_name
    number = header.values.get("general.file_type")
    label = _LABELS.get(number, "") if isinstance(number, int) else ""
    return label if label and _family(label) == _family(leading) else leading


def _family(label: str) -> str:
    match = _QUANT_FAMILY.match(label)
    return match[0] if match else label


def _token_id(header: GgufHeader, which: str) -> int | None:
    value = header.values.get(f"tokenizer.ggml.{which}_token_id")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _bytes(tensors: Iterable[TensorInfo]) -> int:
    return sum(tensor.size_bytes for tensor in tensors)
