from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from localfast import errors
from localfast.dialects import openai
from localfast.errors import ContextLengthExceeded, InvalidRequest, LocalfastError, ModelNotFound, from_wire, to_wire

SAMPLES: dict[str, Any] = {"str": "a {sample}", "str | None": "messages", "int": 7, "tuple[str, ...]": ("a", "b")}


def subclasses(kind: type[LocalfastError] = LocalfastError) -> Iterator[type[LocalfastError]]:
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def sample(kind: type[LocalfastError]) -> LocalfastError:
    return kind(**{field.name: SAMPLES[str(field.type)] for field in dataclasses.fields(kind)})


ERRORS = sorted(subclasses(), key=lambda kind: kind.__name__)
every_error = pytest.mark.parametrize("kind", ERRORS, ids=[kind.__name__ for kind in ERRORS])


def drawn_tree() -> dict[str, tuple[str, str]]:
    """class -> (parent, what is written next to it), as drawn in the module's docstring."""
    rows, parents = {}, {0: "LocalfastError"}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"    ([│ ]*)[├└]─ (\w+)\s+(.*)", line):
            depth = len(match[1]) // 3 + 1
            parents[depth] = match[2]
            rows[match[2]] = (parents[depth - 1], match[3])
    return rows


def test_codes_are_unique_and_stable_words() -> None:
    codes = [kind.code for kind in ERRORS]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in codes)


def test_drawn_tree_shows_every_error() -> None:
    assert set(drawn_tree()) == {kind.__name__ for kind in ERRORS}


@every_error
def test_drawn_tree_shows_parent_status_and_exit_code(kind: type[LocalfastError]) -> None:
    parent, words = drawn_tree()[kind.__name__]
    assert kind.__mro__[1].__name__ == parent
    if status := re.match(r"\d{3}\b", words):
        assert kind.status == int(status[0])
    exit_code = re.search(r"exit code (\d+)", words)
    assert kind.exit_code == (int(exit_code[1]) if exit_code else 1)


@every_error
def test_error_is_one_sentence_with_its_next_step(kind: type[LocalfastError]) -> None:
    error = sample(kind)
    assert str(error) and "\n" not in str(error)
    assert isinstance(error.hint, str) and "\n" not in error.hint
    for text in (str(error), error.hint):  # a fact that holds braces is printed, not formatted again
        assert not re.search(r"\{(?!sample)", text)


@every_error
def test_error_crosses_the_pipe(kind: type[LocalfastError]) -> None:
    error = sample(kind)
    code, facts = msgspec.msgpack.decode(msgspec.msgpack.encode(to_wire(error)))
    rebuilt = from_wire(code, facts)
    assert type(rebuilt) is kind
    assert (str(rebuilt), rebuilt.hint, rebuilt.status) == (str(error), error.hint, error.status)
    assert rebuilt.facts == {name: list(v) if isinstance(v, tuple) else v for name, v in error.facts.items()}


@every_error
def test_openai_error_has_its_fixed_keys(kind: type[LocalfastError]) -> None:
    error = sample(kind)
    body = openai.error(error)
    assert list(body) == ["error"]
    content = body["error"]
    more = {"n_prompt_tokens", "n_ctx"} if kind is ContextLengthExceeded else set()
    assert set(content) == {"message", "type", "param", "code"} | more | ({"hint"} if error.hint else set())
    assert content["param"] == ("messages" if isinstance(error, InvalidRequest) else None)
    assert (content["message"], content["code"]) == (str(error), kind.code)
    assert content["type"].endswith("_error")
    msgspec.json.encode(body)


def test_overflow_is_worded_as_clients_expect() -> None:
    error = ContextLengthExceeded(prompt_tokens=9000, context_tokens=4096)
    content = openai.error(error)["error"]
    assert "maximum context length is 4096 tokens" in content["message"]
    assert "resulted in 9000 tokens" in content["message"]
    assert (content["n_prompt_tokens"], content["n_ctx"], content["code"]) == (9000, 4096, "context_length_exceeded")
    assert content["type"] == "invalid_request_error"


@pytest.mark.parametrize(("near", "ending"), [((), "no model 'x'"), (("y", "z"), "did you mean y, z?")])
def test_model_not_found_names_what_is_near(near: tuple[str, ...], ending: str) -> None:
    assert str(ModelNotFound(name="x", near=near)).endswith(ending)


def test_invalid_setting_says_where_it_was_set() -> None:
    error = errors.InvalidSetting(name="port", value="x", source="flag --port", reason="is not a whole number")
    assert str(error) == "setting 'port' from flag --port: 'x' is not a whole number"
    assert error.exit_code == 2
