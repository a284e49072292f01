"""The scheduler against a KV cache that notices every wrong position, stale token and overdrawn cell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakes import FakeLlama
from hypothesis import given, settings
from hypothesis import strategies as st

from localfast.engine.scheduler import Batch, Chunk, Copy, Scheduler, Sequence, Truncate, common_prefix


class Bench:
    """A scheduler with its fake llama; token n of a sequence's answer is 1000 + n."""

    def __init__(
        self, slots: int = 4, cells: int = 200, context: int = 100, batch: int = 16, window: int = 0, max_outputs: int = 8
    ) -> None:
        self.scheduler = Scheduler(
            slots=slots, cells=cells, context_tokens=context, batch_tokens=batch, max_outputs=max_outputs, window=window
        )
        self.llama = FakeLlama(slots, cells, window)
        self.finished: list[Sequence] = []
        self.batches: list[Batch] = []

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
        oldest = dict(enumerate(self.llama.oldest)) if self.scheduler.window else None
        batch = self.scheduler.next_batch(oldest)
        self.batches.append(batch)
        self.llama.edit(batch.edits)
        assert batch.token_count <= self.scheduler.batch_tokens
        assert sum(chunk.outputs for chunk in batch.chunks) <= self.scheduler.max_outputs
        if batch.chunks:
            self.llama.decode(batch)
        for chunk in self.scheduler.advance(batch):
            assert chunk.outputs >= 1, "a sequence whose next token is wanted needs logits"
            self._next_token(chunk.sequence)
        return batch

    def _next_token(self, sequence: Sequence) -> None:
        sequence.score_prompt = False
        if len(sequence.tokens) >= sequence.limit or self.scheduler.append(
            sequence, 1000 + len(sequence.tokens) - sequence.prompt_tokens
        ):
            self.scheduler.finish(sequence)
            self.finished.append(sequence)

    def run(self, until: Callable[[], bool] | None = None, most: int = 2000) -> None:
        for _ in range(most):
            if until() if until else not self.scheduler.running and not self.scheduler.waiting:
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
    assert any(isinstance(edit, Copy) for batch in bench.batches for edit in batch.edits)


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
    assert bench.scheduler.preemptions > 0
    assert bench.finished[0] is sequences[0], "the oldest never gives way"
    for sequence in sequences:
        assert sequence.tokens[3:] == [1000 + number for number in range(40)]


def test_scheduler_idle_prefixes_go_before_a_running_sequence_does() -> None:
    bench = Bench(slots=2, cells=60, context=60)
    bench.add(list(range(30)), generate=5)
    bench.run()
    bench.add(list(range(500, 540)), generate=15)
    bench.run()
    assert bench.scheduler.preemptions == 0
    assert any(edit == Truncate(0, 0) for batch in bench.batches for edit in batch.edits)


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


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(prompts, st.integers(0, 30), st.integers(1, 3), st.booleans()), min_size=1, max_size=12),
    cancels=st.sets(st.integers(1, 12)),
    slots=st.integers(1, 4),
    cells=st.integers(72, 150),
    window=st.sampled_from([0, 0, 1, 8]),
    pause=st.integers(0, 6),
)
def test_scheduler_any_load_every_sequence_ends_with_its_own_tokens(
    requests: list[tuple[list[int], int, int, bool]], cancels: set[int], slots: int, cells: int, window: int, pause: int
) -> None:
    bench = Bench(slots=slots, cells=cells, context=72, window=window)
    alive = []
    for number, (prompt, generate, choices, scored) in enumerate(requests, 1):
        for _ in range(choices):
            sequence = bench.add(prompt, generate, request=number, score_prompt=scored)
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
    assert bench.scheduler.used_cells <= cells


@pytest.mark.parametrize(
    ("left", "right", "length"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1), ([4], [5], 0)]
)
def test_common_prefix_counts_equal_beginnings(left: list[int], right: list[int], length: int) -> None:
    assert common_prefix(left, right) == length
