"""The engine process: loads one model, then steps until told to stop. Never imported by the server.

Three threads. Intake reads the pipe and tokenizes; the step loop (the main thread) owns scheduler, context and samplers; the
sender encodes and writes. They share two queues and nothing else. When the pipe ends, the server is gone and so are we.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from localfast import errors
from localfast.core import Accepted, Event, Failed, GenerateRequest
from localfast.engine import messages
from localfast.engine.crowding import ThreadCount
from localfast.engine.disk import DiskStates
from localfast.engine.drafting import Drafter, can_take_back
from localfast.engine.keeping import StateKeeper
from localfast.engine.llama import ENGINE_VERSION, Context, Model, NativeLog
from localfast.engine.messages import EngineConfig, EngineFacts
from localfast.engine.pace import Pace
from localfast.engine.scheduler import Scheduler
from localfast.engine.states import RamStates
from localfast.engine.steps import Engine, StepLoop, Tokenized, Work

MIN_PROMPT_TOKENS = 8
"""A step holds at least so many prompt tokens, however slow they are: otherwise a prompt would never end."""
Outgoing = list[tuple[int, Event]]


class Intake:
    """Reads frames and tokenizes prompts beside the step loop, so that a long prompt does not hold up a step."""

    def __init__(
        self, connection: Connection, model: Model, config: EngineConfig, put_events: Callable[[Outgoing], None]
    ) -> None:
        self.inbox: SimpleQueue[Work] = SimpleQueue()
        self._connection = connection
        self._model = model
        self._config = config
        self._put_events = put_events

    def run(self) -> None:
        while True:
            try:
                frame = messages.decode_to_engine(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)  # the server is gone; a native call of the step loop must not keep us alive
            match frame:
                case messages.Submit(request_id, request):
                    self._submit(request_id, request)
                case messages.Cancel() | messages.Describe() | messages.Stop():
                    self.inbox.put(frame)

    def _submit(self, request_id: int, request: GenerateRequest) -> None:
        received_s = time.monotonic()
        try:
            prompts = [self._tokens(prompt) for prompt in request.prompts]
        except errors.LocalfastError as error:
            self._put_events([(request_id, Failed(error))])
            return
        self._put_events([(request_id, Accepted(sum(len(prompt) for prompt in prompts)))])
        self.inbox.put(Tokenized(request_id, request, prompts, received_s))

    def _tokens(self, prompt: str | tuple[int, ...]) -> list[int]:
        tokens = self._model.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens and self._model.bos >= 0:
            tokens = [self._model.bos]
        if not tokens:
            raise errors.InvalidRequest(reason="the prompt is empty", param="prompt")
        if wrong := next((token for token in tokens if not 0 <= token < self._model.vocabulary), None):
            raise errors.InvalidRequest(
                reason=f"token {wrong} is not in the vocabulary of {self._model.vocabulary} tokens", param="prompt"
            )
        if len(tokens) >= self._config.context_tokens:
            raise errors.ContextLengthExceeded(
                param="messages", prompt_tokens=len(tokens), context_tokens=self._config.context_tokens
            )
        return tokens


class Sender:
    """Encodes and writes frames beside the step loop."""

    def __init__(self, connection: Connection) -> None:
        self.outbox: SimpleQueue[messages.FromEngine | None] = SimpleQueue()
        self._connection = connection

    def run(self) -> None:
        while (frame := self.outbox.get()) is not None:
            try:
                self._connection.send_bytes(messages.encode(frame))
            except OSError:
                return  # intake sees the same broken pipe and ends the process


def serve(connection: Connection, config: EngineConfig) -> None:
    """Load, answer Ready or Broken, and step until Stop."""
    _redirect_output(config.log_path)
    faulthandler.enable()  # a crash in native code leaves its Python stack in the log
    sender = Sender(connection)
    sending = _start_thread("sender", sender.run)
    try:
        model, context, drafter, facts = _load(config)
    except errors.LocalfastError as error:
        connection.send_bytes(messages.encode(messages.Broken(*errors.to_wire(error))))
        return
    intake = Intake(connection, model, config, lambda events: sender.outbox.put(messages.Step.of(events)))
    engine = _assemble(config, model, context, drafter, intake)
    sender.outbox.put(messages.Ready(facts))
    _start_thread("intake", intake.run)
    # What is loaded stays: the collector need not look through it again in the middle of a step.
    gc.collect()
    gc.freeze()
    StepLoop(engine, sender.outbox.put).run(intake.inbox)
    engine.keeper.close()
    if drafter:
        drafter.close()
    context.close()
    model.close()
    sender.outbox.put(None)
    sending.join()


def _assemble(config: EngineConfig, model: Model, context: Context, drafter: Drafter | None, intake: Intake) -> Engine:
    cuttable = model.window == 0
    states = RamStates(config.cache_ram_bytes, cuttable)
    key = f"{config.cache_key} {ENGINE_VERSION} {config.kv_type}"
    disk_bytes = config.cache_disk_bytes if config.cache_folder and config.cache_key else 0
    disk = DiskStates(Path(config.cache_folder), key, disk_bytes, cuttable)
    scheduler = Scheduler(
        slots=config.slots,
        cells=min(context.cells, config.cells),
        context_tokens=config.context_tokens,
        batch_tokens=config.batch_tokens,
        max_outputs=config.slots + messages.SPARE_OUTPUT_ROWS,
        window=model.window,
        states=states,
    )
    pace = Pace(config.max_stall_s, MIN_PROMPT_TOKENS, config.batch_tokens)
    keeper = StateKeeper(context, states, disk, intake.inbox.put)
    # With layers on a GPU the CPU's threads wait for that, which looks like a lack of cores: then all stay.
    threads = ThreadCount(config.threads, patient=config.gpu_layers > 0)
    speculation = config.speculation and can_take_back(model, config)
    return Engine(model, context, scheduler, pace, keeper, threads, speculation, drafter if speculation else None)


def _load(config: EngineConfig) -> tuple[Model, Context, Drafter | None, EngineFacts]:
    started_s = time.monotonic()
    log = NativeLog()
    model = Model(config, log)
    context = Context(model, config, config.slots + messages.SPARE_OUTPUT_ROWS)
    context.warm_up()
    drafter = Drafter(model, config) if config.draft_path else None
    facts = EngineFacts(
        pid=os.getpid(),
        description=model.description,
        parameters=model.parameters,
        size_bytes=model.size_bytes,
        vocabulary=model.vocabulary,
        train_context_tokens=model.train_context_tokens,
        context_tokens=config.context_tokens,
        cells=context.cells,
        slots=config.slots,
        layers=model.layers,
        gpu_layers=min(config.gpu_layers, model.layers),
        load_s=time.monotonic() - started_s,
        buffers=tuple(log.buffers),
    )
    return model, context, drafter, facts


def _start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """A thread that fails takes the process with it: the server then learns of it, instead of waiting for ever."""

    def run_or_die() -> None:
        try:
            run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    thread = threading.Thread(target=run_or_die, name=name, daemon=True)
    thread.start()
    return thread


def _redirect_output(log_path: str) -> None:
    """Native libraries print where they like; all of it goes to the log file, whose tail is the evidence if we die."""
    if not log_path:
        return
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
