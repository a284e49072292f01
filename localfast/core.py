"""The nouns every other file is a verb on: one request type and one event union.

Imports nothing of ours. Plain frozen dataclasses, so that they cross the pipe to the engine process unchanged
(`engine/messages.py` encodes them) and compare by value in tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from localfast.errors import LocalfastError

FinishReason = Literal["stop", "length"]
RequestClass = Literal["interactive", "fim", "chat", "batch"]

CacheMissReason = Literal["new", "longer", "differs", "forgotten", "window", "scored"]
"""new: nothing cached begins like it. longer: all that was cached was used. differs: the nearest cached prompt goes on otherwise.
forgotten: it was cached and had to give way. window: the cache cannot be cut there (sliding window, recurrent). scored: the log
probabilities of the prompt were asked for, so all of it is computed."""

Prompt = str | tuple[int, ...]
"""Text to tokenize, or token ids of the model's own vocabulary."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat; `content` is plain text."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. Defaults are llama.cpp's own; `temperature=0` is greedy."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What a dialect makes of a body: everything the engine needs, nothing of the protocol it came in.

    Either `messages` (a chat, to be rendered by the model's template into one prompt) or `prompts` is filled.
    Each prompt yields `n` sequences; the sequence of prompt p and choice c has index `p * n + c`.
    """

    model: str
    messages: tuple[Message, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    max_tokens: int | None = None
    """Tokens to generate per sequence; None means until the end of the context."""
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    """Number of alternatives reported per token (0: only the chosen one); None: no log probabilities."""
    echo: bool = False
    """Repeat the prompt's text (and, with `logprobs`, its log probabilities) before the generated text."""
    ignore_eos: bool = False
    request_class: RequestClass = "chat"
    """Whose turn it is when there is not room for all."""
    replaces: str = ""
    """A request of class fim ends the older one of the same name, wherever that is; empty: it ends nobody."""
    prompt_time_s: float | None = None
    """Most seconds from arrival to the first token; then the answer ends empty, with `length`."""
    generate_time_s: float | None = None
    """Most seconds of generating after the first token; then the answer ends at the next line's end, with `length`."""
    ignored: tuple[str, ...] = ()
    """Parameters the client sent that have no effect here; they are named in the answer, never dropped silently."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token before sampling, with the most likely alternatives (most likely first)."""

    text: str
    token_bytes: bytes
    logprob: float | None
    """None for the first token of an echoed prompt: nothing precedes it."""
    top: tuple[tuple[str, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts over all sequences of a request; `cached_tokens` of the prompt were not computed again.

    `drafted_tokens` were guessed ahead by speculation, `accepted_tokens` of them were what the model itself chose.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """Why not all of a prompt (but its last token) was in the cache: from `position` on it was computed."""

    reason: CacheMissReason
    position: int
    cached_text: str = ""
    """For `differs`: the token that the nearest cached prompt has at `position`, and what this prompt has there."""
    prompt_text: str = ""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent waiting for a slot, computing the prompt, and generating, measured in the engine process."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Accepted:
    """The prompt was tokenized and fits; the answer will follow. Always the first event of a request."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one sequence: whole characters only, never part of a stop string."""

    index: int
    text: str
    tokens: int
    """Tokens this delta stands for; 0 where text was held back and released later."""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """One sequence came to its end; the others of the request may go on."""

    index: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Finished:
    """The last word of a request that succeeded."""

    usage: Usage
    timings: Timings
    cache_miss: CacheMiss | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The last word of a request that did not."""

    error: LocalfastError


Event = Accepted | TextDelta | SequenceFinished | Finished | Failed
FINAL_EVENTS = (Finished, Failed)
