"""What a quantization loses, by its name: evidence, the order of quality, and how far down a model of some size may go.

Loss is the mean KL divergence from the unquantized model: Llama-3-8B in llama.cpp's `tools/perplexity/README.md`, with importance
matrices where published. Small models lose more at the same quant, large ones and mixtures of experts less.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from localfast.models.gguf import ModelFacts

_TABLE = """
F32 0, F16 0, BF16 0, Q8_0 .0014, Q6_K .0055, Q5_K_M .0108, Q5_K_S .0166, Q5_1 .018, Q5_0 .022, Q4_K_M .028, Q4_K_S .032,
IQ4_NL .036, IQ4_XS .036, Q4_1 .072, Q4_0 .072, Q3_K_L .073, Q3_K_M .084, IQ3_M .103, IQ3_S .111, IQ3_XS .139, IQ3_XXS .184,
Q3_K_S .2, IQ2_M .326, Q2_K .332, Q2_K_S .445, IQ2_S .45, IQ2_XS .546, IQ2_XXS .81, IQ1_M 1.39, IQ1_S 2.2
"""
LOSS = {name: float(loss) for name, loss in (entry.split() for entry in _TABLE.replace("\n", " ").split(","))}
_SIZE_SUFFIX = re.compile(r"_(XXL|XL|L|M|S)$")
_BITS_LOSS = ((8.4, 0.0014), (6.5, 0.0055), (5.6, 0.0108), (4.8, 0.028), (4.4, 0.036), (3.9, 0.084), (3.4, 0.139), (2.9, 0.33))
_WORST = 1.0
_WORDS = (("almost none", 0.008), ("small", 0.045), ("visible", 0.15))
_NATIVE = {"gpt-oss": "MXFP4"}
"""Architectures that were trained in a quantized type: no other quant is better than that."""


def quant_loss(label: str, facts: ModelFacts) -> float:
    """Mean KL divergence; for a name that nobody measured, that of a quant with as many bits per weight."""
    plain = label.upper().removeprefix("UD-")
    native = _NATIVE.get(facts.architecture)
    if native and plain.startswith(native):
        return 0.0
    for name in (plain, _SIZE_SUFFIX.sub("", plain), f"{_SIZE_SUFFIX.sub('', plain)}_M", f"{plain}_M", f"{plain}_S"):
        if name in LOSS:
            return LOSS[name]
    bits = 8 * facts.size_bytes / max(1, facts.parameters)
    return next((loss for least, loss in _BITS_LOSS if bits >= least), _WORST)


def loss_words(loss: float, parameters: int) -> str:
    """How a user would notice: "none", "almost none", "small", "visible", "large"."""
    tolerance = 0.5 if parameters <= 2e9 else 1.0 if parameters < 20e9 else 2.0
    if loss == 0:
        return "none"
    return next((word for word, most in _WORDS if loss <= most * tolerance), "large")


def worst_allowed(facts: ModelFacts) -> float:
    """The loss that nobody gets without asking for it."""
    if facts.experts:  # their experts can go to the RAM instead
        return LOSS["IQ4_XS"]
    for most_parameters, name in ((2e9, "Q5_K_M"), (6e9, "Q4_K_M"), (20e9, "IQ4_XS")):
        if facts.parameters <= most_parameters * 1.1:  # an "8B" has more than eight billion weights
            return LOSS[name]
    return LOSS["IQ3_M"]


def unquantized(label: str) -> bool:
    return label.upper() in ("F32", "F16", "BF16")


def slow_on_cpu(label: str) -> bool:
    """Whether its decoding tables make a CPU slow."""
    return label.upper().removeprefix("UD-").startswith(("IQ", "TQ"))


def acceptable(labels: Sequence[tuple[str, ModelFacts]]) -> list[str]:
    """Those a model may be given unasked, best first; where all are beyond the limits, the nearest to them."""
    losses = {label: quant_loss(label, facts) for label, facts in labels}
    small = {label for label, facts in labels if facts.parameters <= 0.5e9}
    ordered = sorted(labels, key=lambda pair: (losses[pair[0]], -pair[1].size_bytes))
    within = [(label, facts) for label, facts in ordered if losses[label] <= worst_allowed(facts)]
    quantized = [label for label, _ in within if not unquantized(label) or label in small]
    return quantized or [label for label, _ in within][-1:] or [label for label, _ in ordered][:1]
