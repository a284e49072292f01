"""Carries saved states between the KV cache, RAM and disk, as placement decided. Two threads of its own do the disk's work:
the step loop never waits for a file.

Owns no decision about who is saved for whom; owns when idle conversations go to disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from queue import SimpleQueue

from localfast.engine.disk import DiskStates
from localfast.engine.llama import Context
from localfast.engine.messages import CacheReport, LevelReport, SlotReport
from localfast.engine.placement import RESTORE_GAIN_TOKENS, SAVE_TOKENS, Placement, Slot
from localfast.engine.scheduler import Scheduler
from localfast.engine.sequence import Park, Restore, Save
from localfast.engine.states import RamStates, Saved

IDLE_S = 2.0
"""An engine without work for so long writes its conversations to disk: a crash loses no more than the newest turns."""
MAX_WRITES = 16
"""States that wait for the disk are in RAM beyond its limit: on a slow disk the next ones are dropped."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What the disk had for a request that waits for it."""

    request_id: int
    saved: Saved | None


@dataclass(frozen=True, slots=True)
class _Lookup:
    request_id: int
    tokens: list[int]
    at_least: int


class StateKeeper:
    """`put_work` brings what was read from disk back to the step loop."""

    def __init__(self, context: Context, states: RamStates, disk: DiskStates, put_work: Callable[[Fetched], None]) -> None:
        self._context = context
        self._states = states
        self._disk = disk
        self._put_work = put_work
        self._dirty = False
        self._last_step_s = 0.0
        self._lookups: SimpleQueue[_Lookup] = SimpleQueue()
        self._writes: SimpleQueue[Saved | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="state-writer", daemon=True)
        if disk.limit_bytes:
            self._writer.start()
            threading.Thread(target=self._read, name="state-reader", daemon=True).start()

    # --- step loop ------------------------------------------------------------------------------------------------------------

    @property
    def patience_s(self) -> float | None:
        """How long to wait for work before `keep_idle`; None: nothing is left to keep."""
        if not self._dirty or not self._disk.limit_bytes:
            return None
        return max(0.0, self._last_step_s + IDLE_S - time.monotonic())

    def note_step(self) -> None:
        """Something was computed: there is something to keep, and the engine is not idle."""
        self._dirty = True
        self._last_step_s = time.monotonic()

    def keep(self, edit: Save | Park, forget: Callable[[Tokens[int]], None]) -> None:
        """Carry out a Save or a Park; `forget` is told what found no room."""
        match edit:
            case Save(slot, tokens):
                pushed_out = self._states.put(Saved(tuple(tokens), self._context.read_state(slot)))
            case Park(slot, sequence, tokens):
                pushed_out = self._states.park(sequence, Saved(tuple(tokens), self._context.read_state(slot)))
        for saved in pushed_out:
            forget(saved.tokens)
            self._to_disk(saved)

    def restore(self, edit: Restore) -> bool:
        """Fill the slot. False: it could not be, and is empty."""
        if not self._context.write_state(edit.slot, edit.saved.state):
            return False
        if edit.length < len(edit.saved.tokens):
            self._context.truncate(edit.slot, edit.length)
        return True

    def fetch(self, request_id: int, tokens: list[int], placement: Placement) -> bool:
        """Have the disk looked through if it may know more of this prompt than the memory does. True: `Fetched` will come."""
        if not self._disk.limit_bytes or not self._disk.entries:
            return False
        known = placement.known(tokens)
        if len(tokens) - known < SAVE_TOKENS:
            return False
        self._lookups.put(_Lookup(request_id, tokens[:-1], known + RESTORE_GAIN_TOKENS))
        return True

    def take(self, fetched: Fetched) -> None:
        if fetched.saved is not None:
            for pushed_out in self._states.put(fetched.saved):
                self._to_disk(pushed_out)

    def keep_idle(self, slots: list[Slot]) -> None:
        """Write what idle slots and RAM hold to disk, unless it is there already."""
        self._dirty = False
        if not self._disk.limit_bytes:
            return
        for saved in self._states.saved():
            if not self._disk.has(saved.tokens):
                self._to_disk(saved)
        for slot in slots:
            if slot.sequence is None and len(slot.held) >= SAVE_TOKENS and not self._disk.has(tuple(slot.held)):
                self._to_disk(Saved(tuple(slot.held), self._context.read_state(slot.id)))

    def _to_disk(self, saved: Saved) -> None:
        if self._disk.limit_bytes and self._writes.qsize() < MAX_WRITES:
            self._writes.put(saved)

    def close(self) -> None:
        """Wait until all that was given to the disk is written."""
        if self._disk.limit_bytes:
            self._writes.put(None)
            self._writer.join()

    def report(self, number: int, scheduler: Scheduler) -> CacheReport:
        placement = scheduler.placement
        slots = [SlotReport(slot.id, len(slot.tokens), slot.sequence is not None) for slot in placement.slots]
        ram = LevelReport(len(self._states.saved()), self._states.used_bytes, self._states.limit_bytes)
        disk = LevelReport(self._disk.entries, self._disk.used_bytes, self._disk.limit_bytes)
        return CacheReport(number, placement.total, placement.cells.used, slots, ram, disk, self._states.parked_count)

    # --- disk threads ---------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while True:
            lookup = self._lookups.get()
            self._put_work(Fetched(lookup.request_id, self._disk.find(lookup.tokens, lookup.at_least)))

    def _write(self) -> None:
        while (saved := self._writes.get()) is not None:
            self._disk.write(saved)
