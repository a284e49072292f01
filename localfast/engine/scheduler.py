"""Owns slots, queues and cells, and decides what each step computes. Step loop's thread only.

Pure: no llama, no clock, no I/O. There is no prefill phase and no decode phase: every sequence has `computed` tokens chasing
`len(tokens)`. A step is `place` (who gets a slot, what happens to the cache), then `next_batch`, then `advance` and `append`.
Where a sequence's beginning comes from is decided in `engine/placement.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from localfast.core import FinishReason
from localfast.engine.placement import Placement
from localfast.engine.queues import RANKS, WEIGHTS, Queues
from localfast.engine.sequence import Batch, Chunk, Edit, Sequence
from localfast.engine.states import RamStates

TURN_TOKENS = 16
"""Tokens that a sequence gets computed before a higher class may take its slot; twice as many after each time it had to go, so
that it gets to its end even where its state cannot be kept."""
RESERVE_TOKENS = 16
"""Cells kept for the growth of each running sequence before another one comes in; without them it would soon have to go again."""
CHECKPOINT_TOKENS = 4
CHECKPOINT_SPACING = 64
"""Where the cache cannot be cut, a prompt's state is kept so many tokens before its end, if so many were computed anew."""


class Scheduler:
    """`window`: positions before a cut that must still be in the cache for a prefix to be reusable (sliding window size; 1 for
    recurrent models, whose state exists for the last position only; 0 for full attention, which can be cut anywhere).
    `states`: where sequences that give way are kept; without room there they are computed again."""

    def __init__(
        self,
        *,
        slots: int,
        cells: int,
        context_tokens: int,
        batch_tokens: int,
        max_outputs: int,
        window: int = 0,
        states: RamStates | None = None,
    ) -> None:
        assert context_tokens <= cells and slots <= min(batch_tokens, max_outputs)
        self.placement = Placement(slots=slots, cells=cells, window=window, states=states or RamStates(0, window == 0))
        self.slots = self.placement.slots
        self.context_tokens = context_tokens
        self.batch_tokens = batch_tokens
        self.max_outputs = max_outputs
        self.window = window
        self.waiting = Queues()
        self.running = self.placement.running
        self.parked = 0
        self._prompt_budget = batch_tokens
        self._numbers = 0
        self._just_parked: set[Sequence] = set()

    # --- what the step loop calls -------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        assert len(sequence.tokens) < self.context_tokens, "a prompt that can never fit is refused before it gets here"
        self._numbers += 1
        sequence.number = self._numbers
        self.waiting.put(sequence)

    def limit(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Most tokens that a sequence may have, prompt included."""
        return self.context_tokens if max_tokens is None else min(self.context_tokens, prompt_tokens + max_tokens)

    def cancel(self, request_id: int) -> None:
        """Remove all sequences of a request, wherever they are; what they computed stays reusable."""
        for sequence in [s for s in self.waiting if s.request_id == request_id]:
            self.placement.states.unpark(sequence)
        self.waiting.remove(lambda sequence: sequence.request_id == request_id)
        for sequence in [s for s in self.running if s.request_id == request_id]:
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """The sequence has ended, wherever it is."""
        if sequence.slot is None:
            self.waiting.remove(lambda other: other is sequence)
            self.placement.states.unpark(sequence)
        else:
            self.placement.leave(sequence)

    def place(self, oldest: Mapping[int, int] | None = None) -> list[Edit]:
        """Decide who runs. Returns the memory edits to carry out, in order, before the next batch.

        `oldest`: for slots whose cache has lost its beginning (sliding window, recurrent), the first position still there.
        """
        self._just_parked.clear()
        self.placement.begin(oldest or {})
        # Every running sequence was counted with its newest token; if that overdrew the cells, somebody gives way.
        while self.placement.overdrawn:
            if not self.placement.evict_oldest():
                self._park(self._lowest())
        while self.waiting.take(self._admit):
            pass
        self.placement.save_checkpoints()
        return self.placement.take_edits()

    def next_batch(self, prompt_budget: int | None = None) -> Batch:
        """The work of one decode call, with at most `prompt_budget` tokens of prompts."""
        budget = self.batch_tokens
        outputs = self.max_outputs
        batch = Batch()
        decoders = [s for s in self.running if s.behind == 1]
        prompts = sorted((s for s in self.running if s.behind > 1), key=lambda s: (s.behind, s.number))
        for sequence in decoders:
            batch.chunks.append(_chunk(sequence, 1, 1))
        batch.decoders = len(decoders)
        budget -= len(decoders)
        outputs -= len(decoders)
        budget = self._prompt_budget = min(budget, self.batch_tokens if prompt_budget is None else prompt_budget)
        # Waiting prompts share what is left by the weight of their class, so that a short one is not held up by a long one;
        # what the short ones do not need goes to the longer ones.
        weight = sum(WEIGHTS[s.request_class] for s in prompts)
        for sequence in prompts:
            share = math.ceil(budget * WEIGHTS[sequence.request_class] / weight)
            weight -= WEIGHTS[sequence.request_class]
            count = min(sequence.behind, share, _until_pause(sequence))
            if sequence.score_prompt:
                count = min(count, outputs)
            elif outputs == 0:
                count = min(count, sequence.behind - 1)  # no output row is left for its last token in this step
            if count <= 0:
                continue
            wanted = count if sequence.score_prompt else int(count == sequence.behind)
            batch.chunks.append(_chunk(sequence, count, wanted))
            budget -= count
            outputs -= wanted
        self._add_drafts(batch, min(self.batch_tokens - batch.token_count, outputs))
        return batch

    def advance(self, batch: Batch) -> list[Chunk]:
        """The batch was computed. Returns the chunks that are now complete up to their last token: each wants its next one."""
        for chunk in batch.chunks:
            chunk.sequence.computed += chunk.count
            self.placement.grow(chunk.slot, chunk.count)
        return [chunk for chunk in batch.chunks if chunk.sequence.behind <= 0]

    def append(self, sequence: Sequence, token: int) -> FinishReason | None:
        """A token was chosen. Returns the reason if the sequence may not go on."""
        sequence.tokens.append(token)
        return "length" if len(sequence.tokens) >= sequence.limit else None

    def accept(self, sequence: Sequence, accepted: int) -> None:
        """So many of the drafted tokens were what the model chose; the cells of the others are given back."""
        rejected = len(sequence.draft) - accepted
        sequence.draft = []
        self.placement.shorten(sequence, sequence.computed - rejected)

    def lost(self, sequence: Sequence) -> None:
        """Its saved state could not be restored: the slot is empty and all is computed."""
        self.placement.lost(sequence)

    def no_room(self) -> bool:
        """The engine found no cells for the last batch (nothing of it was computed). Returns False if nobody can give way."""
        for sequence in self.running:
            sequence.draft = []
        if self.placement.evict_oldest():
            return True
        if len(self.running) > 1:
            self._park(self._lowest())
            return True
        return False

    @property
    def used_cells(self) -> int:
        return self.placement.cells.used

    # --- decisions ----------------------------------------------------------------------------------------------------------

    def _admit(self, sequence: Sequence) -> bool | None:
        """Offered by the queues: give the sequence a slot if there is one and its tokens fit, at the cost of lower classes."""
        if sequence in self._just_parked or self._waits(sequence):
            return None
        if not self._could_fit(sequence):
            return False
        growth = min(RESERVE_TOKENS, sequence.limit - len(sequence.tokens))
        while True:
            reserve = sum(min(RESERVE_TOKENS, s.limit - len(s.tokens)) for s in self.running) + growth if self.running else 0
            if self.placement.seat(sequence, reserve):
                self._plan_pauses(sequence)
                return True
            victim = next((s for s in self._by_importance() if self._yields_to(s, sequence)), None)
            if victim is None:
                return False
            self._park(victim)

    def _could_fit(self, sequence: Sequence) -> bool:
        """Whether it could get in at all now: nobody is parked in vain."""
        staying = [s for s in self.running if not self._yields_to(s, sequence)]
        if len(staying) >= len(self.slots):
            return False
        return len(staying) == len(self.running) or self.placement.total - sum(len(s.tokens) for s in staying) >= len(
            sequence.tokens
        ) + RESERVE_TOKENS * (len(staying) + 1)

    def _yields_to(self, running: Sequence, newcomer: Sequence) -> bool:
        higher = RANKS[newcomer.request_class] < RANKS[running.request_class]
        return higher and running.computed - running.seated_at >= TURN_TOKENS << running.parks

    def _by_importance(self) -> list[Sequence]:
        """Running sequences, those that give way first in front: the lowest class, then the youngest."""
        return sorted(self.running, key=lambda s: (RANKS[s.request_class], s.number), reverse=True)

    def _lowest(self) -> Sequence:
        return self._by_importance()[0]

    def _park(self, sequence: Sequence) -> None:
        """Its cells are needed: it goes back to the head of its queue, and its text goes on from where it was."""
        self.placement.park(sequence)
        sequence.parks += 1
        self.waiting.put(sequence, first=True)
        self._just_parked.add(sequence)
        self.parked += 1

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
        prompts = [other for other in self.running if not other.prompt_computed]
        if sequence.score_prompt or not prompts:
            return None, 0
        here, source, length = self.placement.common_with(sequence, prompts)
        if source is None or length <= here:
            return None, 0
        step = max(1, self._prompt_budget)
        chunks = math.ceil((length - source.computed) / step)
        delay = min(chunks * step, source.behind) + len(sequence.tokens) - length
        if delay > 2 * (len(sequence.tokens) - here):
            return None, 0
        if self.window:
            source.pauses.add(length)  # what it has computed can be shared at its very end only
        return source, length

    def _plan_pauses(self, sequence: Sequence) -> None:
        """Where the cache cannot be cut, a state near the end of the prompt is kept, so that the prompt can be gone on with."""
        checkpoint = sequence.prompt_tokens - CHECKPOINT_TOKENS
        if self.window and checkpoint - sequence.computed >= CHECKPOINT_SPACING and not sequence.score_prompt:
            sequence.pauses.add(checkpoint)

    def _add_drafts(self, batch: Batch, room: int) -> None:
        """Guesses of the decoders, as far as rows, tokens and cells are left."""
        room = min(room, self.placement.free)
        for position, chunk in enumerate(batch.chunks[: batch.decoders]):
            sequence = chunk.sequence
            # The last token that a sequence may have needs no successor.
            most = min(room, len(sequence.draft), sequence.limit - len(sequence.tokens) - 1)
            del sequence.draft[max(0, most) :]
            if most > 0:
                batch.chunks[position] = _chunk(sequence, 1 + most, 1 + most)
                room -= most


def _chunk(sequence: Sequence, count: int, outputs: int) -> Chunk:
    assert sequence.slot is not None
    return Chunk(sequence, sequence.slot, sequence.computed, count, outputs)


def _until_pause(sequence: Sequence) -> int:
    ahead = [length - sequence.computed for length in sequence.pauses if length > sequence.computed]
    return min(ahead, default=sequence.behind)
