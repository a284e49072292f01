"""A request while the engine works on it: its sequences' samplers and text, its counts and times, and the events they make.

Engine process, step loop's thread. Knows nothing of slots or batches.
"""

from __future__ import annotations

from localfast.core import (
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
from localfast.engine.scheduler import Sequence
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
        text = self._text.feed(self._model.piece(token))
        if self._text.stopped is not None:
            self.reason = "stop"
        return self._delta(text)

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

    def __init__(self, request_id: int, streams: list[Stream], choices: int, submitted_s: float) -> None:
        self.request_id = request_id
        self._choices = choices
        self.streams = {stream.sequence: stream for stream in streams}
        self.completion_tokens = 0
        self._open = len(streams)
        self._submitted_s = submitted_s
        self._admitted_s: float | None = None
        self._first_token_s: float | None = None

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
        prompts = [sequence for sequence in self.streams if sequence.index % self._choices == 0]  # choices share theirs
        admitted_s = self._admitted_s or now_s
        first_s = self._first_token_s or now_s
        return Finished(
            Usage(
                prompt_tokens=sum(sequence.prompt_tokens for sequence in prompts),
                completion_tokens=self.completion_tokens,
                cached_tokens=sum(sequence.cached for sequence in prompts),
            ),
            Timings(
                queue_s=admitted_s - self._submitted_s,
                prefill_s=first_s - admitted_s,
                decode_s=now_s - first_s,
            ),
        )

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()
