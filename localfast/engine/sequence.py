"""The words between scheduler and step loop: a sequence, the memory edits, and a step's batch. Plain state, no decisions."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from localfast.core import CacheMissReason, RequestClass
from localfast.engine.states import Saved


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens. `tokens` is prompt and answer; the KV cache of its slot holds the first `computed` of them."""

    request_id: int
    index: int
    tokens: list[int]
    prompt_tokens: int
    limit: int
    """Most tokens this sequence may have, prompt included."""
    request_class: RequestClass = "chat"
    score_prompt: bool = False
    """Logits are wanted for every prompt token, not only the last; cleared by whoever got them."""
    draft: list[int] = field(default_factory=list)
    """Guesses at the tokens after the last one, to be verified in the next batch; cut to what there is room for."""
    awaited: tuple[Sequence | None, int] | None = None
    """The running sequence whose first so many tokens this one will share; decided once, so that nobody waits again and again."""
    pauses: set[int] = field(default_factory=set)
    """Lengths at which a chunk of the prompt ends, because the cache can only be shared or saved there."""
    slot: int | None = None
    computed: int = 0
    cached: int | None = None
    """Prompt tokens that were not computed because the cache had them; None before its first turn."""
    miss: Miss | None = None
    seated_at: int = 0
    """`computed` when it got its slot."""
    parks: int = 0
    """How often it had to give way."""
    number: int = 0
    """In order of arrival."""

    @property
    def behind(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def prompt_computed(self) -> bool:
        return self.computed >= self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a prompt was computed from `position` on; for `differs`, what the nearest cached prompt has there."""

    reason: CacheMissReason
    position: int
    cached_token: int | None = None


@dataclass(frozen=True, slots=True)
class Truncate:
    """Forget everything of `slot` from position `length` on."""

    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Let `target`, which is empty, share the first `length` cells of `source`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Save:
    """Keep the state of `slot`, which stands for `tokens`, outside the cache."""

    slot: int
    tokens: Tokens[int]


@dataclass(frozen=True, slots=True)
class Park:
    """Keep the state of a sequence that gives its cells to others and goes on later."""

    slot: int
    sequence: Sequence
    tokens: Tokens[int]


@dataclass(frozen=True, slots=True)
class Restore:
    """Fill `slot`, which is empty, from a saved state and shorten it to `length`. Fails: tell the scheduler that it is lost."""

    slot: int
    sequence: Sequence
    saved: Saved
    length: int


Edit = Truncate | Copy | Save | Park | Restore


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of a sequence, from position `start` on, the last of them perhaps a draft; the last `outputs` of them yield
    logits."""

    sequence: Sequence
    slot: int
    start: int
    count: int
    outputs: int

    @property
    def tokens(self) -> list[int]:
        tokens = self.sequence.tokens[self.start : self.start + self.count]
        return tokens + self.sequence.draft if len(tokens) < self.count else tokens


@dataclass(slots=True)
class Batch:
    """The chunks of one decode call; decoders come first."""

    chunks: list[Chunk] = field(default_factory=list)
    decoders: int = 0

    @property
    def token_count(self) -> int:
        return sum(chunk.count for chunk in self.chunks)
