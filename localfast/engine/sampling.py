"""Sampling settings -> a native sampler chain, one per sequence. Step loop's thread only."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from localfast.core import Sampling, TokenLogprob
from localfast.engine.llama import Context, FloatRow, Model, bindings

# The native sampler allocates its whole window at once.
MAX_PENALTY_TOKENS = 65536


class Sampler:
    """Chooses the next token of one sequence and remembers what penalties and randomness need.

    The order is llama.cpp's: bias, penalties, top-k, top-p, min-p, temperature, draw.
    """

    def __init__(self, model: Model, sampling: Sampling, prompt: Sequence[int], seed: int, *, ignore_eos: bool = False) -> None:
        self._chain = bindings.llama_sampler_chain_init(bindings.llama_sampler_chain_default_params())
        bias = list(sampling.logit_bias) + ([(token, float("-inf")) for token in model.ends] if ignore_eos else [])
        if bias:
            entries = (bindings.llama_logit_bias * len(bias))(*bias)
            self._add(bindings.llama_sampler_init_logit_bias(model.vocabulary, len(bias), entries))
        self._add_penalties(model, sampling, prompt)
        if sampling.temperature <= 0:
            self._add(bindings.llama_sampler_init_greedy())
            return
        if sampling.top_k > 0:
            self._add(bindings.llama_sampler_init_top_k(sampling.top_k))
        if sampling.top_p < 1:
            self._add(bindings.llama_sampler_init_top_p(sampling.top_p, 1))
        if sampling.min_p > 0:
            self._add(bindings.llama_sampler_init_min_p(sampling.min_p, 1))
        self._add(bindings.llama_sampler_init_temp(sampling.temperature))
        self._add(bindings.llama_sampler_init_dist(seed))

    def _add(self, sampler: ctypes.c_void_p) -> None:
        bindings.llama_sampler_chain_add(self._chain, sampler)

    def _add_penalties(self, model: Model, sampling: Sampling, prompt: Sequence[int]) -> None:
        """`repeat_penalty` looks at prompt and answer, as in llama.cpp; the OpenAI pair looks at the answer only."""
        if sampling.repeat_penalty != 1.0 and sampling.repeat_last_n != 0:
            last = sampling.repeat_last_n if 0 < sampling.repeat_last_n < MAX_PENALTY_TOKENS else MAX_PENALTY_TOKENS
            repeat = bindings.llama_sampler_init_penalties(model.vocabulary, last, sampling.repeat_penalty, 0.0, 0.0)
            for token in prompt[-last:]:
                bindings.llama_sampler_accept(repeat, token)
            self._add(repeat)
        if sampling.frequency_penalty or sampling.presence_penalty:
            pair = (sampling.frequency_penalty, sampling.presence_penalty)
            self._add(bindings.llama_sampler_init_penalties(model.vocabulary, MAX_PENALTY_TOKENS, 1.0, *pair))

    def sample(self, context: Context, row: int) -> int:
        """The next token, from the logits of `row`."""
        return int(bindings.llama_sampler_sample(self._chain, context.handle, row))

    def close(self) -> None:
        bindings.llama_sampler_free(self._chain)


def log_probability(model: Model, logits: FloatRow, token: int, top: int) -> TokenLogprob:
    """Log softmax of the row before sampling, for `token` and the `top` most likely ones."""
    peak = float(logits.max())
    norm = peak + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    best: list[int] = []
    if top > 0:
        best = sorted(np.argpartition(logits, -top)[-top:].tolist(), key=lambda other: (-logits[other], other))
    alternatives = tuple((*_written(model, other), float(logits[other]) - norm) for other in best)
    return TokenLogprob(*_written(model, token), float(logits[token]) - norm, alternatives)


def unscored(model: Model, token: int) -> TokenLogprob:
    """The first token of an echoed prompt, which nothing precedes."""
    return TokenLogprob(*_written(model, token), None)


def _written(model: Model, token: int) -> tuple[str, bytes]:
    piece = model.piece(token)
    return piece.decode("utf-8", "replace"), piece
