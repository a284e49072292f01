from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localfast.core import Sampling
from localfast.dialects.fields import Fields, read_max_tokens, read_sampling, read_stop
from localfast.errors import InvalidRequest

READERS: dict[str, Callable[[Fields], Any]] = {
    "text": lambda fields: fields.text("x", "default"),
    "flag": lambda fields: fields.flag("x", True),
    "integer": lambda fields: fields.integer("x", 5, -1, 10),
    "number": lambda fields: fields.number("x", 0.5, 0, 2),
    "texts": lambda fields: fields.texts("x", 2),
}
VALUES: list[Any] = [True, 1, 1.5, "a", [], ["a"], [1], {}, {"a": 1}]
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**400), 10**400) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def refused_param(call: Callable[[], Any]) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        call()
    return caught.value.param


@pytest.mark.parametrize(
    ("reader", "accepted", "default"),
    [
        ("text", ["a"], "default"),
        ("flag", [True], True),
        ("integer", [1], 5),
        ("number", [1, 1.5], 0.5),
        ("texts", ["a", [], ["a"]], ()),
    ],
)
def test_reader_takes_its_own_type_only_and_null_as_absent(reader: str, accepted: list[Any], default: Any) -> None:
    read = READERS[reader]
    assert read(Fields({})) == read(Fields({"x": None})) == default
    for value in VALUES:
        if any(type(value) is type(good) and value == good for good in accepted):
            read(Fields({"x": value}))
        else:
            assert refused_param(lambda value=value: read(Fields({"x": value}))) == "x", value  # type: ignore[misc]


@pytest.mark.parametrize("value", [-2, 11, 3.7, 10**30, 1e300, -1e300])
def test_integer_out_of_range_or_with_a_fraction_is_refused(value: Any) -> None:
    assert refused_param(lambda: Fields({"x": value}).integer("x", None, -1, 10)) == "x"


def test_integer_takes_a_whole_float() -> None:
    found = Fields({"x": 3.0}).integer("x", None, 0)
    assert found == 3 and type(found) is int


@pytest.mark.parametrize("value", [-0.1, 2.1, 10**400, -(10**400), 1e308, float("nan"), float("inf")])
def test_number_out_of_range_is_refused_in_few_words(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"'x' must be between 0 and 2, not \S{1,24}$"):
        Fields({"x": value}).number("x", 1, 0, 2)


def test_texts_drops_empty_ones_and_counts_what_was_sent() -> None:
    assert Fields({"x": ["", "a"]}).texts("x", 2) == ("a",)
    assert Fields({"x": ""}).texts("x", 2) == ()
    assert refused_param(lambda: Fields({"x": ["", "", "a"]}).texts("x", 2)) == "x"


def test_nested_field_is_named_by_its_path() -> None:
    child = Fields({"a": {"b": {"c": 1}}}).child("a")
    assert child is not None
    inner = child.child("b")
    assert inner is not None and refused_param(lambda: inner.text("c")) == "a.b.c"
    assert refused_param(lambda: Fields({"a": [1]}).child("a")) == "a"
    assert Fields({"a": None}).child("a") is None


@pytest.mark.parametrize("body", [None, 1, "text", [], [{}]])
def test_body_that_is_no_object_is_refused(body: Any) -> None:
    assert refused_param(lambda: Fields(body)) is None


def test_ignored_names_what_nobody_read_and_that_may_matter() -> None:
    fields = Fields({"read": 1, "zeta": 1, "alpha": False, "empty": None, "user": "me", "metadata": {}})
    fields.raw("read")
    assert fields.ignored == ("alpha", "zeta")


def test_ignored_is_short_whatever_was_sent() -> None:
    ignored = Fields({f"{number:03}" + "x" * 1000: 1 for number in range(100)}).ignored
    assert len(ignored) == 32 and max(map(len, ignored)) == 64


# --- shared fields ------------------------------------------------------------------------------------------------------------


def test_sampling_defaults_to_the_engine_s_own() -> None:
    assert (
        read_sampling(Fields({})) == read_sampling(Fields({"temperature": None, "logit_bias": None, "seed": None})) == Sampling()
    )


def test_sampling_reads_every_field() -> None:
    body = {
        "temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0.1, "repeat_penalty": 1.1, "repeat_last_n": 32,
        "frequency_penalty": -2, "presence_penalty": 2, "logit_bias": {"7": -100, "12": 0.5}, "seed": 42,
    }  # fmt: skip
    assert read_sampling(Fields(body)) == Sampling(
        temperature=0, top_k=-1, top_p=1, min_p=0.1, repeat_penalty=1.1, repeat_last_n=32,
        frequency_penalty=-2, presence_penalty=2, logit_bias=((7, -100.0), (12, 0.5)), seed=42,
    )  # fmt: skip


def test_sampling_takes_the_other_name_of_repeat_penalty() -> None:
    assert read_sampling(Fields({"repetition_penalty": 1.2})).repeat_penalty == 1.2
    assert read_sampling(Fields({"repetition_penalty": 1.2, "repeat_penalty": 1.3})).repeat_penalty == 1.3


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("temperature", -0.1), ("temperature", "hot"), ("temperature", True), ("top_k", -2), ("top_k", 0.5),
        ("top_p", 1.01), ("top_p", -1), ("min_p", 2), ("repeat_penalty", 0), ("repetition_penalty", 0),
        ("repeat_last_n", -2), ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1), ("seed", -2), ("seed", 2**63), ("seed", "x"), ("logit_bias", [1]), ("logit_bias", "7"),
    ],
)  # fmt: skip
def test_sampling_names_the_field_that_is_wrong(name: str, wrong: Any) -> None:
    assert refused_param(lambda: read_sampling(Fields({name: wrong}))) == name


@pytest.mark.parametrize(
    ("bias", "param"),
    [
        ({"the": 1}, "logit_bias.the"), ({"-1": 1}, "logit_bias.-1"), ({"1.0": 1}, "logit_bias.1.0"), ({"²": 1}, "logit_bias.²"),
        ({"7": 101}, "logit_bias.7"), ({"7": "no"}, "logit_bias.7"), ({str(2**31): 1}, f"logit_bias.{2**31}"),
        ({"9" * 5000: 1}, "logit_bias." + "9" * 40),
    ],
)  # fmt: skip
def test_logit_bias_takes_token_ids_and_small_numbers_only(bias: dict[str, Any], param: str) -> None:
    assert refused_param(lambda: read_sampling(Fields({"logit_bias": bias}))) == param


@pytest.mark.parametrize(("sent", "seed"), [(-1, None), (0, 0), (2**32 + 5, 5), (2**63 - 1, 2**32 - 1)])
def test_seed_fits_the_engine_and_minus_one_is_random(sent: int, seed: int | None) -> None:
    assert read_sampling(Fields({"seed": sent})).seed == seed


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, 16),
        ({"a": 5}, 5),
        ({"b": 6}, 6),
        ({"a": 5, "b": 6}, 5),
        ({"a": None, "b": 6}, 6),
        ({"a": -1, "b": 6}, None),
        ({"a": 0}, 0),
    ],
)
def test_max_tokens_takes_the_first_name_given(body: dict[str, Any], expected: int | None) -> None:
    assert read_max_tokens(Fields(body), "a", "b", default=16) == expected


def test_max_tokens_without_a_default_runs_to_the_end_of_the_context() -> None:
    assert read_max_tokens(Fields({}), "a") is None
    assert refused_param(lambda: read_max_tokens(Fields({"a": 1, "b": -2}), "a", "b")) == "b"


def test_stop_takes_one_or_sixteen() -> None:
    assert read_stop(Fields({"stop": "\n"})) == ("\n",)
    assert len(read_stop(Fields({"stop": [str(number) for number in range(16)]}))) == 16
    assert refused_param(lambda: read_stop(Fields({"stop": ["x"] * 17}))) == "stop"


@given(st.sampled_from([*Sampling.__dataclass_fields__, "stop", "max_tokens"]), json_values)
def test_any_json_is_read_or_refused(name: str, value: Any) -> None:
    fields = Fields({name: value})
    try:
        sampling = read_sampling(fields)
        read_stop(fields), read_max_tokens(fields, "max_tokens")
    except InvalidRequest as error:
        assert error.param is not None and error.param.startswith(name)
    else:
        assert sampling.seed is None or 0 <= sampling.seed < 2**32
