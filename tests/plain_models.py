"""Models in plain numbers, with layers of round sizes: for sums that can be done by hand. For tests."""

from __future__ import annotations

from dataclasses import replace

from localfast.footprint import MIB
from localfast.models.gguf import LayerFacts, ModelFacts


def model(
    layers: int,
    embedding: int,
    feed_forward: int,
    heads: int,
    *,
    layer_mib: float,
    output_mib: float = 400,
    input_mib: float = 400,
) -> ModelFacts:
    """A dense model with 8 key-value heads of width 128, like Qwen3."""
    layer = LayerFacts(int(layer_mib * MIB), 0, int(layer_mib * MIB / 4), 8, 1024, 1024)
    return ModelFacts(
        path="m.gguf",
        architecture="qwen3",
        name="m",
        quant="Q4_K",
        parameters=1,
        size_bytes=1,
        train_context=40_960,
        vocabulary=151_936,
        embedding=embedding,
        feed_forward=feed_forward,
        heads=heads,
        head_width=128,
        per_layer=(layer,) * layers,
        input_bytes=int(input_mib * MIB),
        output_bytes=int(output_mib * MIB),
        tied_embeddings=False,
    )


# Weights on the GPU with everything offloaded: 5171 MiB (Q5_K_M) and 8166 MiB (Q4_K_M).
QWEN3_8B = model(36, 4096, 12_288, 32, layer_mib=(5171 - 487) / 36, output_mib=487)
QWEN3_14B = model(40, 5120, 17_408, 40, layer_mib=(8166 - 608) / 40, output_mib=608)
SMALL = model(12, 1024, 4096, 8, layer_mib=20, output_mib=60, input_mib=60)
WINDOWED = replace(
    SMALL, sliding_window=512, per_layer=tuple(replace(layer, windowed=n % 6 != 5) for n, layer in enumerate(SMALL.per_layer))
)
HYBRID = replace(
    SMALL,
    per_layer=tuple(
        layer if n % 4 == 3 else replace(layer, key_width=0, value_width=0, state_elements=2**20)
        for n, layer in enumerate(SMALL.per_layer)
    ),
)
EXPERTS = replace(
    SMALL,
    experts=32,
    experts_used=2,
    per_layer=tuple(replace(layer, weight_bytes=320 * MIB, expert_bytes=300 * MIB) for layer in SMALL.per_layer),
)
MODELS = [SMALL, WINDOWED, HYBRID, QWEN3_8B, EXPERTS]
