"""A request while the engine works on it: its sequences' samplers and text, its counts and times, and the events they make.

Engine process, step loop's thread. Knows nothing of slots or batches.
"""

from __future__ import annotations

from localfast.core import (
    CacheMiss,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    SequenceFinished,
    TextDelta,
    Timings,
    TokenLogprob,
    Usage,
)
from localfast.engine.llama import Context, FloatRow, Model
from localfast.engine.sampling import Sampler, log_probability, unscored
from localfast.engine.sequence import Sequence
from localfast.engine.speculation import Speculator
from localfast.engine.text import TextAssembler


class Stream:
    """One sequence's way from logits to text."""

    def __init__(self, model: Model, request: GenerateRequest, sequence: Sequence, seed: int) -> None:
        self.sequence = sequence
        self._model = model
        self._request = request
        self._text = TextAssembler(request.stop)
        self._sampler = Sampler(model, request.sampling, sequence.tokens, seed, ignore_eos=request.ignore_eos)
        self._held_tokens = 0
        self._held_logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: dict[int, TokenLogprob] = {}
        self._echoed = not request.echo
        self.speculator = Speculator()
        self.asked_drafter = False
        """Whether the present draft comes from a draft model."""
        self.line_ended = False
        """Whether a generated token had a newline."""
        self.reason: FinishReason | None = None

    def score_prompt(self, position: int, logits: FloatRow) -> None:
        """`logits` follow prompt token `position` - 1: they say how likely the one at `position` was."""
        assert self._request.logprobs is not None
        token = self.sequence.tokens[position]
        self._prompt_logprobs[position] = log_probability(self._model, logits, token, self._request.logprobs)

    def next_token(self, context: Context, row: int) -> int:
        token = self._sampler.sample(context, row)
        if self._request.logprobs is not None and not self._model.is_end(token):
            self._held_logprobs.append(log_probability(self._model, context.logits(row), token, self._request.logprobs))
        return token

    def take(self, token: int) -> list[Event]:
        """The token was chosen. Sets `reason` if the text ends with it."""
        self._held_tokens += 1
        if self._model.is_end(token):
            self.reason = "stop"
            return []
        piece = self._model.piece(token)
        self.line_ended = self.line_ended or b"\n" in piece
        text = self._text.feed(piece)
        if self._text.stopped is not None:
            self.reason = "stop"
        return self._delta(text)

    @property
    def cache_miss(self) -> CacheMiss | None:
        miss = self.sequence.miss
        if miss is None:
            return None
        if miss.cached_token is None:
            return CacheMiss(miss.reason, miss.position)
        tokens = (miss.cached_token, self.sequence.tokens[miss.position])
        cached, prompt = (self._model.piece(token).decode("utf-8", "replace") for token in tokens)
        return CacheMiss(miss.reason, miss.position, cached, prompt)

    def echo(self) -> list[Event]:
        """The prompt's own text, once, before the first generated text."""
        if self._echoed:
            return []
        self._echoed = True
        prompt = self.sequence.tokens[: self.sequence.prompt_tokens]
        text = b"".join(self._model.piece(token) for token in prompt).decode("utf-8", "replace")
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._request.logprobs is not None:
            logprobs = (unscored(self._model, prompt[0]), *(self._prompt_logprobs[i] for i in range(1, len(prompt))))
        return [TextDelta(self.sequence.index, text, 0, logprobs)]

    def end(self, reason: FinishReason) -> list[Event]:
        """What was held back, then the end."""
        self.reason = reason
        events = self._delta(self._text.flush(), last=True)
        self._sampler.close()
        return [*events, SequenceFinished(self.sequence.index, reason)]

    def close(self) -> None:
        """Give up without a word."""
        if self.reason is None:
            self._sampler.close()

    def _delta(self, text: str, last: bool = False) -> list[Event]:
        if not text and not (last and (self._held_tokens or self._held_logprobs)):
            return []
        delta = TextDelta(self.sequence.index, text, self._held_tokens, tuple(self._held_logprobs))
        self._held_tokens = 0
        self._held_logprobs.clear()
        return [delta]


class Generation:
    """One request: its streams by sequence, and when what happened (seconds of a monotonic clock)."""

    def __init__(self, request_id: int, request: GenerateRequest, streams: list[Stream], submitted_s: float) -> None:
        self.request_id = request_id
        self.request = request
        self.streams = {stream.sequence: stream for stream in streams}
        self.completion_tokens = 0
        self._open = len(streams)
        self._submitted_s = submitted_s
        self._admitted_s: float | None = None
        self._first_token_s: float | None = None
        self.drafted_tokens = 0
        self.accepted_tokens = 0

    def late_for_first_token(self, now_s: float) -> bool:
        limit_s = self.request.prompt_time_s
        return limit_s is not None and self._first_token_s is None and now_s - self._submitted_s > limit_s

    def late_for_next_token(self, now_s: float) -> bool:
        limit_s = self.request.generate_time_s
        return limit_s is not None and self._first_token_s is not None and now_s - self._first_token_s > limit_s

    def mark_admitted(self, now_s: float) -> None:
        if self._admitted_s is None:
            self._admitted_s = now_s

    def mark_token(self, now_s: float) -> None:
        self.completion_tokens += 1
        if self._first_token_s is None:
            self._first_token_s = now_s

    def close_one(self) -> bool:
        """One sequence has ended. True when it was the last."""
        self._open -= 1
        return self._open == 0

    def finished(self, now_s: float) -> Finished:
        prompts = [sequence for sequence in self.streams if sequence.index % self.request.n == 0]  # choices share theirs
        admitted_s = self._admitted_s or now_s
        first_s = self._first_token_s or now_s
        return Finished(
            Usage(
                prompt_tokens=sum(sequence.prompt_tokens for sequence in prompts),
                completion_tokens=self.completion_tokens,
                cached_tokens=sum(sequence.cached or 0 for sequence in prompts),
                drafted_tokens=self.drafted_tokens,
                accepted_tokens=self.accepted_tokens,
            ),
            Timings(
                queue_s=admitted_s - self._submitted_s,
                prefill_s=first_s - admitted_s,
                decode_s=now_s - first_s,
            ),
            next(iter(self.streams.values())).cache_miss,
        )

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()
