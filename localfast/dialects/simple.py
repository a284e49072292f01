"""The simple pair: POST /generate answers one JSON object, POST /generate_stream the same as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from localfast.core import Accepted, Event, Failed, Finished, GenerateRequest, SequenceFinished, TextDelta
from localfast.dialects import Encoder, Head, openai, openai_answers, sse
from localfast.dialects.fields import Fields, read_max_tokens, read_sampling, read_stop, read_time_limit

error = openai.error


@dataclass(frozen=True, slots=True)
class SimpleCall:
    request: GenerateRequest
    stream: bool

    def encoder(self, head: Head) -> Encoder:
        return SimpleEncoder(head)

    def fold(self, head: Head, events: Sequence[Event]) -> dict[str, Any]:
        finished = events[-1]
        assert isinstance(finished, Finished)
        answer = {"text": "".join(event.text for event in events if isinstance(event, TextDelta))}
        reason = next(event.reason for event in events if isinstance(event, SequenceFinished))
        warnings = [f"ignored parameter '{name}'" for name in self.request.ignored]
        return answer | _closing(head, finished, reason) | ({"warnings": warnings} if warnings else {})


class SimpleEncoder:
    """`{"text": ...}` per piece, then `{"done": true, ...}` with the counts; an error is `{"error": {...}}`."""

    content_type = "text/event-stream"
    heartbeat = b":\n\n"

    def __init__(self, head: Head) -> None:
        self._head = head
        self._reason = ""

    def feed(self, event: Event) -> bytes:
        match event:
            case Accepted():
                return b""
            case TextDelta(_, text):
                return sse({"text": text})
            case SequenceFinished(_, reason):
                self._reason = reason
                return b""
            case Finished():
                return sse({"done": True, **_closing(self._head, event, self._reason)})
            case Failed(failure):
                return sse(error(failure))


def parse(body: Any, *, stream: bool) -> SimpleCall:
    fields = Fields(body)
    if fields.raw("prompt") is None:
        raise fields.refuse("prompt", "is missing")
    request = GenerateRequest(
        model=fields.text("model"),
        prompts=(fields.text("prompt"),),
        max_tokens=read_max_tokens(fields, "max_tokens", "max_new_tokens", default=256),
        sampling=read_sampling(fields),
        stop=read_stop(fields),
        prompt_time_s=read_time_limit(fields, "t_max_prompt_ms"),
        generate_time_s=read_time_limit(fields, "t_max_predict_ms"),
        request_class="interactive",
    )
    fields.raw("stream")  # the path decides
    return SimpleCall(replace(request, ignored=fields.ignored), stream)


def _closing(head: Head, finished: Finished, reason: str) -> dict[str, Any]:
    usage, timings = finished.usage, finished.timings
    elapsed_s = timings.queue_s + timings.prefill_s + timings.decode_s
    return {
        "tokens_generated": usage.completion_tokens,
        "elapsed_ms": round(elapsed_s * 1000, 3),
        "tokens_per_second": round(usage.completion_tokens / elapsed_s, 3) if elapsed_s > 0 else 0,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "finish_reason": reason,
        "model": head.model,
        **openai_answers.cache_miss(finished),
    }
