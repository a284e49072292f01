"""A load generator for any server that speaks OpenAI's chat protocol, so that a peer is measured by the very same code.

A work is a closed set of requests with the numbers it yields. Two servers take turns at each work, and what counts is the ratio
within one run: machines are never equally quiet twice. Talks HTTP only; knows nothing of engines.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from localfast.errors import MeasurementFailed, ServerUnreachable

_WORDS = """
river stone market window garden engine paper signal winter copper silent bridge candle harbor meadow orbit puzzle ribbon
saddle timber lantern valley cotton mirror thunder basket pepper island canvas marble
"""
WORDS = _WORDS.split()
LONG_WORDS = 480
"""About a thousand tokens with the vocabularies of small models."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the name of its model; `key` is sent when it is not empty."""

    url: str
    model: str
    key: str = ""


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
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.stamps, self.stamps[1:], strict=False)]


Numbers = dict[str, float]
Work = Callable[[Target, random.Random], Awaitable[Numbers]]


# --- one request --------------------------------------------------------------------------------------------------------------


class Chat:
    """One streamed chat over a connection of its own. A context: leaving it early hangs up, as an impatient client does."""

    def __init__(self, target: Target, messages: Sequence[dict[str, str]], max_tokens: int) -> None:
        self._target = target
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
        self._writer.write(request_bytes(self._target, "/v1/chat/completions", self._body))
        await self._writer.drain()
        return self

    async def __aexit__(self, *_: object) -> None:
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


def request_bytes(target: Target, path: str, body: object = None) -> bytes:
    """A whole HTTP/1.1 request; a GET without a body."""
    parts = urlsplit(target.url)
    content = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc}"]
    lines += [f"Authorization: Bearer {target.key}"] if target.key else []
    lines += [] if body is None else ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + content


async def body_lines(reader: asyncio.StreamReader, target: Target) -> AsyncIterator[bytes]:
    """Lines of an answer's body, chunked or not. Raises MeasurementFailed for any status but 200."""
    status = (await reader.readline()).split(b" ")
    chunked = False
    while (header := await reader.readline()) not in (b"\r\n", b"\n", b""):
        chunked = chunked or header.lower().startswith(b"transfer-encoding: chunked")
    if len(status) < 2 or status[1] != b"200":
        said = (await reader.read(400)).decode("utf-8", "replace") if len(status) > 1 else "it hung up"
        raise MeasurementFailed(url=target.url, reason=said.strip())
    rest = b""
    while part := await (_chunk(reader) if chunked else reader.read(2**16)):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readline()).split(b";")[0] or b"0", 16)
    content = await reader.readexactly(size + 2)
    return content[:-2]


async def first_model(url: str, key: str = "") -> str:
    """The first model that a server lists. Raises ServerUnreachable, MeasurementFailed."""
    target = Target(url, "", key)
    reader, writer = await connect(url)
    writer.write(request_bytes(target, "/v1/models"))
    try:
        answer = json.loads(b"\n".join([line async for line in body_lines(reader, target)]))
        return str(answer["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise MeasurementFailed(url=url, reason="it lists no model") from None
    finally:
        writer.close()


# --- works --------------------------------------------------------------------------------------------------------------------


async def ask(target: Target, text: str, max_tokens: int) -> Sample:
    async with Chat(target, [{"role": "user", "content": text}], max_tokens) as chat:
        return await chat.finish()


def prose(random_words: random.Random, count: int) -> str:
    return " ".join(random_words.choice(WORDS) for _ in range(count))


def streams(count: int, max_tokens: int = 64) -> Work:
    """`count` distinct short prompts at once."""

    async def work(target: Target, rng: random.Random) -> Numbers:
        samples = await asyncio.gather(
            *(ask(target, f"Tell a long story about {prose(rng, 20)}", max_tokens) for _ in range(count))
        )
        return {**_speed(samples), **_first_texts(samples), **_gaps(samples)}

    return work


async def long_prompt(target: Target, rng: random.Random) -> Numbers:
    """One long prompt on an idle server."""
    return _first_texts([await ask(target, prose(rng, LONG_WORDS), 8)])


async def shared_prefix(target: Target, rng: random.Random) -> Numbers:
    """Eight requests at once that share a long beginning."""
    prefix = prose(rng, LONG_WORDS)
    samples = await asyncio.gather(*(ask(target, f"{prefix}\nQuestion {number}: {prose(rng, 5)}", 24) for number in range(8)))
    return _first_texts(samples)


async def intruder(target: Target, rng: random.Random) -> Numbers:
    """A long prompt arrives while four streams run, and a short one right behind it."""
    begun = [asyncio.Event() for _ in range(4)]
    started_s = time.perf_counter()
    running = [asyncio.create_task(_tell(target, prose(rng, 20), event)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    long = asyncio.create_task(ask(target, prose(rng, LONG_WORDS), 8))
    await asyncio.sleep(0.2)  # until the server has begun with it
    short = await ask(target, f"Hello {prose(rng, 3)}", 8)
    long_sample, *samples = await asyncio.gather(long, *running)
    longest_s = max(gap for sample in samples for gap in sample.gaps_s)
    return {
        "gap_max_ms": longest_s * 1000,
        "short_ttft_ms": short.ttft_s * 1000,
        "long_ttft_ms": long_sample.ttft_s * 1000,
        "total_s": time.perf_counter() - started_s,
    }


async def _tell(target: Target, subject: str, begun: asyncio.Event) -> Sample:
    try:
        async with Chat(target, [{"role": "user", "content": f"Tell a long story about {subject}"}], 96) as chat:
            async for _ in chat.pieces():
                begun.set()
            return chat.sample()
    finally:
        begun.set()  # a stream that failed must not be waited for


async def next_turn(target: Target, rng: random.Random) -> Numbers:
    """The second turn of a long conversation: what was said before need not be read again."""
    messages = [{"role": "user", "content": prose(rng, 2 * LONG_WORDS)}]
    async with Chat(target, messages, 16) as chat:
        first = await chat.finish()
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": prose(rng, 5)}]
    async with Chat(target, messages, 8) as chat:
        second = await chat.finish()
    return {"cold_ttft_ms": first.ttft_s * 1000, "turn_ttft_ms": second.ttft_s * 1000}


async def cancel(target: Target, rng: random.Random) -> Numbers:
    """Eight clients hang up in the middle of long prompts; then somebody asks something short."""
    for _ in range(8):
        async with Chat(target, [{"role": "user", "content": prose(rng, LONG_WORDS)}], 256):
            await asyncio.sleep(0.02)
    return {"next_ttft_ms": (await ask(target, f"Hello {prose(rng, 3)}", 8)).ttft_s * 1000}


WORKS: dict[str, Work] = {
    **{f"streams-{count}": streams(count) for count in (1, 2, 4, 8, 16)},
    "long-prompt": long_prompt,
    "shared-prefix": shared_prefix,
    "intruder": intruder,
    "next-turn": next_turn,
    "cancel": cancel,
}


def _speed(samples: Sequence[Sample]) -> Numbers:
    seconds = max(sample.stamps[-1] for sample in samples) - min(sample.started_s for sample in samples)
    return {"tokens_per_s": sum(sample.tokens for sample in samples) / seconds, "requests_per_s": len(samples) / seconds}


def _first_texts(samples: Sequence[Sample]) -> Numbers:
    times = [sample.ttft_s * 1000 for sample in samples]
    return {"ttft_p50_ms": percentile(times, 50), "ttft_p95_ms": percentile(times, 95)}


def _gaps(samples: Sequence[Sample]) -> Numbers:
    gaps = [gap * 1000 for sample in samples for gap in sample.gaps_s] or [0.0]
    return {f"gap_p{part}_ms": percentile(gaps, part) for part in (50, 95, 99)} | {"gap_max_ms": max(gaps)}


def percentile(values: Sequence[float], part: int) -> float:
    """Nearest rank: a value that was really measured."""
    ordered = sorted(values)
    return ordered[max(0, -(-part * len(ordered) // 100) - 1)]


# --- a run --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One number of one work: the median over the rounds for us and, if there is one, the peer; `ratio` is ours / peer."""

    work: str
    number: str
    ours: float
    peer: float | None

    @property
    def ratio(self) -> float | None:
        return self.ours / self.peer if self.peer else None

    @property
    def better(self) -> bool | None:
        """Whether we are at least as good; None without a peer."""
        if self.ratio is None:
            return None
        return self.ratio >= 1 if self.number.endswith("_per_s") else self.ratio <= 1


async def run(
    ours: Target, peer: Target | None, works: Sequence[str], rounds: int, tell: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """Both servers take turns at every work, `rounds` times, with the same prompts; each round has prompts of its own."""
    rows = []
    for name in works:
        measured: dict[str, list[Numbers]] = {"ours": [], "peer": []}
        for number in range(rounds):
            # A fresh salt per run and round: nothing that was computed before may help, unless the work says so.
            salt = f"{name} {number} {time.time_ns()}"
            for side, target in (("ours", ours), ("peer", peer)):
                if target is not None:
                    tell(f"{name}, round {number + 1} of {rounds}: {target.url}")
                    measured[side].append(await WORKS[name](target, random.Random(salt)))
        for key in measured["ours"][0]:
            medians = [statistics.median(numbers[key] for numbers in side) if side else None for side in measured.values()]
            assert medians[0] is not None
            rows.append(Row(name, key, medians[0], medians[1]))
    return rows


def verdict(rows: Sequence[Row]) -> str | None:
    """What eight streams against one say of this server, in a sentence; None if they were not both measured."""
    speed = {row.work: row.ours for row in rows if row.number == "tokens_per_s"}
    if not {"streams-1", "streams-8"} <= speed.keys():
        return None
    gain = speed["streams-8"] / speed["streams-1"]
    if gain >= 2:
        meaning = "batching works: more streams share the work of reading the weights"
    elif gain >= 0.8:
        meaning = "the machine is busy computing with one stream already: more streams share the same speed"
    else:
        meaning = "requests get into each other's way: look at slots, threads and memory"
    return f"8 streams give {gain:.2f} times the tokens/s of one: {meaning}"
