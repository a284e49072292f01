"""Fakes that record what they were asked, and that notice what the real part would choke on."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from array import array
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from localfast.core import Accepted, Event, Finished, GenerateRequest, SequenceFinished, TextDelta, Timings, Usage
from localfast.engine.client import EventStream
from localfast.engine.messages import CacheReport, EngineConfig, EngineFacts, EngineStats, LevelReport, SlotReport
from localfast.engine.scheduler import Scheduler
from localfast.engine.sequence import Batch, Copy, Edit, Park, Restore, Save, Truncate
from localfast.engine.states import Saved
from localfast.hardware import Device, EngineBuild, Hardware

FACTS = EngineFacts(
    pid=4711,
    description="fake 1B Q4_K_M",
    parameters=1_000_000,
    size_bytes=2_000_000,
    vocabulary=1000,
    train_context_tokens=4096,
    context_tokens=2048,
    cells=4096,
    slots=4,
    layers=5,
    gpu_layers=0,
    load_s=0.1,
)
USAGE = Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=3)
TIMINGS = Timings(queue_s=0.001, prefill_s=0.02, decode_s=0.04)


def answer(*texts: str, n: int = 1, reason: str = "stop") -> list[Event]:
    """The events of a request that went well; every choice says the same."""
    deltas = [TextDelta(index, text, 1) for text in texts for index in range(n)]
    ends = [SequenceFinished(index, reason) for index in range(n)]  # type: ignore[arg-type]
    return [Accepted(5), *deltas, *ends, Finished(USAGE, TIMINGS)]


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing else is to be done; work for threads is done in place.

    Where everybody waits for somebody for ever, it fails instead of hanging.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._look = self._selector.select  # type: ignore[attr-defined]
        self._selector.select = self._jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now_s

    def _jump(self, timeout_s: float | None) -> Any:
        if found := self._look(0):
            return found
        assert timeout_s is not None, "everybody waits, and nothing will ever happen"
        self._now_s += timeout_s
        return []

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        future = self.create_future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


def run_virtually(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(test)


class FakeEngine:
    """An Engine that answers from a script. `submitted` and `abandoned` record; `push` goes on with a stream by hand."""

    def __init__(self, script: Callable[[GenerateRequest], Iterable[Event]] | None = None) -> None:
        self.facts = FACTS
        self.stats = EngineStats()
        self.submitted: list[GenerateRequest] = []
        self.streams: dict[int, EventStream] = {}
        self.abandoned: list[int] = []
        self.abandoned_one = threading.Event()  # set in the server's thread, awaited in the test's
        self.submitted_one = threading.Event()
        self.stopped = False
        self.alive = True
        self.users = 0  # counted by tests that lease
        self.stopped_busy = False
        self.crashed = False
        self.refuse: Exception | None = None
        self._script = script or (lambda request: answer("Hello", " world", n=request.n * max(1, len(request.prompts))))

    def generate(self, request: GenerateRequest) -> EventStream:
        if self.refuse is not None:
            raise self.refuse
        self.submitted.append(request)
        number = len(self.submitted)
        stream = self.streams[number] = EventStream(number, self)  # type: ignore[arg-type]
        for event in self._script(request):
            stream.put(event)
        self.submitted_one.set()
        return stream

    def abandon(self, request_id: int) -> None:
        """Called at every close, as by the real client, which knows which requests are still open."""
        self.abandoned.append(request_id)
        self.abandoned_one.set()

    async def describe_cache(self) -> CacheReport:
        return CacheReport(1, 4096, 40, [SlotReport(0, 40, False)], LevelReport(1, 100, 1000), LevelReport(2, 200, 2000), 0)

    def crash(self) -> None:
        self.alive, self.crashed = False, True

    async def stop(self, grace_s: float) -> None:
        self.stopped_busy = self.users > 0
        self.alive = False
        await asyncio.sleep(0)
        self.stopped = True

    @property
    def open_requests(self) -> int:
        return len(self.submitted) - len(self.abandoned)


class FakeStart:
    """Starts FakeEngines for a ModelManager; `gate`, while set, holds every start up.

    `fail` fails every start, `failures` one each. An engine holds the size of its file on the device that its layers are on.
    """

    def __init__(self, script: Callable[[GenerateRequest], Iterable[Event]] | None = None) -> None:
        self.configs: list[EngineConfig] = []
        self.engines: list[FakeEngine] = []
        self.gate: asyncio.Event | None = None
        self.fail: Exception | None = None
        self.failures: list[Exception] = []
        self._script = script

    async def __call__(self, config: EngineConfig, settings: object) -> FakeEngine:
        self.configs.append(config)
        if self.gate is not None:
            await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        if self.fail is not None:
            raise self.fail
        engine = FakeEngine(self._script)
        device = "CUDA0" if config.gpu_layers else "CPU_Mapped"
        engine.facts = dataclasses.replace(
            FACTS,
            context_tokens=config.context_tokens,
            slots=config.slots,
            gpu_layers=config.gpu_layers,
            buffers=((device, "model", Path(config.path).stat().st_size),),
        )
        self.engines.append(engine)
        return engine


class FakeMachine:
    """16 GiB of RAM and perhaps a card, of which every engine that is not stopped takes what it holds."""

    def __init__(self, start: FakeStart, ram_bytes: int = 16 * 2**30, card_bytes: int = 0) -> None:
        self._start, self._ram_bytes, self._card_bytes = start, ram_bytes, card_bytes

    def __call__(self) -> Hardware:
        card = Device(
            backend="CUDA",
            name="Card",
            kind="gpu",
            total_bytes=self._card_bytes,
            free_bytes=self._card_bytes - self.used_bytes("CUDA0"),
            in_engine=True,
        )
        return Hardware(
            devices=(card,) if self._card_bytes else (),
            ram_total_bytes=self._ram_bytes,
            ram_available_bytes=self._ram_bytes - self.used_bytes("CPU_Mapped"),
            physical_cores=2,
            engine=EngineBuild(installed=True),
            system="linux",
        )

    def used_bytes(self, device: str) -> int:
        running = [engine for engine in self._start.engines if not (engine.stopped or engine.crashed)]
        used = sum(size for engine in running for name, _, size in engine.facts.buffers if name == device)
        assert used <= (self._card_bytes if device == "CUDA0" else self._ram_bytes), "more memory than there is"
        return used


class FakeLlama:
    """A KV cache that remembers the tokens of every slot and refuses what the real one would compute wrongly.

    With a `window` it forgets, as a sliding window does: all but the last `window` tokens of a slot. Cells are shared where they
    were copied: the same object stands for the same cell.
    """

    def __init__(self, slots: int, cells: int, window: int = 0) -> None:
        self.slots: list[list[tuple[int, object]]] = [[] for _ in range(slots)]
        self.oldest = [0] * slots
        self.cells = cells
        self.window = window
        self.calls: list[int] = []
        self.break_states = False
        """While set, no saved state can be restored."""

    def edit(self, edits: Sequence[Edit], scheduler: Scheduler) -> None:
        for edit in edits:
            self._edit(edit, scheduler)
            assert self.used <= self.cells, "more cells than there are"

    def _edit(self, edit: Edit, scheduler: Scheduler) -> None:
        states = scheduler.placement.states
        match edit:
            case Truncate(slot, length):
                # Guessed tokens may be taken back: what they pushed out of a window is not missed before the next token.
                assert length == 0 or self.oldest[slot] <= max(0, length - self.window), "cut where the past is gone"
                del self.slots[slot][length:]
                self.oldest[slot] = self.oldest[slot] if length else 0
            case Copy(source, target, length):
                assert not self.slots[target], "shared into a slot that is not empty"
                assert self.oldest[source] <= max(0, length - self.window), "shared where the past is gone"
                assert len(self.slots[source]) >= length
                self.slots[target] = self.slots[source][:length]
                self.oldest[target] = self.oldest[source]
            case Save(slot, tokens):
                for lost in states.put(self._state(slot, tokens)):
                    scheduler.placement.forget(lost.tokens)
            case Park(slot, sequence, tokens):
                states.park(sequence, self._state(slot, tokens))
            case Restore(slot, sequence, saved, length):
                assert not self.slots[slot], "restored into a slot that is not empty"
                if self.break_states:
                    scheduler.lost(sequence)
                    return
                oldest, *tokens = array("i", saved.state)
                assert tuple(tokens) == tuple(saved.tokens), "the state of other tokens"
                assert length == len(tokens) or not self.window, "a saved state cut where the past is gone"
                self.slots[slot] = [(token, object()) for token in tokens[:length]]
                self.oldest[slot] = oldest

    def _state(self, slot: int, tokens: Sequence[int]) -> Saved:
        held = [token for token, _ in self.slots[slot]]
        assert held == list(tokens), "the state would be saved under the wrong name"
        return Saved(tuple(tokens), array("i", [self.oldest[slot], *held]).tobytes())

    @property
    def used(self) -> int:
        return len({id(cell) for slot in self.slots for _, cell in slot})

    def decode(self, batch: Batch) -> bool:
        for chunk in batch.chunks:
            assert len(self.slots[chunk.slot]) == chunk.start, "positions must follow on what the slot holds"
            assert len(chunk.tokens) == chunk.count
            self.slots[chunk.slot] += [(token, object()) for token in chunk.tokens]
            held = [token for token, _ in self.slots[chunk.slot]]
            assert held == (chunk.sequence.tokens + chunk.sequence.draft)[: len(held)], (
                "the slot must hold the sequence's own tokens"
            )
            if self.window:
                self.oldest[chunk.slot] = max(
                    self.oldest[chunk.slot], chunk.start + (chunk.count if self.window == 1 else 1) - self.window
                )
        assert self.used <= self.cells, "more cells than there are"
        self.calls.append(batch.token_count)
        return True
