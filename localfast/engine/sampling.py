"""Sampling settings and a row of logits -> the next token; one Sampler per sequence. Step loop's thread only.

The rules and their order are llama.cpp's: bias, penalties, top-k, top-p, min-p, temperature, draw. Its own chains copy the whole
vocabulary into an array of structs for every token; each set of settings goes the way that measured fastest after a real decode
(scripts/profile_sampling). Must not know slots, batches or text.
"""

from __future__ import annotations

import math
import random
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from localfast.core import Sampling, TokenLogprob
from localfast.engine.llama import Context, FloatRow, Model, bindings

Ids = npt.NDArray[np.intp]

LARGE_VOCABULARY = 100_000
"""From here on numpy finds the candidates. At 49k it takes twice as long as the native chain for a step's first row, at 262k
three quarters, and always less for the other rows; between them this is an estimate."""
MAX_TOP_K = 256
"""More candidates than this are too many for lists."""
_GRID_ROWS = 64  # of 16 to 128 the fastest or nearly so, from 32k to 262k tokens
_BLOCK = 512
_TINY = 1e-30
"""Lowest temperature: distances divided by it are still finite."""


class Sampler:
    """Chooses the next token of one sequence and remembers what penalties and randomness need.

    Sampling a row changes the sampler only, so whoever samples several rows may stop after any of them.
    """

    def __init__(self, model: Model, sampling: Sampling, prompt: Sequence[int], seed: int, *, ignore_eos: bool = False) -> None:
        bias: dict[int, float] = {}
        for token, amount in (*sampling.logit_bias, *((end, -math.inf) for end in model.ends if ignore_eos)):
            if 0 <= token < model.vocabulary:
                bias[token] = bias.get(token, 0) + amount
        self._penalties = _penalties(sampling, prompt)
        self._changes: tuple[Bias | Penalty, ...] = (*([Bias(bias)] if bias else ()), *self._penalties)
        self._choose = fastest_way(sampling, model.vocabulary, seed)

    def sample(self, context: Context, row: int) -> int:
        """The next token, from the logits of `row`."""
        if not self._changes:
            return self._choose(context, row)
        logits = context.logits(row)
        # Changing the row and putting it right again is cheaper than a copy, and the native chain sees it too.
        undo = [change.apply(logits) for change in self._changes]
        token = self._choose(context, row)
        for tokens, before in reversed(undo):
            logits[tokens] = before
        for penalty in self._penalties:
            penalty.add(token)
        return token

    def close(self) -> None:
        if isinstance(self._choose, NativeChain):
            self._choose.close()


def fastest_way(sampling: Sampling, vocabulary: int, seed: int) -> Callable[[Context, int], int]:
    """From a row to a token."""
    if sampling.temperature <= 0:
        return _greedy
    if sampling.top_k <= 0 and (sampling.top_p < 1 or sampling.min_p <= 0):
        return WholeRow(sampling, seed)
    if vocabulary < LARGE_VOCABULARY or sampling.top_k > MAX_TOP_K:
        return NativeChain(sampling, seed)
    return TopK(sampling, seed) if sampling.top_k > 0 else WholeRow(sampling, seed)


def _greedy(context: Context, row: int) -> int:
    return int(context.logits(row).argmax())


class NativeChain:
    """The library's own samplers after bias and penalties."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.handle = bindings.llama_sampler_chain_init(bindings.llama_sampler_chain_default_params())
        if sampling.top_k > 0:
            self._add(bindings.llama_sampler_init_top_k(sampling.top_k))
        if sampling.top_p < 1:
            self._add(bindings.llama_sampler_init_top_p(sampling.top_p, 1))
        if sampling.min_p > 0:
            self._add(bindings.llama_sampler_init_min_p(sampling.min_p, 1))
        self._add(bindings.llama_sampler_init_temp(sampling.temperature))
        self._add(bindings.llama_sampler_init_dist(seed % bindings.LLAMA_DEFAULT_SEED))  # that one would mean: any seed

    def _add(self, sampler: object) -> None:
        bindings.llama_sampler_chain_add(self.handle, sampler)

    def __call__(self, context: Context, row: int) -> int:
        return int(bindings.llama_sampler_sample(self.handle, context.handle, row))

    def close(self) -> None:
        bindings.llama_sampler_free(self.handle)


class TopK:
    """A small top-k, then top-p, min-p, temperature and draw over lists: numpy is slower on so few numbers."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self._sampling = sampling
        self._floor = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        self._temperature = max(sampling.temperature, _TINY)
        self._random = random.Random(seed).random

    def __call__(self, context: Context, row: int) -> int:
        tokens, weights = self.candidates(context.logits(row))
        running = list(accumulate(weights))
        target = (1 - self._random()) * running[-1]  # above 0, so that no weight of 0 is drawn
        return tokens[min(bisect_left(running, target), len(running) - 1)]

    def candidates(self, logits: FloatRow) -> tuple[list[int], list[float]]:
        """Tokens that may be drawn, most likely first, and their weights, which are not normalized."""
        tokens, values = largest(logits, self._sampling.top_k)
        peak = values[0]
        kept = len(values)
        if self._sampling.top_p < 1:
            running = list(accumulate([math.exp(value - peak) for value in values]))
            kept = min(bisect_left(running, self._sampling.top_p * running[-1]) + 1, kept)
        while values[kept - 1] < peak + self._floor:
            kept -= 1
        return tokens[:kept], [math.exp((value - peak) / self._temperature) for value in values[:kept]]


class WholeRow:
    """No top-k: top-p and min-p of the whole vocabulary, or neither."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self._temperature = np.float32(max(sampling.temperature, _TINY))
        self._top_p = np.float32(sampling.top_p)
        self._min_p = sampling.min_p
        self._random = random.Random(seed).random

    def __call__(self, context: Context, row: int) -> int:
        tokens, weights = self.candidates(context.logits(row))
        place = draw(weights, self._random())
        return place if tokens is None else int(tokens[place])

    def candidates(self, logits: FloatRow) -> tuple[Ids | None, FloatRow]:
        """Tokens that may be drawn and their weights, which are not normalized. No tokens: every one, by its id."""
        peak = logits.max()
        if self._top_p >= 1 and self._min_p <= 0:
            return None, self._tempered(logits, peak)
        if self._top_p >= 1:
            tokens = _at_least(logits, peak + np.float32(math.log(self._min_p)))
            return tokens, self._tempered(logits[tokens], peak)
        # Tokens whose share is below (1 - top_p) / vocabulary have less than 1 - top_p together: none of them is needed.
        total = _exp(logits - peak).sum()
        unneeded = (1 - float(self._top_p)) * float(total) / logits.size / 2
        tokens = _at_least(logits, peak + np.float32(math.log(max(unneeded, self._min_p))))
        tokens = tokens[(-logits[tokens]).argsort(kind="stable")]
        values = logits[tokens]
        running = _exp(values - peak).cumsum(dtype=np.float64)
        kept = int(running.searchsorted(self._top_p * float(total))) + 1
        return tokens[:kept], self._tempered(values[:kept], peak)

    def _tempered(self, values: FloatRow, peak: np.float32) -> FloatRow:
        distances: FloatRow = values - peak
        distances /= self._temperature
        return _exp(distances)


class Bias:
    """Amounts that are added to the logits of some tokens."""

    def __init__(self, amounts: Mapping[int, float]) -> None:
        self._tokens = np.fromiter(amounts.keys(), np.intp, len(amounts))
        self._amounts = np.fromiter(amounts.values(), np.float32, len(amounts))

    def apply(self, logits: FloatRow) -> tuple[Ids, FloatRow]:
        """Change the row; returns what to write where to undo that."""
        before = logits[self._tokens]
        logits[self._tokens] = before + self._amounts
        return self._tokens, before


class Penalty:
    """Makes the last `window` tokens less likely. How often each occurs is kept in arrays, so that a row is changed at once."""

    def __init__(self, window: int, repeat: float, frequency: float, presence: float) -> None:
        self._window = window
        self._factors = tuple(map(np.float32, (repeat, frequency, presence)))
        self._recent: deque[int] = deque()
        self._places: dict[int, int] = {}
        self._tokens = np.zeros(64, np.intp)
        self._counts = np.zeros(64, np.float32)

    def add(self, token: int) -> None:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == self._tokens.size:
                self._tokens, self._counts = np.resize(self._tokens, 2 * place), np.resize(self._counts, 2 * place)
            self._tokens[place], self._counts[place] = token, 0
        self._counts[place] += 1
        self._recent.append(token)
        if len(self._recent) > self._window:
            self._remove(self._recent.popleft())

    def _remove(self, token: int) -> None:
        place = self._places[token]
        self._counts[place] -= 1
        if self._counts[place] > 0:
            return
        del self._places[token]
        last = len(self._places)
        if place != last:
            self._tokens[place], self._counts[place] = self._tokens[last], self._counts[last]
            self._places[int(self._tokens[place])] = place

    def apply(self, logits: FloatRow) -> tuple[Ids, FloatRow]:
        """Change the row; returns what to write where to undo that."""
        repeat, frequency, presence = self._factors
        used = len(self._places)
        tokens = self._tokens[:used]
        before = logits[tokens]
        after = np.where(before <= 0, before * repeat, before / repeat)
        logits[tokens] = after - (self._counts[:used] * frequency + presence)
        return tokens, before


def _penalties(sampling: Sampling, prompt: Sequence[int]) -> tuple[Penalty, ...]:
    """`repeat_penalty` looks at prompt and answer, as in llama.cpp; the OpenAI pair looks at the answer only."""
    penalties = []
    if sampling.repeat_penalty != 1.0 and sampling.repeat_last_n != 0:
        window = sampling.repeat_last_n if sampling.repeat_last_n > 0 else sys.maxsize
        repeat = Penalty(window, sampling.repeat_penalty, 0.0, 0.0)
        for token in prompt[-window:]:
            repeat.add(token)
        penalties.append(repeat)
    if sampling.frequency_penalty or sampling.presence_penalty:
        penalties.append(Penalty(sys.maxsize, 1.0, sampling.frequency_penalty, sampling.presence_penalty))
    return tuple(penalties)


def draw(weights: FloatRow, chance: float) -> int:
    """A place, by weight; never one of weight 0. `chance` is uniform in [0, 1)."""
    chance = 1 - chance
    start, before = 0, 0.0
    if weights.size > 8 * _BLOCK:  # a running sum over everything would take longer than all the rest
        sums = np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK)).cumsum(dtype=np.float64)
        chance *= sums[-1]
        block = min(int(sums.searchsorted(chance)), sums.size - 1)
        start, before = block * _BLOCK, float(sums[block - 1]) if block else 0.0
        running = weights[start : start + _BLOCK].cumsum(dtype=np.float64)
        target = min(chance - before, running[-1])
    else:
        running = weights.cumsum(dtype=np.float64)
        target = chance * running[-1]
    return start + min(int(running.searchsorted(target)), running.size - 1)


def largest(logits: FloatRow, count: int) -> tuple[list[int], list[float]]:
    """The `count` tokens with the largest logits, and these, largest first, among equals by id; all if there are no more."""
    width = logits.size // _GRID_ROWS
    if 2 * count > width:
        count = min(count, logits.size)
        return _largest_above(logits, count, np.partition(logits, -count)[-count])
    # A column is a group of tokens that lie far apart. As many tokens as groups reach the count-th largest of the groups' maxima:
    # all that are wanted, and few others.
    grid = logits[: _GRID_ROWS * width].reshape(_GRID_ROWS, width)
    maxima = grid.max(axis=0)
    floor = np.partition(maxima, -count)[-count]
    columns = (maxima >= floor).nonzero()[0]
    if not count <= columns.size <= 2 * count:  # many equal logits, as in a masked row, or such that are no numbers
        return _largest_above(logits, count, floor)
    part = grid.take(columns, axis=1).ravel()
    hits = (part >= floor).nonzero()[0]
    groups = columns.tolist()
    tokens = [hit // len(groups) * width + groups[hit % len(groups)] for hit in hits.tolist()]
    values = part.take(hits).tolist()
    if grid.size < logits.size:
        rest = (logits[grid.size :] >= floor).nonzero()[0] + grid.size
        tokens += rest.tolist()
        values += logits[rest].tolist()
    return _sorted(tokens, values, count)


def _largest_above(logits: FloatRow, count: int, floor: np.float32) -> tuple[list[int], list[float]]:
    """The same where at least `count` logits reach the floor; those that equal it are as many as it takes."""
    above = (logits > floor).nonzero()[0]
    equal = (logits == floor).nonzero()[0][: max(count - above.size, 0)]
    tokens = np.concatenate((above, equal)) if above.size + equal.size else np.array([logits.argmax()])
    return _sorted(tokens.tolist(), logits[tokens].tolist(), count)


def _sorted(tokens: list[int], values: list[float], count: int) -> tuple[list[int], list[float]]:
    order = sorted(range(len(tokens)), key=values.__getitem__, reverse=True)[:count]  # stable also in reverse
    return [tokens[place] for place in order], [values[place] for place in order]


def _at_least(logits: FloatRow, floor: np.float32) -> Ids:
    """Ids, ascending; one at least, also where a logit is not a number."""
    tokens: Ids = (logits >= floor).nonzero()[0]
    return tokens if tokens.size else np.array([logits.argmax()])


def _exp(values: FloatRow) -> FloatRow:
    """In place: a second array of the vocabulary's size would have to be allocated."""
    np.exp(values, out=values)
    return values


def log_probability(model: Model, logits: FloatRow, token: int, top: int) -> TokenLogprob:
    """Log softmax of the row before sampling, for `token` and the `top` most likely ones."""
    peak = logits.max()
    norm = float(peak) + math.log(_exp(logits - peak).sum())
    best = zip(*largest(logits, top), strict=True) if top > 0 else ()
    alternatives = tuple((*_written(model, other), value - norm) for other, value in best)
    return TokenLogprob(*_written(model, token), float(logits[token]) - norm, alternatives)


def unscored(model: Model, token: int) -> TokenLogprob:
    """The first token of an echoed prompt, which nothing precedes."""
    return TokenLogprob(*_written(model, token), None)


def _written(model: Model, token: int) -> tuple[str, bytes]:
    piece = model.piece(token)
    return piece.decode("utf-8", "replace"), piece
