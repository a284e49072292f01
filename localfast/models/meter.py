"""What one rendering of an untrusted template may use: time, memory, and the size of every value it makes.

Owns the measure of values and the bounded form of each Python operation that can make much out of little. Containers cannot
change after they were made, so a measure stays true. Knows nothing of Jinja's environment (`sandbox.py`) or of chats.
"""

from __future__ import annotations

import re
import time
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from jinja2.exceptions import SecurityError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one rendering may use. Sizes of text are characters; a list counts as the text it would print as."""

    time_s: float = 2.0
    output_chars: int = 8 * 2**20
    value_chars: int = 16 * 2**20
    memory_bytes: int = 256 * 2**20
    """All values made in one rendering together, also those already dropped."""
    source_chars: int = 2**17


MAX_ITEMS = 2**21
MAX_DEPTH = 100
MAX_INTEGER_BITS = 4096
CONTAINERS: tuple[type[Any], ...] = (list, tuple, dict, type({}.keys()), type({}.values()), type({}.items()))


class LimitExceeded(Exception):
    """The template was stopped; the text says which limit it met."""


class Meter:
    """What one rendering has used so far. Belongs to the thread that renders."""

    def __init__(self, limits: Limits, deadline: float) -> None:
        self.limits = limits
        self._deadline = deadline
        self._made_bytes = 0
        self._known: dict[int, tuple[object, int, int]] = {}  # by id; the object is kept, so that no other takes its id

    def tick(self) -> None:
        if time.monotonic() > self._deadline:
            raise LimitExceeded(f"it ran longer than {self.limits.time_s:g} s")

    def room(self, size_chars: int) -> None:
        """Called before a value of this size is made."""
        if size_chars > self.limits.value_chars:
            raise LimitExceeded(f"it made a value of more than {self.limits.value_chars} characters")

    def items(self, count: int) -> None:
        """Called before a text is cut into this many pieces."""
        if count > MAX_ITEMS:
            raise LimitExceeded(f"it made a list of more than {MAX_ITEMS} items")

    def charge(self, size_bytes: int) -> None:
        self._made_bytes += size_bytes
        if self._made_bytes > self.limits.memory_bytes:
            raise LimitExceeded(f"it used more than {self.limits.memory_bytes} bytes of memory")

    def made(self, value: T) -> T:
        """Account for a value that was just made, and give it back."""
        if isinstance(value, (str, list, tuple, dict)):
            self.room(self.measure(value)[0])
            self.charge(value.__sizeof__())
        return value

    def measure(self, value: object) -> tuple[int, int]:
        """About how many characters a value prints as, and how deep it is nested. Shared parts count each time they are seen."""
        if isinstance(value, str):
            return len(value), 0
        if not isinstance(value, CONTAINERS):
            return (value.bit_length() // 3 + 2 if isinstance(value, int) else 24), 0
        known = self._known.get(id(value))
        if known is not None:
            return known[1], known[2]
        size, depth = 2, 0
        for child in chain.from_iterable(value.items()) if isinstance(value, dict) else value:
            child_size, child_depth = self.measure(child)
            size += child_size + 4
            depth = max(depth, child_depth)
        return self.remember(value, size, depth + 1)

    def remember(self, value: object, size: int, depth: int) -> tuple[int, int]:
        self.room(size)
        if depth > MAX_DEPTH:
            raise LimitExceeded(f"it nested values more than {MAX_DEPTH} deep")
        self._known[id(value)] = (value, size, depth)
        return size, depth


# --- operators --------------------------------------------------------------------------------------------------------------


def add(meter: Meter, left: Any, right: Any) -> Any:
    if not isinstance(left, (str, list, tuple)):
        return left + right
    (left_size, left_depth), (right_size, right_depth) = meter.measure(left), meter.measure(right)
    meter.room(left_size + right_size)
    total = left + right
    if not isinstance(total, str):  # saves measuring a growing list anew each time
        meter.remember(total, left_size + right_size, max(left_depth, right_depth))
    return meter.made(total)


def multiply(meter: Meter, left: Any, right: Any) -> Any:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(count, int):
            meter.room(meter.measure(value)[0] * count)
    if isinstance(left, int) and isinstance(right, int):
        _check_integer(left.bit_length() + right.bit_length())
    return meter.made(left * right)


def power(meter: Meter, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_integer(left.bit_length() * abs(right))
    return left**right


def _check_integer(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise LimitExceeded(f"it made an integer of more than {MAX_INTEGER_BITS} bits")


def modulo(meter: Meter, left: Any, right: Any) -> Any:
    if not isinstance(left, str):
        return left % right
    widths = 0
    for spec in re.findall(r"%(?:\([^)]*\))?[^a-zA-Z%]*", left):
        if "*" in spec:
            raise SecurityError("'*' is not available in a format")
        widths += sum(map(int, re.findall(r"\d+", spec)))
    meter.room(len(left) + widths + left.count("%") * meter.measure(right)[0])
    return meter.made(left % right)


OPERATORS: dict[str, Callable[[Meter, Any, Any], Any]] = {"+": add, "*": multiply, "**": power, "%": modulo}


def join(meter: Meter, separator: str, parts: Iterable[Any]) -> str:
    texts, size = [], 0
    for part in parts:
        texts.append(part if isinstance(part, str) else str(part))
        size += len(texts[-1]) + len(separator)
        meter.room(size)
    return meter.made(separator.join(texts))


# --- methods ----------------------------------------------------------------------------------------------------------------

PADDING = frozenset(["center", "ljust", "rjust", "zfill"])
SPLITTING = frozenset(["split", "rsplit", "splitlines"])
METHODS: dict[type, frozenset[str]] = {
    str: frozenset(name for name in dir(str) if not name.startswith("_")) - {"encode", "expandtabs", "maketrans", "translate"},
    list: frozenset(["copy", "count", "index"]),
    tuple: frozenset(["count", "index"]),
    dict: frozenset(["copy", "get", "items", "keys", "values"]),
}


def _check_method(meter: Meter, text: str, name: str, args: tuple[Any, ...]) -> None:
    """Refuse a string method before it makes something too large."""
    if name in PADDING:
        meter.room(max([0, *(width for width in args if isinstance(width, int))]))
    elif name == "replace" and len(args) > 1:
        check_replace(meter, text, args[0], args[1])
    elif name in SPLITTING:
        by_text = name != "splitlines" and args and isinstance(args[0], str) and args[0]
        meter.items(text.count(args[0]) if by_text else len(text) // 2)


def check_replace(meter: Meter, text: str, old: str, new: str) -> None:
    meter.room(len(text) + text.count(old) * max(0, len(new) - len(old)))


def call_method(meter: Meter, method: types.BuiltinMethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    owner, name = method.__self__, method.__name__
    if name not in METHODS.get(type(owner), ()):
        raise SecurityError(f"the method {name!r} of a {type(owner).__name__} is not available to templates")
    if not isinstance(owner, str):
        return meter.made(method()) if name == "copy" else method(*args, **kwargs)
    if name == "join":
        return join(meter, owner, *args)
    _check_method(meter, owner, name, args)
    result = method(*args, **kwargs)
    if name in SPLITTING:
        meter.charge(len(result) * "".__sizeof__())
    return result if result is owner else meter.made(result)
