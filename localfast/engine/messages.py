"""What crosses the pipe between the server and an engine process, and its encoding: msgspec structs as msgpack, one per frame.

A step of the engine sends one `Step` with the events of all its sequences. Errors travel as code and facts, never pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from localfast import errors
from localfast.core import Accepted, Event, Failed, Finished, GenerateRequest, SequenceFinished, TextDelta

SPARE_OUTPUT_ROWS = 32
"""Rows of logits that one step may yield beyond one per slot: for guessed tokens and for scoring an echoed prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All an engine process needs to load one model; every number is decided, none is automatic."""

    model: str
    """Name for messages and logs."""
    path: str
    """First (or only) file of the model."""
    gpu_layers: int
    context_tokens: int
    """Longest context of one request."""
    cells: int
    """Size of the unified KV cache in tokens, all requests together."""
    slots: int
    batch_tokens: int
    ubatch_tokens: int
    threads: int
    kv_type: str
    use_mmap: bool = True
    cpu_experts: int = 0
    """Leading layers whose experts stay in RAM although the layer is on a GPU."""
    split: tuple[float, ...] = ()
    """Share of the offloaded layers of each GPU, in the engine's order; empty: by free memory."""
    engine_path: str = ""
    """Folder of the engine build; empty: the one in this Python environment."""
    draft_path: str = ""
    """First file of a smaller model with the same tokenizer that guesses ahead; empty: none."""
    draft_gpu_layers: int = 0
    max_stall_s: float = 0.25
    """How long a running stream may wait for other requests' prompts."""
    speculation: bool = True
    """Guess ahead where a text repeats itself."""
    cache_ram_bytes: int = 0
    """Room for saved states of conversations and parked sequences in RAM."""
    cache_disk_bytes: int = 0
    """Room for saved states on disk, all models together; 0: none are written or read."""
    cache_folder: str = ""
    cache_key: str = ""
    """Of the model's content: states on disk are used for the same key, engine version and cache type only."""
    log_path: str = ""
    """Where native libraries' output goes; its tail is the evidence when the process dies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the engine process found out by really loading the model; sent once, with Ready."""

    pid: int
    description: str
    parameters: int
    size_bytes: int
    vocabulary: int
    train_context_tokens: int
    context_tokens: int
    cells: int
    slots: int
    layers: int
    """Layers that can be offloaded, the output layer included."""
    gpu_layers: int
    load_s: float
    buffers: tuple[tuple[str, str, int], ...] = ()
    """Real memory: (device, use, bytes), read from the engine's log."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Running totals and the present state, sent with every step."""

    decode_calls: int = 0
    batched_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    parked: int = 0
    restored: int = 0
    """States brought back from RAM or disk instead of being computed again."""
    decode_s: float = 0.0
    """Time inside llama_decode, of `step_s`, the time of all steps that computed something."""
    step_s: float = 0.0
    running: int = 0
    waiting: int = 0
    used_cells: int = 0


class Load(msgspec.Struct, tag=True, frozen=True):
    config: EngineConfig


class Submit(msgspec.Struct, tag=True, frozen=True):
    request_id: int
    request: GenerateRequest


class Cancel(msgspec.Struct, tag=True, frozen=True):
    request_id: int


class Describe(msgspec.Struct, tag=True, frozen=True):
    """Ask for a CacheReport."""

    number: int


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End the process; running requests fail with ShuttingDown."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    facts: EngineFacts


class Broken(msgspec.Struct, tag=True, frozen=True):
    """The model did not load."""

    code: str
    facts: dict[str, Any]


class SlotReport(msgspec.Struct, frozen=True):
    id: int
    tokens: int
    running: bool


class LevelReport(msgspec.Struct, frozen=True):
    """One level of the prompt cache."""

    entries: int
    used_bytes: int
    limit_bytes: int


class CacheReport(msgspec.Struct, tag=True, frozen=True):
    """What an engine keeps of prompts and answers: slots of the KV cache, saved states in RAM, and on disk."""

    number: int
    cells: int
    used_cells: int
    slots: list[SlotReport]
    ram: LevelReport
    disk: LevelReport
    parked: int
    """Sequences that wait in RAM for cells."""


class Step(msgspec.Struct, tag=True, frozen=True):
    """Events by kind; kinds are listed in the order in which they may follow each other within one request."""

    stats: EngineStats | None
    """None when the step loop was not asked: the intake thread answers alone."""
    accepted: list[tuple[int, Accepted]] = []
    deltas: list[tuple[int, TextDelta]] = []
    sequences: list[tuple[int, SequenceFinished]] = []
    finished: list[tuple[int, Finished]] = []
    failed: list[tuple[int, str, dict[str, Any]]] = []

    @classmethod
    def of(cls, events: list[tuple[int, Event]], stats: EngineStats | None = None) -> Step:
        step = cls(stats, [], [], [], [], [])
        for request_id, event in events:
            match event:
                case TextDelta():
                    step.deltas.append((request_id, event))
                case Accepted():
                    step.accepted.append((request_id, event))
                case SequenceFinished():
                    step.sequences.append((request_id, event))
                case Finished():
                    step.finished.append((request_id, event))
                case Failed(error):
                    step.failed.append((request_id, *errors.to_wire(error)))
        return step

    def events(self) -> list[tuple[int, Event]]:
        failed = [(request_id, Failed(errors.from_wire(code, facts))) for request_id, code, facts in self.failed]
        return [*self.accepted, *self.deltas, *self.sequences, *self.finished, *failed]


ToEngine = Load | Submit | Cancel | Describe | Stop
FromEngine = Ready | Broken | Step | CacheReport

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
