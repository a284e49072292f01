"""What llama.cpp's memories can and cannot do, one kind of model each: the facts that scheduler and cache are built on.

Each was seen with llama-cpp-python 0.3.36; a test that fails after an update names what to think about anew.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import EXACT_KV_TYPE, KINDS, WINDOW, Kind, tiny_model

from localfast.engine.messages import EngineConfig
from localfast.engine.sequence import Chunk, Sequence

pytestmark = pytest.mark.model
SLOTS, CELLS, BATCH = 4, 4096, 128
TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 40
PARTIAL = 1
"""LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: only what cannot be cut, which is a window's cells or a recurrent state."""


@functools.cache
def native_log() -> Any:
    from localfast.engine.llama import NativeLog

    return NativeLog()  # one for the whole run: the library goes on calling it


class Slots:
    """A tiny model with a context, fed in one call per batch as the step loop does."""

    def __init__(self, kind: Kind, folder: Path, batch: int = BATCH, ubatch: int = BATCH) -> None:
        from localfast.engine.llama import Context, Model, bindings

        path = tiny_model(kind, folder)
        self.kind: Kind = kind
        self.native = bindings
        self.config = EngineConfig(
            model=path.stem,
            path=str(path),
            gpu_layers=0,
            context_tokens=CELLS,
            cells=CELLS,
            slots=SLOTS,
            batch_tokens=batch,
            ubatch_tokens=ubatch,
            threads=1,
            kv_type=EXACT_KV_TYPE,
        )
        self.model = Model(self.config, native_log())
        self.context = Context(self.model, self.config, SLOTS)
        self.text: list[int] = self.model.tokenize(TEXT)

    def feed(self, slot: int, tokens: list[int], start: int = 0) -> np.ndarray:
        """Logits after the last token."""
        for done in range(0, len(tokens), BATCH):
            part = tokens[done : done + BATCH]
            assert self.context.decode([chunk(slot, part, start + done)])
        return self.context.logits(len(part) - 1).copy()

    def greedy(self, slot: int, row: np.ndarray, start: int, count: int = 40) -> list[int]:
        tokens: list[int] = []
        for position in range(start, start + count):
            tokens.append(int(row.argmax()))
            row = self.feed(slot, tokens[-1:], position)
        return tokens

    def cut(self, slot: int, start: int, end: int = -1) -> bool:
        return bool(self.native.llama_memory_seq_rm(self.context.memory, slot, start, end))

    def positions(self, slot: int) -> tuple[int, int]:
        """First and last that the library says it holds."""
        memory = self.context.memory
        return self.native.llama_memory_seq_pos_min(memory, slot), self.native.llama_memory_seq_pos_max(memory, slot)

    def save(self, slot: int, flags: int = 0) -> ctypes.Array[ctypes.c_uint8]:
        size = self.native.llama_state_seq_get_size_ext(self.context.handle, slot, flags)
        state = (ctypes.c_uint8 * size)()
        assert self.native.llama_state_seq_get_data_ext(self.context.handle, state, size, slot, flags) == size
        return state

    def restore(self, slot: int, state: ctypes.Array[ctypes.c_uint8], flags: int = 0) -> bool:
        return bool(self.native.llama_state_seq_set_data_ext(self.context.handle, state, len(state), slot, flags) == len(state))


def chunk(slot: int, tokens: list[int], start: int) -> Chunk:
    sequence = Sequence(request_id=slot, index=0, tokens=[0] * start + tokens, prompt_tokens=0, limit=CELLS)
    return Chunk(sequence, slot, start, len(tokens), 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@functools.cache
def loaded(kind: Kind, folder: Path) -> Slots:
    return Slots(kind, folder)


@pytest.fixture(params=KINDS)
def slots(request: pytest.FixtureRequest, folder: Path) -> Iterator[Slots]:
    pytest.importorskip("llama_cpp")
    slots = loaded(request.param, folder)
    slots.native.llama_memory_clear(slots.context.memory, True)
    yield slots


only = functools.partial(pytest.mark.parametrize, "slots", indirect=True)


def test_tiny_models_are_the_same_bytes_each_time(tmp_path: Path, folder: Path) -> None:
    for kind in KINDS:
        assert tiny_model(kind, tmp_path).read_bytes() == tiny_model(kind, folder).read_bytes()
        assert tiny_model(kind, tmp_path).stat().st_size < 2**20


def test_tiny_models_say_something_readable_that_is_not_a_loop(slots: Slots) -> None:
    row = slots.feed(0, slots.text[:100])
    tokens = slots.greedy(0, row, 100)
    assert slots.greedy(1, slots.feed(1, slots.text[:100]), 100) == tokens
    assert len(set(tokens)) >= 15
    assert b"".join(map(slots.model.piece, tokens)).isascii()
    assert not any(map(slots.model.is_end, tokens))


def test_tiny_models_remember_what_is_out_of_any_window(slots: Slots) -> None:
    other = [*slots.text[:20], slots.text[20] + 1, *slots.text[21:100]]
    answer = slots.greedy(0, slots.feed(0, slots.text[:100]), 100)
    assert slots.greedy(1, slots.feed(1, other), 100) != answer


def test_tiny_models_give_the_same_logits_however_the_prompt_is_cut_into_batches(slots: Slots) -> None:
    row = slots.feed(0, slots.text[:300])
    slots.feed(1, slots.text[:293])
    for position in range(293, 300):
        last = slots.feed(1, slots.text[position : position + 1], position)
    assert np.abs(row - last).max() < 0.01 < np.diff(np.sort(row)[-2:])[0]


def test_tiny_models_cover_every_window_that_the_scheduler_knows(slots: Slots) -> None:
    assert slots.model.window == {"recurrent": 1, "hybrid": 1, "window": WINDOW, "full": 0}[slots.kind]


def test_tiny_models_tokenize_text_to_and_fro(slots: Slots) -> None:
    tokens = slots.model.tokenize("the lazy fox: ünïcödé 🦊")
    assert tokens[0] == slots.model.bos
    assert b"".join(map(slots.model.piece, tokens)).decode() == "the lazy fox: ünïcödé 🦊"
    assert len(tokens) < len("the lazy fox: ünïcödé 🦊".encode())


def test_tiny_models_go_on_from_a_saved_state_in_another_slot(slots: Slots) -> None:
    row = slots.feed(0, slots.text[:100])
    state = slots.context.read_state(0)
    answer = slots.greedy(0, row, 100)
    slots.feed(2, slots.text[10:50])
    assert slots.context.write_state(1, state)
    assert slots.context.write_state(2, state), "a slot that is not empty is emptied first"
    assert slots.greedy(1, row, 100) == answer
    assert slots.greedy(2, row, 100) == answer


def test_tiny_models_go_on_from_a_copy_of_a_whole_slot_while_its_source_goes_on_too(slots: Slots) -> None:
    row = slots.feed(0, slots.text[:100])
    slots.context.share(0, 1, 100)
    answer = slots.greedy(1, row, 100)
    assert slots.greedy(0, row, 100) == answer
    slots.cut(0, 0)
    assert slots.greedy(1, slots.feed(1, slots.text[:5], 140), 145)


@only(argvalues=["full"])
def test_tiny_models_full_attention_can_be_cut_and_shared_anywhere(slots: Slots) -> None:
    row = slots.feed(0, slots.text[:300])
    answer = slots.greedy(0, row, 300)
    for length in (299, 250, 1):
        assert slots.cut(0, length)
        assert slots.positions(0) == (0, length - 1)
        assert slots.greedy(0, slots.feed(0, slots.text[length:300], length), 300) == answer
    slots.context.share(0, 1, 150)
    assert slots.positions(1) == (0, 149)
    assert slots.greedy(1, slots.feed(1, slots.text[150:300], 150), 300) == answer


@only(argvalues=["recurrent", "hybrid"])
def test_tiny_models_recurrent_state_refuses_every_cut_and_goes_on_unharmed(slots: Slots) -> None:
    row = slots.feed(0, slots.text[:100])
    assert not any(slots.cut(0, length) for length in (1, 50, 99))
    assert slots.cut(0, 100), "nothing to forget"
    assert slots.positions(0) == (99, 99)
    answer = slots.greedy(0, row, 100)
    assert slots.cut(0, 0)
    assert slots.positions(0) == (-1, -1)
    assert slots.greedy(0, slots.feed(0, slots.text[:100]), 100) == answer


@only(argvalues=["recurrent", "hybrid"])
def test_tiny_models_recurrent_state_is_copied_whole_whatever_length_was_asked_for(slots: Slots) -> None:
    row = slots.feed(0, slots.text[:100])
    slots.context.share(0, 1, 50)
    if slots.kind == "recurrent":
        assert slots.positions(1) == (99, 99)
        with pytest.raises(RuntimeError):
            slots.feed(1, slots.text[50:51], 50)
        return
    assert slots.positions(1) == (99, 49), "the last position looks right"
    assert np.abs(slots.feed(1, slots.text[50:100], 50) - row).max() > 1, "the state is not"


@only(argvalues=["window"])
def test_tiny_models_window_can_be_cut_where_the_window_before_is_still_there(slots: Slots) -> None:
    row = slots.feed(0, slots.text[:600])
    oldest, last = slots.positions(0)
    assert WINDOW < oldest < last == 599
    answer = slots.greedy(0, row, 600)
    for length in (599, 500, oldest + WINDOW - 1):
        slots.cut(0, 0)
        slots.feed(0, slots.text[:600])
        assert slots.positions(0)[0] == oldest
        assert slots.cut(0, length)
        assert slots.greedy(0, slots.feed(0, slots.text[length:600], length), 600) == answer


@only(argvalues=["window"])
def test_tiny_models_window_accepts_a_cut_that_spoils_the_text(slots: Slots) -> None:
    good = slots.feed(1, slots.text[:301])
    slots.cut(1, 0)
    slots.feed(0, slots.text[:600])
    assert slots.positions(0)[0] > 300
    assert slots.cut(0, 300), "no refusal"
    assert slots.positions(0) == (-1, -1), "the only sign; an empty slot looks the same"
    assert np.abs(slots.feed(0, slots.text[300:301], 300) - good).max() > 1


@only(argvalues=["window"])
def test_tiny_models_window_shared_with_a_copy_blocks_every_slot_until_the_copy_owns_its_window(slots: Slots) -> None:
    row = slots.feed(0, slots.text[:600])
    slots.native.llama_memory_seq_cp(slots.context.memory, 0, 1, 0, 600)  # what Context.share does first
    assert not slots.context.decode([chunk(0, [5], 600)]), "the window's cells are all taken, and shared ones are never reused"
    assert not slots.context.decode([chunk(2, [5], 0)]), "though most of the cache is free"
    assert slots.restore(1, slots.save(1, PARTIAL), PARTIAL)
    answer = slots.greedy(0, row, 600)
    assert slots.greedy(1, row, 600) == answer


@only(argvalues=["window"])
def test_tiny_models_window_of_a_shorter_copy_can_be_owned_too(slots: Slots) -> None:
    row = slots.feed(0, slots.text[:600])
    length = slots.positions(0)[0] + WINDOW - 1
    slots.context.share(0, 1, length)
    assert slots.restore(1, slots.save(1, PARTIAL), PARTIAL)
    answer = slots.greedy(1, slots.feed(1, slots.text[length:600], length), 600)
    assert slots.greedy(0, row, 600) == answer


def test_tiny_models_window_loses_cells_behind_guesses_when_the_batch_is_computed_in_parts(folder: Path) -> None:
    pytest.importorskip("llama_cpp")
    slots = Slots("window", folder, batch=512, ubatch=64)
    slots.feed(0, slots.text[:600])
    assert slots.context.decode([chunk(0, [slots.text[600], *[7] * 20], 600), chunk(1, slots.text[:235], 0)])
    assert slots.cut(0, 601), "the guesses were wrong"
    oldest, last = slots.positions(0)
    assert last == 600 and oldest > 601 - WINDOW, "the prompt's later parts took cells that only the guesses no longer needed"


def test_tiny_models_partial_state_is_small_and_does_not_grow_with_the_text(slots: Slots) -> None:
    slots.feed(0, slots.text[:150])
    early = len(slots.save(0, PARTIAL)), len(slots.save(0))
    slots.feed(0, slots.text[150:600], 150)
    late = len(slots.save(0, PARTIAL)), len(slots.save(0))
    match slots.kind:
        case "recurrent":
            assert early[0] == early[1] == late[0] == late[1]
        case "hybrid" | "window":
            assert early[0] == late[0] < early[1] < late[1]
        case "full":
            assert early[0] == early[1] < late[0] == late[1], "all of it: a partial state saves nothing here"


def test_tiny_models_go_back_in_place_to_a_partial_state_and_a_cut_after_it(slots: Slots) -> None:
    slots.feed(0, slots.text[:150])
    checkpoint = slots.save(0, PARTIAL)
    row = slots.feed(0, slots.text[150:600], 150)
    answer = slots.greedy(0, row, 600)
    assert slots.restore(0, checkpoint, PARTIAL)
    assert slots.cut(0, 150), "refused before, granted now that the state ends there"
    assert slots.positions(0)[1] == 149
    assert slots.greedy(0, slots.feed(0, slots.text[150:600], 150), 600) == answer


def test_tiny_models_share_a_beginning_of_a_longer_slot_with_a_partial_state(slots: Slots) -> None:
    slots.feed(0, slots.text[:150])
    checkpoint = slots.save(0, PARTIAL)
    row = slots.feed(0, slots.text[150:600], 150)
    slots.context.share(0, 1, 150)
    assert slots.restore(1, checkpoint, PARTIAL)
    assert slots.positions(1)[1] == 149
    answer = slots.greedy(1, slots.feed(1, slots.text[150:600], 150), 600)
    assert slots.greedy(0, row, 600) == answer


@only(argvalues=["hybrid", "window"])
def test_tiny_models_take_no_state_of_the_other_form(slots: Slots) -> None:
    slots.feed(0, slots.text[:150])
    assert not slots.restore(1, slots.save(0, PARTIAL))
    assert not slots.restore(1, slots.save(0), PARTIAL)
    assert slots.positions(1) == (-1, -1)


@pytest.mark.parametrize("seed", range(3))
def test_tiny_models_any_mix_of_batches_copies_and_states_gives_the_logits_of_the_text_alone(slots: Slots, seed: int) -> None:
    random = np.random.RandomState(seed)
    texts: dict[int, list[int]] = {slot: [] for slot in range(SLOTS - 1)}  # the last slot computes each text alone
    kept: list[tuple[list[int], ctypes.Array[ctypes.c_uint8]]] = []
    for _ in range(40):
        slot, other = (int(number) for number in random.permutation(SLOTS - 1)[:2])
        match random.choice(["batch", "batch", "batch", "copy", "save", "restore", "empty"]):
            case "batch":
                check_batch(slots, texts, random)
            case "copy":
                slots.cut(other, 0)
                slots.context.share(slot, other, len(texts[slot]))
                if slots.kind == "window" and texts[slot]:
                    assert slots.restore(other, slots.save(other, PARTIAL), PARTIAL)
                texts[other] = list(texts[slot])
            case "save" if texts[slot]:
                kept.append((list(texts[slot]), slots.save(slot)))
            case "restore" if kept:
                texts[slot], state = list(kept[-1][0]), kept[-1][1]
                assert slots.restore(slot, state)
            case "empty":
                slots.cut(slot, 0)
                texts[slot] = []


def check_batch(slots: Slots, texts: dict[int, list[int]], random: np.random.RandomState) -> None:
    chunks = []
    for slot in random.permutation(SLOTS - 1)[: random.randint(1, SLOTS)]:
        tokens = [int(token) for token in random.randint(2, slots.model.vocabulary, random.choice([1, 1, 7, 30]))]
        chunks.append(chunk(int(slot), tokens, len(texts[slot])))
        texts[slot].extend(tokens)
    assert slots.context.decode(chunks)
    end, rows = 0, {}
    for part in chunks:
        end += part.count
        rows[part.slot] = slots.context.logits(end - 1).copy()
    for slot, row in rows.items():
        alone = slots.feed(SLOTS - 1, texts[slot])
        slots.cut(SLOTS - 1, 0)
        assert np.abs(row - alone).max() < 0.05
