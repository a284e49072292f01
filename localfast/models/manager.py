"""Owns which models are loaded. Ask it for the outcome (`lease`), not for a state to act on later.

Server process, event loop's thread; slow work runs elsewhere and comes back. Requests for a model that is still loading share the
one load. A model whose engine died is loaded again by the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from localfast.core import GenerateRequest
from localfast.engine.client import Engine, EventStream, ProcessEngine
from localfast.engine.messages import EngineConfig, EngineStats
from localfast.errors import EngineMissing, InvalidRequest, LocalfastError, ModelNotFound
from localfast.hardware import Hardware, detect
from localfast.models.catalog import InstalledModel, Store
from localfast.models.eviction import Resident, victim
from localfast.models.gguf import ModelFacts, read_facts
from localfast.models.template import ChatTemplate
from localfast.plan import Plan, Wishes, make_plan
from localfast.settings import Settings

log = logging.getLogger("localfast")

StartEngine = Callable[[EngineConfig, Settings], Awaitable[Engine]]


@dataclass(eq=False, slots=True)
class LoadedModel:
    """A model with its engine running."""

    name: str
    installed: InstalledModel
    hardware: Hardware
    facts: ModelFacts
    plan: Plan
    engine: Engine
    template: ChatTemplate

    async def generate(self, request: GenerateRequest) -> EventStream:
        """Render what needs rendering and submit. Raises TemplateFailed, QueueFull, EngineDied."""
        if request.messages:
            prompt = await asyncio.to_thread(self.template.render, request.messages)
            request = replace(request, messages=(), prompts=(prompt,), stop=request.stop + self.template.stops)
        return self.engine.generate(request)


@dataclass(eq=False, slots=True)
class _Entry:
    """A model from the moment somebody wants it. `loading` ends in the loaded model or in what went wrong."""

    installed: InstalledModel
    loading: asyncio.Task[LoadedModel]
    users: int = 0
    last_used_s: float = 0.0

    @property
    def loaded(self) -> LoadedModel | None:
        done = self.loading.done() and not self.loading.cancelled() and self.loading.exception() is None
        return self.loading.result() if done else None

    @property
    def usable(self) -> bool:
        return not self.loading.done() or (self.loaded is not None and self.loaded.engine.alive)


class ModelManager:
    """`pinned`: the one model to serve, named `settings.alias` if that is set; None: every installed model, on first use."""

    def __init__(
        self,
        settings: Settings,
        pinned: InstalledModel | None = None,
        start_engine: StartEngine | None = None,
        detect_hardware: Callable[[], Hardware] = detect,
    ) -> None:
        self.settings = settings
        self.pinned = pinned
        self._store = Store(settings)
        self._start_engine = start_engine or start_process
        self._detect = detect_hardware
        self._entries: dict[str, _Entry] = {}
        self._idle = asyncio.Event()

    # --- names ----------------------------------------------------------------------------------------------------------------

    def served(self) -> list[tuple[str, InstalledModel]]:
        """What clients may ask for: (name, model)."""
        if self.pinned is not None:
            return [(self.settings.alias or self.pinned.name, self.pinned)]
        installed = self._store.installed()
        names = [model.name for model in installed]
        return [(model.name if names.count(model.name) == 1 else str(model), model) for model in installed]

    def resolve(self, name: str) -> tuple[str, InstalledModel]:
        """The served model that a client means. Raises ModelNotFound with near names; a missing name means the only model."""
        served = self.served()
        if not name:
            if len(served) == 1:
                return served[0]
            raise InvalidRequest(
                reason=f"'model' is missing; served are: {', '.join(n for n, _ in served) or 'none'}", param="model"
            )
        if self.pinned is None:
            model = self._store.find(name)
            if model is None:
                raise self._store.not_found(name)
            return next(entry for entry in served if entry[1] == model)
        public, model = served[0]
        known = {public, model.name, str(model), model.path.name}
        if name.lower().removesuffix(":latest") not in {other.lower() for other in known}:
            raise ModelNotFound(name=name[:200], near=(public,))
        return served[0]

    # --- loading --------------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[LoadedModel]:
        """The model, loaded, and not unloaded while the context is open. Raises ModelNotFound, LoadFailed, EngineMissing."""
        public, model = self.resolve(name)
        entry = self._entries.get(public)
        if entry is None or not entry.usable:
            entry = self._entries[public] = _Entry(model, asyncio.create_task(self._load(public, model)))
            entry.loading.add_done_callback(_log_failure)
        entry.users += 1
        try:
            # Shielded: one client that hangs up must not end a load that others wait for.
            yield await asyncio.shield(entry.loading)
        finally:
            entry.users -= 1
            entry.last_used_s = asyncio.get_running_loop().time()
            self._idle.set()

    async def _load(self, public: str, model: InstalledModel) -> LoadedModel:
        await self._make_place(public)
        hardware, facts, plan = await asyncio.to_thread(self.plan, model)
        while not plan.fits and await self._evict(public):
            hardware, facts, plan = await asyncio.to_thread(self.plan, model)
        for sentence in plan.sentences():
            log.info("%s: %s", public, sentence)
        engine = await self._start_engine(self._config(public, model, plan, hardware), self.settings)
        log.info("%s is ready after %.1f s", public, engine.facts.load_s)
        template = ChatTemplate(facts.chat_template, facts.bos_token, facts.eos_token, facts.control_tokens)
        return LoadedModel(public, model, hardware, facts, plan, engine, template)

    def plan(self, model: InstalledModel) -> tuple[Hardware, ModelFacts, Plan]:
        """What would be done with the model now. Reads the disk and asks the machine: not for the event loop's thread."""
        hardware = self._detect()
        if hardware.engine is not None and not hardware.engine.installed:
            raise EngineMissing(reason=hardware.engine.error)
        facts = read_facts(model.path)
        return hardware, facts, make_plan(hardware, facts, wishes(self.settings))

    def _config(self, public: str, model: InstalledModel, plan: Plan, hardware: Hardware) -> EngineConfig:
        settings = self.settings
        settings.logs_dir.mkdir(parents=True, exist_ok=True)
        return EngineConfig(
            model=public,
            path=str(model.path),
            gpu_layers=plan.gpu_layers,
            context_tokens=plan.context_tokens,
            cells=plan.cells,
            slots=plan.slots,
            batch_tokens=plan.batch_tokens,
            ubatch_tokens=plan.ubatch_tokens,
            threads=plan.threads,
            kv_type=plan.kv_type,
            use_mmap=plan.use_mmap,
            max_stall_s=settings.max_stall_ms / 1000,
            speculation=settings.speculation,
            cache_ram_bytes=min(settings.cache_ram_mib * 2**20, hardware.ram_available_bytes // 8),
            cache_disk_bytes=settings.cache_disk_mib * 2**20,
            cache_folder=str(settings.states_dir),
            cache_key=model.sha256 or _identity(model.path),
            log_path=str(settings.logs_dir / f"engine-{model.path.stem[:80]}-{uuid.uuid4().hex[:8]}.log"),
        )

    async def _make_place(self, public: str) -> None:
        """Wait until another model may be loaded, unloading idle ones."""
        while len(self._others(public)) >= self.settings.max_loaded_models:
            self._idle.clear()
            if not await self._evict(public):
                await self._idle.wait()

    def _others(self, public: str) -> dict[str, _Entry]:
        return {name: entry for name, entry in self._entries.items() if name != public and entry.usable}

    async def _evict(self, public: str) -> bool:
        """Unload the idle model that was unused for longest. False when there is none."""
        others = self._others(public)
        name = victim(Resident(name, entry.users > 0, entry.last_used_s) for name, entry in others.items())
        if name is None:
            return False
        log.info("unloading %s to make place for %s", name, public)
        await self._unload(self._entries.pop(name), grace_s=self.settings.drain_s)
        return True

    async def _unload(self, entry: _Entry, grace_s: float) -> None:
        if entry.loaded is not None:
            await entry.loaded.engine.stop(grace_s)
        else:
            entry.loading.cancel()
            await asyncio.wait({entry.loading})

    # --- state ----------------------------------------------------------------------------------------------------------------

    def loaded(self) -> list[LoadedModel]:
        """Models whose engine runs now."""
        return [entry.loaded for entry in self._entries.values() if entry.loaded is not None and entry.usable]

    @property
    def loading(self) -> list[str]:
        return [name for name, entry in self._entries.items() if not entry.loading.done()]

    def stats(self) -> list[tuple[str, EngineStats]]:
        return [(model.name, model.engine.stats) for model in self.loaded()]

    async def close(self, grace_s: float) -> None:
        """Stop every engine; requests that still run end with ShuttingDown."""
        entries = list(self._entries.values())
        self._entries.clear()
        await asyncio.gather(*(self._unload(entry, grace_s) for entry in entries))


async def start_process(config: EngineConfig, settings: Settings) -> Engine:
    """The real engine, in a process of its own."""
    engine = ProcessEngine(config, settings.max_queue)
    await engine.start(settings.load_timeout_s)
    return engine


def wishes(settings: Settings) -> Wishes:
    return Wishes(
        gpu_layers=settings.gpu_layers,
        ctx=settings.ctx,
        cells=settings.cells,
        slots=settings.slots,
        threads=settings.threads,
        batch=settings.batch,
        kv_type=settings.kv_type,
        draft=settings.draft,
    )


def _identity(path: Path) -> str:
    """What tells one file of a user's own from another: hashing gigabytes at every start would take too long."""
    status = path.stat()
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def _log_failure(loading: asyncio.Task[LoadedModel]) -> None:
    """Say why a load failed even if everybody who waited for it has gone."""
    if not loading.cancelled() and (error := loading.exception()) is not None:
        log.error("%s", error, exc_info=None if isinstance(error, LocalfastError) else error)
