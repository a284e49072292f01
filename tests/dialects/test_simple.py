from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fakes import answer

from localfast.core import Accepted, Failed, Finished, Timings, Usage
from localfast.dialects import Head, simple
from localfast.errors import EngineDied, InvalidRequest

HEAD = Head("1", 0, "tiny")
CLOSING = {
    "tokens_generated": 2,
    "elapsed_ms": 61.0,
    "tokens_per_second": 32.787,
    "prompt_tokens": 5,
    "cached_tokens": 3,
    "finish_reason": "stop",
    "model": "tiny",
}


def parse(body: Any, stream: bool = False) -> simple.SimpleCall:
    return simple.parse(body, stream=stream)


def test_parse_reads_the_documented_fields() -> None:
    call = parse({"prompt": "hi", "model": "m", "max_tokens": 9, "temperature": 0, "stop": ["\n"], "seed": 1})
    request = call.request
    assert (request.prompts, request.model, request.max_tokens, request.stop) == (("hi",), "m", 9, ("\n",))
    assert (request.sampling.temperature, request.sampling.seed, request.n) == (0, 1, 1)
    assert request.request_class == "interactive" and request.ignored == ()


def test_parse_limits_a_request_that_names_no_limit() -> None:
    assert parse({"prompt": "hi"}).request.max_tokens == 256
    assert parse({"prompt": "hi", "max_new_tokens": 3}).request.max_tokens == 3
    assert parse({"prompt": ""}).request.prompts == ("",)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "model": 1}, "model"),
        ([], None),
    ],
)
def test_parse_names_the_field_that_is_wrong(body: Any, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    assert caught.value.param == param


@pytest.mark.parametrize("stream", [True, False])
def test_parse_lets_the_path_decide_about_streaming(stream: bool) -> None:
    call = parse({"prompt": "a", "stream": not stream, "n": 2}, stream)
    assert call.stream is stream
    assert call.request.ignored == ("n",)


def test_stream_is_pieces_and_a_closing_event() -> None:
    encoder = parse({"prompt": "a"}, stream=True).encoder(HEAD)
    frames = b"".join(encoder.feed(event) for event in answer("Hello", ' "world"\n'))
    first, second, last, rest = frames.split(b"\n\n")
    assert (first, second, rest) == (b'data: {"text":"Hello"}', b'data: {"text":" \\"world\\"\\n"}', b"")
    assert msgspec.json.decode(last.removeprefix(b"data: ")) == {"done": True, **CLOSING}


def test_fold_is_the_stream_in_one_object() -> None:
    assert parse({"prompt": "a"}).fold(HEAD, answer("Hello", " world")) == {"text": "Hello world", **CLOSING}


def test_fold_names_ignored_parameters() -> None:
    call = parse({"prompt": "a", "best_of": 3})
    assert call.fold(HEAD, answer("x"))["warnings"] == ["ignored parameter 'best_of'"]


def test_answer_without_text_or_time_has_no_rate() -> None:
    events = answer(reason="length")[:-1]
    folded = parse({"prompt": "a"}).fold(HEAD, [*events, Finished(Usage(), Timings())])
    assert (folded["text"], folded["finish_reason"], folded["tokens_per_second"]) == ("", "length", 0)


def test_stream_that_fails_ends_with_the_error() -> None:
    encoder = parse({"prompt": "a"}, stream=True).encoder(HEAD)
    assert encoder.feed(Accepted(1)) == b""
    frame = encoder.feed(Failed(EngineDied(model="tiny", reason="x")))
    assert frame.startswith(b'data: {"error":{"message":"the engine of \'tiny\' died (x)') and frame.endswith(b"\n\n")
    assert b"done" not in frame and encoder.heartbeat == b":\n\n"
