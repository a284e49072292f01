"""One streamed chat with any server that speaks OpenAI's protocol, and when each piece of its text came.

HTTP by hand on a connection of its own: nothing between the socket and the clock, and hanging up is closing the socket. Decides
nothing about what is asked.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from localfast.errors import MeasurementFailed, ServerUnreachable


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the name of its model; `key` is sent when it is not empty, `pid` is looked up when it is None."""

    url: str
    model: str
    key: str = ""
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One streamed answer. `stamps`: when text arrived, in seconds of one clock; `tokens` as the server counts them."""

    started_s: float
    stamps: tuple[float, ...]
    tokens: int
    text: str

    @property
    def ttft_s(self) -> float:
        return self.stamps[0] - self.started_s

    @property
    def ended_s(self) -> float:
        return self.stamps[-1]

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.stamps, self.stamps[1:], strict=False)]


class Chat:
    """One streamed chat over a connection of its own. A context: leaving it early hangs up, as an impatient client does."""

    def __init__(
        self, target: Target, messages: Sequence[dict[str, str]], max_tokens: int, headers: Mapping[str, str] | None = None
    ) -> None:
        self._target = target
        self._headers = headers or {}
        self._body = {
            "model": target.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,  # equal work for both, where the server knows it
        }
        self.started_s = 0.0
        self.stamps: list[float] = []
        self._pieces: list[str] = []
        self._tokens: int | None = None

    async def __aenter__(self) -> Chat:
        self.started_s = time.perf_counter()
        self._reader, self._writer = await connect(self._target.url)
        self._writer.write(request_bytes(self._target, "/v1/chat/completions", self._body, self._headers))
        await self._writer.drain()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        self._writer.close()

    async def pieces(self) -> AsyncIterator[str]:
        """Text as it arrives. Raises MeasurementFailed when the answer is an error."""
        async for line in body_lines(self._reader, self._target):
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise MeasurementFailed(url=self._target.url, reason=str(chunk["error"].get("message", "an error")))
            self._tokens = (chunk.get("usage") or {}).get("completion_tokens", self._tokens)
            for choice in chunk.get("choices", ()):
                if piece := choice.get("delta", {}).get("content"):
                    self.stamps.append(time.perf_counter())
                    self._pieces.append(piece)
                    yield piece

    async def finish(self) -> Sample:
        """Read to the end."""
        async for _ in self.pieces():
            pass
        return self.sample()

    def sample(self) -> Sample:
        """What was measured, once all has been read."""
        self.stamps = self.stamps or [time.perf_counter()]  # an answer without text has come when it ended
        tokens = self._tokens if self._tokens is not None else len(self.stamps)
        return Sample(self.started_s, tuple(self.stamps), tokens, "".join(self._pieces))


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    try:
        return await asyncio.open_connection(parts.hostname, parts.port or 80, limit=2**24)
    except OSError:
        raise ServerUnreachable(url=url) from None


def request_bytes(target: Target, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> bytes:
    """A whole HTTP/1.1 request; a GET without a body."""
    parts = urlsplit(target.url)
    content = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc}"]
    lines += [f"Authorization: Bearer {target.key}"] if target.key else []
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    lines += [] if body is None else ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + content


async def body_lines(reader: asyncio.StreamReader, target: Target) -> AsyncIterator[bytes]:
    """Lines of an answer's body, chunked or not. Raises MeasurementFailed for any status but 200 and for an answer cut off."""
    try:
        chunked = await _read_head(reader, target)
        rest = b""
        while part := await (_chunk(reader) if chunked else reader.read(2**16)):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield line
    except (OSError, EOFError, ValueError):
        raise MeasurementFailed(url=target.url, reason="the connection broke in the middle of an answer") from None
    if rest:
        yield rest


async def _read_head(reader: asyncio.StreamReader, target: Target) -> bool:
    """Whether the body comes in chunks."""
    status = (await reader.readline()).split(b" ")
    chunked = False
    while (header := await reader.readline()) not in (b"\r\n", b"\n", b""):
        chunked = chunked or header.lower().startswith(b"transfer-encoding: chunked")
    if len(status) < 2 or status[1] != b"200":
        said = (await reader.read(400)).decode("utf-8", "replace") if len(status) > 1 else "it hung up"
        raise MeasurementFailed(url=target.url, reason=said.strip())
    return chunked


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    """The next part of a body, empty at its end."""
    size_bytes = int((await reader.readline()).split(b";")[0], 16)
    content = await reader.readexactly(size_bytes + 2)
    return content[:-2]


async def ask(target: Target, text: str, max_tokens: int) -> Sample:
    async with Chat(target, [{"role": "user", "content": text}], max_tokens) as chat:
        return await chat.finish()


async def get_page(target: Target, path: str) -> str:
    """Raises ServerUnreachable, MeasurementFailed."""
    _, writer = connection = await connect(target.url)
    try:
        writer.write(request_bytes(target, path))
        return b"\n".join([line async for line in body_lines(connection[0], target)]).decode("utf-8", "replace")
    finally:
        writer.close()


async def first_model(url: str, key: str = "") -> str:
    """The first model that a server lists. Raises ServerUnreachable, MeasurementFailed."""
    page = await get_page(Target(url, "", key), "/v1/models")
    try:
        return str(json.loads(page)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise MeasurementFailed(url=url, reason="it lists no model") from None
