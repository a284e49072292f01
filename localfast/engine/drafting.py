"""Guesses of a smaller model with the same tokenizer, for the sequences that run now. Engine process, step loop's thread.

It follows each slot of the large model in a slot of its own, and chooses greedily: how right that is, the shared batch tells.
Which sequences want how many guesses is decided elsewhere. When it fails it guesses nothing; it must never end a request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from localfast.engine.llama import Context, Model
from localfast.engine.messages import EngineConfig
from localfast.engine.pace import Pace
from localfast.engine.prefixes import common_prefix
from localfast.engine.sequence import Sequence
from localfast.errors import LoadFailed

SURE = 0.4
"""Less sure than this, the small model's guess is not worth a place in the batch."""
_SAMPLED_PIECES = 61
_SPARE_VOCABULARY = 128
"""Sizes of the same vocabulary differ by padding."""


@dataclass(frozen=True, slots=True)
class _Feed:
    """Tokens for one slot, as `Context.decode` takes them."""

    slot: int
    start: int
    tokens: list[int]
    outputs: int

    @property
    def count(self) -> int:
        return len(self.tokens)


class _Follower:
    """What a slot of the small model holds. Of the sequence it follows, the first `known` held tokens are the sequence's own."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.sequence: Sequence | None = None
        self.known = 0

    def common_with(self, sequence: Sequence) -> int:
        """How much of it can stay. The sequence's last token is always left to compute: its logits are wanted."""
        # Of a sequence that was followed before only guesses can differ: comparing it all at each step would take too long.
        known = min(self.known, len(self.held)) if self.sequence is sequence else 0
        common = known + common_prefix(self.held[known:], sequence.tokens[known:])
        self.sequence, self.known = sequence, min(common, len(sequence.tokens) - 1)
        return self.known


class Drafter:
    """Raises LoadFailed when the small model cannot be loaded, speaks another vocabulary, or cannot take back wrong guesses."""

    def __init__(self, target: Model, config: EngineConfig) -> None:
        small = replace(config, path=config.draft_path, gpu_layers=config.draft_gpu_layers, split=(), cpu_experts=0)
        self._model = Model(small, target.log)
        if reason := _unsuitable(self._model, target, config):
            self._model.close()
            raise LoadFailed(model=config.model, reason=f"the draft model cannot be used: {reason}")
        self._context = Context(self._model, small, config.slots)
        self._context.warm_up()
        self._followers = [_Follower() for _ in range(config.slots)]
        self._pace = Pace(config.max_stall_s / 2, 8, config.batch_tokens)
        started_s = time.perf_counter()
        self._context.warm_up()  # the first one was to allocate, this one is to measure
        self._pace.observe(1, 0, time.perf_counter() - started_s)

    def token_s(self, sequences: int) -> float:
        """Seconds that one guess takes while so many sequences are guessed for; 0 while nothing is known."""
        return self._pace.plain_s(sequences) / max(1, sequences)

    def draft(self, wanted: Mapping[Sequence, int], threads: int) -> list[Sequence]:
        """Give each sequence up to so many guesses, fewer where the small model is not sure. Returns whom it had an answer for:
        one that it has not caught up with gets its guesses in a later step."""
        self._context.set_threads(threads)
        going = self._catch_up(wanted)
        answered = list(going)
        while going:
            more = [sequence for sequence, row in going.items() if self._guess(sequence, row, wanted[sequence])]
            going = self._decode([_Feed(_slot(s), len(s.tokens) + len(s.draft) - 1, [s.draft[-1]], 1) for s in more], more)
        return answered

    def close(self) -> None:
        self._context.close()
        self._model.close()

    def _guess(self, sequence: Sequence, row: int, most: int) -> bool:
        """Whether another guess is wanted after this one."""
        logits = self._context.logits(row)
        token = int(logits.argmax())
        sure = np.exp(logits - logits[token]).sum() * SURE <= 1
        if sure and not self._model.is_end(token):
            sequence.draft.append(token)
        return bool(sure) and not self._model.is_end(token) and len(sequence.draft) < most

    def _catch_up(self, sequences: Iterable[Sequence]) -> dict[Sequence, int]:
        """Compute what the small model has not seen yet, as much as a step may take. Returns whose logits are there, by row."""
        room = self._pace.prompt_tokens(1)
        feeds, complete = [], []
        for sequence in sequences:
            follower, slot = self._followers[_slot(sequence)], _slot(sequence)
            start = follower.common_with(sequence)
            if start < len(follower.held):
                self._context.truncate(slot, start)
                del follower.held[start:]
            tokens = sequence.tokens[start : start + room]
            last = start + len(tokens) == len(sequence.tokens)
            if tokens:
                feeds.append(_Feed(slot, start, tokens, int(last)))
                room -= len(tokens)
                complete += [sequence] if last else []
        return self._decode(feeds, complete)

    def _decode(self, feeds: list[_Feed], wanting: list[Sequence]) -> dict[Sequence, int]:
        """Rows of logits by sequence; none when the cache has no room, which then is emptied."""
        if not feeds:
            return {}
        started_s = time.perf_counter()
        if not self._context.decode(feeds):
            for slot, follower in enumerate(self._followers):
                self._context.truncate(slot, 0)
                follower.held.clear()
            return {}
        tokens = sum(feed.count for feed in feeds)
        plain = tokens if tokens == len(feeds) else 0
        self._pace.observe(plain, tokens - plain, time.perf_counter() - started_s)
        ends = dict(zip((feed.slot for feed in feeds), accumulate(feed.count for feed in feeds), strict=True))
        for feed in feeds:
            self._followers[feed.slot].held += feed.tokens
        return {sequence: ends[_slot(sequence)] - 1 for sequence in wanting}


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot


def _unsuitable(small: Model, target: Model, config: EngineConfig) -> str:
    """Why, in words; empty when the small model can guess for the large one."""
    if abs(small.vocabulary - target.vocabulary) > _SPARE_VOCABULARY or small.bos != target.bos:
        return f"its vocabulary has {small.vocabulary} tokens, not {target.vocabulary}"
    for token in range(0, min(small.vocabulary, target.vocabulary), _SAMPLED_PIECES):
        if small.piece(token) != target.piece(token):
            return f"token {token} is {small.piece(token)!r} there and {target.piece(token)!r} here"
    if not can_take_back(small, config):
        return "its memory cannot take back wrong guesses"
    if small.train_context_tokens and small.train_context_tokens < config.context_tokens:
        return f"it was trained for {small.train_context_tokens} tokens, and requests may have {config.context_tokens}"
    return ""


def can_take_back(model: Model, config: EngineConfig) -> bool:
    """Whether guesses that turn out wrong can be cut off.

    A recurrent state cannot take tokens back, and a batch that is computed in parts may take the cells of a sliding window just
    behind guesses that turn out wrong.
    """
    return model.window == 0 or (model.window > 1 and config.batch_tokens <= config.ubatch_tokens)
