"""OpenAI's chat and text completions: what a body means. What is answered is in `openai_answers.py`.

Field by field truth: the OpenAI API reference, and what its SDKs and other clients really send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from localfast.core import Event, GenerateRequest, Message, Prompt
from localfast.dialects import Encoder, Head
from localfast.dialects.fields import MAX_NUMBER, Fields, read_max_tokens, read_sampling, read_stop, read_time_limit
from localfast.dialects.openai_answers import ChatEncoder, CompletionEncoder, error, fold_chat, fold_completion
from localfast.errors import UnsupportedParameter

__all__ = ["ChatCall", "CompletionCall", "error", "parse_chat", "parse_completion"]

MAX_CHOICES = 8
MAX_PROMPTS = 64
MAX_MESSAGES = 1024
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class ChatCall:
    request: GenerateRequest
    stream: bool
    include_usage: bool

    def encoder(self, head: Head) -> Encoder:
        return ChatEncoder(head, self.request, self.include_usage)

    def fold(self, head: Head, events: Sequence[Event]) -> dict[str, Any]:
        return fold_chat(head, self.request, events)


@dataclass(frozen=True, slots=True)
class CompletionCall:
    request: GenerateRequest
    stream: bool
    include_usage: bool

    def encoder(self, head: Head) -> Encoder:
        return CompletionEncoder(head, self.request, self.include_usage)

    def fold(self, head: Head, events: Sequence[Event]) -> dict[str, Any]:
        return fold_completion(head, self.request, events)


def parse_chat(body: Any) -> ChatCall:
    fields = Fields(body)
    _refuse_unsupported(fields)
    top_logprobs = fields.integer("top_logprobs", None, 0, 20)
    logprobs = (top_logprobs or 0) if fields.flag("logprobs") else None
    if top_logprobs and logprobs is None:
        raise fields.refuse("top_logprobs", "needs 'logprobs' to be true")
    request = GenerateRequest(
        model=fields.text("model"),
        messages=_read_messages(fields),
        max_tokens=read_max_tokens(fields, "max_completion_tokens", "max_tokens", "n_predict"),
        sampling=read_sampling(fields),
        stop=read_stop(fields),
        prompt_time_s=read_time_limit(fields, "t_max_prompt_ms"),
        generate_time_s=read_time_limit(fields, "t_max_predict_ms"),
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
        prompt_time_s=read_time_limit(fields, "t_max_prompt_ms"),
        generate_time_s=read_time_limit(fields, "t_max_predict_ms"),
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
    if message.raw("tool_calls"):
        raise UnsupportedParameter(reason="'tool_calls' are not offered yet", param=f"{message.path}.tool_calls")
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
        raise UnsupportedParameter(
            reason=f"content of type '{kind[:40]}' is not offered yet; send text", param=f"{part.path}.type"
        )
    return part.text("text")


def _read_prompts(fields: Fields) -> tuple[Prompt, ...]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    value = fields.raw("prompt")
    if isinstance(value, str):
        return (value,)
    wrong = fields.refuse("prompt", "must be a string, a list of strings, or token ids")
    if not isinstance(value, list) or not value:
        raise wrong
    if all(map(_is_token_id, value)):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise fields.refuse("prompt", f"may have at most {MAX_PROMPTS} entries, not {len(value)}")
    prompts: list[Prompt] = []
    for item in value:
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and item and all(map(_is_token_id, item)):
            prompts.append(tuple(item))
        else:
            raise wrong
    return tuple(prompts)


def _is_token_id(item: Any) -> bool:
    return type(item) is int and 0 <= item <= MAX_NUMBER
