"""What the server says of itself: alive, ready, metrics, models, plans; and what its owner asks of it: load, unload.

Only `load` and `unload` change anything, and they leave that to the manager.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localfast import __version__
from localfast.bodies import read_json
from localfast.errors import InvalidRequest
from localfast.metrics import Metrics
from localfast.models.catalog import InstalledModel
from localfast.models.manager import LoadedModel, ModelManager, Standing
from localfast.plan.entries import plan_entry

MAX_BODY_BYTES = 4096
MAX_KEEP_ALIVE_S = 10**9


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
        served = await asyncio.to_thread(self._manager.served)
        ready = bool(loaded) or (bool(served) and self._manager.pinned is None)
        content = {"status": "ready" if ready else "not ready", "loaded": loaded, "loading": self._manager.loading}
        return JSONResponse(content, status_code=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        """GET /v1/models: what clients may ask for."""
        loaded = {model.name: model for model in self._manager.loaded()}
        served = await asyncio.to_thread(self._manager.served)
        entries = [self._model_entry(name, model, loaded.get(name)) for name, model in served]
        return JSONResponse({"object": "list", "data": entries})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME. Raises ModelNotFound."""
        name, model = await asyncio.to_thread(self._manager.resolve, request.path_params["name"])
        loaded = next((entry for entry in self._manager.loaded() if entry.name == name), None)
        return JSONResponse(self._model_entry(name, model, loaded))

    async def processes(self, request: Request) -> Response:
        """GET /v1/localfast/models: loaded models and what they are doing (`localfast ps`)."""
        manager = self._manager
        entries = [_process_entry(model, manager.standing(model.name)) for model in manager.loaded()]
        return JSONResponse({"models": entries, "loading": manager.loading})

    async def load(self, request: Request) -> Response:
        """POST /v1/localfast/models/NAME/load: load it without a request; `keep_alive_s` says how long it stays."""
        keep_alive_s = _flags(await read_json(request, MAX_BODY_BYTES, {}), "keep_alive_s")
        number = (
            isinstance(keep_alive_s, int | float) and not isinstance(keep_alive_s, bool) and abs(keep_alive_s) <= MAX_KEEP_ALIVE_S
        )
        if keep_alive_s is not None and not number:
            raise InvalidRequest(reason="'keep_alive_s' must be a number of seconds; -1: for ever", param="keep_alive_s")
        async with self._manager.lease(request.path_params["name"], keep_alive_s) as model:
            return JSONResponse(_process_entry(model, self._manager.standing(model.name)))

    async def unload(self, request: Request) -> Response:
        """POST /v1/localfast/models/NAME/unload. Raises ModelInUse unless `force`: then its requests get `drain_s` to end."""
        force = _flags(await read_json(request, MAX_BODY_BYTES, {}), "force")
        if not isinstance(force, bool | None):
            raise InvalidRequest(reason="'force' must be true or false", param="force")
        name, _ = await asyncio.to_thread(self._manager.resolve, request.path_params["name"])
        return JSONResponse({"name": name, "unloaded": await self._manager.unload(name, bool(force))})

    async def plan(self, request: Request) -> Response:
        """GET /v1/localfast/plan?model=NAME: how it would be loaded now, beside the models that are. Raises ModelNotFound."""
        model, plan = await self._manager.plan(request.query_params.get("model", ""))
        return JSONResponse({"model": str(model), "path": str(model.path), **plan_entry(plan)})

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


def _flags(body: Any, known: str) -> Any:
    """The one field that a small request may have; None when it is not there. Raises InvalidRequest."""
    if not isinstance(body, dict):
        raise InvalidRequest(reason="the body must be a JSON object")
    if unknown := sorted(body.keys() - {known}):
        raise InvalidRequest(reason=f"'{unknown[0][:40]}' is not known here; there is '{known}'", param=unknown[0][:40])
    return body.get(known)


def _process_entry(model: LoadedModel, standing: Standing) -> dict[str, Any]:
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
        "memory": [
            {"device": memory.device, "planned_bytes": memory.needed_bytes, "real_bytes": real_bytes}
            for memory, real_bytes in zip(model.plan.memory, model.held, strict=False)
        ],
        "load_s": facts.load_s,
        "steps": list(model.steps),
        **asdict(standing),
        "plan": list(model.plan.sentences()),
    }
