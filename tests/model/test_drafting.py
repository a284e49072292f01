"""A small model's guesses: the very tokens that it would choose itself, whatever happened to the slot before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from real_engine import ask, running, starter_config, text_of, with_engine
from tiny_models import EXACT_KV_TYPE, Kind, tiny_model

from localfast.engine.client import ProcessEngine
from localfast.engine.drafting import Drafter
from localfast.engine.llama import Context, Model, NativeLog
from localfast.engine.messages import EngineConfig
from localfast.engine.sequence import Chunk, Sequence
from localfast.errors import LoadFailed

pytestmark = pytest.mark.model

PROMPT = [5, 9, 17, 33, 65, 12, 40, 7, 21, 90, 14, 28]


def config_for(kind: Kind, draft: Kind, folder: Path) -> EngineConfig:
    return replace(
        starter_config(tiny_model(kind, folder), folder),
        draft_path=str(tiny_model(draft, folder)),
        kv_type=EXACT_KV_TYPE,
        context_tokens=512,
        cells=1024,
    )


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return config_for("full", "full", tmp_path)


@pytest.fixture
def target(config: EngineConfig) -> Iterator[Model]:
    model = Model(config, NativeLog())
    yield model
    model.close()


@pytest.fixture
def drafter(config: EngineConfig, target: Model) -> Iterator[Drafter]:
    drafter = Drafter(target, config)
    yield drafter
    drafter.close()


def sequence(slot: int, tokens: list[int]) -> Sequence:
    return Sequence(request_id=slot, index=0, tokens=list(tokens), prompt_tokens=len(tokens), limit=500, slot=slot)


def continuation(model: Model, config: EngineConfig, tokens: list[int], count: int) -> list[int]:
    """What the model itself says, one token at a time."""
    context = Context(model, config, config.slots)
    grown = list(tokens)
    whole = sequence(0, grown)
    done = 0
    while len(grown) < len(tokens) + count:
        whole.tokens = grown
        assert context.decode([Chunk(whole, 0, done, len(grown) - done, 1)])
        rows = len(grown) - done
        done = len(grown)
        grown.append(int(context.logits(rows - 1).argmax()))
    context.close()
    return grown[len(tokens) :]


def guesses(drafter: Drafter, wanted: dict[Sequence, int]) -> list[list[int]]:
    """Until the small model has caught up with all."""
    for one in wanted:
        one.draft = []
    waiting = dict(wanted)
    while waiting:
        for one in drafter.draft(waiting, 2):
            del waiting[one]
    return [one.draft for one in wanted]


@pytest.fixture(autouse=True)
def always_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights are never sure of anything."""
    monkeypatch.setattr("localfast.engine.drafting.SURE", 0.0)


def test_drafter_guesses_what_the_small_model_itself_would_say(drafter: Drafter, target: Model, config: EngineConfig) -> None:
    other = [token + 1 for token in PROMPT] * 9
    drafts = guesses(drafter, {sequence(0, PROMPT): 6, sequence(2, other): 3})
    assert drafts[0] == continuation(target, config, PROMPT, 6)
    assert drafts[1] == continuation(target, config, other, 3)


def test_drafter_goes_on_after_wrong_guesses_and_in_another_slot(drafter: Drafter, target: Model, config: EngineConfig) -> None:
    one = sequence(1, PROMPT)
    first = guesses(drafter, {one: 5})[0]
    one.tokens += [*first[:2], first[2] ^ 1]  # two were right, then came another token
    assert guesses(drafter, {one: 4})[0] == continuation(target, config, one.tokens, 4)
    one.slot = 3  # it gave way and got another slot, and its old one went to somebody else
    somebody = sequence(1, PROMPT[:6] * 3)
    drafts = guesses(drafter, {one: 4, somebody: 4})
    assert drafts[0] == continuation(target, config, one.tokens, 4)
    assert drafts[1] == continuation(target, config, somebody.tokens, 4)


def test_drafter_without_room_forgets_and_goes_on(target: Model, config: EngineConfig) -> None:
    drafter = Drafter(target, replace(config, cells=256, context_tokens=256))
    fillers = {sequence(slot, PROMPT * 14): 1 for slot in range(3)}
    for _ in range(12):
        drafter.draft(fillers, 2)
    last = sequence(3, PROMPT)
    assert guesses(drafter, {last: 4})[0] == continuation(target, config, PROMPT, 4)
    drafter.close()


@pytest.mark.parametrize(("kind", "words"), [("recurrent", "take back"), ("hybrid", "take back")])
def test_drafter_refuses_a_model_that_cannot_take_back(kind: Kind, words: str, target: Model, tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=words):
        Drafter(target, config_for("full", kind, tmp_path))


def test_engine_refuses_a_draft_model_of_another_vocabulary(starter_path: Path, tmp_path: Path) -> None:
    config = replace(starter_config(starter_path, tmp_path), draft_path=str(tiny_model("full", tmp_path)))

    async def run() -> None:
        with pytest.raises(LoadFailed, match="vocabulary has"):
            async with running(config):
                pass

    asyncio.run(run())


def test_engine_text_is_the_same_with_a_draft_model(starter_path: Path, tmp_path: Path) -> None:
    plain = replace(starter_config(starter_path, tmp_path), kv_type=EXACT_KV_TYPE)
    requests = [ask(f"<|im_start|>user\n{what}<|im_end|>\n<|im_start|>assistant\n", 60) for what in ("Hello!", "Count to ten.")]
    texts: dict[str, list[str]] = {}

    def test_with(draft: str) -> None:
        async def test(engine: ProcessEngine) -> None:
            texts[draft] = [await text_of(engine, request) for request in requests]
            if draft:  # at least once, before it is known what a guess costs
                assert engine.stats.drafted_tokens > 0

        with_engine(replace(plain, draft_path=draft), test)

    test_with("")
    test_with(str(starter_path))
    assert texts[""] == texts[str(starter_path)]
