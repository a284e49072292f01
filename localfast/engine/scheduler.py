"""Owns slots, queue and cell counts, and decides what each step computes. Step loop's thread only.

Pure: no llama, no clock, no I/O. There is no prefill phase and no decode phase: every sequence has `computed` tokens chasing
`len(tokens)`, and a step spends a token budget, sequences that are one token behind (decoders) first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from localfast.core import FinishReason


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens. `tokens` is prompt and answer; the KV cache of its slot holds the first `computed` of them."""

    request_id: int
    index: int
    tokens: list[int]
    prompt_tokens: int
    limit: int
    """Most tokens this sequence may have, prompt included."""
    score_prompt: bool = False
    """Logits are wanted for every prompt token, not only the last; cleared by whoever got them."""
    awaited: tuple[Sequence | None, int] | None = None
    """The running sequence whose first so many tokens this one will share; decided once, so that nobody waits again and again."""
    slot: int | None = None
    computed: int = 0
    cached: int = 0
    """Prompt tokens that were not computed because a slot already held them."""

    @property
    def behind(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def prompt_computed(self) -> bool:
        return self.computed >= self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Truncate:
    """Forget everything of `slot` from position `length` on."""

    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Let `target`, emptied first, share the first `length` cells of `source`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of a sequence, from position `start` on; the last `outputs` of them yield logits."""

    sequence: Sequence
    slot: int
    start: int
    count: int
    outputs: int

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens[self.start : self.start + self.count]


@dataclass(slots=True)
class Batch:
    """One step's work: memory edits, in order, then the chunks of one decode call."""

    edits: list[Truncate | Copy] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def token_count(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(slots=True)
class Slot:
    """A sequence id of the llama context. `held` are the tokens in its cells while no sequence runs in it."""

    id: int
    sequence: Sequence | None = None
    held: list[int] = field(default_factory=list)
    last_used: int = 0
    seated: int = 0
    """The step in which its sequence came in; what the engine says of the slot's past is older."""

    @property
    def cells(self) -> int:
        """Cells counted for this slot; a running prompt counts whole, so that it can always be finished."""
        return len(self.sequence.tokens) if self.sequence else len(self.held)


class Scheduler:
    """`window`: positions before a cut that must still be in the cache for a prefix to be reusable (sliding window size; 1 for
    recurrent models, whose state exists for the last position only; 0 for full attention, which can be cut anywhere)."""

    def __init__(
        self, *, slots: int, cells: int, context_tokens: int, batch_tokens: int, max_outputs: int, window: int = 0
    ) -> None:
        assert context_tokens <= cells and slots <= min(batch_tokens, max_outputs)
        self.slots = [Slot(number) for number in range(slots)]
        self.cells = cells
        self.context_tokens = context_tokens
        self.batch_tokens = batch_tokens
        self.max_outputs = max_outputs
        self.window = window
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.preemptions = 0
        self._pending: list[Truncate | Copy] = []
        self._tick = 0

    # --- what the step loop calls -------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        assert len(sequence.tokens) < self.context_tokens, "a prompt that can never fit is refused before it gets here"
        self.waiting.append(sequence)

    def limit(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Most tokens that a sequence may have, prompt included."""
        return self.context_tokens if max_tokens is None else min(self.context_tokens, prompt_tokens + max_tokens)

    def cancel(self, request_id: int) -> None:
        """Remove all sequences of a request, wherever they are; what they computed stays reusable."""
        self.waiting = deque(s for s in self.waiting if s.request_id != request_id)
        for sequence in [s for s in self.running if s.request_id == request_id]:
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        slot = self.slots[sequence.slot] if sequence.slot is not None else None
        if slot is None:
            return
        slot.held = sequence.tokens[: sequence.computed]
        slot.sequence = None
        self.running.remove(sequence)
        sequence.slot = None

    def next_batch(self, oldest: Mapping[int, int] | None = None) -> Batch:
        """`oldest`: for slots whose cache has lost its beginning (sliding window, recurrent), the first position still there."""
        self._tick += 1
        self._make_room_for_decoders()
        self._admit(oldest or {})
        batch = Batch(edits=self._pending)
        self._pending = []
        budget = self.batch_tokens
        outputs = self.max_outputs
        decoders = [s for s in self.running if s.behind == 1]
        prompts = [s for s in self.running if s.behind > 1]
        for sequence in decoders[:budget]:
            batch.chunks.append(self._chunk(sequence, 1, 1))
            budget -= 1
            outputs -= 1
        # Waiting prompts share what is left evenly, so that a short one is not held up by a long one.
        for position, sequence in enumerate(prompts):
            share = math.ceil(budget / (len(prompts) - position))
            count = min(sequence.behind, share)
            if sequence.score_prompt:
                count = min(count, outputs)
            elif outputs == 0:
                count = min(count, sequence.behind - 1)  # no output row is left for its last token in this step
            wanted = count if sequence.score_prompt else int(count == sequence.behind)
            if count == 0:
                continue
            batch.chunks.append(self._chunk(sequence, count, wanted))
            budget -= count
            outputs -= wanted
        return batch

    def advance(self, batch: Batch) -> list[Chunk]:
        """The batch was computed. Returns the chunks that are now complete up to their last token: each wants its next one."""
        for chunk in batch.chunks:
            chunk.sequence.computed += chunk.count
            self.slots[chunk.slot].last_used = self._tick
        return [chunk for chunk in batch.chunks if chunk.sequence.behind == 0]

    def append(self, sequence: Sequence, token: int) -> FinishReason | None:
        """A token was chosen. Returns the reason if the sequence may not go on."""
        sequence.tokens.append(token)
        return "length" if len(sequence.tokens) >= sequence.limit else None

    def no_room(self) -> bool:
        """The engine found no cells for the last batch (nothing of it was computed). Returns False if nobody can give way."""
        for slot in self.slots:
            if slot.sequence is None and slot.held:
                self._forget(slot)
                return True
        if len(self.running) > 1:
            self._preempt(self.running[-1])
            return True
        return False

    @property
    def used_cells(self) -> int:
        return sum(slot.cells for slot in self.slots)

    # --- decisions ----------------------------------------------------------------------------------------------------------

    def _make_room_for_decoders(self) -> None:
        """Each running sequence was counted with its newest token; if that overdrew the cells, somebody gives way."""
        while self.used_cells > self.cells:
            idle = [slot for slot in self.slots if slot.sequence is None and slot.held]
            if idle:
                self._forget(min(idle, key=lambda slot: slot.last_used))
            else:
                self._preempt(self.running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; its text goes on from where it was when it is computed again."""
        assert sequence.slot is not None
        slot = self.slots[sequence.slot]
        self.finish(sequence)
        self._forget(slot)
        sequence.computed = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _forget(self, slot: Slot) -> None:
        slot.held = []
        self._pending.append(Truncate(slot.id, 0))

    def _admit(self, oldest: Mapping[int, int]) -> None:
        """First come, first served: the head of the queue waits for cells, and nobody overtakes it. One that waits for a running
        prompt to compute what both begin with lets the others pass."""
        passed_over: list[Sequence] = []
        while self.waiting and any(slot.sequence is None for slot in self.slots):
            sequence = self.waiting.popleft()
            if self._waits(sequence):
                passed_over.append(sequence)
            elif not self._place(sequence, oldest):
                passed_over.append(sequence)
                break
        self.waiting.extendleft(reversed(passed_over))

    def _waits(self, sequence: Sequence) -> bool:
        if sequence.awaited is None:
            sequence.awaited = self._worth_waiting_for(sequence)
        source, length = sequence.awaited
        return source is not None and source.slot is not None and source.computed < length

    def _worth_waiting_for(self, sequence: Sequence) -> tuple[Sequence | None, int]:
        """The running prompt with the longest beginning in common, if sharing it is no later than computing beside it.

        Beside it, both go at half speed: twice the own tokens. Waiting takes as long as the other needs to get there, in whole
        chunks, and then the rest of the own prompt.
        """
        if sequence.score_prompt or self.window == 1:  # a recurrent state is that of the last token only
            return None, 0
        tokens = sequence.tokens[:-1]
        known = [slot.held for slot in self.slots if not slot.sequence] + [s.tokens[: s.computed] for s in self.running]
        here = max(common_prefix(held, tokens) for held in known)
        prompts = [other for other in self.running if not other.prompt_computed]
        shared = [(common_prefix(other.tokens, tokens), other) for other in prompts]
        length, source = max(shared, key=lambda found: found[0], default=(0, None))
        if source is None or length <= here:
            return None, 0
        chunks = math.ceil((length - source.computed) / self.batch_tokens)
        delay = min(chunks * self.batch_tokens, source.behind) + len(sequence.tokens) - length
        return (source, length) if delay <= 2 * (len(sequence.tokens) - here) else (None, 0)

    def _place(self, sequence: Sequence, oldest: Mapping[int, int]) -> bool:
        idle = [slot for slot in self.slots if slot.sequence is None]
        # At least the last token is computed again: its logits are needed. Scored prompts need all of theirs.
        tokens = sequence.tokens[: 0 if sequence.score_prompt else -1]
        source, length = self._best_prefix(tokens, oldest)
        # An idle slot that holds the beginning is gone on with; a running one's is shared into an empty or the oldest slot.
        slot = source if source in idle and length else min(idle, key=lambda slot: (bool(slot.held), slot.last_used))
        # One spare cell per running sequence: otherwise the newcomer would be thrown out in the very next step.
        needed = len(sequence.tokens) + (len(self.running) + 1 if self.running else 0)
        if not self._free(needed, [other for other in idle if other is not slot and other.held], slot):
            return False
        if slot is not source and length:
            self._pending.append(Copy(source.id, slot.id, length))
        elif length < len(slot.held):
            self._pending.append(Truncate(slot.id, length))
        self._seat(sequence, slot, length)
        return True

    def _free(self, needed: int, others: list[Slot], slot: Slot) -> bool:
        """See to it that `slot` can grow to `needed` cells, at the cost of idle prefixes, oldest first. False: it cannot."""
        free = self.cells - self.used_cells + len(slot.held)
        if needed > free + sum(other.cells for other in others):
            return False
        for other in sorted(others, key=lambda other: other.last_used):
            if needed <= free:
                break
            free += len(other.held)
            self._forget(other)
        return True

    def _seat(self, sequence: Sequence, slot: Slot, length: int) -> None:
        slot.held = []
        slot.sequence = sequence
        slot.seated = self._tick
        sequence.slot = slot.id
        sequence.computed = length
        if len(sequence.tokens) == sequence.prompt_tokens:  # not when it comes back after giving way
            sequence.cached = length
        self.running.append(sequence)

    def _best_prefix(self, tokens: list[int], oldest: Mapping[int, int]) -> tuple[Slot, int]:
        """The slot, idle or running, whose cells hold the longest usable beginning of `tokens`, and its length."""

        def usable(slot: Slot) -> int:
            if slot.sequence and slot.seated == self._tick:
                return 0
            held = slot.sequence.tokens[: slot.sequence.computed] if slot.sequence else slot.held
            length = common_prefix(held, tokens)
            return length if oldest.get(slot.id, 0) <= max(0, length - self.window) else 0

        return max(((slot, usable(slot)) for slot in self.slots), key=lambda found: (found[1], found[0].sequence is None))

    def _chunk(self, sequence: Sequence, count: int, outputs: int) -> Chunk:
        assert sequence.slot is not None
        return Chunk(sequence, sequence.slot, sequence.computed, count, outputs)


def common_prefix(left: list[int], right: list[int]) -> int:
    """Number of equal tokens at the beginning of both."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(i for i in range(shorter) if left[i] != right[i])
