"""Which models are loaded, by whom they are shared, and who must go: against engines that only record."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeStart
from live_server import MACHINE, fake_manager, tiny_model

from localfast.core import GenerateRequest, Message
from localfast.errors import EngineMissing, InvalidRequest, LoadFailed, ModelNotFound
from localfast.hardware import EngineBuild
from localfast.models.catalog import InstalledModel, ModelFile, Store
from localfast.models.manager import ModelManager
from localfast.settings import Settings, load_settings


def install(settings: Settings, *names: str) -> None:
    for name in names:
        model = name.partition(":")
        folder = settings.store_dir / ".partial" / name.replace(":", "-")
        path = tiny_model(folder, "model")
        record = InstalledModel(
            name=model[0],
            quant=model[2] or "Q4_K",
            source="test",
            files=(ModelFile(path.name, path.stat().st_size),),
            folder=folder,
        )
        Store(settings).add(record)


def manager(start: FakeStart, *names: str, pinned: Path | None = None, **flags: Any) -> ModelManager:
    settings = load_settings(flags)
    install(settings, *names)
    return fake_manager(settings, start, pinned)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_lease_loads_once_and_keeps_the_engine() -> None:
    async def test() -> None:
        start = FakeStart()
        models = manager(start, "one")
        for _ in range(3):
            async with models.lease("one") as model:
                assert model.name == "one"
        assert len(start.engines) == 1 and not start.engines[0].stopped
        assert start.configs[0].slots <= start.configs[0].batch_tokens
        await models.close(1)
        assert start.engines[0].stopped

    run(test())


def test_lease_failed_load_fails_everybody_and_the_next_request_tries_again() -> None:
    async def test() -> None:
        start = FakeStart()
        start.gate = asyncio.Event()
        start.fail = LoadFailed(model="one", reason="missing tensor")
        models = manager(start, "one")

        async def want() -> None:
            async with models.lease("one"):
                pass

        waiting = [asyncio.create_task(want()) for _ in range(3)]
        await asyncio.sleep(0)
        start.gate.set()
        assert all(isinstance(result, LoadFailed) for result in await asyncio.gather(*waiting, return_exceptions=True))
        assert len(start.configs) == 1
        start.fail = None
        await want()

    run(test())


def test_lease_client_that_leaves_during_the_load_does_not_end_it() -> None:
    async def test() -> None:
        start = FakeStart()
        start.gate = asyncio.Event()
        models = manager(start, "one")

        async def want() -> None:
            async with models.lease("one"):
                pass

        first, second = asyncio.create_task(want()), asyncio.create_task(want())
        while not start.configs:
            await asyncio.sleep(0)
        first.cancel()
        start.gate.set()
        await second
        assert first.cancelled() and len(start.configs) == 1

    run(test())


def test_lease_engine_that_died_is_started_again() -> None:
    async def test() -> None:
        start = FakeStart()
        models = manager(start, "one")
        async with models.lease("one") as model:
            model.engine.alive = False  # type: ignore[misc]
        async with models.lease("one") as model:
            assert model.engine.alive
        assert len(start.engines) == 2

    run(test())


def test_lease_idle_model_that_was_unused_for_longest_goes() -> None:
    async def test() -> None:
        start = FakeStart()
        models = manager(start, "a", "b", "c", max_loaded_models=2)
        for name in ("a", "b", "a", "c"):
            async with models.lease(name):
                pass
        assert sorted(model.name for model in models.loaded()) == ["a", "c"]
        assert [engine.stopped for engine in start.engines] == [False, True, False]

    run(test())


def test_lease_busy_model_is_never_unloaded_the_newcomer_waits() -> None:
    async def test() -> None:
        start = FakeStart()
        models = manager(start, "a", "b", max_loaded_models=1)
        order: list[str] = []

        async def want_b() -> None:
            async with models.lease("b"):
                order.append("b")

        async with models.lease("a"):
            waiting = asyncio.create_task(want_b())
            for _ in range(20):
                await asyncio.sleep(0)
            assert not start.engines[0].stopped
            order.append("a is done")
        await waiting
        assert order == ["a is done", "b"] and start.engines[0].stopped

    run(test())


def test_lease_without_an_engine_says_what_to_install(tmp_path: Path) -> None:
    async def test() -> None:
        bare = load_settings()
        install(bare, "one")
        hardware = type(MACHINE)(engine=EngineBuild(installed=False))
        models = ModelManager(bare, None, FakeStart(), lambda: hardware)
        with pytest.raises(EngineMissing) as caught:
            async with models.lease("one"):
                pass
        assert "localfast engine install" in caught.value.hint

    run(test())


@pytest.mark.parametrize("name", ["tiny", "TINY", "tiny:latest", "chat", "", "tiny.gguf"])
def test_resolve_pinned_model_by_any_of_its_names(tmp_path: Path, name: str) -> None:
    async def test() -> None:
        models = manager(FakeStart(), pinned=tiny_model(tmp_path), alias="chat")
        assert models.resolve(name)[0] == "chat"
        with pytest.raises(ModelNotFound) as caught:
            models.resolve("gpt-4")
        assert caught.value.near == ("chat",)

    run(test())


def test_resolve_installed_models_by_name_and_quant() -> None:
    async def test() -> None:
        models = manager(FakeStart(), "solo", "twin:Q4_K_M", "twin:Q8_0")
        assert {name for name, _ in models.served()} == {"solo", "twin:Q4_K_M", "twin:Q8_0"}
        assert models.resolve("SOLO")[0] == "solo"
        assert models.resolve("twin:q8_0")[0] == "twin:Q8_0"
        assert models.resolve("twin")[0].startswith("twin:")
        with pytest.raises(ModelNotFound) as caught:
            models.resolve("sola")
        assert "solo" in caught.value.near
        with pytest.raises(InvalidRequest, match="'model' is missing"):
            models.resolve("")

    run(test())


@pytest.mark.parametrize("name", ["../tiny", "/etc/passwd", "C:\\x.gguf", "a\x00b", "x" * 5000, "..%2f..%2fx"])
def test_resolve_name_of_a_client_never_opens_a_path(name: str) -> None:
    async def test() -> None:
        with pytest.raises((ModelNotFound, InvalidRequest)):
            manager(FakeStart(), "one").resolve(name)

    run(test())


def test_generate_renders_messages_and_adds_the_stops_of_the_form() -> None:
    async def test() -> None:
        start = FakeStart()
        models = manager(start, "one")
        async with models.lease("one") as model:
            await model.generate(GenerateRequest(model="one", messages=(Message("user", "Hi"),), stop=("x",)))
        (request,) = start.engines[0].submitted
        assert request.messages == () and request.prompts == ("User: Hi\nAssistant:",)
        assert request.stop == ("x", "\nUser:")

    run(test())
