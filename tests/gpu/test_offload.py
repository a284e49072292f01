"""Layers really move to a GPU, as the plan said: needs a device that the installed engine can use."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from localfast.core import GenerateRequest, Sampling, TextDelta
from localfast.hardware import Hardware, detect
from localfast.models.catalog import model_at
from localfast.models.manager import LoadedModel, ModelManager
from localfast.settings import load_settings

pytestmark = [pytest.mark.gpu, pytest.mark.model]


@pytest.fixture(scope="module")
def gpu() -> Hardware:
    hardware = detect()
    if not hardware.engine_gpus:
        pytest.skip("the engine sees no GPU")
    return hardware


async def answer(model: LoadedModel) -> str:
    prompt = GenerateRequest(model="", prompts=("The capital of France is",), max_tokens=8, sampling=Sampling(temperature=0))
    async with contextlib.aclosing(await model.generate(prompt)) as events:
        return "".join([event.text async for event in events if isinstance(event, TextDelta)])


def loaded_bytes(model: LoadedModel, use: str) -> tuple[int, int]:
    """(on CPU, on GPU), as the engine reported them after the load."""
    on_cpu = sum(size for device, kind, size in model.engine.facts.buffers if kind == use and device.startswith("CPU"))
    return on_cpu, sum(size for _, kind, size in model.engine.facts.buffers if kind == use) - on_cpu


@pytest.mark.parametrize(("pin", "layers"), [(-1, 31), (16, 16), (0, 0)])
def test_offload_moves_the_layers_that_the_plan_names(gpu: Hardware, starter_path: Path, pin: int, layers: int) -> None:
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
                assert layers == 0 or abs(on_gpu - planned) < 0.05 * planned + 2**20
                assert "Paris" in await answer(model)
                assert on_cpu > 0, "the input embeddings stay in RAM"
        finally:
            await manager.close(10)

    asyncio.run(test())
