"""Three real models where there is room for two, many clients: everybody is answered and the memory comes back."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from real_engine import ask, joined

from localfast.core import Finished
from localfast.engine.messages import EngineConfig
from localfast.hardware import EngineBuild, Hardware
from localfast.models.catalog import InstalledModel, ModelFile, Store
from localfast.models.loading import start_process
from localfast.models.manager import ModelManager
from localfast.settings import Settings, load_settings

pytestmark = pytest.mark.model
CLIENTS, REQUESTS = 12, 200


def install_copies(settings: Settings, source: Path, *names: str) -> None:
    """Models of their own names over the one file."""
    for name in names:
        folder = settings.store_dir / ".partial" / name
        folder.mkdir(parents=True)
        shutil.copyfile(source, folder / source.name)
        files = (ModelFile(source.name, source.stat().st_size),)
        Store(settings).add(InstalledModel(name=name, quant="Q4_1", source="test", files=files, folder=folder))


def machine() -> Hardware:
    memory = psutil.virtual_memory()
    return Hardware(
        ram_total_bytes=memory.total,
        ram_available_bytes=memory.available,
        physical_cores=2,
        engine=EngineBuild(installed=True),
    )


def resident_bytes() -> int:
    """Of this process and all below it, without what the allocator holds back for each thread: that says nothing of models."""
    gc.collect()
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
    me = psutil.Process()
    return sum(process.memory_info().rss for process in (me, *me.children(recursive=True)))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows gives a process's memory back when it likes")
def test_three_models_under_a_limit_for_two_answer_twelve_clients(starter_path: Path) -> None:
    pins = {"ctx": 512, "cells": 512, "slots": 4, "cache_disk_mib": 0, "ram_limit": "1.1GB"}
    settings = load_settings({**pins, "max_loaded_models": 3, "threads": 1})
    install_copies(settings, starter_path, "a", "b", "c")
    most, stopped_busy = 0, 0
    chance = random.Random(1)
    names = [chance.choice("abc") for _ in range(REQUESTS)]
    for number in range(CLIENTS, REQUESTS):  # a client stays with a model for a while
        names[number] = names[number - CLIENTS] if chance.random() < 0.7 else names[number]

    async def start(config: EngineConfig, options: Settings) -> object:
        return await start_process(config, options)

    async def test() -> None:
        manager = ModelManager(settings, None, start, machine)  # type: ignore[arg-type]

        async def client(number: int) -> int:
            nonlocal most, stopped_busy
            answered = 0
            for name in names[number::CLIENTS]:
                async with manager.lease(name) as model:
                    request = replace(ask(f"{number}, {answered},", max_tokens=2), model=name)
                    events = [event async for event in await model.generate(request)]
                    most = max(most, len(manager.loaded()))
                    stopped_busy += not model.engine.alive
                assert isinstance(events[-1], Finished) and joined(events)
                answered += 1
            return answered

        async def all_clients() -> int:
            assert sum(await asyncio.gather(*(client(number) for number in range(CLIENTS)))) == REQUESTS
            for name in "abc":
                await manager.unload(name)
            return resident_bytes()

        await all_clients()
        before = await all_clients()  # what a process keeps for good once it has worked is there now; models are not among it
        after = await all_clients()
        assert (most, stopped_busy) == (2, 0)
        assert not psutil.Process().children(recursive=True)[1:], "engines have ended; the rest is Python's own resource tracker"
        assert abs(after - before) <= before * 0.02, f"{before / 2**20:.1f} MiB before, {after / 2**20:.1f} MiB after"
        await manager.close(1)

    asyncio.run(test())
