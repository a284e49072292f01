"""OpenAI's chat and text completions: bodies, streams, whole answers, errors and the model list.

Field by field truth: the OpenAI API reference, and what its SDKs and other clients really read (one kind of payload per
chunk, absent keys instead of null or empty ones).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localfast.core import (
    Accepted,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    Message,
    Prompt,
    SequenceFinished,
    TextDelta,
    Timings,
    TokenLogprob,
    Usage,
)
from localfast.dialects import Encoder, Head, sse
from localfast.dialects.fields import Fields, read_max_tokens, read_sampling, read_stop
from localfast.errors import ContextLengthExceeded, InvalidRequest, LocalfastError, UnsupportedParameter

MAX_CHOICES = 8
MAX_PROMPTS = 64
MAX_MESSAGES = 1024
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


# --- bodies -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatCall:
    request: GenerateRequest
    stream: bool
    include_usage: bool

    def encoder(self, head: Head) -> Encoder:
        return ChatEncoder(head, self)

    def fold(self, head: Head, events: Sequence[Event]) -> dict[str, Any]:
        choices = [
            _drop_none(
                index=index,
                message={"role": "assistant", "content": answer.text},
                logprobs=_chat_logprobs(answer.logprobs) if self.request.logprobs is not None else None,
                finish_reason=answer.reason,
            )
            for index, answer in enumerate(_answers(events))
        ]
        return _whole(head, "chatcmpl", "chat.completion", choices, events, self.request.ignored)


@dataclass(frozen=True, slots=True)
class CompletionCall:
    request: GenerateRequest
    stream: bool
    include_usage: bool

    def encoder(self, head: Head) -> Encoder:
        return CompletionEncoder(head, self)

    def fold(self, head: Head, events: Sequence[Event]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": answer.text,
                "logprobs": _completion_logprobs(answer.logprobs, 0) if self.request.logprobs is not None else None,
                "finish_reason": answer.reason,
            }
            for index, answer in enumerate(_answers(events))
        ]
        return _whole(head, "cmpl", "text_completion", choices, events, self.request.ignored)


def parse_chat(body: Any) -> ChatCall:
    fields = Fields(body)
    _refuse_unsupported(fields)
    logprobs = (fields.integer("top_logprobs", 0, 0, 20) or 0) if fields.flag("logprobs") else None
    fields.raw("top_logprobs")
    request = GenerateRequest(
        model=fields.text("model"),
        messages=_read_messages(fields),
        max_tokens=read_max_tokens(fields, "max_completion_tokens", "max_tokens", "n_predict"),
        sampling=read_sampling(fields),
        stop=read_stop(fields),
        n=fields.integer("n", 1, 1, MAX_CHOICES) or 1,
        logprobs=logprobs,
        ignore_eos=fields.flag("ignore_eos"),
        request_class="chat",
    )
    stream, include_usage = _read_stream(fields)
    return ChatCall(replace(request, ignored=fields.ignored), stream, include_usage)


def parse_completion(body: Any) -> CompletionCall:
    fields = Fields(body)
    _refuse_unsupported(fields)
    if fields.text("suffix"):
        raise UnsupportedParameter(reason="'suffix' (fill in the middle) is not offered yet", param="suffix")
    n = fields.integer("n", 1, 1, MAX_CHOICES) or 1
    if (fields.integer("best_of", n, 1, MAX_CHOICES) or n) != n:
        raise UnsupportedParameter(reason="'best_of' other than n is not offered", param="best_of")
    request = GenerateRequest(
        model=fields.text("model"),
        prompts=_read_prompts(fields),
        # The API's own default for text completions; a forgotten limit would run to the end of the context.
        max_tokens=read_max_tokens(fields, "max_tokens", "max_completion_tokens", "n_predict", default=16),
        sampling=read_sampling(fields),
        stop=read_stop(fields),
        n=n,
        logprobs=fields.integer("logprobs", None, 0, 20),
        echo=fields.flag("echo"),
        ignore_eos=fields.flag("ignore_eos"),
        request_class="interactive",
    )
    stream, include_usage = _read_stream(fields)
    return CompletionCall(replace(request, ignored=fields.ignored), stream, include_usage)


def _read_stream(fields: Fields) -> tuple[bool, bool]:
    options = fields.child("stream_options")
    return fields.flag("stream"), options is not None and options.flag("include_usage")


def _refuse_unsupported(fields: Fields) -> None:
    """What would change the answer and is not offered is refused; ignoring it would be a wrong answer without a word."""
    if fields.raw("tools") and fields.raw("tool_choice") != "none":
        raise UnsupportedParameter(reason="'tools' are not offered yet; tool_choice \"none\" gives plain text", param="tools")
    if fields.raw("functions"):
        raise UnsupportedParameter(reason="'functions' are not offered; they were replaced by 'tools'", param="functions")
    response_format = fields.child("response_format")
    if response_format is not None and response_format.text("type", "text") != "text":
        raise UnsupportedParameter(reason="'response_format' other than text is not offered yet", param="response_format")


def _read_messages(fields: Fields) -> tuple[Message, ...]:
    value = fields.raw("messages")
    if not isinstance(value, list) or not value:
        raise fields.refuse("messages", "must be a list of at least one message")
    if len(value) > MAX_MESSAGES:
        raise fields.refuse("messages", f"may have at most {MAX_MESSAGES} entries, not {len(value)}")
    return tuple(_read_message(Fields(item, f"messages[{number}]")) for number, item in enumerate(value))


def _read_message(message: Fields) -> Message:
    role = message.text("role")
    if role not in ROLES:
        raise message.refuse("role", f"must be one of {', '.join(ROLES)}")
    content = message.raw("content")
    if content is None and role in ("assistant", "tool", "function"):
        return Message(role, "")
    if isinstance(content, str):
        return Message(role, content)
    if not isinstance(content, list):
        raise message.refuse("content", "must be a string or a list of parts")
    parts = [Fields(part, f"{message.path}.content[{number}]") for number, part in enumerate(content)]
    return Message(role, "".join(_read_part(part) for part in parts))


def _read_part(part: Fields) -> str:
    kind = part.text("type")
    if kind not in ("text", "input_text", "output_text"):
        raise UnsupportedParameter(reason=f"content of type '{kind}' is not offered yet; send text", param=f"{part.path}.type")
    return part.text("text")


def _read_prompts(fields: Fields) -> tuple[Prompt, ...]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    value = fields.raw("prompt")
    if isinstance(value, str):
        return (value,)
    wrong = fields.refuse("prompt", "must be a string, a list of strings, or token ids")
    if not isinstance(value, list) or not value:
        raise wrong
    if all(type(item) is int for item in value):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise fields.refuse("prompt", f"may have at most {MAX_PROMPTS} entries, not {len(value)}")
    prompts: list[Prompt] = []
    for item in value:
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and item and all(type(token) is int for token in item):
            prompts.append(tuple(item))
        else:
            raise wrong
    return tuple(prompts)


# --- streams ------------------------------------------------------------------------------------------------------------------


class _SseEncoder:
    content_type = "text/event-stream"
    heartbeat = b":\n\n"
    prefix = ""
    object = ""

    def __init__(self, head: Head, call: ChatCall | CompletionCall) -> None:
        self._head = head
        self._request = call.request
        self._include_usage = call.include_usage

    def feed(self, event: Event) -> bytes:
        match event:
            case Accepted():
                return b"".join(self._opening())
            case TextDelta(index):
                return self._chunk([{"index": index, **self._delta(event), "finish_reason": None}])
            case SequenceFinished(index, reason):
                return self._chunk([{"index": index, **self._delta(None), "finish_reason": reason}])
            case Finished(usage, timings):
                last = [self._chunk([], usage=_usage(usage), timings=_timings(usage, timings))] if self._include_usage else []
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

    def __init__(self, head: Head, call: CompletionCall) -> None:
        super().__init__(head, call)
        self._offsets: dict[int, int] = {}

    def _delta(self, event: TextDelta | None) -> dict[str, Any]:
        if event is None:
            return {"text": "", "logprobs": None}
        offset = self._offsets.get(event.index, 0)
        self._offsets[event.index] = offset + len(event.text)
        logprobs = _completion_logprobs(event.logprobs, offset) if self._request.logprobs is not None else None
        return {"text": event.text, "logprobs": logprobs}


# --- whole answers ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Answer:
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
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


def _whole(
    head: Head, prefix: str, kind: str, choices: list[dict[str, Any]], events: Sequence[Event], ignored: tuple[str, ...]
) -> dict[str, Any]:
    finished = events[-1]
    assert isinstance(finished, Finished)
    answer = {
        "id": f"{prefix}-{head.id}",
        "object": kind,
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "usage": _usage(finished.usage),
        "timings": _timings(finished.usage, finished.timings),
    }
    if ignored:
        answer["warnings"] = [f"ignored parameter '{name}'" for name in ignored]
    return answer


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
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


# --- errors and models --------------------------------------------------------------------------------------------------------


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
