"""Reads a JSON body field by field: the right type or an InvalidRequest that names the field. null counts as absent.

Remembers which fields were read, so that the others can be named as ignored.
"""

from __future__ import annotations

from typing import Any

from localfast.core import Sampling
from localfast.errors import InvalidRequest

MAX_STOPS = 16
MAX_NUMBER = 2**31 - 1
# Say something about the caller, not about the answer: ignoring them changes nothing.
_HARMLESS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_prompt"})


class Fields:
    """One JSON object, under the name `path` in error messages ('' for the body itself)."""

    def __init__(self, body: Any, path: str = "") -> None:
        self.path = path
        if not isinstance(body, dict):
            raise InvalidRequest(reason=f"{path or 'the body'} must be a JSON object", param=path or None)
        self._body = body
        self._read: set[str] = set()

    def refuse(self, name: str, reason: str) -> InvalidRequest:
        name = f"{self.path}.{name}" if self.path else name
        return InvalidRequest(reason=f"'{name}' {reason}", param=name)

    def raw(self, name: str) -> Any:
        self._read.add(name)
        return self._body.get(name)

    def text(self, name: str, default: str = "") -> str:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, f"must be a string, not {_kind(value)}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, f"must be true or false, not {_kind(value)}")
        return value

    def integer(self, name: str, default: int | None, minimum: int, maximum: int = MAX_NUMBER) -> int | None:
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, f"must be a whole number, not {_kind(value)}")
        if not minimum <= value <= maximum:
            raise self.refuse(name, f"must be between {minimum} and {maximum}, not {_shortened(value)}")
        return value

    def number(self, name: str, default: float, minimum: float, maximum: float) -> float:
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, f"must be a number, not {_kind(value)}")
        if not minimum <= value <= maximum:
            raise self.refuse(name, f"must be between {minimum:g} and {maximum:g}, not {_shortened(value)}")
        return float(value)

    def texts(self, name: str, maximum: int) -> tuple[str, ...]:
        """A string or a list of strings; empty strings are dropped."""
        value = self.raw(name)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if len(items) > maximum:
            raise self.refuse(name, f"may have at most {maximum} entries, not {len(items)}")
        for item in items:
            if not isinstance(item, str):
                raise self.refuse(name, f"must be a string or a list of strings, not {_kind(item)}")
        return tuple(item for item in items if item)

    def child(self, name: str) -> Fields | None:
        value = self.raw(name)
        return None if value is None else Fields(value, f"{self.path}.{name}" if self.path else name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._body)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields that nobody asked for and that might have meant something."""
        unread = sorted(name for name, value in self._body.items() if value is not None and name not in self._read | _HARMLESS)
        return tuple(name[:64] for name in unread[:32])


def read_sampling(fields: Fields) -> Sampling:
    """The sampling fields that OpenAI's and llama.cpp's protocols share."""
    default = Sampling()
    top_k = fields.integer("top_k", default.top_k, -1)
    repeat = fields.number("repetition_penalty", default.repeat_penalty, 0.01, 10)
    last_n = fields.integer("repeat_last_n", default.repeat_last_n, -1)
    assert top_k is not None and last_n is not None
    return Sampling(
        temperature=fields.number("temperature", default.temperature, 0, 100),
        top_k=top_k,
        top_p=fields.number("top_p", default.top_p, 0, 1),
        min_p=fields.number("min_p", default.min_p, 0, 1),
        repeat_penalty=fields.number("repeat_penalty", repeat, 0.01, 10),
        repeat_last_n=last_n,
        frequency_penalty=fields.number("frequency_penalty", 0, -2, 2),
        presence_penalty=fields.number("presence_penalty", 0, -2, 2),
        logit_bias=_read_logit_bias(fields),
        seed=_read_seed(fields),
    )


def read_max_tokens(fields: Fields, *names: str, default: int = -1) -> int | None:
    """The first of `names` that is given, else `default`; -1 means until the end of the context, which is None here."""
    values = [fields.integer(name, None, -1) for name in names]
    value = next((value for value in values if value is not None), default)
    return None if value == -1 else value


def read_time_limit(fields: Fields, name: str) -> float | None:
    """One of llama.cpp's limits in milliseconds, as seconds; -1 means none."""
    limit_ms = fields.integer(name, -1, -1)
    return None if limit_ms is None or limit_ms == -1 else limit_ms / 1000


def read_stop(fields: Fields) -> tuple[str, ...]:
    return fields.texts("stop", MAX_STOPS)


def _read_seed(fields: Fields) -> int | None:
    seed = fields.integer("seed", None, -1, 2**63 - 1)
    return None if seed is None or seed == -1 else seed & 0xFFFFFFFF


def _read_logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    bias = fields.child("logit_bias")
    if bias is None:
        return ()
    pairs = []
    for token in bias.names:
        if not token.isdecimal() or len(token) > len(str(MAX_NUMBER)) or int(token) > MAX_NUMBER:
            raise bias.refuse(token[:40], "must have a token id as its key")
        pairs.append((int(token), bias.number(token, 0, -100, 100)))
    return tuple(pairs)


def _shortened(value: float) -> str:
    """A number as the client wrote it; JSON's may have thousands of digits, which no float holds."""
    digits = str(value)
    return digits if len(digits) <= 24 else f"{digits[:21]}..."


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds: dict[type, str] = {bool: "true or false", int: "a number", float: "a number", str: "a string", list: "a list"}
    return kinds.get(type(value), "an object")
