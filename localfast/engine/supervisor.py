"""Owns one engine process: spawn, the pipe's two threads, the READY handshake, its death and the evidence for it.

Server process, event loop's thread (the two pipe threads only move frames). Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import SimpleQueue

import msgspec

from localfast import errors
from localfast.engine import entry, messages
from localfast.engine.messages import EngineConfig, EngineFacts

log = logging.getLogger("localfast")


class EngineProcess:
    """`on_frame` and `on_death` are called in the event loop; `on_death` exactly once, after the last `on_frame`."""

    def __init__(
        self,
        config: EngineConfig,
        on_frame: Callable[[messages.Step | messages.CacheReport], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._config = config
        self._on_frame = on_frame
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineFacts] = self._loop.create_future()
        self._gone = asyncio.Event()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()

    async def start(self, timeout_s: float) -> EngineFacts:
        """Spawn and wait until the model is loaded. Raises LoadFailed; nothing is left behind then."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=entry.main, args=(theirs,), name="localfast-engine", daemon=True)
        await asyncio.to_thread(_start_deaf, self._process)
        self.pid = self._process.pid
        theirs.close()  # so that our end reads EOF when the process is gone
        for target in (self._read, self._write):
            threading.Thread(target=target, args=(self._connection,), name=f"engine-{self.pid}", daemon=True).start()
        self.send(messages.Load(self._config))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ready
        except TimeoutError:
            await self.stop(grace_s=0)
            reason = f"it was not ready after {timeout_s:.0f} s; raise the load_timeout_s setting if the disk is slow"
            raise errors.LoadFailed(model=self._config.model, reason=reason) from None
        except BaseException:
            await self.stop(grace_s=0)
            raise

    def send(self, frame: messages.ToEngine) -> None:
        self._outbox.put(messages.encode(frame))

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, then end it. Returns when the process is gone and its memory is free."""
        self.send(messages.Stop())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._gone.wait()
        if not self._gone.is_set():
            self._process.kill()
            await self._gone.wait()

    # --- pipe threads ---------------------------------------------------------------------------------------------------------

    def _write(self, connection: Connection) -> None:
        while (frame := self._outbox.get()) is not None:
            try:
                connection.send_bytes(frame)
            except OSError:
                return  # the reader sees the same and reports the death

    def _read(self, connection: Connection) -> None:
        try:
            while True:
                frame = messages.decode_from_engine(connection.recv_bytes())
                self._in_loop(self._take, frame)
        except (EOFError, OSError):
            pass
        except msgspec.MsgspecError:
            log.exception("the engine of %s sent what nobody understands", self._config.model)
            self._process.kill()
        self._process.join()
        self._outbox.put(None)
        self._in_loop(self._bury, self._process.exitcode or 0)

    def _in_loop(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is ending and nobody waits for this
            self._loop.call_soon_threadsafe(function, *args)

    # --- event loop -----------------------------------------------------------------------------------------------------------

    def _take(self, frame: messages.FromEngine) -> None:
        match frame:
            case messages.Step() | messages.CacheReport():
                self._on_frame(frame)
            case messages.Ready(facts):
                if not self._ready.done():
                    self._ready.set_result(facts)
            case messages.Broken(code, facts_):
                if not self._ready.done():
                    self._ready.set_exception(errors.from_wire(code, facts_))

    def _bury(self, exit_code: int) -> None:
        self._connection.close()
        self._process.close()
        reason = exit_words(exit_code)
        evidence = log_tail(self._config.log_path)
        if exit_code == 0 and self._config.log_path:
            Path(self._config.log_path).unlink(missing_ok=True)  # it is evidence only of what went wrong
        if not self._ready.done():
            what = f"{reason}: {evidence}" if evidence else reason
            self._ready.set_exception(errors.LoadFailed(model=self._config.model, reason=what))
        self._gone.set()
        self._on_death(reason)


def _start_deaf(process: SpawnProcess) -> None:
    """Start it with Ctrl-C blocked, until it ignores that itself. The child inherits this thread's mask."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    process.start()


def exit_words(exit_code: int) -> str:
    """How a process ended, in words: a signal's name on POSIX, the NTSTATUS on Windows."""
    if exit_code == 0:
        return "it ended"
    if exit_code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-exit_code).name
            meaning = {
                "SIGKILL": "killed, perhaps by the system for lack of memory",
                "SIGSEGV": "a crash in native code",
                "SIGABRT": "a native library gave up, often for lack of GPU memory",
                "SIGILL": "this CPU lacks an instruction the engine was built with",
            }.get(name)
            return f"{name}: {meaning}" if meaning else name
    if exit_code & 0xFFFFFFFF == 0xC000001D:
        return "0xC000001D: this CPU lacks an instruction the engine was built with"
    return f"exit code {exit_code}"


def log_tail(path: str, lines: int = 3) -> str:
    """The last lines that an engine process wrote, as one line; empty when there are none."""
    if not path:
        return ""
    try:
        content = Path(path).read_bytes()[-4096:].decode("utf-8", "replace")
    except OSError:
        return ""
    return " | ".join([line.strip() for line in content.splitlines() if line.strip()][-lines:])
