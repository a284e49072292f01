"""Layers really move to a GPU, as the plan said: on a GPU that the installed engine can use, else on a loopback device."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from rpc_device import Device, built_engine, install

from localfast.core import Failed, GenerateRequest, Sampling, TextDelta
from localfast.errors import EngineDied
from localfast.fit import Fitter, wishes
from localfast.hardware import detect
from localfast.measure import HeaderSource
from localfast.models.catalog import model_at
from localfast.models.gguf import read_facts
from localfast.models.manager import LoadedModel, ModelManager
from localfast.settings import load_settings

pytestmark = [pytest.mark.gpu, pytest.mark.model]


@pytest.fixture(scope="module")
def engine() -> Path | None:
    """None: the engine of this environment has a GPU of its own."""
    if detect().engine_gpus:
        return None
    folder = built_engine()
    if folder is None:
        pytest.skip("the engine sees no GPU, and none is built with -DGGML_RPC=ON")
    return folder


@pytest.fixture
def device(engine: Path | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device | None]:
    if engine is None:
        yield None
        return
    device = Device(engine)
    monkeypatch.setenv("RPC_DEVICE", device.endpoint)
    install(engine, load_settings({}))
    yield device
    device.kill()


def greedy(prompt: str, max_tokens: int) -> GenerateRequest:
    return GenerateRequest(model="", prompts=(prompt,), max_tokens=max_tokens, sampling=Sampling(temperature=0), ignore_eos=True)


async def answer(model: LoadedModel, prompt: str, max_tokens: int = 8) -> str:
    async with contextlib.aclosing(await model.generate(greedy(prompt, max_tokens))) as events:
        return "".join([event.text async for event in events if isinstance(event, TextDelta)])


def loaded_bytes(model: LoadedModel, use: str) -> tuple[int, int]:
    """(on CPU, on GPU), as the engine reported them after the load."""
    on_cpu = sum(size for device, kind, size in model.engine.facts.buffers if kind == use and device.startswith("CPU"))
    return on_cpu, sum(size for _, kind, size in model.engine.facts.buffers if kind == use) - on_cpu


@pytest.mark.parametrize(("pin", "layers"), [(-1, 31), (16, 16), (0, 0)])
def test_offload_moves_the_layers_that_the_plan_names(device: Device | None, starter_path: Path, pin: int, layers: int) -> None:
    async def test() -> None:
        manager = ModelManager(load_settings({"gpu_layers": pin}), model_at(starter_path))
        try:
            async with manager.lease("") as model:
                assert model.plan.gpu_layers == model.engine.facts.gpu_layers == layers, model.plan.sentences()
                on_cpu, on_gpu = loaded_bytes(model, "model")
                cache_on_cpu, cache_on_gpu = loaded_bytes(model, "KV")
                assert (on_gpu > 0) == (cache_on_gpu > 0) == (layers > 0)
                assert (cache_on_cpu == 0) == (layers == 31)
                planned = next((size for label, size in model.plan.memory[-1].parts if label == "model"), 0)
                assert layers == 0 or abs(on_gpu - planned) < 0.02 * planned + 2**20
                planned = next((size for label, size in model.plan.memory[-1].parts if label == "chat memory"), 0)
                assert abs(cache_on_gpu - planned) <= 2**20
                assert "Paris" in await answer(model, "The capital of France is")
                assert on_cpu > 0, "the input embeddings stay in RAM"
        finally:
            await manager.close(10)

    asyncio.run(test())


def test_offload_dry_run_measures_each_device_like_the_load(device: Device | None, starter_path: Path) -> None:
    settings = load_settings({"gpu_layers": 20, "kv_type": "q8_0", "cells": 8192, "ctx": 8192})
    fitter = Fitter(settings)
    facts = read_facts(starter_path)
    source = partial(HeaderSource.on_disk, starter_path)
    plan = fitter.plan(fitter.hardware(), facts, wishes(settings), source=source, exact=True)

    async def test() -> None:
        manager = ModelManager(settings, model_at(starter_path))
        try:
            async with manager.lease("") as model:
                assert model.plan.shape == plan.shape
                for use, label in (("model", "model"), ("KV", "chat memory"), ("compute", "work space")):
                    planned = dict(plan.memory[-1].parts)[label]
                    _, real = loaded_bytes(model, use)
                    assert abs(planned - real) <= 0.02 * real + 2**16, (label, planned, real)
        finally:
            await manager.close(10)

    asyncio.run(test())


def test_offload_says_the_same_as_the_cpu(device: Device | None, starter_path: Path) -> None:
    texts = []

    async def test(layers: int) -> None:
        manager = ModelManager(load_settings({"gpu_layers": layers}), model_at(starter_path))
        try:
            async with manager.lease("") as model:
                texts.append(await answer(model, "The capital of France is", 12))
        finally:
            await manager.close(10)

    for layers in (0, 31, 12):
        asyncio.run(test(layers))
    assert texts[0] == texts[1] == texts[2]


def test_offload_device_that_is_lost_ends_its_streams_and_the_next_request_runs_without_it(
    device: Device | None, starter_path: Path
) -> None:
    if device is None:
        pytest.skip("a real GPU is not taken away")

    async def test() -> None:
        manager = ModelManager(load_settings({}), model_at(starter_path))
        try:
            async with manager.lease("") as model:
                assert model.plan.on_gpu
                streams = [await model.generate(greedy("Once upon a time", 400)) for _ in range(3)]
                for stream in streams:
                    while not isinstance(await anext(stream), TextDelta):
                        pass
                device.kill()
                for stream in streams:
                    last = [event async for event in stream][-1]
                    assert isinstance(last, Failed) and isinstance(last.error, EngineDied), last
            assert not Fitter(manager.settings).hardware().engine_gpus
            async with manager.lease("") as model:
                assert model.plan.gpu_layers == 0
                assert "Paris" in await answer(model, "The capital of France is")
        finally:
            await manager.close(10)

    asyncio.run(test())
