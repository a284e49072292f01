"""What a protocol is to the rest of the server: a parser of bodies and an encoder of events. Imports no dialect.

A dialect does no I/O, knows no engine and no clock. The answer to a call without streaming is a fold over the same events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from localfast.core import Event, GenerateRequest

json_bytes = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Head:
    """What an answer says of itself, decided once per request outside the dialect. `created` in seconds since 1970."""

    id: str
    created: int
    model: str


class Encoder(Protocol):
    """Turns events into frames of one stream."""

    content_type: str
    heartbeat: bytes
    """Sent while there is nothing to say, so that nobody takes the connection for dead."""

    def feed(self, event: Event) -> bytes: ...


class Call(Protocol):
    """One parsed body."""

    @property
    def request(self) -> GenerateRequest: ...

    @property
    def stream(self) -> bool: ...

    def encoder(self, head: Head) -> Encoder: ...

    def fold(self, head: Head, events: Sequence[Event]) -> dict[str, Any]:
        """The whole answer; `events` ends in Finished."""
        ...


def sse(content: Any) -> bytes:
    """One server-sent event with compact JSON."""
    return b"data: " + json_bytes(content) + b"\n\n"
