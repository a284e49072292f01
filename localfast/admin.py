"""What the server says of itself: alive, ready, metrics, models. None of it waits for an engine."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localfast import __version__
from localfast.metrics import Metrics
from localfast.models.catalog import InstalledModel
from localfast.models.manager import LoadedModel, ModelManager


class Admin:
    """Endpoints over one manager."""

    def __init__(self, manager: ModelManager, metrics: Metrics, started_at: int) -> None:
        self._manager = manager
        self._metrics = metrics
        self._started_at = started_at

    async def health(self, request: Request) -> Response:
        """The server is alive."""
        return JSONResponse({"status": "ok", "version": __version__})

    async def ready(self, request: Request) -> Response:
        """A model can answer: one is loaded, or one is installed and will be loaded by the first request."""
        loaded = [model.name for model in self._manager.loaded()]
        served = [name for name, _ in self._manager.served()]
        ready = bool(loaded) or (bool(served) and self._manager.pinned is None)
        content = {"status": "ready" if ready else "not ready", "loaded": loaded, "loading": self._manager.loading}
        return JSONResponse(content, status_code=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        """GET /v1/models: what clients may ask for."""
        loaded = {model.name: model for model in self._manager.loaded()}
        entries = [self._model_entry(name, model, loaded.get(name)) for name, model in self._manager.served()]
        return JSONResponse({"object": "list", "data": entries})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME. Raises ModelNotFound."""
        name, model = self._manager.resolve(request.path_params["name"])
        loaded = next((entry for entry in self._manager.loaded() if entry.name == name), None)
        return JSONResponse(self._model_entry(name, model, loaded))

    async def processes(self, request: Request) -> Response:
        """GET /v1/localfast/models: loaded models and what they are doing (`localfast ps`)."""
        return JSONResponse(
            {"models": [_process_entry(model) for model in self._manager.loaded()], "loading": self._manager.loading}
        )

    async def cache(self, request: Request) -> Response:
        """GET /v1/localfast/cache: what each loaded model keeps of prompts: slots of the KV cache, RAM, disk."""
        models = self._manager.loaded()
        reports = await asyncio.gather(*(model.engine.describe_cache() for model in models))
        entries = [{"name": model.name} | msgspec.to_builtins(report) for model, report in zip(models, reports, strict=True)]
        for entry in entries:
            del entry["type"], entry["number"]
        return JSONResponse({"models": entries})

    def _model_entry(self, name: str, model: InstalledModel, loaded: LoadedModel | None) -> dict[str, Any]:
        entry: dict[str, Any] = {"id": name, "object": "model", "created": self._started_at, "owned_by": "localfast"}
        meta: dict[str, Any] = {"quant": model.quant, "size": model.size_bytes, "loaded": loaded is not None}
        if loaded is not None:
            facts = loaded.engine.facts
            entry["context_length"] = facts.context_tokens
            meta |= {
                "n_ctx": facts.context_tokens,
                "n_ctx_train": facts.train_context_tokens,
                "n_params": facts.parameters,
                "n_vocab": facts.vocabulary,
            }
        return entry | {"meta": meta}


def _process_entry(model: LoadedModel) -> dict[str, Any]:
    facts, stats = model.engine.facts, model.engine.stats
    return {
        "name": model.name,
        "quant": model.installed.quant,
        "size_bytes": model.installed.size_bytes,
        "pid": facts.pid,
        "gpu_layers": facts.gpu_layers,
        "layers": facts.layers,
        "context_tokens": facts.context_tokens,
        "cells": facts.cells,
        "used_cells": stats.used_cells,
        "slots": facts.slots,
        "running": stats.running,
        "waiting": stats.waiting,
        "open_requests": model.engine.open_requests,
        "decode_calls": stats.decode_calls,
        "batched_tokens": stats.batched_tokens,
        "buffers": [{"device": device, "use": use, "size_bytes": size} for device, use, size in facts.buffers],
        "plan": list(model.plan.sentences()),
    }
