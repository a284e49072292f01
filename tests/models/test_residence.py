"""Several models on one machine: who fits beside whom, who waits, who goes and when, what is tried when one does not load.

All against engines and a machine that only record, on a clock that jumps.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, FakeMachine, FakeStart, run_virtually
from gguf_writer import llama_tensors, llama_values, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localfast.errors import BadModelFile, DoesNotFit, EngineError, LoadFailed, ModelInUse, ModelNotFound, ShuttingDown
from localfast.models.catalog import InstalledModel, ModelFile, Store, model_at
from localfast.models.crashes import MAX_DEATHS, WINDOW_S
from localfast.models.manager import LoadedModel, ModelManager
from localfast.settings import load_settings

GIB = 2**30
OUT_OF_MEMORY = "SIGABRT: a native library gave up, often for lack of GPU memory"


def write_model(path: Path, size_bytes: int, layers: int = 8) -> Path:
    """A header in front of a hole that is as long as the model would be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = size_bytes // layers // 272
    tensors = [(f"blk.{layer}.ffn_up.weight", (256, rows), "Q8_0") for layer in range(layers)]
    return write_gguf(path, llama_values(layers), [*llama_tensors(0), *tensors])


@dataclass
class House:
    """A manager with its fakes; models are named by letter, with their size in GiB."""

    sizes: dict[str, float]
    flags: dict[str, Any] = field(default_factory=dict)
    ram: float = 16
    card: float = 0
    pinned: Path | None = None

    def __post_init__(self) -> None:
        options = load_settings({"load_timeout_s": 100, "drain_s": 2, **self.flags})
        store = Store(options)
        for name, size in self.sizes.items():
            path = write_model(options.store_dir / ".partial" / name / "model.gguf", int(size * GIB))
            files = (ModelFile(path.name, path.stat().st_size),)
            store.add(InstalledModel(name=name, quant="Q8_0", source="test", files=files, folder=path.parent))
        self.start = FakeStart()
        self.machine = FakeMachine(self.start, int(self.ram * GIB), int(self.card * GIB))
        model = model_at(self.pinned) if self.pinned else None
        self.manager = ModelManager(options, model, self.start, self.machine)

    @contextlib.asynccontextmanager
    async def use(self, name: str, keep_alive_s: float | None = None) -> AsyncIterator[LoadedModel]:
        async with self.manager.lease(name, keep_alive_s) as model:
            assert isinstance(model.engine, FakeEngine)
            assert not model.engine.stopped, "an engine that has ended was given away"
            model.engine.users += 1
            try:
                yield model
            finally:
                model.engine.users -= 1

    async def ask(self, *names: str, for_s: float = 0, keep_alive_s: float | None = None) -> None:
        for name in names:
            async with self.use(name, keep_alive_s):
                await asyncio.sleep(for_s)

    @property
    def loaded(self) -> str:
        return "".join(sorted(model.name for model in self.manager.loaded()))


# --- memory -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("house", "asked", "loaded"),
    [
        ({"sizes": {"a": 3, "b": 3, "c": 3}}, "abc", "abc"),
        ({"sizes": {"a": 6, "b": 6, "c": 6}}, "abc", "bc"),
        ({"sizes": {"a": 6, "b": 6, "c": 6}}, "abac", "ac"),
        ({"sizes": {"a": 1, "b": 9, "c": 9}}, "abc", "ac"),  # the oldest holds too little to be worth its end
        ({"sizes": {"a": 4, "b": 4, "c": 9}}, "abc", "bc"),
        ({"sizes": {"a": 4, "b": 4, "c": 12}}, "abc", "c"),
        ({"sizes": {"a": 3, "b": 3, "c": 3}, "flags": {"ram_limit": "8GB"}}, "abc", "bc"),
        ({"sizes": {"a": 3, "b": 3, "c": 3}, "flags": {"ram_limit": "0.5"}}, "abc", "bc"),
        ({"sizes": {"a": 3, "b": 3, "c": 3}, "card": 8}, "abc", "bc"),
        ({"sizes": {"a": 3, "b": 3, "c": 3}, "card": 24}, "abc", "abc"),
        ({"sizes": {"a": 3, "b": 3, "c": 3}, "card": 24, "flags": {"vram_limit": "8GB"}}, "abc", "bc"),
    ],
)
def test_lease_unloads_as_few_as_make_the_newcomer_fit(house: dict[str, Any], asked: str, loaded: str) -> None:
    async def test() -> None:
        living = House(**house)
        await living.ask(*asked)
        assert living.loaded == loaded
        if living.card:
            assert {config.gpu_layers for config in living.start.configs} == {9}, "all layers on the card for each of them"

    run_virtually(test())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"ram_limit": "2GB"}, "ram_limit allows 1.86 GiB"),
        ({"model_limit": "2GB"}, "model_limit allows 1.86 GiB"),
    ],
)
def test_lease_model_beyond_the_users_limit_is_refused_at_once(flags: dict[str, str], words: str) -> None:
    async def test() -> None:
        house = House({"big": 6, "small": 1}, flags)
        await house.ask("small")
        with pytest.raises(DoesNotFit, match=words) as caught:
            await house.ask("big")
        assert caught.value.status == 507
        assert house.loaded == "small" and len(house.start.configs) == 1, "nobody was unloaded for it"

    run_virtually(test())


@pytest.mark.parametrize("flags", [{}, {"ram_limit": "2GB", "ctx": 4096}], ids=["no limit", "pinned"])
def test_lease_estimate_alone_refuses_nobody(flags: dict[str, Any]) -> None:
    async def test() -> None:
        house = House({"a": 1, "huge": 15.5}, flags)
        await house.ask("a")
        async with house.use("huge") as model:
            assert any("needed" in warning for warning in model.plan.warnings)
        assert house.loaded == "huge"

    run_virtually(test())


def test_lease_newcomer_waits_for_a_busy_model_in_its_way_and_then_takes_its_place() -> None:
    async def test() -> None:
        house = House({"a": 9, "b": 9})
        async with asyncio.TaskGroup() as group:
            group.create_task(house.ask("a", for_s=50))
            await asyncio.sleep(1)
            group.create_task(house.ask("b"))
            await asyncio.sleep(40)
            assert house.loaded == "a"
        assert house.loaded == "b" and not house.start.engines[0].stopped_busy

    run_virtually(test())


@pytest.mark.parametrize(("busy_s", "whole"), [(10, True), (60, False)])
def test_lease_newcomer_waits_for_a_card_but_not_for_ever(busy_s: float, whole: bool) -> None:
    async def test() -> None:
        house = House({"a": 6, "b": 6}, card=8)
        async with asyncio.TaskGroup() as group:
            group.create_task(house.ask("a", for_s=busy_s))
            await asyncio.sleep(1)
            group.create_task(house.ask("b"))
        assert (house.start.configs[1].gpu_layers == 9) is whole
        assert not house.start.engines[0].stopped_busy

    run_virtually(test())


@pytest.mark.parametrize(
    ("house", "error", "words"),
    [
        ({"sizes": {"a": 9, "b": 9}}, DoesNotFit, "a need its memory and still answer requests after 100 s"),
        ({"sizes": {"a": 1, "b": 1}, "flags": {"max_loaded_models": 1}}, LoadFailed, "1 models may be loaded, and a still"),
    ],
)
def test_lease_waiting_has_an_end_in_words(house: dict[str, Any], error: type[LoadFailed], words: str) -> None:
    async def test() -> None:
        living = House(**house)
        async with living.use("a"):
            with pytest.raises(error, match=words):
                await living.ask("b")
        await living.ask("b")
        assert living.loaded == "b"

    run_virtually(test())


def test_lease_newcomer_that_nobody_waits_for_any_more_unloads_nobody() -> None:
    async def test() -> None:
        house = House({"a": 9, "b": 9, "c": 1})
        async with house.use("a"):
            gone = asyncio.create_task(house.ask("b"))
            await asyncio.sleep(1)
            gone.cancel()
            await house.ask("c")
        assert house.loaded == "ac" and [config.model for config in house.start.configs] == ["a", "c"]

    run_virtually(test())


def test_lease_newcomers_that_race_never_count_the_same_free_memory() -> None:
    async def test() -> None:
        house = House(dict.fromkeys("abcd", 6))
        await asyncio.gather(*(house.ask(name, for_s=1) for name in "abcd"))
        assert [config.model for config in house.start.configs] == list("abcd"), "first come, first served"
        assert house.machine.used_bytes("CPU_Mapped") <= 13 * GIB

    run_virtually(test())


def test_lease_loaded_model_is_found_without_reading_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        house = House({"a": 1})
        await house.ask("A:latest", "a")
        with monkeypatch.context() as patch:
            patch.setattr(house.manager, "resolve", lambda name: pytest.fail("the disk was read"))
            await house.ask("a", "A:latest", "a")
        (model,) = house.manager.loaded()
        model.installed.path.unlink()
        with pytest.raises(ModelNotFound):
            await house.ask("a")

    run_virtually(test())


def test_lease_other_context_size_never_reloads() -> None:
    async def test() -> None:
        house = House({"a": 1})
        for _ in range(3):
            await house.ask("a")
        assert len(house.start.configs) == 1

    run_virtually(test())


# --- keep alive and unload ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "override", "kept_s"),
    [(60, None, 60), (60, 10, 10), (60, 0, 0), (-1, None, None), (-1, 10, 10), (60, -1, None), (0, None, 0)],
)
def test_keep_alive_counts_from_the_last_request(setting: float, override: float | None, kept_s: float | None) -> None:
    async def test() -> None:
        house = House({"a": 1}, {"keep_alive_s": setting})
        await house.ask("a", for_s=1000, keep_alive_s=override)
        if kept_s is None:
            await asyncio.sleep(10**6)
            assert house.loaded == "a"
            return
        if kept_s:
            await asyncio.sleep(kept_s - 1)
            assert house.manager.standing("a").keep_alive_left_s == pytest.approx(1)
            await house.ask("a")
            await asyncio.sleep(kept_s - 1)
            assert house.loaded == "a"
        await asyncio.sleep(2)
        assert house.loaded == "" and house.start.engines[0].stopped and house.machine.used_bytes("CPU_Mapped") == 0

    run_virtually(test())


def test_keep_alive_each_model_goes_at_its_own_time() -> None:
    async def test() -> None:
        house = House({"a": 1, "b": 1, "c": 1}, {"keep_alive_s": 100})
        await house.ask("a")
        await house.ask("b", keep_alive_s=10)
        await house.ask("c", keep_alive_s=50)
        seen = []
        for _ in range(3):
            seen.append(house.loaded)
            await asyncio.sleep(40)
        assert [*seen, house.loaded] == ["abc", "ac", "a", ""]

    run_virtually(test())


def test_keep_alive_pinned_model_stays_whatever_a_client_asks_for(tmp_path: Path) -> None:
    async def test() -> None:
        house = House({}, {"keep_alive_s": 5}, pinned=write_model(tmp_path / "pinned.gguf", GIB))
        await house.ask("", keep_alive_s=0)
        await asyncio.sleep(10**6)
        assert house.loaded == "pinned" and house.manager.standing("pinned").keep_alive_left_s is None

    run_virtually(test())


def test_unload_busy_model_only_by_force_and_its_requests_may_end() -> None:
    async def test() -> None:
        house = House({"a": 1})
        assert await house.manager.unload("a") is False
        asking = [asyncio.create_task(house.ask("a", for_s=1)) for _ in range(3)]
        await asyncio.sleep(0.5)
        with pytest.raises(ModelInUse) as caught:
            await house.manager.unload("a")
        assert caught.value.requests == 3 and house.loaded == "a"
        assert await house.manager.unload("a", force=True) is True
        assert all(task.done() for task in asking), "it waited for them"
        assert house.start.engines[0].stopped and not house.start.engines[0].stopped_busy
        await house.ask("a")
        assert house.loaded == "a"

    run_virtually(test())


def test_unload_by_force_waits_no_longer_than_the_drain_time() -> None:
    async def test() -> None:
        house = House({"a": 1})
        asking = asyncio.create_task(house.ask("a", for_s=60))
        await asyncio.sleep(1)
        await house.manager.unload("a", force=True)
        assert asyncio.get_running_loop().time() == pytest.approx(1 + house.manager.settings.drain_s)
        assert house.start.engines[0].stopped_busy
        await asking

    run_virtually(test())


def test_unload_by_force_while_it_loads_tells_those_who_wait() -> None:
    async def test() -> None:
        house = House({"a": 1})
        house.start.gate = asyncio.Event()
        waiting = asyncio.create_task(house.ask("a"))
        await asyncio.sleep(1)
        assert await house.manager.unload("a", force=True) is True
        with pytest.raises(LoadFailed, match="unloaded while it was loading"):
            await waiting
        house.start.gate = None
        await house.ask("a")

    run_virtually(test())


def test_load_without_a_request_keeps_it_as_long_as_asked() -> None:
    async def test() -> None:
        house = House({"a": 1})
        model = await house.manager.load("a", keep_alive_s=30)
        assert model.name == "a" == house.loaded
        await asyncio.sleep(31)
        assert house.loaded == ""

    run_virtually(test())


def test_close_ends_all_and_whoever_comes_then_is_told() -> None:
    async def test() -> None:
        house = House({"a": 1, "b": 1})
        await house.ask("a")
        house.start.gate = asyncio.Event()
        waiting = asyncio.create_task(house.ask("b"))
        await asyncio.sleep(1)
        await house.manager.close(1)
        with pytest.raises(ShuttingDown):
            await waiting
        with pytest.raises(ShuttingDown):
            await house.ask("a")
        assert all(engine.stopped for engine in house.start.engines)

    run_virtually(test())


# --- when it does not load ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [1, 2, 3, 4])
def test_load_goes_down_a_step_after_each_failure_and_says_so(failures: int) -> None:
    async def test() -> None:
        house = House({"a": 3}, card=8)
        house.start.failures = [LoadFailed(model="a", reason=OUT_OF_MEMORY) for _ in range(failures)]
        async with house.use("a") as model:
            assert len(model.steps) == failures
            assert all(f"it did not load otherwise: {step}" in model.plan.reasons for step in model.steps)
            assert model.plan.cells == house.start.configs[-1].cells
        sizes = [(c.ubatch_tokens, c.kv_type == "f16", c.cells, c.context_tokens, c.gpu_layers) for c in house.start.configs]
        assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == failures + 1
        changed = [len([1 for x, y in zip(one, two, strict=True) if x != y]) for one, two in pairwise(sizes)]
        assert changed == [1, 1, 1, 1][:failures]

    run_virtually(test())


def test_load_gives_up_after_four_steps_and_tells_what_it_tried() -> None:
    async def test() -> None:
        house = House({"a": 3}, card=8)
        house.start.fail = LoadFailed(model="a", reason=OUT_OF_MEMORY)
        with pytest.raises(LoadFailed, match=r"SIGABRT.*; tried in vain: prompts in batches of .*layers on the GPU"):
            await house.ask("a")
        assert len(house.start.configs) == 5

    run_virtually(test())


def test_load_begins_where_it_worked_and_never_repeats_what_failed() -> None:
    async def test() -> None:
        house = House({"a": 3}, card=8)
        house.start.failures = [LoadFailed(model="a", reason=OUT_OF_MEMORY) for _ in range(2)]
        await house.ask("a", keep_alive_s=0)
        await asyncio.sleep(1)
        assert house.loaded == ""
        await house.ask("a")
        shapes = [(config.ubatch_tokens, config.kv_type, config.cells) for config in house.start.configs]
        assert len(shapes) == 4 and shapes[3] == shapes[2]

    run_virtually(test())


def test_load_that_failed_at_a_full_machine_is_tried_whole_when_there_is_room_again() -> None:
    async def test() -> None:
        house = House({"a": 3, "b": 3}, ram=16)
        async with house.use("b"):
            house.start.failures = [LoadFailed(model="a", reason=OUT_OF_MEMORY)]
            await house.ask("a", keep_alive_s=0)
        await house.manager.unload("b")
        async with house.use("a") as model:
            assert model.steps == ()

    run_virtually(test())


def test_load_steps_leave_pins_alone() -> None:
    async def test() -> None:
        pins = {"batch": 256, "kv_type": "f16", "ctx": 4096, "gpu_layers": 5}
        house = House({"a": 3}, pins, card=8)
        house.start.fail = LoadFailed(model="a", reason=OUT_OF_MEMORY)
        with pytest.raises(LoadFailed):
            await house.ask("a")
        kept = {(c.ubatch_tokens, c.kv_type, c.context_tokens, c.gpu_layers) for c in house.start.configs}
        assert kept == {(256, "f16", 4096, 5)}

    run_virtually(test())


@pytest.mark.parametrize(
    "error",
    [
        LoadFailed(model="a", reason="error loading model: unknown model architecture: 'new'"),
        BadModelFile(path="a.gguf", reason="no header"),
    ],
)
def test_load_what_no_smaller_shape_can_cure_is_told_at_once(error: Exception) -> None:
    async def test() -> None:
        house = House({"a": 1})
        house.start.fail = error
        with pytest.raises(type(error)):
            await house.ask("a")
        assert len(house.start.configs) == 1

    run_virtually(test())


def test_load_reason_hidden_in_the_engines_log_is_found() -> None:
    async def test() -> None:
        house = House({"a": 1}, {"batch": 128, "kv_type": "f16", "cells": 4096})

        async def start(config: Any, _: object) -> Any:
            log = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 512 MiB: cudaMalloc failed: out of memory\n"
            Path(config.log_path).write_text(log + "fused Gated Delta Net not supported\n", encoding="utf-8")
            raise LoadFailed(model="a", reason="fused Gated Delta Net not supported")

        house.manager._loader.start_engine = start
        with pytest.raises(LoadFailed, match=r"its log says: .*out of memory"):
            await house.ask("a")

    run_virtually(test())


def test_lease_engine_that_dies_again_and_again_is_left_alone_for_a_while() -> None:
    async def test() -> None:
        house = House({"a": 1})
        for _ in range(MAX_DEATHS):
            async with house.use("a") as model:
                model.engine.crash()  # type: ignore[attr-defined]
            await asyncio.sleep(1)
        for _ in range(3):
            with pytest.raises(LoadFailed, match="again and again within 60 s; it is started again in"):
                await house.ask("a")
        assert len(house.start.engines) == MAX_DEATHS
        await asyncio.sleep(WINDOW_S)
        await house.ask("a")
        assert house.manager.standing("a").restarts == MAX_DEATHS

    run_virtually(test())


def test_lease_engine_that_dies_now_and_then_is_always_started_again() -> None:
    async def test() -> None:
        house = House({"a": 1})
        for _ in range(10):
            async with house.use("a") as model:
                model.engine.crash()  # type: ignore[attr-defined]
            await asyncio.sleep(WINDOW_S / 2)
        assert len(house.start.engines) == 10

    run_virtually(test())


# --- everything at once -------------------------------------------------------------------------------------------------------


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), card=st.sampled_from([0, 14]))
def test_lease_three_models_under_a_budget_for_two_twelve_clients(
    seed: int, card: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chance = random.Random(seed)
    requests = [(chance.choice("abc"), chance.choice([0, 0.1, 1, 3])) for _ in range(200)]

    async def client(house: House, number: int) -> int:
        for name, for_s in requests[number::12]:
            await house.ask(name, for_s=for_s)
            await asyncio.sleep(for_s / 2)
        return len(requests[number::12])

    async def test() -> None:
        home = str(tmp_path_factory.mktemp("house"))
        house = House(dict.fromkeys("abc", 6), {"home": home, "load_timeout_s": 1000, "keep_alive_s": 20}, card=card)
        answered = await asyncio.gather(*(client(house, number) for number in range(12)))
        assert sum(answered) == 200
        assert not any(engine.stopped_busy for engine in house.start.engines)
        assert len(house.loaded) <= 2
        await asyncio.sleep(21)
        assert house.loaded == "" and house.machine.used_bytes("CUDA0") == house.machine.used_bytes("CPU_Mapped") == 0
        await house.manager.close(1)

    run_virtually(test())


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "leave", "die", "unload", "force"]),
        st.sampled_from("abc"),
        st.sampled_from([0.0, 0.5, 5.0, 400.0]),
    ),
    max_size=25,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_lease_whatever_comes_together_everybody_gets_an_answer(
    steps: list[tuple[str, str, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Requests, clients that leave, engines that die, models that are unloaded, in any order: no hang, no fault, no leak."""

    async def test() -> None:
        home = str(tmp_path_factory.mktemp("house"))
        house = House({"a": 6, "b": 6, "c": 9}, {"home": home, "keep_alive_s": 50, "max_loaded_models": 2})
        tasks: list[asyncio.Task[Any]] = []
        for what, name, for_s in steps:
            loaded = [model for model in house.manager.loaded() if model.name == name]
            if what == "ask":
                tasks.append(asyncio.create_task(house.ask(name, for_s=for_s)))
            elif what == "leave" and tasks:
                tasks[len(tasks) // 2].cancel()
            elif what == "die" and loaded:
                loaded[0].engine.crash()  # type: ignore[attr-defined]
            elif what in ("unload", "force"):
                tasks.append(asyncio.create_task(house.manager.unload(name, force=what == "force")))
            await asyncio.sleep(for_s / 100)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result in (None, True, False) or isinstance(result, EngineError | ModelInUse | asyncio.CancelledError), result
        await house.ask("a") if not house.manager._crashes["a"].wait_s(asyncio.get_running_loop().time()) else None
        await house.manager.close(1)
        assert all(engine.stopped or engine.crashed for engine in house.start.engines)

    run_virtually(test())
