"""The step loop: schedule, decode, sample, emit. The engine process's main thread; owns everything that a step touches."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from localfast import errors
from localfast.core import Event, Failed, FinishReason, GenerateRequest
from localfast.engine import messages
from localfast.engine.crowding import ThreadCount
from localfast.engine.drafting import Drafter
from localfast.engine.generation import Generation, Stream
from localfast.engine.keeping import Fetched, StateKeeper
from localfast.engine.llama import Context, Model
from localfast.engine.messages import EngineStats
from localfast.engine.pace import Pace
from localfast.engine.scheduler import Scheduler
from localfast.engine.sequence import Batch, Chunk, Copy, Edit, Park, Restore, Save, Sequence, Truncate
from localfast.engine.speculation import Confidence


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A request that intake has checked: its prompts fit the context."""

    request_id: int
    request: GenerateRequest
    prompts: list[list[int]]
    received_s: float


Work = Tokenized | Fetched | messages.Cancel | messages.Describe | messages.Stop
Outgoing = list[tuple[int, Event]]


@dataclass(frozen=True, slots=True)
class Engine:
    """What a step loop works with."""

    model: Model
    context: Context
    scheduler: Scheduler
    pace: Pace
    keeper: StateKeeper
    threads: ThreadCount
    speculation: bool
    drafter: Drafter | None = None


class StepLoop:
    def __init__(self, engine: Engine, put: Callable[[messages.FromEngine], None]) -> None:
        self._model = engine.model
        self._context = engine.context
        self._scheduler = engine.scheduler
        self._pace = engine.pace
        self._keeper = engine.keeper
        self._threads = engine.threads
        self._speculation = engine.speculation
        self._drafter = engine.drafter
        self._confidence = Confidence()
        self._put = put
        self._generations: dict[int, Generation] = {}
        self._timed: set[int] = set()  # requests with a time for their first token
        self._latest: dict[str, int] = {}  # by `replaces`
        self._decode_calls = 0
        self._batched_tokens = 0
        self._generated_tokens = 0
        self._drafted_tokens = 0
        self._accepted_tokens = 0
        self._decode_s = 0.0
        self._step_s = 0.0
        self._stopping = False

    @property
    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            decode_calls=self._decode_calls,
            batched_tokens=self._batched_tokens,
            generated_tokens=self._generated_tokens,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
            parked=scheduler.parked,
            restored=scheduler.placement.restored,
            decode_s=self._decode_s,
            step_s=self._step_s,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            used_cells=scheduler.used_cells,
        )

    def run(self, inbox: SimpleQueue[Work]) -> None:
        while not self._stopping:
            calls = self._decode_calls
            events = self._drain(inbox)
            started_s = time.perf_counter()
            events += self._step()
            if self._decode_calls > calls:
                self._keeper.note_step()
                self._step_s += time.perf_counter() - started_s
            if events or self._decode_calls > calls:  # a step without events still tells how far a prompt is
                self._put(messages.Step.of(events, self.stats))
        self._put(messages.Step.of(self._fail_all(errors.ShuttingDown()), self.stats))
        self._keeper.keep_idle(self._scheduler.slots)

    # --- what has arrived -----------------------------------------------------------------------------------------------------

    def _drain(self, inbox: SimpleQueue[Work]) -> Outgoing:
        """Take all that has arrived; wait only when there is nothing to compute."""
        events: Outgoing = []
        while True:
            try:
                idle = not self._generations and not events
                work = inbox.get(block=idle, timeout=self._keeper.patience_s if idle else None)
            except Empty:
                if not idle:
                    return events
                self._keeper.keep_idle(self._scheduler.slots)
                continue
            match work:
                case Tokenized():
                    events += self._begin(work)
                case Fetched():
                    self._fetched(work)
                case messages.Cancel(request_id):
                    events += self._cancel(request_id, errors.Cancelled())
                case messages.Describe(number):
                    self._put(self._keeper.report(number, self._scheduler))
                case messages.Stop():
                    self._stopping = True
                    return events

    def _begin(self, work: Tokenized) -> Outgoing:
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
                    request_class=request.request_class,
                    score_prompt=request.echo and request.logprobs is not None,
                )
                streams.append(Stream(self._model, request, sequence, (seed + choice) & 0xFFFFFFFF))
        self._generations[work.request_id] = Generation(work.request_id, request, streams, work.received_s)
        if request.prompt_time_s is not None:
            self._timed.add(work.request_id)
        if not self._keeper.fetch(work.request_id, work.prompts[0], self._scheduler.placement):
            self._enqueue(work.request_id)
        return self._replace_older(request, work.request_id)

    def _enqueue(self, request_id: int) -> None:
        if request_id in self._generations:  # it may have been cancelled while the disk was read
            for sequence in self._generations[request_id].streams:
                self._scheduler.add(sequence)

    def _fetched(self, work: Fetched) -> None:
        self._keeper.take(work)
        self._enqueue(work.request_id)

    def _replace_older(self, request: GenerateRequest, request_id: int) -> Outgoing:
        """The newest completion of a file is the only one that anybody still wants."""
        if request.request_class != "fim" or not request.replaces:
            return []
        older = self._latest.get(request.replaces)
        self._latest = {name: number for name, number in self._latest.items() if number in self._generations}
        self._latest[request.replaces] = request_id
        return self._cancel(older, errors.Superseded()) if older is not None else []

    def _cancel(self, request_id: int, error: errors.LocalfastError) -> Outgoing:
        generation = self._generations.pop(request_id, None)
        if generation is None:
            return []  # it finished while the cancel was on its way
        self._scheduler.cancel(request_id)
        self._timed.discard(request_id)
        generation.close()
        return [(request_id, Failed(error))]

    def _fail_all(self, error: errors.LocalfastError) -> Outgoing:
        failed: Outgoing = []
        for request_id in list(self._generations):
            failed += self._cancel(request_id, error)
        return failed

    # --- a step ---------------------------------------------------------------------------------------------------------------

    def _step(self) -> Outgoing:
        scheduler = self._scheduler
        events = self._end_the_late() if self._timed else []
        oldest = self._context.oldest_positions(len(scheduler.slots)) if scheduler.window and len(scheduler.waiting) else None
        for edit in scheduler.place(oldest):
            self._carry_out(edit)
        decoders = [sequence for sequence in scheduler.running if sequence.behind == 1]
        if self._speculation:
            self._guess(decoders)
        batch = scheduler.next_batch(self._pace.prompt_tokens(len(decoders)))
        if not batch.chunks:
            return events
        now_s = time.monotonic()
        for chunk in batch.chunks:
            self._generations[chunk.sequence.request_id].mark_admitted(now_s)
        self._context.set_threads(self._threads.now)
        started_s, cpu_started_s = time.perf_counter(), time.process_time()
        if not self._context.decode(batch.chunks):
            if not scheduler.no_room():
                raise RuntimeError("the KV cache has no room for a single sequence")
            return events
        decode_s = time.perf_counter() - started_s
        self._threads.observe(decode_s, time.process_time() - cpu_started_s)
        self._pace.observe(batch.decoders, batch.token_count - batch.decoders, decode_s)
        self._decode_s += decode_s
        self._decode_calls += 1
        self._batched_tokens += batch.token_count
        return events + self._harvest(batch)

    def _end_the_late(self) -> Outgoing:
        """Requests whose first token did not come in time end empty; what was computed for them serves their next attempt."""
        now_s = time.monotonic()
        events: Outgoing = []
        for request_id in [i for i in self._timed if self._generations[i].late_for_first_token(now_s)]:
            generation = self._generations[request_id]
            for stream in [stream for stream in generation.streams.values() if stream.reason is None]:
                events += [(request_id, event) for event in self._end(generation, stream, "length", now_s)]
        return events

    def _carry_out(self, edit: Edit) -> None:
        match edit:
            case Truncate(slot, length):
                self._context.truncate(slot, length)
            case Copy(source, target, length):
                self._context.share(source, target, length)
            case Restore():
                if not self._keeper.restore(edit):
                    self._scheduler.lost(edit.sequence)
            case Save() | Park():
                self._keeper.keep(edit, self._scheduler.placement.forget)

    def _guess(self, decoders: list[Sequence]) -> None:
        cost = self._pace.draft_cost(len(decoders))
        ceiling = messages.SPARE_OUTPUT_ROWS // max(1, len(decoders))
        for sequence in decoders:
            sequence.draft = self._stream(sequence).speculator.draft(sequence.tokens, cost, ceiling) if ceiling else []
        if self._drafter and ceiling:
            self._ask_drafter(self._drafter, [sequence for sequence in decoders if not sequence.draft], cost, ceiling)

    def _ask_drafter(self, drafter: Drafter, sequences: list[Sequence], cost: float, ceiling: int) -> None:
        """A smaller model guesses where the text itself tells nothing."""
        plain_s = self._pace.plain_s(len(sequences)) / max(1, len(sequences))
        cost += drafter.token_s(len(sequences)) / plain_s if plain_s else 0.0
        open_ended = [sequence for sequence in sequences if sequence.limit - len(sequence.tokens) > 1]
        most = self._confidence.worth(cost, ceiling) if open_ended else 0
        if most and self._confidence.trying:
            open_ended = [min(open_ended, key=lambda sequence: len(sequence.tokens))]
        wanted = {s: min(most, s.limit - len(s.tokens) - 1) for s in open_ended if most}
        for sequence in drafter.draft(wanted, self._threads.now):
            self._stream(sequence).asked_drafter = True

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
                row = end - 1 - len(chunk.sequence.draft)
                events += [(chunk.sequence.request_id, event) for event in self._continue(chunk.sequence, row, now_s)]
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
        """The sequence's next tokens, from the logits of its last one and of the drafted ones, as far as those were right."""
        generation = self._generations[sequence.request_id]
        stream = generation.streams[sequence]
        events = stream.echo()
        if len(sequence.tokens) >= sequence.limit:  # nothing was to be generated
            return events + self._end(generation, stream, "length", now_s)
        draft = sequence.draft
        accepted = 0
        while True:
            token = stream.next_token(self._context, row + accepted)
            generation.mark_token(now_s)
            self._generated_tokens += 1
            events += stream.take(token)
            reason = stream.reason or self._scheduler.append(sequence, token)
            if reason is None and stream.line_ended and generation.late_for_next_token(now_s):
                reason = "length"
            if accepted == len(draft) or token != draft[accepted] or stream.reason:
                break
            accepted += 1
            if reason:
                break
        if stream.asked_drafter:
            self._confidence.learn(max(1, len(draft)), accepted)  # a model that is not sure cost time for nothing too
            stream.asked_drafter = False
        if draft:
            self._count_draft(generation, len(draft), accepted)
            self._scheduler.accept(sequence, accepted)
        return events + self._end(generation, stream, reason, now_s) if reason else events

    def _count_draft(self, generation: Generation, drafted: int, accepted: int) -> None:
        generation.drafted_tokens += drafted
        generation.accepted_tokens += accepted
        self._drafted_tokens += drafted
        self._accepted_tokens += accepted

    def _end(self, generation: Generation, stream: Stream, reason: FinishReason, now_s: float) -> list[Event]:
        self._scheduler.finish(stream.sequence)
        events = stream.end(reason)
        if generation.close_one():
            del self._generations[generation.request_id]
            self._timed.discard(generation.request_id)
            events.append(generation.finished(now_s))
        return events
