"""The scheduler against a KV cache that notices every wrong position, stale token and overdrawn cell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakes import FakeLlama
from hypothesis import given, settings
from hypothesis import strategies as st

from localfast.core import RequestClass
from localfast.engine.prefixes import common_prefix
from localfast.engine.scheduler import Scheduler
from localfast.engine.sequence import Batch, Chunk, Copy, Edit, Restore, Sequence, Truncate
from localfast.engine.states import RamStates


class Bench:
    """A scheduler with its fake llama; token n of a sequence's answer is 1000 + n. `states` is RAM for saved states, in bytes."""

    def __init__(
        self,
        slots: int = 4,
        cells: int = 200,
        context: int = 100,
        batch: int = 16,
        window: int = 0,
        max_outputs: int = 8,
        states: int = 0,
        prompt_budget: int | None = None,
    ) -> None:
        self.states = RamStates(states, window == 0)
        self.scheduler = Scheduler(
            slots=slots,
            cells=cells,
            context_tokens=context,
            batch_tokens=batch,
            max_outputs=max_outputs,
            window=window,
            states=self.states,
        )
        self.llama = FakeLlama(slots, cells, window)
        self.prompt_budget = prompt_budget
        self.finished: list[Sequence] = []
        self.batches: list[Batch] = []
        self.edits: list[Edit] = []
        self.guess: Callable[[Sequence], list[int]] = lambda sequence: []

    def add(self, prompt: list[int], generate: int = 3, request: int = 0, **options: object) -> Sequence:
        sequence = Sequence(
            request_id=request or id(prompt),
            index=0,
            tokens=list(prompt),
            prompt_tokens=len(prompt),
            limit=self.scheduler.limit(len(prompt), generate),
            **options,  # type: ignore[arg-type]
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Batch:
        scheduler = self.scheduler
        edits = scheduler.place(dict(enumerate(self.llama.oldest)) if scheduler.window else None)
        self.edits += edits
        self.llama.edit(edits, scheduler)
        for sequence in scheduler.running:
            if sequence.behind == 1:
                sequence.draft = self.guess(sequence)
        decoders = sum(sequence.behind == 1 for sequence in scheduler.running)
        batch = scheduler.next_batch(self.prompt_budget)
        self.batches.append(batch)
        assert batch.token_count <= scheduler.batch_tokens
        assert sum(chunk.outputs for chunk in batch.chunks) <= scheduler.max_outputs
        assert batch.decoders == decoders, "every decoder is in every batch"
        if self.prompt_budget is not None:
            assert sum(chunk.count for chunk in batch.chunks[decoders:]) <= self.prompt_budget
        if batch.chunks:
            self.llama.decode(batch)
        for chunk in scheduler.advance(batch):
            assert chunk.outputs >= 1, "a sequence whose next token is wanted needs logits"
            self._next_tokens(chunk.sequence)
        assert scheduler.used_cells == self.llama.used - self._given_back(), "cells are counted exactly"
        return batch

    def _given_back(self) -> int:
        """Cells that the scheduler has let go of and the engine hears of with the next step's edits."""
        copy = FakeLlama(len(self.llama.slots), self.llama.cells, self.llama.window)
        copy.slots = [list(slot) for slot in self.llama.slots]
        for edit in self.scheduler.placement._edits:
            assert isinstance(edit, Truncate)
            del copy.slots[edit.slot][edit.length :]
        return self.llama.used - copy.used

    def _next_tokens(self, sequence: Sequence) -> None:
        sequence.score_prompt = False
        accepted = 0
        reason = None
        while len(sequence.tokens) < sequence.limit:
            token = 1000 + len(sequence.tokens) - sequence.prompt_tokens
            reason = self.scheduler.append(sequence, token)
            if accepted == len(sequence.draft) or token != sequence.draft[accepted]:
                break
            accepted += 1
        self.scheduler.accept(sequence, accepted)
        if reason or len(sequence.tokens) >= sequence.limit:
            self.scheduler.finish(sequence)
            self.finished.append(sequence)

    def run(self, until: Callable[[], bool] | None = None, most: int = 3000) -> None:
        for _ in range(most):
            if until() if until else not self.scheduler.running and not len(self.scheduler.waiting):
                return
            self.step()
        raise AssertionError("the scheduler makes no progress")


def chunk_of(batch: Batch, sequence: Sequence) -> Chunk | None:
    return next((chunk for chunk in batch.chunks if chunk.sequence is sequence), None)


def test_scheduler_two_sequences_share_every_batch() -> None:
    bench = Bench()
    bench.add([1, 2, 3], generate=5)
    bench.add([7, 8], generate=5)
    bench.run()
    assert len(bench.finished) == 2
    assert len(bench.llama.calls) == 5, "five tokens each, five calls together"


def test_scheduler_decoders_go_before_prompts() -> None:
    bench = Bench(batch=8)
    talking = bench.add([1, 2], generate=50)
    bench.run(until=lambda: len(talking.tokens) > 3)
    bench.add(list(range(100, 160)))
    for _ in range(5):
        batch = bench.step()
        assert batch.chunks[0].sequence is talking
        assert batch.token_count == 8, "what decoders leave is used"


def test_scheduler_prompts_share_what_is_left() -> None:
    bench = Bench(batch=16)
    long = bench.add(list(range(100, 180)))
    short = bench.add(list(range(300, 308)))
    batch = bench.step()
    assert chunk_of(batch, long) and chunk_of(batch, short)
    assert len(short.tokens) == 9, "the short prompt was done in one step, beside the long one"


def test_scheduler_prefix_of_an_idle_slot_is_reused() -> None:
    bench = Bench()
    first = bench.add([1, 2, 3, 4, 5], generate=3)
    bench.run()
    follow_up = bench.add([*first.tokens[:-1], 9, 9])
    bench.run()
    assert follow_up.cached == 7
    again = bench.add([1, 2, 3, 99])
    bench.run()
    assert again.cached == 3


def test_scheduler_last_prompt_token_is_always_computed() -> None:
    bench = Bench()
    bench.add([1, 2, 3, 4])
    bench.run()
    same = bench.add([1, 2, 3, 4])
    bench.run()
    assert same.cached == 3


def test_scheduler_windowed_prefix_is_reused_only_while_its_past_is_there() -> None:
    bench = Bench(window=8)
    first = bench.add(list(range(40)), generate=10)
    bench.run()
    grown = bench.add([*first.tokens[:-1], 77], generate=2)
    bench.run()
    assert grown.cached == 49, "going on where it ended is safe"
    cut = bench.add(list(range(20)), generate=2)
    bench.run()
    assert cut.cached == 0, "what position 20 looks back on is gone"


def test_scheduler_choices_of_one_prompt_compute_it_once() -> None:
    bench = Bench()
    bench.add(list(range(50)), generate=4, request=1)
    others = [bench.add(list(range(50)), generate=4, request=1) for _ in range(2)]
    bench.run()
    assert sum(bench.llama.calls) < 50 + 3 * 6
    assert [other.cached for other in others] == [49, 49]
    assert any(isinstance(edit, Copy) for edit in bench.edits)


def test_scheduler_prompts_with_a_common_beginning_compute_it_once_while_it_runs() -> None:
    bench = Bench(slots=4, cells=400, context=100)
    common = list(range(60))
    sequences = [bench.add([*common, 100 + number, 7], generate=4) for number in range(4)]
    bench.run()
    assert [sequence.cached for sequence in sequences] == [0, 60, 60, 60]
    assert sum(bench.llama.calls) == 62 + 3 * 2 + 4 * 3
    late = bench.add([*common, 9], generate=60)
    bench.run(until=lambda: late.prompt_computed)
    guest = bench.add([*late.tokens[:50], 8])
    bench.step()
    assert guest.cached == 50, "what a running sequence holds is shared, not only what an idle slot does"
    bench.run()


def test_scheduler_short_prompt_does_not_wait_for_a_long_one_with_the_same_first_words() -> None:
    bench = Bench(batch=16, context=100)
    long = bench.add(list(range(90)))
    bench.add([*range(4), 200, 201])
    first = bench.step()
    assert len(first.chunks) == 2, "four tokens saved are not worth a step of sixteen"
    bench.run()
    assert long in bench.finished


def test_scheduler_prompt_whose_source_is_cancelled_goes_on_with_what_there_is() -> None:
    bench = Bench()
    bench.add(list(range(80)), request=1)
    heir = bench.add([*range(78), 500], request=2)
    bench.step()
    assert heir.slot is None
    bench.scheduler.cancel(1)
    bench.run()
    assert heir in bench.finished and heir.cached == 16


def test_scheduler_windowed_prompts_share_only_while_the_past_is_there() -> None:
    bench = Bench(slots=3, cells=400, window=30)
    sequences = [bench.add([*range(60), 100 + number], generate=3) for number in range(3)]
    bench.run()
    assert len(bench.finished) == 3 and all(sequence.cached in (0, 60) for sequence in sequences)


def test_scheduler_scored_prompt_yields_logits_for_every_token() -> None:
    bench = Bench(max_outputs=6)
    bench.add(list(range(20)))
    bench.run()
    scored = bench.add(list(range(20)), score_prompt=True)
    rows = 0
    while not scored.prompt_computed:
        rows += sum(chunk.outputs for chunk in bench.step().chunks)
    assert rows == 20
    assert scored.cached == 0


def test_scheduler_cancel_frees_the_slot_at_once_wherever_the_sequence_is() -> None:
    bench = Bench(slots=1, batch=4)
    in_prefill = bench.add(list(range(50)), request=1)
    queued = bench.add([5, 6, 7], request=2)
    last = bench.add([8, 9], request=3)
    bench.step()
    bench.scheduler.cancel(1)
    bench.scheduler.cancel(2)
    batch = bench.step()
    assert [chunk.sequence for chunk in batch.chunks] == [last]
    bench.run()
    assert bench.finished == [last]
    assert in_prefill.slot is None and queued.slot is None


def test_scheduler_cancelled_prefix_stays_reusable() -> None:
    bench = Bench(batch=10)
    bench.add(list(range(60)), request=1)
    bench.step()
    bench.scheduler.cancel(1)
    again = bench.add(list(range(60)))
    bench.run()
    assert again.cached == 10


def test_scheduler_out_of_cells_the_youngest_gives_way_and_loses_nothing() -> None:
    bench = Bench(slots=3, cells=60, context=60, batch=8)
    sequences = [bench.add([10 * number, 1, 2], generate=40) for number in range(3)]
    bench.run()
    assert bench.scheduler.parked > 0
    assert bench.finished[0] is sequences[0], "the oldest never gives way"
    for sequence in sequences:
        assert sequence.tokens[3:] == [1000 + number for number in range(40)]


def test_scheduler_idle_prefixes_go_before_a_running_sequence_does() -> None:
    bench = Bench(slots=2, cells=60, context=60)
    bench.add(list(range(30)), generate=5)
    bench.run()
    bench.add(list(range(500, 540)), generate=15)
    bench.run()
    assert bench.scheduler.parked == 0
    assert Truncate(0, 0) in bench.edits


def test_scheduler_nobody_overtakes_the_head_of_the_queue() -> None:
    bench = Bench(slots=3, cells=100, context=90)
    bench.add(list(range(40)), generate=20)
    bench.step()
    large = bench.add(list(range(200, 280)), generate=2)
    small = bench.add([7, 7], generate=2)
    for _ in range(10):
        bench.step()
        assert large.slot is None and small.slot is None, "there is room for the small one, and it is not its turn"
    bench.run()
    assert large in bench.finished and small in bench.finished


def test_scheduler_no_room_in_the_engine_sends_the_youngest_back() -> None:
    bench = Bench()
    older = bench.add([1, 2], generate=30)
    younger = bench.add([3, 4], generate=30)
    bench.step()
    assert bench.scheduler.no_room()
    assert younger.slot is None and older.slot is not None
    assert not bench.scheduler.no_room(), "a sequence that is alone has nobody to send away"
    bench.run()
    assert len(bench.finished) == 2


def test_scheduler_nothing_to_generate_still_computes_the_prompt() -> None:
    bench = Bench()
    empty = bench.add([1, 2, 3], generate=0)
    bench.run()
    assert empty in bench.finished and len(empty.tokens) == 3


# --- saved states -------------------------------------------------------------------------------------------------------------


def test_scheduler_parked_sequences_go_on_without_computing_again() -> None:
    bench = Bench(slots=3, cells=60, context=60, batch=8, states=10_000)
    sequences = [bench.add([10 * number, 1, 2], generate=40) for number in range(3)]
    bench.run()
    assert bench.scheduler.parked > 0
    assert sum(bench.llama.calls) == 3 * (3 + 40 - 1), "every token was computed once"
    for sequence in sequences:
        assert sequence.tokens[3:] == [1000 + number for number in range(40)]
    assert bench.states.used_bytes == 0 or bench.states.parked_count == 0, "nothing parked is left behind"


def test_scheduler_conversation_that_lost_its_slot_comes_back_from_ram() -> None:
    bench = Bench(slots=1, cells=200, context=200, states=10_000)
    first = bench.add(list(range(100)), generate=5)
    bench.run()
    bench.add(list(range(500, 600)))
    bench.run()
    again = bench.add([*first.tokens, 7])
    bench.run()
    assert again.cached == 104
    assert any(isinstance(edit, Restore) for edit in bench.edits)


def test_scheduler_state_that_does_not_come_back_is_computed_again() -> None:
    bench = Bench(slots=1, cells=200, context=200, states=10_000)
    first = bench.add(list(range(100)), generate=5)
    bench.run()
    bench.add(list(range(500, 600)))
    bench.run()
    bench.llama.break_states = True
    again = bench.add([*first.tokens, 7])
    bench.run()
    assert again.cached == 0 and again in bench.finished


@pytest.mark.parametrize("window", [1, 30])
def test_scheduler_prompt_that_cannot_be_cut_goes_on_from_its_checkpoint(window: int) -> None:
    bench = Bench(slots=2, cells=600, context=300, window=window, states=10_000)
    bench.add(list(range(200)), generate=60)
    bench.run()
    again = bench.add(list(range(200)), generate=2)
    bench.run()
    assert again.cached == 196, "the state four tokens before the prompt's end was kept"


def test_scheduler_recurrent_prompts_with_a_common_beginning_compute_it_once() -> None:
    bench = Bench(slots=3, cells=900, context=300, window=1, states=10_000)
    sequences = [bench.add([*range(150), 500 + number, 7], generate=3) for number in range(3)]
    bench.run()
    assert [sequence.cached for sequence in sequences] == [0, 150, 150]


def test_scheduler_branch_of_a_conversation_leaves_the_other_one_in_its_slot() -> None:
    bench = Bench(slots=2, cells=400, context=200)
    first = bench.add(list(range(150)), generate=5)
    bench.run()
    bench.add([*range(50), 900, 901])
    bench.run()
    again = bench.add([*first.tokens, 3])
    bench.run()
    assert again.cached == 154


# --- why a prompt missed --------------------------------------------------------------------------------------------------------


def test_scheduler_explains_every_miss() -> None:
    bench = Bench(slots=2, cells=300, context=150)

    def miss(prompt: list[int], **options: object) -> tuple[str, int, int | None] | None:
        sequence = bench.add(prompt, generate=1, **options)
        bench.run()
        return sequence.miss and (sequence.miss.reason, sequence.miss.position, sequence.miss.cached_token)

    assert miss(list(range(1, 100))) == ("new", 0, None)
    assert miss(list(range(1, 100))) is None
    assert miss([*range(1, 100), 7, 8]) == ("longer", 99, None)
    assert miss([*range(1, 50), 999, 5]) == ("differs", 49, 50)
    assert miss(list(range(1, 100)), score_prompt=True) == ("scored", 0, None)
    for start in (1000, 2000, 3000):
        bench.add(list(range(start, start + 100)))
        bench.run()
    assert miss(list(range(1, 100))) == ("forgotten", 0, None)


def test_scheduler_windowed_miss_says_that_the_past_is_gone() -> None:
    bench = Bench(window=8)
    bench.add(list(range(90)), generate=5)
    bench.run()
    cut = bench.add(list(range(50)), generate=1)
    bench.run()
    assert cut.miss is not None and cut.miss.reason == "window"


# --- classes --------------------------------------------------------------------------------------------------------------------


def test_scheduler_higher_class_takes_the_slot_of_a_lower_one_which_goes_on_later() -> None:
    bench = Bench(slots=1, cells=200, context=100, states=10_000)
    job = bench.add([1, 2, 3], generate=60, request_class="batch")
    bench.run(until=lambda: len(job.tokens) > 25)
    quick = bench.add([7, 8], generate=4, request_class="fim")
    bench.run(until=lambda: quick in bench.finished, most=6)
    assert job not in bench.finished
    bench.run()
    assert job.tokens[3:] == [1000 + number for number in range(60)]


def test_scheduler_equal_class_waits_for_its_turn() -> None:
    bench = Bench(slots=1)
    first = bench.add([1, 2, 3], generate=40)
    bench.run(until=lambda: len(first.tokens) > 30)
    bench.add([7, 8])
    bench.run(until=lambda: first in bench.finished, most=20)
    assert bench.scheduler.parked == 0


def test_scheduler_lowest_class_progresses_under_a_stream_of_higher_ones() -> None:
    bench = Bench(slots=1, cells=200, context=100, states=10_000)
    job = bench.add([1, 2, 3], generate=60, request_class="batch")
    for _ in range(600):
        while len(bench.scheduler.waiting) < 3:
            bench.add([7, 8, len(bench.batches)], generate=6, request_class="interactive")
        bench.step()
        if job in bench.finished:
            return
    raise AssertionError("the batch job starved")


def test_scheduler_nobody_overtakes_for_ever_what_needs_many_cells() -> None:
    bench = Bench(slots=4, cells=120, context=110)
    bench.add([5, 6], generate=30)
    bench.step()
    large = bench.add(list(range(200, 300)), generate=2, request_class="batch")
    for _ in range(400):
        while len(bench.scheduler.waiting) < 3:
            bench.add([7, 8, len(bench.batches)], generate=8, request_class="chat")
        bench.step()
        if large in bench.finished:
            return
    raise AssertionError("a large prompt of the lowest class starved")


# --- drafts ---------------------------------------------------------------------------------------------------------------------


def right(sequence: Sequence) -> list[int]:
    start = 1000 + len(sequence.tokens) - sequence.prompt_tokens
    return list(range(start, start + 4))


def test_scheduler_right_guesses_save_steps_and_change_nothing() -> None:
    bench = Bench()
    bench.guess = right
    sequence = bench.add([1, 2, 3], generate=20)
    bench.run()
    assert sequence.tokens[3:] == [1000 + number for number in range(20)]
    assert len(bench.llama.calls) == 5, "the prompt, then four times five tokens less one"


def test_scheduler_wrong_guesses_change_nothing_and_give_their_cells_back() -> None:
    bench = Bench()
    bench.guess = lambda sequence: [*right(sequence)[:1], 5, 5]
    sequences = [bench.add([number, 2, 3], generate=20) for number in range(3)]
    bench.run()
    for sequence in sequences:
        assert sequence.tokens[3:] == [1000 + number for number in range(20)]


# --- any load -------------------------------------------------------------------------------------------------------------------

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=40)
classes: st.SearchStrategy[RequestClass] = st.sampled_from(["interactive", "fim", "chat", "batch"])
requests_ = st.lists(st.tuples(prompts, st.integers(0, 30), st.integers(1, 3), st.booleans(), classes), min_size=1, max_size=12)


@settings(max_examples=400, deadline=None)
@given(
    requests=requests_,
    cancels=st.sets(st.integers(1, 12)),
    slots=st.integers(1, 4),
    cells=st.integers(72, 150),
    window=st.sampled_from([0, 0, 1, 8]),
    pause=st.integers(0, 6),
    states=st.sampled_from([0, 300, 5000]),
    budget=st.one_of(st.none(), st.integers(1, 20)),
    guesses=st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=5),
    breaks=st.booleans(),
)
def test_scheduler_any_load_every_sequence_ends_with_its_own_tokens(
    requests: list[tuple[list[int], int, int, bool, RequestClass]],
    cancels: set[int],
    slots: int,
    cells: int,
    window: int,
    pause: int,
    states: int,
    budget: int | None,
    guesses: list[tuple[int, bool]],
    breaks: bool,
) -> None:
    """No sequence starves, no batch exceeds its budget (see Bench.step), no cell is counted wrongly or leaks."""
    bench = Bench(slots=slots, cells=cells, context=72, window=window, states=states, prompt_budget=budget)
    bench.llama.break_states = breaks

    def guess(sequence: Sequence) -> list[int]:
        count, good = guesses[len(sequence.tokens) % len(guesses)]
        return right(sequence)[:count] if good else [*right(sequence)[: count // 2], *([1] * (count - count // 2))]

    if window != 1:
        bench.guess = guess
    alive = []
    for number, (prompt, generate, choices, scored, request_class) in enumerate(requests, 1):
        for _ in range(choices):
            sequence = bench.add(prompt, generate, request=number, score_prompt=scored, request_class=request_class)
            if number not in cancels:
                alive.append(sequence)
        for _ in range(pause):
            bench.step()
    for number in cancels:
        bench.scheduler.cancel(number)
    bench.run()
    assert all(sequence in bench.finished for sequence in alive)
    for sequence in bench.finished:
        generated = sequence.tokens[sequence.prompt_tokens :]
        assert generated == [1000 + number for number in range(len(generated))]
        assert len(sequence.tokens) == sequence.limit
    assert bench.states.parked_count == 0
    bench.step()
    while bench.scheduler.placement.evict_oldest():
        pass
    bench.step()
    assert bench.llama.used == bench.scheduler.used_cells == 0, "with all slots emptied no cell is left"


@pytest.mark.parametrize(
    ("left", "right", "length"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1), ([4], [5], 0)]
)
def test_common_prefix_counts_equal_beginnings(left: list[int], right: list[int], length: int) -> None:
    assert common_prefix(left, right) == length
