from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from fakes import answer
from hypothesis import given
from hypothesis import strategies as st

from localfast.core import GenerateRequest, Message
from localfast.dialects import Call, Head, openai
from localfast.errors import InvalidRequest, LocalfastError, UnsupportedParameter

HEAD = Head("1", 7, "tiny")
USER = {"role": "user", "content": "hi"}
Parse = Callable[[Any], Call]


def chat(**fields: Any) -> openai.ChatCall:
    return openai.parse_chat({"messages": [USER], **fields})


def completion(**fields: Any) -> openai.CompletionCall:
    return openai.parse_completion({"prompt": "hi", **fields})


CALLS: dict[str, Callable[..., openai.ChatCall | openai.CompletionCall]] = {"chat": chat, "completion": completion}
both = pytest.mark.parametrize("kind", CALLS)


def refusal(call: Callable[[], Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        call()
    return caught.value


# --- bodies -------------------------------------------------------------------------------------------------------------------


def test_chat_reads_the_documented_fields() -> None:
    call = openai.parse_chat(
        {
            "model": "m",
            "messages": [{"role": "system", "content": "be brief"}, USER],
            "max_completion_tokens": 9,
            "max_tokens": 99,
            "temperature": 0.5,
            "stop": "\n",
            "n": 2,
            "logprobs": True,
            "top_logprobs": 3,
            "seed": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    request = call.request
    assert request.messages == (Message("system", "be brief"), Message("user", "hi")) and request.prompts == ()
    assert (request.model, request.max_tokens, request.stop, request.n, request.logprobs) == ("m", 9, ("\n",), 2, 3)
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 1)
    assert (call.stream, call.include_usage, request.request_class, request.ignored) == (True, True, "chat", ())


@pytest.mark.parametrize(
    "name",
    ["model", "max_tokens", "temperature", "stop", "n", "stream", "stream_options", "logprobs", "tools", "tool_choice",
     "functions", "response_format", "logit_bias", "seed", "user"],
)  # fmt: skip
@both
def test_null_is_the_same_as_absent(kind: str, name: str) -> None:
    assert CALLS[kind](**{name: None}) == CALLS[kind]()


def test_defaults_are_those_of_the_api() -> None:
    assert (chat().request.max_tokens, completion().request.max_tokens) == (None, 16)
    for call in (chat(), completion()):
        assert (call.stream, call.include_usage, call.request.n, call.request.logprobs) == (False, False, 1, None)
    assert (completion().request.echo, completion().request.request_class) == (False, "interactive")


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": False, "top_logprobs": 0}, None),
    ],
)
def test_chat_reads_logprobs_as_a_switch_and_a_number(fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat(**fields).request.logprobs == logprobs


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("model", 5), ("max_tokens", "9"), ("max_tokens", 1.5), ("max_tokens", -2), ("temperature", "hot"), ("temperature", 101),
        ("stop", 5), ("stop", ["a", 5]), ("n", 0), ("n", 9), ("n", "2"), ("n", True), ("stream", "true"), ("stream", 1),
        ("stream_options", []), ("ignore_eos", "yes"), ("seed", "x"), ("top_p", 2), ("logit_bias", []),
    ],
)  # fmt: skip
@both
def test_wrong_type_or_range_names_the_field(kind: str, name: str, wrong: Any) -> None:
    error = refusal(lambda: CALLS[kind](**{name: wrong}))
    assert (error.param, type(error), error.status) == (name, InvalidRequest, 400)
    assert name in str(error)


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"logprobs": 3}, "logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat", {"top_logprobs": 5}, "top_logprobs"),
        ("chat", {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ("completion", {"logprobs": True}, "logprobs"),
        ("completion", {"logprobs": 21}, "logprobs"),
        ("completion", {"echo": "yes"}, "echo"),
        ("completion", {"best_of": 0}, "best_of"),
        ("completion", {"suffix": 1}, "suffix"),
    ],
)
def test_wrong_value_of_one_endpoint_names_the_field(kind: str, fields: dict[str, Any], param: str) -> None:
    assert refusal(lambda: CALLS[kind](**fields)).param == param


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"tools": [{"type": "function"}]}, "tools"),
        ("chat", {"functions": [{"name": "f"}]}, "functions"),
        ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
        ("completion", {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ("completion", {"suffix": "}"}, "suffix"),
        ("completion", {"best_of": 3}, "best_of"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ],
)
def test_what_would_change_the_answer_is_refused_and_not_ignored(kind: str, fields: dict[str, Any], param: str) -> None:
    error = refusal(lambda: CALLS[kind](**fields))
    assert isinstance(error, UnsupportedParameter) and error.param == param


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": [{}], "tool_choice": "none"}, {"response_format": {"type": "text"}}])
def test_tools_and_formats_that_change_nothing_pass(fields: dict[str, Any]) -> None:
    assert chat(**fields).request == chat().request


@both
def test_ignored_parameters_are_listed(kind: str) -> None:
    call = CALLS[kind](verbosity="low", dry_multiplier=0.5, user="me", metadata={}, store=False)
    assert call.request.ignored == ("dry_multiplier", "verbosity")
    assert call.fold(HEAD, answer("x"))["warnings"] == ["ignored parameter 'dry_multiplier'", "ignored parameter 'verbosity'"]
    assert "warnings" not in CALLS[kind]().fold(HEAD, answer("x"))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "developer", "content": "a"}, Message("developer", "a")),
        ({"role": "user", "content": ""}, Message("user", "")),
        ({"role": "user", "content": []}, Message("user", "")),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            Message("user", "ab"),
        ),
        ({"role": "assistant", "content": None}, Message("assistant", "")),
        ({"role": "assistant"}, Message("assistant", "")),
        ({"role": "tool", "tool_call_id": "1", "content": "4"}, Message("tool", "4")),
    ],
)
def test_message_is_read(message: dict[str, Any], expected: Message) -> None:
    assert chat(messages=[message]).request.messages == (expected,)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"), ([], "messages"), ("hi", "messages"), ({}, "messages"), ([USER] * 1025, "messages"),
        (["hi"], "messages[0]"),
        ([USER, {"content": "a"}], "messages[1].role"), ([{"role": "wizard", "content": "a"}], "messages[0].role"),
        ([{"role": 1, "content": "a"}], "messages[0].role"), ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"), ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "a"}}], "messages[0].content"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
    ],
)  # fmt: skip
def test_wrong_message_is_named_by_its_place(messages: Any, param: str) -> None:
    assert refusal(lambda: chat(messages=messages)).param == param


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [2]], ("a", (2,))),
        ([0] * 1000, ((0,) * 1000,)),
    ],
)
def test_prompt_is_read(prompt: Any, expected: tuple[Any, ...]) -> None:
    assert completion(prompt=prompt).request.prompts == expected


@pytest.mark.parametrize(
    "prompt",
    [None, 5, {}, [], [[]], [None], [1, "a"], [1.0, 2.0], [True], [[1, "a"]], [[[1]]], [-1], [2**31], [[2**70]], ["a"] * 65],
)
def test_wrong_prompt_is_refused(prompt: Any) -> None:
    assert refusal(lambda: completion(prompt=prompt)).param == "prompt"


@pytest.mark.parametrize("parse", [openai.parse_chat, openai.parse_completion])
@pytest.mark.parametrize("body", [None, [], "text", 5])
def test_body_that_is_no_object_is_refused(parse: Parse, body: Any) -> None:
    assert refusal(lambda: parse(body)).param is None


def test_refusal_never_repeats_the_prompt() -> None:
    canary = "canary-7f3a"
    bodies: list[Any] = [
        canary,
        [canary],
        {"prompt": {"text": canary}},
        {"prompt": [canary, 5]},
        {"prompt": canary, "n": 99},
        {"prompt": canary, "stop": [canary, 1]},
        {"messages": canary},
        {"messages": [canary]},
        {"messages": [{"role": canary}]},
        {"messages": [{"role": "user", "content": {"text": canary}}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": [canary]}]}]},
    ]
    for body in bodies:
        for parse in (openai.parse_chat, openai.parse_completion):
            assert canary not in str(openai.error(refusal(lambda parse=parse, body=body: parse(body))))  # type: ignore[misc]


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "x"]), inner, max_size=3)
    ),
    max_leaves=10,
)
NAMES = [
    "model",
    "messages",
    "prompt",
    "stop",
    "n",
    "stream",
    "stream_options",
    "logprobs",
    "tools",
    "response_format",
    "suffix",
    "echo",
]


@given(st.dictionaries(st.sampled_from(NAMES), JSON), st.sampled_from([openai.parse_chat, openai.parse_completion]))
def test_any_body_becomes_a_request_or_a_refusal(body: dict[str, Any], parse: Parse) -> None:
    try:
        call = parse({"messages": [USER], "prompt": "hi", **body})
    except LocalfastError as error:
        assert error.status == 400
        assert msgspec.json.encode(openai.error(error))
    else:
        assert isinstance(call.request, GenerateRequest)
        msgspec.msgpack.encode(call.request)  # what the engine's pipe must take
