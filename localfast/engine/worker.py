"""The engine process: loads one model, then steps until told to stop. Never imported by the server.

Three threads. Intake reads the pipe and tokenizes; the step loop (the main thread) owns scheduler, context and samplers; the
sender encodes and writes. They share two queues and nothing else. When the pipe ends, the server is gone and so are we.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue

from localfast import errors
from localfast.core import Accepted, Event, Failed, FinishReason, GenerateRequest
from localfast.engine import messages
from localfast.engine.generation import Generation, Stream
from localfast.engine.llama import Context, Model, NativeLog
from localfast.engine.messages import EngineConfig, EngineFacts, EngineStats
from localfast.engine.scheduler import Batch, Chunk, Scheduler, Sequence


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A request that intake has checked: its prompts fit the context."""

    request_id: int
    request: GenerateRequest
    prompts: list[list[int]]
    received_s: float


Work = Tokenized | messages.Cancel | messages.Stop
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
                case messages.Cancel() | messages.Stop():
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


class StepLoop:
    """Schedule, decode, sample, emit; owns everything a step touches."""

    def __init__(self, model: Model, context: Context, scheduler: Scheduler, put_step: Callable[[messages.Step], None]) -> None:
        self._model = model
        self._context = context
        self._scheduler = scheduler
        self._put_step = put_step
        self._generations: dict[int, Generation] = {}
        self._decode_calls = 0
        self._batched_tokens = 0
        self._generated_tokens = 0
        self._stopping = False

    @property
    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            decode_calls=self._decode_calls,
            batched_tokens=self._batched_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=scheduler.preemptions,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            used_cells=scheduler.used_cells,
        )

    def run(self, inbox: SimpleQueue[Work]) -> None:
        while not self._stopping:
            calls = self._decode_calls
            events = self._drain(inbox)
            events += self._step()
            if events or self._decode_calls > calls:  # a step without events still tells how far a prompt is
                self._put_step(messages.Step.of(events, self.stats))
        self._put_step(messages.Step.of(self._fail_all(errors.ShuttingDown()), self.stats))

    def _drain(self, inbox: SimpleQueue[Work]) -> Outgoing:
        """Take all that has arrived; wait only when there is nothing to compute."""
        events: Outgoing = []
        while True:
            try:
                work = inbox.get(block=not self._generations and not events)
            except Empty:
                return events
            match work:
                case Tokenized():
                    self._begin(work)
                case messages.Cancel(request_id):
                    events += self._cancel(request_id)
                case messages.Stop():
                    self._stopping = True
                    return events

    def _begin(self, work: Tokenized) -> None:
        request = work.request
        streams = []
        seed = random.getrandbits(31) if request.sampling.seed is None else request.sampling.seed
        for number, prompt in enumerate(work.prompts):
            for choice in range(request.n):
                sequence = Sequence(
                    request_id=work.request_id,
                    index=number * request.n + choice,
                    tokens=list(prompt),
                    prompt_tokens=len(prompt),
                    limit=self._scheduler.limit(len(prompt), request.max_tokens),
                    score_prompt=request.echo and request.logprobs is not None,
                )
                streams.append(Stream(self._model, request, sequence, (seed + choice) & 0xFFFFFFFF))
                self._scheduler.add(sequence)
        self._generations[work.request_id] = Generation(work.request_id, streams, request.n, work.received_s)

    def _cancel(self, request_id: int) -> Outgoing:
        generation = self._generations.pop(request_id, None)
        if generation is None:
            return []  # it finished while the cancel was on its way
        self._scheduler.cancel(request_id)
        generation.close()
        return [(request_id, Failed(errors.Cancelled()))]

    def _fail_all(self, error: errors.LocalfastError) -> Outgoing:
        failed: Outgoing = [(request_id, Failed(error)) for request_id in self._generations]
        self._generations.clear()
        return failed

    def _step(self) -> Outgoing:
        scheduler = self._scheduler
        oldest = self._context.oldest_positions(len(scheduler.slots)) if scheduler.window and scheduler.waiting else None
        batch = scheduler.next_batch(oldest)
        self._context.edit(batch.edits)
        if not batch.chunks:
            return []
        now_s = time.monotonic()
        for chunk in batch.chunks:
            self._generations[chunk.sequence.request_id].mark_admitted(now_s)
        if not self._context.decode(batch.chunks):
            if not scheduler.no_room():
                raise RuntimeError("the KV cache has no room for a single sequence")
            return []
        self._decode_calls += 1
        self._batched_tokens += batch.token_count
        return self._harvest(batch)

    def _harvest(self, batch: Batch) -> Outgoing:
        """Turn the rows of a computed batch into tokens, text and endings."""
        now_s = time.monotonic()
        events: Outgoing = []
        end = 0
        complete = set(map(id, self._scheduler.advance(batch)))
        for chunk in batch.chunks:
            end += chunk.count
            if chunk.sequence.score_prompt:
                self._score_prompt(chunk, end)
            if id(chunk) in complete:
                events += [(chunk.sequence.request_id, event) for event in self._continue(chunk.sequence, end - 1, now_s)]
        return events

    def _score_prompt(self, chunk: Chunk, end: int) -> None:
        stream = self._stream(chunk.sequence)
        for offset in range(chunk.outputs):
            position = chunk.start + chunk.count - chunk.outputs + offset + 1
            if position < chunk.sequence.prompt_tokens:
                stream.score_prompt(position, self._context.logits(end - chunk.outputs + offset))
        if chunk.sequence.prompt_computed:
            chunk.sequence.score_prompt = False

    def _stream(self, sequence: Sequence) -> Stream:
        return self._generations[sequence.request_id].streams[sequence]

    def _continue(self, sequence: Sequence, row: int, now_s: float) -> list[Event]:
        """The sequence's next token, from the logits of its last one."""
        generation = self._generations[sequence.request_id]
        stream = generation.streams[sequence]
        events = stream.echo()
        if len(sequence.tokens) >= sequence.limit:  # nothing was to be generated
            return events + self._end(generation, stream, "length", now_s)
        token = stream.next_token(self._context, row)
        generation.mark_token(now_s)
        self._generated_tokens += 1
        events += stream.take(token)
        reason = stream.reason or self._scheduler.append(sequence, token)
        return events + self._end(generation, stream, reason, now_s) if reason else events

    def _end(self, generation: Generation, stream: Stream, reason: FinishReason, now_s: float) -> list[Event]:
        self._scheduler.finish(stream.sequence)
        events = stream.end(reason)
        if generation.close_one():
            del self._generations[generation.request_id]
            events.append(generation.finished(now_s))
        return events


def serve(connection: Connection, config: EngineConfig) -> None:
    """Load, answer Ready or Broken, and step until Stop."""
    _redirect_output(config.log_path)
    sender = Sender(connection)
    sending = _start_thread("sender", sender.run)
    try:
        model, context, facts = _load(config)
    except errors.LocalfastError as error:
        connection.send_bytes(messages.encode(messages.Broken(*errors.to_wire(error))))
        return
    scheduler = Scheduler(
        slots=config.slots,
        cells=min(context.cells, config.cells),
        context_tokens=config.context_tokens,
        batch_tokens=config.batch_tokens,
        max_outputs=config.slots + messages.SPARE_OUTPUT_ROWS,
        window=model.window,
    )
    loop = StepLoop(model, context, scheduler, sender.outbox.put)
    intake = Intake(connection, model, config, lambda events: sender.outbox.put(messages.Step.of(events)))
    sender.outbox.put(messages.Ready(facts))
    _start_thread("intake", intake.run)
    loop.run(intake.inbox)
    context.close()
    model.close()
    sender.outbox.put(None)
    sending.join()


def _load(config: EngineConfig) -> tuple[Model, Context, EngineFacts]:
    started_s = time.monotonic()
    log = NativeLog()
    model = Model(config, log)
    context = Context(model, config, config.slots + messages.SPARE_OUTPUT_ROWS)
    context.warm_up()
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
    return model, context, facts


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
