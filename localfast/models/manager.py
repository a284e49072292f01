"""Owns which models are loaded. Ask it for the outcome (`lease`), not for a state to act on later.

Server process, event loop's thread; slow work runs elsewhere and comes back. Requests for a model that is still loading share the
one load; loads take turns, so that no two count the same free memory. A busy model is never unloaded: the newcomer waits. A
model whose engine died is loaded again by the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from localfast.engine.messages import EngineStats
from localfast.errors import (
    Cancelled,
    DoesNotFit,
    LoadFailed,
    LocalfastError,
    ModelInUse,
    ShuttingDown,
)
from localfast.fit import Fitter
from localfast.hardware import Hardware
from localfast.models.budget import worth
from localfast.models.catalog import InstalledModel
from localfast.models.crashes import WINDOW_S, CrashLoop
from localfast.models.eviction import Decision, Resident, Vector, Worth, decide, freed
from localfast.models.loading import Candidate, LoadedModel, Loader, StartEngine, start_process
from localfast.models.served import ServedModels
from localfast.plan import Plan
from localfast.plan.policy import WANTED_CONTEXTS
from localfast.settings import Settings

__all__ = ["LoadedModel", "ModelManager", "Standing", "StartEngine", "start_process"]

log = logging.getLogger("localfast")

PATIENCE_S = 20.0
"""So long a newcomer waits for a busy GPU before it settles for a place in RAM."""
MAX_NAMES = 256


@dataclass(eq=False, slots=True)
class _Entry:
    """A model from the moment somebody wants it. `loading` ends in the loaded model or in what went wrong."""

    name: str
    installed: InstalledModel
    keep_alive_s: float
    """Negative: for ever."""
    loading: asyncio.Task[LoadedModel] = field(init=False)
    users: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    last_used_s: float = 0.0

    @property
    def loaded(self) -> LoadedModel | None:
        done = self.loading.done() and not self.loading.cancelled() and self.loading.exception() is None
        return self.loading.result() if done else None

    @property
    def running(self) -> LoadedModel | None:
        """The model while its engine lives."""
        model = self.loaded
        return model if model is not None and model.engine.alive else None

    @property
    def usable(self) -> bool:
        return not self.loading.done() or self.running is not None

    @property
    def expires_s(self) -> float:
        """When it is unloaded unless somebody wants it, by the loop's clock."""
        return float("inf") if self.keep_alive_s < 0 or self.users else self.last_used_s + self.keep_alive_s


@dataclass(frozen=True, slots=True)
class Standing:
    """How a loaded model stands among the others."""

    users: int
    idle_s: float
    keep_alive_left_s: float | None
    """None: it stays."""
    goes_next: bool
    """Whether it is the one to go if another model needs its place now."""
    restarts: int


class ModelManager:
    """`pinned`: the one model to serve, named `settings.alias` if that is set; None: every installed model, on first use."""

    def __init__(
        self,
        settings: Settings,
        pinned: InstalledModel | None = None,
        start_engine: StartEngine | None = None,
        detect_hardware: Callable[[], Hardware] | None = None,
    ) -> None:
        self.settings = settings
        self.pinned = pinned
        self._served = ServedModels(settings, pinned)
        self._loader = Loader(settings, start_engine or start_process, Fitter(settings, detect_hardware))
        self._entries: dict[str, _Entry] = {}
        self._resolved: dict[str, tuple[str, InstalledModel]] = {}
        self._crashes: dict[str, CrashLoop] = defaultdict(CrashLoop)
        self._turn = asyncio.Lock()
        self._somebody_idle = asyncio.Event()
        self._unloading: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # --- names ----------------------------------------------------------------------------------------------------------------

    def served(self) -> list[tuple[str, InstalledModel]]:
        """What clients may ask for: (name, model). Reads the disk."""
        return self._served.all()

    def resolve(self, name: str) -> tuple[str, InstalledModel]:
        """The served model that a client means; a missing name means the only one. Reads the disk. Raises ModelNotFound."""
        return self._served.resolve(name)

    async def _find(self, name: str) -> tuple[str, InstalledModel]:
        """As `resolve`; the disk is not read while the model is loaded, and never in the event loop's thread."""
        known = self._resolved.get(name)
        entry = self._entries.get(known[0]) if known else None
        if known is None or entry is None or entry.running is None or not known[1].path.exists():
            known = await asyncio.to_thread(self.resolve, name)
            if len(self._resolved) >= MAX_NAMES:
                self._resolved.clear()
            self._resolved[name] = known
        return known

    # --- use ------------------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def lease(self, name: str, keep_alive_s: float | None = None) -> AsyncIterator[LoadedModel]:
        """The model, loaded, and not unloaded while the context is open.

        `keep_alive_s`: how long it stays loaded without requests from now on; 0: no longer than this one, negative: for ever.
        The pinned model always stays. Raises ModelNotFound, LoadFailed, DoesNotFit, EngineMissing, ShuttingDown.
        """
        found = await self._find(name)
        if self._closed:
            raise ShuttingDown
        entry = self._entry(*found)
        if keep_alive_s is not None and self.pinned is None:
            entry.keep_alive_s = keep_alive_s
        entry.users += 1
        entry.idle.clear()
        try:
            yield await self._ready(entry)
        finally:
            entry.users -= 1
            entry.last_used_s = asyncio.get_running_loop().time()
            if not entry.users:
                entry.idle.set()
                if self._entries.get(entry.name) is entry:  # the order of use, also where the clock stood still
                    self._entries[entry.name] = self._entries.pop(entry.name)
                self._somebody_idle.set()
                self._set_timer()
                self._served.used(entry.installed)

    async def load(self, name: str, keep_alive_s: float | None = None) -> LoadedModel:
        """Load it without a request. Raises what `lease` raises."""
        async with self.lease(name, keep_alive_s) as model:
            return model

    async def unload(self, name: str, force: bool = False) -> bool:
        """Unload it now; False when it is not loaded. A busy one: ModelInUse, or if forced its requests get `drain_s` to end."""
        public, _ = await self._find(name)
        entry = self._entries.get(public)
        if entry is None or not entry.usable:
            return False
        if entry.users and not force:
            raise ModelInUse(name=public, requests=entry.users)
        await asyncio.shield(self._unload(entry))
        return True

    def _entry(self, public: str, model: InstalledModel) -> _Entry:
        entry = self._entries.get(public)
        if entry is not None and entry.usable:
            return entry
        now_s = asyncio.get_running_loop().time()
        crashes = self._crashes[public]
        if entry is not None and entry.loaded is not None:
            del self._entries[public]  # a death is counted once
            crashes.died(now_s)
        if wait_s := crashes.wait_s(now_s):
            reason = f"its engine failed again and again within {WINDOW_S:.0f} s; it is started again in {wait_s:.0f} s"
            raise LoadFailed(model=public, reason=reason)
        entry = _Entry(public, model, -1 if self.pinned is not None else self.settings.keep_alive_s)
        entry.loading = asyncio.create_task(self._load(entry))
        entry.loading.add_done_callback(_log_failure)
        self._entries[public] = entry
        return entry

    async def _ready(self, entry: _Entry) -> LoadedModel:
        """Wait for the load. Shielded: one client that hangs up must not end a load that others wait for."""
        try:
            return await asyncio.shield(entry.loading)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not entry.loading.cancelled() or (task is not None and task.cancelling()):
                raise
            if self._closed:
                raise ShuttingDown from None
            raise LoadFailed(model=entry.name, reason="it was unloaded while it was loading") from None

    # --- loading --------------------------------------------------------------------------------------------------------------

    async def _load(self, entry: _Entry) -> LoadedModel:
        async with self._turn:
            candidate, plan = await self._make_room(entry)
            try:
                return await self._loader.load(candidate, plan)
            except LoadFailed:
                self._crashes[entry.name].died(asyncio.get_running_loop().time())
                raise

    async def _make_room(self, entry: _Entry) -> tuple[Candidate, Plan]:
        """Wait until the model may be loaded, unloading idle ones; its plan is made with the memory free after that."""
        deadline_s = asyncio.get_running_loop().time() + self.settings.load_timeout_s
        while True:
            while self._unloading:
                await asyncio.wait(self._unloading)
            candidate = await asyncio.to_thread(self._loader.look, entry.name, entry.installed)
            decision = await self._decide(entry, candidate, deadline_s)
            if decision is None:
                continue
            if not decision.evict:
                candidate = candidate.beside(freed(self._residents()))
                return candidate, await asyncio.to_thread(self._loader.plan, candidate, True)
            for name in decision.evict:
                log.info("unloading %s to make place for %s", name, entry.name)
                self._unload(self._entries[name])

    async def _decide(self, entry: _Entry, candidate: Candidate, deadline_s: float) -> Decision | None:
        """Who is to go now; None when the machine must be looked at again, because some model has gone meanwhile.

        Waits while busy models are in the way, with what was seen of the machine: looking again takes a second, in which a model
        that was idle for a moment is busy again. Raises DoesNotFit, LoadFailed after the deadline.
        """
        seen = {resident.name for resident in self._residents()}
        held = freed(self._residents())
        judged = self._judge(candidate, held)
        await asyncio.to_thread(self._loader.refuse_beyond_limits, candidate.beside(held, held))
        settle_s = min(deadline_s, asyncio.get_running_loop().time() + PATIENCE_S)
        while True:
            if not entry.users:
                raise Cancelled  # everybody who wanted it has gone
            self._somebody_idle.clear()
            residents = self._residents()
            if self._unloading or seen != {resident.name for resident in residents}:
                return None
            decision = await asyncio.to_thread(decide, residents, judged, self.settings.max_loaded_models - 1)
            hoping = bool(decision.hope_for) and asyncio.get_running_loop().time() < settle_s
            if not decision.wait_for and not hoping:
                idle = {resident.name for resident in self._residents() if not resident.busy}
                if idle.issuperset(decision.evict):
                    return decision
                continue  # somebody was faster
            log.info("%s waits for %s", entry.name, ", ".join(decision.wait_for or decision.hope_for))
            try:
                async with asyncio.timeout_at(settle_s if hoping else deadline_s):
                    await self._somebody_idle.wait()
            except TimeoutError:
                if decision.wait_for:
                    raise self._in_the_way(entry.name, residents, decision) from None

    def _judge(self, candidate: Candidate, held: Vector) -> Callable[[Vector], Worth]:
        """What its plan is worth once so much is freed; planned once for each answer, which may take a while."""
        wanted = self.settings.ctx or WANTED_CONTEXTS[0]  # a model is unloaded for that much, not for luxury

        @cache
        def judged(gone: Vector) -> Worth:
            return worth(self._loader.plan(candidate.beside(held, gone)), wanted)

        return judged

    def _in_the_way(self, name: str, residents: Sequence[Resident], decision: Decision) -> LoadFailed:
        waited = f"after {self.settings.load_timeout_s:.0f} s; they are not unloaded while they do"
        if len(residents) >= self.settings.max_loaded_models:
            who = ", ".join(resident.name for resident in residents)
            return LoadFailed(
                model=name, reason=f"{len(residents)} models may be loaded, and {who} still answer requests {waited}"
            )
        return DoesNotFit(model=name, reason=f"{', '.join(decision.wait_for)} need its memory and still answer requests {waited}")

    def _residents(self) -> list[Resident]:
        return [
            Resident(entry.name, entry.users > 0, entry.last_used_s, entry.running.held)
            for entry in self._entries.values()
            if entry.running is not None
        ]

    async def plan(self, name: str) -> tuple[InstalledModel, Plan]:
        """What would be done with the model now, beside those that are loaded. Raises ModelNotFound, BadModelFile."""
        public, model = await self._find(name)
        candidate = await asyncio.to_thread(self._loader.look, public, model)
        return model, await asyncio.to_thread(self._loader.plan, candidate.beside(freed(self._residents())), True)

    # --- unloading ------------------------------------------------------------------------------------------------------------

    def _unload(self, entry: _Entry) -> asyncio.Task[None]:
        """From now on it is not loaded for anybody new; the task ends when its memory is free."""
        if self._entries.get(entry.name) is entry:
            del self._entries[entry.name]
        task = asyncio.create_task(self._stop(entry, self.settings.drain_s, self.settings.drain_s))
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)
        return task

    async def _stop(self, entry: _Entry, drain_s: float, grace_s: float) -> None:
        """Requests get `drain_s`, the engine then `grace_s` to end."""
        if entry.loaded is None:
            entry.loading.cancel()
            await asyncio.wait({entry.loading})
            return
        if entry.users and drain_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await entry.idle.wait()
        await entry.loaded.engine.stop(grace_s)

    def _set_timer(self) -> None:
        """One timer for all: at the moment when the next idle model has been idle for long enough."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = min((entry.expires_s for entry in self._entries.values() if entry.running is not None), default=float("inf"))
        if next_s < float("inf") and not self._closed:
            self._timer = asyncio.get_running_loop().call_at(next_s, self._expire)

    def _expire(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for entry in [entry for entry in self._entries.values() if entry.running is not None and entry.expires_s <= now_s]:
            log.info("unloading %s: nobody has asked for it for %g s", entry.name, entry.keep_alive_s)
            self._unload(entry)
        self._set_timer()

    # --- state ----------------------------------------------------------------------------------------------------------------

    def loaded(self) -> list[LoadedModel]:
        """Models whose engine runs now."""
        return [entry.running for entry in self._entries.values() if entry.running is not None]

    @property
    def loading(self) -> list[str]:
        return [name for name, entry in self._entries.items() if not entry.loading.done()]

    def standing(self, name: str) -> Standing:
        """Of a loaded model, by its public name."""
        entry, now_s = self._entries[name], asyncio.get_running_loop().time()
        idle = [other for other in self._entries.values() if other.running is not None and not other.users]
        oldest = min(idle, key=lambda other: other.last_used_s, default=None)
        kept = entry.keep_alive_s >= 0
        left_s = entry.keep_alive_s if entry.users else max(0.0, entry.expires_s - now_s)
        return Standing(
            users=entry.users,
            idle_s=0.0 if entry.users else now_s - entry.last_used_s,
            keep_alive_left_s=left_s if kept else None,
            goes_next=entry is oldest,
            restarts=self._crashes[name].total,
        )

    def stats(self) -> list[tuple[str, EngineStats]]:
        return [(model.name, model.engine.stats) for model in self.loaded()]

    async def close(self, grace_s: float) -> None:
        """Stop every engine; requests that still run end with ShuttingDown."""
        self._closed = True
        entries = list(self._entries.values())
        self._entries.clear()
        self._set_timer()
        await asyncio.gather(*(self._stop(entry, 0, grace_s) for entry in entries), *self._unloading)


def _log_failure(loading: asyncio.Task[LoadedModel]) -> None:
    """Say why a load failed even if everybody who waited for it has gone."""
    error = None if loading.cancelled() else loading.exception()
    if error is not None and not isinstance(error, Cancelled):
        log.error("%s", error, exc_info=None if isinstance(error, LocalfastError) else error)
