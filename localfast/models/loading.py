"""One load of one model: look at the machine, plan, start the engine, and step down the ladder when it does not load.

Server process; slow parts run in worker threads. Knows nothing of other models but what they hold: who stays loaded and who
waits is the manager's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import platform
import re
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from localfast.core import GenerateRequest
from localfast.engine.client import Engine, EventStream, ProcessEngine
from localfast.engine.messages import EngineConfig
from localfast.engines.builds import offer_engine
from localfast.errors import DoesNotFit, EngineDied, EngineMissing, LoadFailed
from localfast.fit import Fitter, wishes
from localfast.hardware import Hardware
from localfast.measure import Failure, HeaderSource, Learned
from localfast.models.budget import after_unloading, beyond_limits, held_bytes
from localfast.models.catalog import InstalledModel, draft_model
from localfast.models.eviction import Vector
from localfast.models.gguf import ModelFacts, read_facts
from localfast.models.ladder import Attempt, Step, may_be_memory, steps_down
from localfast.models.template import ChatTemplate
from localfast.plan import Plan, Wishes
from localfast.settings import Settings

log = logging.getLogger("localfast")

StartEngine = Callable[[EngineConfig, Settings], Awaitable[Engine]]
MAX_STEPS = 4
_WISHES = {wish.name for wish in dataclasses.fields(Wishes)}
_ALLOCATION = re.compile(r"(failed|unable|not enough|out of).{0,40}(alloc|memory)|alloc\w* failed|OutOfDeviceMemory", re.I)
_LOG_BYTES = 64 * 1024


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
    steps: tuple[str, ...] = ()
    """What had to be made smaller until it loaded, in words."""
    held: Vector = ()
    """Bytes on each device of the plan, by the engine's own log."""

    async def generate(self, request: GenerateRequest) -> EventStream:
        """Render what needs rendering and submit. Raises TemplateFailed, QueueFull, EngineDied."""
        if request.messages:
            prompt = await asyncio.to_thread(self.template.render, request.messages)
            request = replace(request, messages=(), prompts=(prompt,), stop=request.stop + self.template.stops)
        return self.engine.generate(request)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that is to be loaded, and the machine as it was when we looked."""

    name: str
    installed: InstalledModel
    hardware: Hardware
    facts: ModelFacts
    residents: Vector = ()
    """What other models hold."""
    draft: InstalledModel | None = None
    draft_facts: ModelFacts | None = None

    def beside(self, held: Vector, freed: Vector = ()) -> Candidate:
        """The same beside models that hold `held`, of which `freed` will be gone by then."""
        staying = tuple(max(0, holds - gone) for holds, gone in itertools.zip_longest(held, freed, fillvalue=0))
        hardware = after_unloading(self.hardware, freed)
        return replace(self, hardware=hardware, residents=staying[: 1 + len(hardware.engine_gpus)])


def speaks_against(failure: Failure, attempt: Attempt, usable: Vector) -> bool:
    """Whether trying is pointless: it is as large as what failed, and there is hardly more memory than then."""
    larger = attempt.at_least(Attempt(failure.shape, attempt.context_tokens))
    return larger and all(now <= then * 1.05 for now, then in zip(usable, failure.usable_bytes, strict=False))


@dataclass(slots=True)
class Loader:
    settings: Settings
    start_engine: StartEngine
    fitter: Fitter
    wishes: Wishes = field(init=False)

    def __post_init__(self) -> None:
        self.wishes = wishes(self.settings)

    def look(self, name: str, model: InstalledModel) -> Candidate:
        """Ask the machine and read the header; not for the event loop's thread. Raises EngineMissing, BadModelFile."""
        hardware = self.fitter.hardware()
        if hardware.engine is not None and not hardware.engine.installed:
            raise EngineMissing(
                reason=hardware.engine.error or "none is installed", offer=offer_engine(hardware, platform.machine())
            )
        draft = draft_model(self.settings, model)
        draft_facts = read_facts(draft.path) if draft else None
        return Candidate(name, model, hardware, read_facts(model.path), draft=draft, draft_facts=draft_facts)

    def plan(self, candidate: Candidate, measured: bool = False) -> Plan:
        """May take a while: not for the event loop's thread. `measured`: the engine itself is asked where memory is tight."""
        return self._plan(candidate, self.wishes, measured)

    def _plan(self, candidate: Candidate, wanted: Wishes, measured: bool = False) -> Plan:
        return self.fitter.plan(
            candidate.hardware,
            candidate.facts,
            replace(wanted, draft_facts=candidate.draft_facts),
            residents_bytes=candidate.residents,
            source=(lambda: HeaderSource.on_disk(candidate.installed.path)) if measured else None,
        )

    def refuse_beyond_limits(self, alone: Candidate) -> None:
        """Raises DoesNotFit for a model that is too big for the user's limits even alone. What the user pinned is tried."""
        plan = self.plan(alone)
        if not plan.fits and not pins(self.wishes) and (reason := beyond_limits(plan, self.wishes)):
            raise DoesNotFit(model=alone.name, reason=reason)

    # --- the engine -----------------------------------------------------------------------------------------------------------

    async def load(self, candidate: Candidate, plan: Plan) -> LoadedModel:
        """Raises LoadFailed with all that was tried; a shape that failed is not tried again while there is no more memory."""
        usable = tuple(memory.usable_bytes for memory in plan.memory)
        reason = ""
        taken: tuple[str, ...] = ()
        for attempt, taken in itertools.islice(self._attempts(candidate, plan, usable), 1 + MAX_STEPS):
            smaller = await asyncio.to_thread(self._stepped, candidate, plan, attempt, taken) if taken else plan
            try:
                return await self._start(candidate, smaller, attempt, taken)
            except (LoadFailed, EngineDied) as error:
                reason = error.reason
                if not may_be_memory(reason):
                    raise
                self._learned(candidate).remember_failure(candidate.installed.content_key, Failure(attempt.shape, reason, usable))
                log.warning("%s did not load: %s", candidate.name, reason)
        tried = f"; tried in vain: {'; '.join(taken)}" if taken else ""
        raise LoadFailed(model=candidate.name, reason=reason + tried)

    def _attempts(self, candidate: Candidate, plan: Plan, usable: Vector) -> Iterator[tuple[Attempt, tuple[str, ...]]]:
        """With all steps taken so far. What failed before is passed over; if all did, the smallest gets another chance."""
        attempt, tried = Attempt(plan.shape, plan.context_tokens), False
        taken: tuple[str, ...] = ()
        failures = self._learned(candidate).failures(candidate.installed.content_key)
        for step in itertools.chain([Step(attempt, "")], steps_down(attempt, candidate.facts, pins(self.wishes))):
            attempt, taken = step.attempt, (*taken, step.words) if step.words else ()
            if not any(speaks_against(failure, attempt, usable) for failure in failures):
                tried = True
                yield attempt, taken
        if not tried:
            yield attempt, taken

    def _learned(self, candidate: Candidate) -> Learned:
        return self.fitter.learned(candidate.hardware)

    def _stepped(self, candidate: Candidate, plan: Plan, attempt: Attempt, taken: tuple[str, ...]) -> Plan:
        """The plan of a smaller attempt, with sums that add up."""
        shape = attempt.shape
        fixed = {
            "gpu_layers": shape.gpu_layers,
            "cpu_experts": shape.cpu_experts,
            "ctx": attempt.context_tokens,
            "cells": shape.cells,
            "slots": shape.slots,
            "batch": shape.ubatch_tokens,
            "kv_type": shape.kv_type,
        }
        wanted = replace(self.wishes, **{name: value for name, value in fixed.items() if name in _WISHES})  # type: ignore[arg-type]
        smaller = self._plan(candidate, wanted)
        summary = smaller.summary
        if plan.gpu_layers and not shape.gpu_layers:
            summary = f"{smaller.layers}/{smaller.layers} layers on CPU: it did not load with layers on the GPU"
        words = tuple(f"it did not load otherwise: {words}" for words in taken)
        return replace(smaller, batch_tokens=plan.batch_tokens, summary=summary, reasons=(*words, *smaller.reasons))

    async def _start(self, candidate: Candidate, plan: Plan, attempt: Attempt, steps: tuple[str, ...]) -> LoadedModel:
        for sentence in plan.sentences():
            log.info("%s: %s", candidate.name, sentence)
        config = await asyncio.to_thread(self._config, candidate, plan, attempt)
        try:
            engine = await self.start_engine(config, self.settings)
        except (LoadFailed, EngineDied) as error:
            # The last line of a log need not be the one that says why.
            if (line := await asyncio.to_thread(allocation_line, config.log_path)) and line not in error.reason:
                error.reason = f"{error.reason}; its log says: {line}"
            raise
        facts = candidate.facts
        log.info("%s is ready after %.1f s", candidate.name, engine.facts.load_s)
        template = ChatTemplate(facts.chat_template, facts.bos_token, facts.eos_token, facts.control_tokens)
        held = held_bytes(plan, candidate.hardware.engine_gpus, engine.facts.buffers)
        await asyncio.to_thread(self._learn, candidate, plan, engine, steps)
        model = candidate.installed
        return LoadedModel(candidate.name, model, candidate.hardware, facts, plan, engine, template, steps, held)

    def _learn(self, candidate: Candidate, plan: Plan, engine: Engine, steps: tuple[str, ...]) -> None:
        """Say where the plan was wrong, and remember it for the next one."""
        for line in self.fitter.learn(candidate.installed.content_key, candidate.hardware, plan, engine.facts.buffers):
            log.debug("%s: %s", candidate.name, line)
        if not steps:
            self._learned(candidate).forget_failures(candidate.installed.content_key)

    def _config(self, candidate: Candidate, plan: Plan, attempt: Attempt) -> EngineConfig:
        settings, path, shape = self.settings, candidate.installed.path, attempt.shape
        settings.logs_dir.mkdir(parents=True, exist_ok=True)
        return EngineConfig(
            model=candidate.name,
            path=str(path),
            gpu_layers=shape.gpu_layers,
            cpu_experts=shape.cpu_experts,
            split=plan.split,
            context_tokens=attempt.context_tokens,
            cells=shape.cells,
            slots=shape.slots,
            batch_tokens=plan.batch_tokens,
            ubatch_tokens=shape.ubatch_tokens,
            threads=plan.threads,
            kv_type=shape.kv_type,
            use_mmap=plan.use_mmap,
            engine_path=self.fitter.engine_path,
            max_stall_s=settings.max_stall_ms / 1000,
            speculation=settings.speculation,
            cache_ram_bytes=min(settings.cache_ram_mib * 2**20, candidate.hardware.ram_available_bytes // 8),
            cache_disk_bytes=settings.cache_disk_mib * 2**20,
            cache_folder=str(settings.states_dir),
            cache_key=candidate.installed.content_key,
            draft_path=str(candidate.draft.path) if candidate.draft and plan.drafts else "",
            draft_gpu_layers=candidate.draft_facts.layers + 1 if candidate.draft_facts and plan.gpu_layers else 0,
            log_path=str(settings.logs_dir / f"engine-{path.stem[:80]}-{uuid.uuid4().hex[:8]}.log"),
        )


async def start_process(config: EngineConfig, settings: Settings) -> Engine:
    """The real engine, in a process of its own."""
    engine = ProcessEngine(config, settings.max_queue)
    await engine.start(settings.load_timeout_s)
    return engine


def pins(wanted: Wishes) -> frozenset[str]:
    """Names of what the user fixed of a model's shape."""
    free = Wishes()
    names = _WISHES & {"gpu_layers", "cpu_experts", "ctx", "cells", "slots", "batch", "kv_type", "split"}
    return frozenset(name for name in names if getattr(wanted, name) != getattr(free, name))


def allocation_line(log_path: str) -> str:
    """The line of an engine's log that tells of memory it did not get; empty when there is none."""
    with contextlib.suppress(OSError):
        content = Path(log_path).read_bytes()[-_LOG_BYTES:].decode("utf-8", "replace")
        return next((line.strip()[:200] for line in content.splitlines() if _ALLOCATION.search(line)), "")
    return ""
