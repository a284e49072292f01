"""OpenAI's answers: streams, whole answers and errors. A whole answer is a fold of the stream's events.

What clients really read decides the form: one kind of payload per chunk, absent keys instead of null or empty ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from localfast.core import (
    Accepted,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    SequenceFinished,
    TextDelta,
    Timings,
    TokenLogprob,
    Usage,
)
from localfast.dialects import Head, sse
from localfast.errors import ContextLengthExceeded, InvalidRequest, LocalfastError

# --- streams ------------------------------------------------------------------------------------------------------------------


class _SseEncoder:
    content_type = "text/event-stream"
    heartbeat = b":\n\n"
    prefix = ""
    object = ""

    def __init__(self, head: Head, request: GenerateRequest, include_usage: bool) -> None:
        self._head = head
        self._request = request
        self._include_usage = include_usage

    def feed(self, event: Event) -> bytes:
        match event:
            case Accepted():
                return b"".join(self._opening())
            case TextDelta(index):
                return self._chunk([{"index": index, **self._delta(event), "finish_reason": None}])
            case SequenceFinished(index, reason):
                return self._chunk([{"index": index, **self._delta(None), "finish_reason": reason}])
            case Finished():
                last = [self._chunk([], **_counts(event))] if self._include_usage else []
                return b"".join([*last, b"data: [DONE]\n\n"])
            case Failed(failure):
                return sse(error(failure))

    def _chunk(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        head = self._head
        identity = {"id": f"{self.prefix}-{head.id}", "object": self.object, "created": head.created, "model": head.model}
        return sse({**identity, "choices": choices, **extra})

    def _opening(self) -> Iterable[bytes]:
        return ()

    def _delta(self, event: TextDelta | None) -> dict[str, Any]:
        raise NotImplementedError


class ChatEncoder(_SseEncoder):
    prefix = "chatcmpl"
    object = "chat.completion.chunk"

    def _opening(self) -> Iterable[bytes]:
        for index in range(self._request.n):
            opening = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield self._chunk([opening])

    def _delta(self, event: TextDelta | None) -> dict[str, Any]:
        if event is None:
            return {"delta": {}}
        delta: dict[str, Any] = {"delta": {"content": event.text}}
        if self._request.logprobs is not None:
            delta["logprobs"] = _chat_logprobs(event.logprobs)
        return delta


class CompletionEncoder(_SseEncoder):
    prefix = "cmpl"
    object = "text_completion"

    def __init__(self, head: Head, request: GenerateRequest, include_usage: bool) -> None:
        super().__init__(head, request, include_usage)
        self._offsets: dict[int, int] = {}

    def _delta(self, event: TextDelta | None) -> dict[str, Any]:
        if event is None:
            return {"text": "", "logprobs": None}
        offset = self._offsets.get(event.index, 0)
        self._offsets[event.index] = offset + len(event.text)
        logprobs = _completion_logprobs(event.logprobs, offset) if self._request.logprobs is not None else None
        return {"text": event.text, "logprobs": logprobs}


# --- whole answers ------------------------------------------------------------------------------------------------------------


def fold_chat(head: Head, request: GenerateRequest, events: Sequence[Event]) -> dict[str, Any]:
    choices = [
        _drop_none(
            index=index,
            message={"role": "assistant", "content": answer.text},
            logprobs=_chat_logprobs(answer.logprobs) if request.logprobs is not None else None,
            finish_reason=answer.reason,
        )
        for index, answer in enumerate(_answers(events))
    ]
    return _whole(head, "chatcmpl", "chat.completion", choices, events) | _warnings(request)


def fold_completion(head: Head, request: GenerateRequest, events: Sequence[Event]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": answer.text,
            "logprobs": _completion_logprobs(answer.logprobs, 0) if request.logprobs is not None else None,
            "finish_reason": answer.reason,
        }
        for index, answer in enumerate(_answers(events))
    ]
    return _whole(head, "cmpl", "text_completion", choices, events) | _warnings(request)


@dataclass(slots=True)
class _Answer:
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None


def _answers(events: Sequence[Event]) -> list[_Answer]:
    answers: dict[int, _Answer] = {}
    for event in events:
        match event:
            case TextDelta(index, text, _, logprobs):
                answer = answers.setdefault(index, _Answer())
                answer.text += text
                answer.logprobs += logprobs
            case SequenceFinished(index, reason):
                answers.setdefault(index, _Answer()).reason = reason
    return [answers[index] for index in sorted(answers)]


def _whole(head: Head, prefix: str, kind: str, choices: list[dict[str, Any]], events: Sequence[Event]) -> dict[str, Any]:
    finished = events[-1]
    assert isinstance(finished, Finished)
    return {
        "id": f"{prefix}-{head.id}",
        "object": kind,
        "created": head.created,
        "model": head.model,
        "choices": choices,
        **_counts(finished),
    }


def _warnings(request: GenerateRequest) -> dict[str, Any]:
    return {"warnings": [f"ignored parameter '{name}'" for name in request.ignored]} if request.ignored else {}


def _counts(finished: Finished) -> dict[str, Any]:
    usage = finished.usage
    return {"usage": _usage(usage), "timings": _timings(usage, finished.timings), **cache_miss(finished)}


def cache_miss(finished: Finished) -> dict[str, Any]:
    """Why the prompt was not in the cache as far as it could have been; nothing when it was."""
    miss = finished.cache_miss
    if miss is None:
        return {}
    entry: dict[str, Any] = {"reason": miss.reason, "position": miss.position}
    if miss.reason == "differs":
        entry |= {"cached_text": miss.cached_text, "prompt_text": miss.prompt_text}
    return {"cache_miss": entry}


def _usage(usage: Usage) -> dict[str, Any]:
    drafted = {
        "accepted_prediction_tokens": usage.accepted_tokens,
        "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_tokens,
    }
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **({"completion_tokens_details": drafted} if usage.drafted_tokens else {}),
    }


def _timings(usage: Usage, timings: Timings) -> dict[str, Any]:
    """llama.cpp's own field, which many clients show; a rate is 0 where its time is too short to measure."""
    computed = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": round(timings.prefill_s * 1000, 3),
        "prompt_per_second": round(computed / timings.prefill_s, 3) if timings.prefill_s > 0 else 0,
        "predicted_n": usage.completion_tokens,
        "predicted_ms": round(timings.decode_s * 1000, 3),
        "predicted_per_second": round(usage.completion_tokens / timings.decode_s, 3) if timings.decode_s > 0 else 0,
        "queue_ms": round(timings.queue_s * 1000, 3),
        **({"draft_n": usage.drafted_tokens, "draft_n_accepted": usage.accepted_tokens} if usage.drafted_tokens else {}),
    }


def _chat_logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": entry.text,
                "logprob": entry.logprob,
                "bytes": list(entry.token_bytes),
                "top_logprobs": [{"token": text, "logprob": value, "bytes": list(raw)} for text, raw, value in entry.top],
            }
            for entry in logprobs
        ]
    }


def _completion_logprobs(logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    offsets = []
    for entry in logprobs:
        offsets.append(offset)
        offset += len(entry.text)
    return {
        "tokens": [entry.text for entry in logprobs],
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [{text: value for text, _, value in entry.top} if entry.top else None for entry in logprobs],
        "text_offset": offsets,
    }


def _drop_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


# --- errors --------------------------------------------------------------------------------------------------------------------


def error(failure: LocalfastError) -> dict[str, Any]:
    """OpenAI's error object; an overflow carries both counts, and `hint` says what to do."""
    content: dict[str, Any] = {
        "message": str(failure),
        "type": _ERROR_TYPES.get(failure.status, "server_error"),
        "param": failure.param if isinstance(failure, InvalidRequest) else None,
        "code": failure.code,
    }
    if isinstance(failure, ContextLengthExceeded):
        content |= {"n_prompt_tokens": failure.prompt_tokens, "n_ctx": failure.context_tokens}
    if failure.hint:
        content["hint"] = failure.hint
    return {"error": content}


_ERROR_TYPES = {
    **dict.fromkeys((400, 404, 405, 413, 415, 422), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
