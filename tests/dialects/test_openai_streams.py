"""OpenAI's answers: exact bytes of small streams, and what holds for every stream and its fold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fakes import TIMINGS, USAGE, answer
from hypothesis import given
from hypothesis import strategies as st
from test_openai import CALLS, HEAD, both, chat, completion

from localfast.core import Accepted, Event, Failed, Finished, SequenceFinished, TextDelta, Timings, TokenLogprob, Usage
from localfast.dialects import Call, openai
from localfast.errors import EngineDied

# --- golden streams -----------------------------------------------------------------------------------------------------------


def stream(call: Call, events: Sequence[Event]) -> bytes:
    encoder = call.encoder(HEAD)
    return b"".join(encoder.feed(event) for event in events)


def chat_frame(rest: str) -> str:
    return f'data: {{"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"tiny",{rest}}}\n\n'


def completion_frame(rest: str) -> str:
    return f'data: {{"id":"cmpl-1","object":"text_completion","created":7,"model":"tiny",{rest}}}\n\n'


DONE = "data: [DONE]\n\n"
COUNTS = (
    '"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":3}},'
    '"timings":{"cache_n":3,"prompt_n":2,"prompt_ms":20.0,"prompt_per_second":100.0,"predicted_n":2,"predicted_ms":40.0,'
    '"predicted_per_second":50.0,"queue_ms":1.0}'
)
SCORED = TokenLogprob("é", "é".encode(), -0.5, (("e", b"e", -1.5), ("é", "é".encode(), -0.5)))


def test_chat_stream_is_these_bytes() -> None:
    call = chat(stream=True, stream_options={"include_usage": True})
    assert stream(call, answer("Hé", '"\n')).decode() == "".join(
        [
            chat_frame('"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]'),
            chat_frame('"choices":[{"index":0,"delta":{"content":"Hé"},"finish_reason":null}]'),
            chat_frame('"choices":[{"index":0,"delta":{"content":"\\"\\n"},"finish_reason":null}]'),
            chat_frame('"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]'),
            chat_frame(f'"choices":[],{COUNTS}'),
            DONE,
        ]
    )


def test_chat_stream_of_two_choices_is_these_bytes() -> None:
    assert stream(chat(n=2, stream=True), answer("a", n=2, reason="length")).decode() == "".join(
        [
            *(
                chat_frame(f'"choices":[{{"index":{n},"delta":{{"role":"assistant","content":""}},"finish_reason":null}}]')
                for n in (0, 1)
            ),
            *(chat_frame(f'"choices":[{{"index":{n},"delta":{{"content":"a"}},"finish_reason":null}}]') for n in (0, 1)),
            *(chat_frame(f'"choices":[{{"index":{n},"delta":{{}},"finish_reason":"length"}}]') for n in (0, 1)),
            DONE,
        ]
    )


def test_chat_logprobs_are_these_bytes() -> None:
    frame = chat(logprobs=True, top_logprobs=2).encoder(HEAD).feed(TextDelta(0, "é", 1, (SCORED,)))
    assert frame.decode() == chat_frame(
        '"choices":[{"index":0,"delta":{"content":"é"},"logprobs":{"content":[{"token":"é","logprob":-0.5,"bytes":[195,169],'
        '"top_logprobs":[{"token":"e","logprob":-1.5,"bytes":[101]},{"token":"é","logprob":-0.5,"bytes":[195,169]}]}]},'
        '"finish_reason":null}]'
    )


def test_completion_stream_is_these_bytes() -> None:
    call = completion(stream=True, stream_options={"include_usage": True})
    assert stream(call, answer("Hello")).decode() == "".join(
        [
            completion_frame('"choices":[{"index":0,"text":"Hello","logprobs":null,"finish_reason":null}]'),
            completion_frame('"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}]'),
            completion_frame(f'"choices":[],{COUNTS}'),
            DONE,
        ]
    )


def test_completion_logprobs_are_these_bytes_with_offsets_in_the_whole_text() -> None:
    encoder = completion(logprobs=2).encoder(HEAD)
    first = TokenLogprob("Hi", b"Hi", None)
    encoder.feed(TextDelta(0, "Hi", 0, (first,)))
    frame = encoder.feed(TextDelta(0, "é!", 2, (SCORED, TokenLogprob("!", b"!", -2.0))))
    assert frame.decode() == completion_frame(
        '"choices":[{"index":0,"text":"é!","logprobs":{"tokens":["é","!"],"token_logprobs":[-0.5,-2.0],'
        '"top_logprobs":[{"e":-1.5,"é":-0.5},null],"text_offset":[2,3]},"finish_reason":null}]'
    )


@both
def test_stream_that_fails_ends_with_the_error_and_no_done(kind: str) -> None:
    call = CALLS[kind](stream=True, stream_options={"include_usage": True})
    begun: list[Event] = [Accepted(1), TextDelta(0, "a", 1)]
    frames = stream(call, [*begun, Failed(EngineDied(model="tiny", reason="SIGSEGV"))])
    assert frames.removeprefix(stream(call, begun)).decode() == (
        'data: {"error":{"message":"the engine of \'tiny\' died (SIGSEGV); the next request starts it again",'
        '"type":"unavailable_error","param":null,"code":"engine_died"}}\n\n'
    )


# --- every chunk, every answer ------------------------------------------------------------------------------------------------

TOKENS = st.builds(
    TokenLogprob,
    st.text(max_size=3),
    st.binary(max_size=3),
    st.none() | st.floats(-50, 0),
    st.lists(st.tuples(st.text(max_size=2), st.binary(max_size=2), st.floats(-50, 0)), max_size=2).map(tuple),
)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[openai.ChatCall | openai.CompletionCall, list[Event]]:
    """A call, and the events of an answer to it: choices that take turns, and that end before the request does."""
    kind, n = draw(st.sampled_from(["chat", "completion"])), draw(st.integers(1, 3))
    scored = draw(st.booleans())
    fields: dict[str, Any] = {"n": n, "stream": True, "stream_options": {"include_usage": draw(st.booleans())}}
    if scored:
        fields["logprobs"] = True if kind == "chat" else 2
    choices = n
    if kind == "completion":
        prompts = draw(st.integers(1, 2))
        fields["prompt"], choices = ["p"] * prompts, n * prompts
    waiting: dict[int, list[Event]] = {}
    for index in range(choices):
        pieces = draw(st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=3))
        deltas = [TextDelta(index, "".join(t.text for t in p), len(p), tuple(p) if scored else ()) for p in pieces]
        waiting[index] = [*deltas, SequenceFinished(index, draw(st.sampled_from(["stop", "length"])))]
    events: list[Event] = [Accepted(draw(st.integers(0, 9)))]
    while waiting:
        index = draw(st.sampled_from(sorted(waiting)))
        events.append(waiting[index].pop(0))
        if not waiting[index]:
            del waiting[index]
    cached = draw(st.integers(0, 9))
    usage = Usage(cached + draw(st.integers(0, 9)), draw(st.integers(0, 99)), cached)
    seconds = st.sampled_from([0.0, 0.001, 1.5])
    return CALLS[kind](**fields), [*events, Finished(usage, Timings(draw(seconds), draw(seconds), draw(seconds)))]


def read_sse(stream_bytes: bytes) -> list[str]:
    """The data of every event, as the specification of server-sent events reads a stream."""
    events: list[str] = []
    lines: list[str] = []
    for line in stream_bytes.decode().split("\n"):
        name, _, value = line.partition(":")
        if line == "" and lines:
            events.append("\n".join(lines))
            lines = []
        elif name == "data":
            lines.append(value.removeprefix(" "))
        else:
            assert name == "", f"a line that is no event and no comment: {line!r}"
    assert not lines, "the last event is not closed"
    return events


def chunks_of(call: Call, events: Sequence[Event]) -> list[dict[str, Any]]:
    """The stream with heartbeats in it, read back; it ends in [DONE]."""
    encoder = call.encoder(HEAD)
    *chunks, done = read_sse(b"".join(encoder.feed(event) + encoder.heartbeat for event in events))
    assert done == "[DONE]"
    return [msgspec.json.decode(chunk) for chunk in chunks]


@dataclass
class Collected:
    text: str = ""
    roles: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)


def collect(chunks: list[dict[str, Any]]) -> dict[int, Collected]:
    """What a client that knows nothing of us puts together, per choice."""
    choices: dict[int, Collected] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        found = choices.setdefault(choice["index"], Collected())
        assert not found.reasons, "something follows the finish reason"
        delta = choice.get("delta", {"content": choice.get("text")})
        found.text += delta.get("content", "")
        found.roles += [delta["role"]] if "role" in delta else []
        found.reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        for name, values in (choice.get("logprobs") or {}).items():
            found.logprobs.setdefault(name, []).extend(values)
    return choices


@given(scripts())
def test_fold_equals_the_stream(script: tuple[openai.ChatCall | openai.CompletionCall, list[Event]]) -> None:
    call, events = script
    chunks = chunks_of(call, events)
    whole = call.fold(HEAD, events)
    collected = collect(chunks)
    assert sorted(collected) == [choice["index"] for choice in whole["choices"]]
    for choice in whole["choices"]:
        found = collected[choice["index"]]
        chatting = isinstance(call, openai.ChatCall)
        assert found.text == (choice["message"]["content"] if chatting else choice["text"])
        assert found.roles == ([choice["message"]["role"]] if chatting else [])
        assert found.reasons == [choice["finish_reason"]]
        if found.logprobs:
            assert found.logprobs == choice["logprobs"]
    closing = [chunk for chunk in chunks if "usage" in chunk]
    assert len(closing) == call.include_usage
    for chunk in closing:
        assert chunk is chunks[-1]
        assert (chunk["usage"], chunk["timings"]) == (whole["usage"], whole["timings"])
    assert {(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks} == {(whole["id"], 7, "tiny")}


@given(scripts())
def test_no_chunk_holds_what_breaks_clients(script: tuple[openai.ChatCall | openai.CompletionCall, list[Event]]) -> None:
    """Absent instead of null or empty: each of these made some client drop text, crash or hang."""
    call, events = script
    for chunk in chunks_of(call, events):
        assert set(chunk) <= {"id", "object", "created", "model", "choices", "usage", "timings"}
        assert isinstance(chunk["choices"], list)
        assert all(value is not None for value in chunk.values())
        if "usage" in chunk:
            assert chunk["choices"] == []
            counts = [chunk["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
            assert all(type(count) is int for count in counts) and counts[0] + counts[1] == counts[2]
        for choice in chunk["choices"]:
            assert set(choice) <= {"index", "delta", "text", "logprobs", "finish_reason"}
            assert choice["finish_reason"] in (None, "stop", "length")
            if chunk["object"] == "text_completion":
                assert isinstance(choice["text"], str)
            else:
                assert set(choice["delta"]) <= {"role", "content"}
                assert all(isinstance(value, str) for value in choice["delta"].values())
                assert "logprobs" not in choice or choice["logprobs"] is not None


@given(scripts(), st.integers(1, 30))
def test_stream_cut_by_an_error_is_still_readable(script: tuple[Call, list[Event]], cut: int) -> None:
    call, events = script
    begun = events[: min(cut, len(events) - 1)]
    *chunks, last = read_sse(stream(call, [*begun, Failed(EngineDied(model="m", reason="\n\ndata: x"))]))
    assert all("choices" in msgspec.json.decode(chunk) for chunk in chunks)
    assert set(msgspec.json.decode(last)) == {"error"}


@both
def test_fold_has_the_shape_of_the_api(kind: str) -> None:
    whole = CALLS[kind](n=2).fold(HEAD, answer("a", "b", n=2))
    assert whole["object"] == {"chat": "chat.completion", "completion": "text_completion"}[kind]
    assert set(whole) == {"id", "object", "created", "model", "choices", "usage", "timings"}
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert (USAGE.prompt_tokens, TIMINGS.prefill_s) == (whole["usage"]["prompt_tokens"], whole["timings"]["prompt_ms"] / 1000)
