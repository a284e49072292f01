"""Where a sequence's beginning comes from: a slot's own cells, cells shared with another slot, or a state saved in RAM.

Owns what slots hold, how cells are counted, and the memory edits that make it so. It is told who comes and goes; who that is, the
scheduler decides. Pure.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from localfast.engine.cells import Cells
from localfast.engine.prefixes import common_prefix
from localfast.engine.sequence import Copy, Edit, Miss, Park, Restore, Save, Sequence, Truncate
from localfast.engine.states import RamStates, Saved

SAVE_TOKENS = 64
"""What is shorter is computed again rather than saved."""
RESTORE_GAIN_TOKENS = 32
"""A saved state costs a copy and cells of its own: it must be so much longer than what slots hold."""
FORGOTTEN_PREFIXES = 64
"""How many lost prefixes are remembered, to explain a miss."""


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
    def tokens(self) -> list[int]:
        return self.sequence.tokens[: self.sequence.computed] if self.sequence else self.held


@dataclass(frozen=True, slots=True)
class Start:
    """`length` tokens that need not be computed: from a slot's cells or from a saved state."""

    length: int = 0
    slot: Slot | None = None
    saved: Saved | None = None


class Placement:
    """Slots and their cells. `free` cells are those that nobody holds and no running prompt still needs."""

    def __init__(self, *, slots: int, cells: int, window: int, states: RamStates) -> None:
        self.slots = [Slot(number) for number in range(slots)]
        self.running: list[Sequence] = []  # in order of admission
        self.total = cells
        self.cells = Cells(slots)
        self.states = states
        self.restored = 0
        self._window = window
        self._oldest: Mapping[int, int] = {}
        self._edits: list[Edit] = []
        self._tick = 0
        self._forgotten: deque[array[int]] = deque(maxlen=FORGOTTEN_PREFIXES)

    # --- a step ----------------------------------------------------------------------------------------------------------------

    def begin(self, oldest: Mapping[int, int]) -> None:
        self._tick += 1
        self._oldest = oldest

    def take_edits(self) -> list[Edit]:
        edits, self._edits = self._edits, []
        return edits

    @property
    def free(self) -> int:
        """A running prompt counts whole, so that it can always be finished."""
        return self.total - self.cells.used - sum(max(0, sequence.behind) for sequence in self.running)

    @property
    def overdrawn(self) -> bool:
        return self.free < 0

    def grow(self, slot: int, count: int) -> None:
        self.cells.grow(slot, count)
        self.slots[slot].last_used = self._tick

    def shorten(self, sequence: Sequence, length: int) -> None:
        assert sequence.slot is not None
        if length < sequence.computed:
            self._truncate(sequence.slot, length)
            sequence.computed = length

    def leave(self, sequence: Sequence) -> None:
        """The sequence is done; what it computed stays in its slot."""
        assert sequence.slot is not None
        slot = self.slots[sequence.slot]
        slot.held = sequence.tokens[: sequence.computed]
        slot.sequence = None
        self.running.remove(sequence)
        sequence.slot = None

    def park(self, sequence: Sequence) -> None:
        """Out of its slot, with its state kept if there is room for it."""
        assert sequence.slot is not None
        slot = self.slots[sequence.slot]
        if sequence.computed:
            self._edits.append(Park(slot.id, sequence, sequence.tokens[: sequence.computed]))
        self.leave(sequence)
        slot.held = []
        self._truncate(slot.id, 0)
        sequence.computed = 0

    def lost(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.cells.truncate(sequence.slot, 0)
        sequence.computed = sequence.seated_at = 0
        if len(sequence.tokens) == sequence.prompt_tokens:
            sequence.cached = 0

    def forget(self, tokens: Tokens[int]) -> None:
        """These tokens were cached and are no more."""
        self._forgotten.append(array("i", tokens))

    # --- room ------------------------------------------------------------------------------------------------------------------

    def evict_oldest(self) -> bool:
        """Empty the idle slot that was used longest ago. False: there is none."""
        idle = [slot for slot in self.slots if slot.sequence is None and slot.held]
        if idle:
            self._evict(min(idle, key=lambda slot: slot.last_used))
        return bool(idle)

    def _evict(self, slot: Slot) -> None:
        if slot.held:
            self._keep(slot, 0)
            slot.held = []
            self._truncate(slot.id, 0)

    def _keep(self, slot: Slot, length: int) -> None:
        """The idle slot is about to lose its tokens from `length` on: save them if that is worth it and nobody else has them."""
        if len(slot.held) - length < SAVE_TOKENS:
            return
        others = [other.tokens for other in self.slots if other is not slot]
        if any(common_prefix(tokens, slot.held) == len(slot.held) for tokens in others):
            return
        if self.states.best(slot.held)[1] == len(slot.held):
            return
        if self.states.limit_bytes:
            self._edits.append(Save(slot.id, slot.held))
        else:
            self.forget(slot.held)

    def _truncate(self, slot: int, length: int) -> None:
        self.cells.truncate(slot, length)
        self._edits.append(Truncate(slot, length))

    def save_checkpoints(self) -> None:
        """States of running prompts that stand where their chunk was made to end."""
        for sequence in self.running:
            if sequence.computed in sequence.pauses:
                sequence.pauses.discard(sequence.computed)
                assert sequence.slot is not None
                if self.states.limit_bytes and sequence.computed >= SAVE_TOKENS:
                    self._edits.append(Save(sequence.slot, sequence.tokens[: sequence.computed]))

    # --- coming in -------------------------------------------------------------------------------------------------------------

    def seat(self, sequence: Sequence, reserve: int) -> bool:
        """Give the sequence a slot and the best beginning there is. False: no slot, or its tokens and `reserve` do not fit."""
        idle = [slot for slot in self.slots if slot.sequence is None]
        if not idle:
            return False
        start = self._best_start(sequence)
        source = start.slot
        target = self._target(source, start.length, idle)
        if not self._fits(sequence, start, target, reserve):
            if source is None or source not in idle or target is source:
                return False
            target = source  # its own tail is what stands in the way
            if not self._fits(sequence, start, target, reserve):
                return False
        if sequence.cached is None:
            sequence.cached = start.length
            sequence.miss = self._explain(sequence, start.length)
        self._prepare(sequence, start, target)
        self._free_up(len(sequence.tokens) - start.length * (start.saved is None) + reserve, target, source)
        if start.saved is not None:
            self._edits.append(Restore(target.id, sequence, start.saved, start.length))
            self.cells.grow(target.id, start.length)
            self.restored += 1
        target.held = []
        target.sequence = sequence
        target.seated = target.last_used = self._tick
        sequence.slot = target.id
        sequence.computed = sequence.seated_at = start.length
        self.running.append(sequence)
        return True

    def _target(self, source: Slot | None, length: int, idle: list[Slot]) -> Slot:
        """Where to go on: in the source itself if little is lost, else in an empty slot, else in the one unused for longest."""
        oldest = min(idle, key=lambda slot: (bool(slot.held), slot.last_used))
        if source in idle and source is not None and length:
            others = [slot for slot in idle if slot is not source]
            if len(source.held) - length < SAVE_TOKENS or not others:
                return source
            return min(others, key=lambda slot: (bool(slot.held), slot.last_used))
        return oldest

    def _fits(self, sequence: Sequence, start: Start, target: Slot, reserve: int) -> bool:
        """Whether the tokens fit once every idle slot but source and target has let go."""
        idle = {slot.id for slot in self.slots if slot.sequence is None}
        needed = len(sequence.tokens) + reserve
        kept = 0
        if start.slot is not None:
            needed -= start.length
            if start.slot is target:
                kept = self.cells.beginning_held_only_by(idle, target.id, start.length)
            elif start.slot.id in idle:
                idle -= {start.slot.id}
        return needed <= self.free + self.cells.held_only_by(idle) - kept

    def _prepare(self, sequence: Sequence, start: Start, target: Slot) -> None:
        """Empty the target, or cut it to what is gone on with, and share what is shared."""
        if start.slot is target:
            if start.length < len(target.held):
                self._keep(target, start.length)
                target.held = target.held[: start.length]
                self._truncate(target.id, start.length)
            return
        self._evict(target)
        if start.slot is not None and start.length:
            self._edits.append(Copy(start.slot.id, target.id, start.length))
            self.cells.share(start.slot.id, target.id, start.length)
        if start.saved is not None and self.states.unpark(sequence) is None:
            self.states.use(start.saved)

    def _free_up(self, needed: int, target: Slot, source: Slot | None) -> None:
        """Let idle slots go, the one unused for longest first, until so many cells are free."""
        idle = [s for s in self.slots if s.sequence is None and s.held and s is not target and s is not source]
        for slot in sorted(idle, key=lambda slot: slot.last_used):
            if self.free >= needed:
                return
            self._evict(slot)

    def _best_start(self, sequence: Sequence) -> Start:
        parked = self.states.parked(sequence)
        if parked is not None:
            return Start(len(parked.tokens), saved=parked)
        if sequence.score_prompt:
            return Start()
        # At least the last token is computed again: its logits are needed.
        tokens = sequence.tokens[:-1]
        slots = [(self._usable(slot, tokens), slot) for slot in self.slots]
        length, slot = max(slots, key=lambda found: (found[0], found[1].sequence is None))
        saved, saved_length = self.states.best(tokens)
        if saved is not None and saved_length >= length + RESTORE_GAIN_TOKENS:
            return Start(saved_length, saved=saved)
        return Start(length, slot=slot) if length else Start()

    def _usable(self, slot: Slot, tokens: list[int]) -> int:
        """Length of the beginning of `tokens` that the slot's cells can give."""
        if slot.sequence and slot.seated == self._tick:
            return 0
        length = common_prefix(slot.tokens, tokens)
        return length if self._oldest.get(slot.id, 0) <= max(0, length - self._window) else 0

    def known(self, tokens: list[int]) -> int:
        """Length of the beginning of `tokens` that slots or saved states hold, usable or not."""
        return max(self.states.best(tokens)[1], *(common_prefix(slot.tokens, tokens) for slot in self.slots))

    def common_with(self, sequence: Sequence, prompts: list[Sequence]) -> tuple[int, Sequence | None, int]:
        """(tokens of its beginning that are here already, the one of `prompts` it has most in common with, and how much)."""
        tokens = sequence.tokens[:-1]
        shared = [(common_prefix(other.tokens, tokens), other) for other in prompts]
        length, source = max(shared, key=lambda found: found[0])
        return self.known(tokens), source, length

    def _explain(self, sequence: Sequence, cached: int) -> Miss | None:
        tokens = sequence.tokens[: sequence.prompt_tokens - 1]
        if cached >= len(tokens):
            return None
        if sequence.score_prompt:
            return Miss("scored", cached)
        known: list[Tokens[int]] = [slot.tokens for slot in self.slots]
        saved = self.states.nearest(tokens)
        if saved is not None:
            known.append(list(saved.tokens))
        nearest = max(known, key=lambda other: common_prefix(other, tokens))
        length = common_prefix(nearest, tokens)
        if length > cached + RESTORE_GAIN_TOKENS:
            return Miss("window", cached)
        if any(common_prefix(lost.tolist(), tokens) > length + RESTORE_GAIN_TOKENS for lost in self._forgotten):
            return Miss("forgotten", cached)
        if cached == 0 and length == 0:
            return Miss("new", 0)
        return Miss("differs", length, nearest[length]) if length < len(nearest) else Miss("longer", length)
