"""A real uvicorn in a thread, for what in-process transports cannot show: the order of bytes, and clients that hang up."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fakes import FakeStart
from gguf_writer import llama_tensors, llama_values, write_gguf
from starlette.applications import Starlette

from localfast.app import create_app
from localfast.core import Event, GenerateRequest
from localfast.hardware import EngineBuild, Hardware
from localfast.models.catalog import model_at
from localfast.models.manager import ModelManager
from localfast.pulls import Fetch
from localfast.settings import Settings, load_settings

MACHINE = Hardware(
    ram_total_bytes=16 * 2**30, ram_available_bytes=12 * 2**30, physical_cores=2, engine=EngineBuild(installed=True)
)


def wait_for(fact: Callable[[], Any], what: str = "it", limit_s: float = 30) -> Any:
    """Look until `fact()` is true, and give it back; a fact that never comes fails the test."""
    deadline = time.monotonic() + limit_s
    while not (found := fact()):
        assert time.monotonic() < deadline, f"{what} did not happen in {limit_s} s"
        time.sleep(0.005)
    return found


def tiny_model(folder: Path, name: str = "tiny") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return write_gguf(folder / f"{name}.gguf", llama_values(), llama_tensors())


def fake_manager(settings: Settings, start: FakeStart, pinned: Path | None) -> ModelManager:
    model = None if pinned is None else dataclasses.replace(model_at(pinned), name=pinned.stem)
    return ModelManager(settings, model, start, lambda: MACHINE)


class LiveServer:
    """Serves `tiny` through a FakeEngine. `client` talks to it; `engine` is the fake, once a request has loaded it."""

    def __init__(
        self,
        folder: Path,
        script: Callable[[GenerateRequest], Iterable[Event]] | None = None,
        fetch: Fetch | None = None,
        **flags: Any,
    ) -> None:
        settings = load_settings({"port": 0, "drain_s": 0, **flags})
        self.start = FakeStart(script)
        self._fetch = fetch
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(settings, tiny_model(folder))))

    async def _serve(self, settings: Settings, path: Path) -> None:
        self.loop = asyncio.get_running_loop()
        app: Starlette = create_app(settings, fake_manager(settings, self.start, path), self._fetch)
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="on", timeout_graceful_shutdown=5))
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self._ready.set()
        await serving

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._ready.wait(20)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20, trust_env=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(20)

    @property
    def engine(self) -> Any:
        return self.start.engines[0]

    def push(self, request: int, *events: Event) -> None:
        """Let the engine say more on a stream that is open."""
        for event in events:
            self.loop.call_soon_threadsafe(self.engine.streams[request].put, event)
