"""The works: closed sets of requests, each told apart by what it strains, with the numbers that come out.

Prompts are random words from a generator that the caller seeds, so that two servers get the same ones and nothing that was
computed before helps. Which number is good when high says `report`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from localfast.bench.client import Chat, Sample, Target, ask
from localfast.errors import MeasurementFailed

Numbers = dict[str, float]
Work = Callable[[Target, random.Random], Awaitable[Numbers]]

_WORDS = """
river stone market window garden engine paper signal winter copper silent bridge candle harbor meadow orbit puzzle ribbon
saddle timber lantern valley cotton mirror thunder basket pepper island canvas marble
"""
WORDS = _WORDS.split()
LONG_WORDS = 480
"""About a thousand tokens with the vocabularies of small models."""
KEYSTROKES = 10
KEYSTROKE_S = 0.03


def streams(count: int, max_tokens: int = 64) -> Work:
    """`count` distinct short prompts at once."""

    async def work(target: Target, rng: random.Random) -> Numbers:
        samples = await asyncio.gather(
            *(ask(target, f"Tell a long story about {prose(rng, 20)}", max_tokens) for _ in range(count))
        )
        return {**_speed(samples), **_first_texts(samples), **_gaps(samples), "together": together(samples)}

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


async def edit(target: Target, rng: random.Random) -> Numbers:
    """A text of about 400 tokens comes back with one name changed: nearly all of the answer stands in the prompt."""
    old, new, *words = rng.sample(WORDS, len(WORDS))
    sample = await ask(target, f"Repeat this text, only with {old} changed to {new}:\n\n{code(rng, [old, *words[:8]], 9)}", 400)
    generated_s = sample.ended_s - sample.stamps[0] or sample.ended_s - sample.started_s
    return {"tokens_per_s": sample.tokens / generated_s, **_first_texts([sample])}


async def burst_fim(target: Target, rng: random.Random) -> Numbers:
    """Ten keystrokes in an editor: each asks anew and hangs up on the one before. Only the last answer matters."""
    text = code(rng, rng.sample(WORDS, 8), 9) + "\ndef "
    headers = {"X-Localfast-Class": "fim", "X-Localfast-File": "a.py"}
    async with contextlib.AsyncExitStack() as open_chats:
        older: Chat | None = None
        for _ in range(KEYSTROKES):
            text += rng.choice(WORDS)[:2]
            messages = [{"role": "user", "content": f"Complete this code:\n{text}"}]
            newer = await open_chats.enter_async_context(Chat(target, messages, 16, headers))
            if older is not None:
                older.hang_up()
            older = newer
            await asyncio.sleep(KEYSTROKE_S)
        return {"last_ttft_ms": (await newer.finish()).ttft_s * 1000}


async def crowded(target: Target, rng: random.Random, answer_tokens: int = 500) -> Numbers:
    """Sixteen long requests at once: together more than many a server has room for."""
    started_s = time.perf_counter()
    asked = [ask(target, prose(rng, LONG_WORDS), answer_tokens) for _ in range(16)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    total_s = time.perf_counter() - started_s
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, MeasurementFailed):
            raise answer
    samples = [answer for answer in answers if isinstance(answer, Sample)]
    return {
        "finished": len(samples),
        "truncated": sum(sample.tokens < answer_tokens for sample in samples),
        "total_s": total_s,
        "tokens_per_s": sum(sample.tokens for sample in samples) / total_s,
    }


WORKS: dict[str, Work] = {
    **{f"streams-{count}": streams(count) for count in (1, 2, 4, 8, 16)},
    "long-prompt": long_prompt,
    "shared-prefix": shared_prefix,
    "intruder": intruder,
    "next-turn": next_turn,
    "cancel": cancel,
    "edit": edit,
    "burst-fim": burst_fim,
    "crowded": crowded,
}
DEFAULT_WORKS = tuple(name for name in WORKS if name != "crowded")
"""What runs in a minute or two a round on a small machine."""


# --- prompts and numbers ------------------------------------------------------------------------------------------------------


def prose(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def code(rng: random.Random, names: Sequence[str], functions: int) -> str:
    """Python that computes nothing; about 45 tokens a function, and the first name stands in each."""
    texts = []
    for number in range(functions):
        action, given, found = rng.sample(names[1:], 3)
        texts.append(
            f"def {action}_{names[0]}_{number}({given}, limit):\n    {found} = {given} + {rng.randrange(100)}\n"
            f"    if {found} > limit:\n        return {names[0]}.{action}({found})\n    return limit\n"
        )
    return "\n".join(texts)


def together(samples: Sequence[Sample]) -> float:
    """How many answers were being written at one moment, at most."""
    return max(sum(other.stamps[0] <= one.stamps[0] <= other.ended_s for other in samples) for one in samples)


def _speed(samples: Sequence[Sample]) -> Numbers:
    seconds = max(sample.ended_s for sample in samples) - min(sample.started_s for sample in samples)
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
