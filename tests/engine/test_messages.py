from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
from fakes import FACTS, TIMINGS, USAGE

from localfast.core import (
    Accepted,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    Message,
    Sampling,
    SequenceFinished,
    TextDelta,
    TokenLogprob,
)
from localfast.engine.messages import (
    Broken,
    Cancel,
    EngineConfig,
    EngineStats,
    FromEngine,
    Load,
    Ready,
    Step,
    Stop,
    Submit,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from localfast.errors import ContextLengthExceeded, EngineMissing, ModelNotFound, to_wire

CONFIG = EngineConfig(
    model="m",
    path="C:\\models\\größe.gguf",
    gpu_layers=-1,
    context_tokens=4096,
    cells=8192,
    slots=4,
    batch_tokens=512,
    ubatch_tokens=128,
    threads=2,
    kv_type="f16",
    use_mmap=False,
    log_path="engine.log",
)
REQUEST = GenerateRequest(
    model="m",
    messages=(Message("user", "hé 🙂"),),
    prompts=("text", (), (1, 2, 3), ""),
    max_tokens=5,
    sampling=Sampling(temperature=0, logit_bias=((7, -100.0), (8, 0.5)), seed=2**32 - 1),
    stop=("\n", "</s>"),
    n=2,
    logprobs=0,
    echo=True,
    ignore_eos=True,
    request_class="fim",
    ignored=("x",),
)
LOGPROBS = (TokenLogprob("a", b"\xff\x00", -0.5, (("b", b"b", -1.5),)), TokenLogprob("", b"", None))
STATS = EngineStats(1, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize("frame", [Load(CONFIG), Submit(2**40, REQUEST), Submit(1, GenerateRequest(model="")), Cancel(7), Stop()])
def test_frame_to_the_engine_arrives_as_it_was_sent(frame: ToEngine) -> None:
    assert decode_to_engine(encode(frame)) == frame


@pytest.mark.parametrize(
    "frame",
    [
        Ready(dataclasses.replace(FACTS, buffers=(("CUDA0", "weights", 2**40), ("CPU", "kv", 0)))),
        Broken(*to_wire(EngineMissing(reason="no library"))),
        Step.of([(1, Accepted(9)), (2, TextDelta(1, "ü", 2, LOGPROBS)), (2, Finished(USAGE, TIMINGS))], STATS),
        Step.of([]),
    ],
)
def test_frame_from_the_engine_arrives_as_it_was_sent(frame: FromEngine) -> None:
    assert decode_from_engine(encode(frame)) == frame


def test_step_carries_every_kind_of_event() -> None:
    sent: list[tuple[int, Event]] = [
        (1, Accepted(3)),
        (1, TextDelta(0, "a", 1, LOGPROBS)),
        (2, TextDelta(1, "b", 0)),
        (1, SequenceFinished(0, "length")),
        (1, Finished(USAGE, TIMINGS)),
        (3, Failed(ContextLengthExceeded(prompt_tokens=9, context_tokens=4))),
    ]
    assert {type(event) for _, event in sent} == set(get_args(Event))
    step = decode_from_engine(encode(Step.of(sent, STATS)))
    assert isinstance(step, Step) and step.stats == STATS
    *others, (request_id, failed) = step.events()
    assert others == sent[:-1]
    assert request_id == 3 and isinstance(failed, Failed)
    assert isinstance(failed.error, ContextLengthExceeded)
    assert (failed.error.prompt_tokens, failed.error.context_tokens, failed.error.param) == (9, 4, None)


def test_step_keeps_the_order_of_each_request_and_puts_its_last_word_last() -> None:
    """Two steps of work may share a frame; events of one kind stay in order, and kinds follow each other as they may."""
    sent: list[tuple[int, Event]] = [
        (1, Finished(USAGE, TIMINGS)),
        (2, Failed(ModelNotFound(name="x", near=("y", "z")))),
        (2, TextDelta(0, "a", 1)),
        (3, Accepted(1)),
        (2, TextDelta(0, "b", 1)),
        (3, TextDelta(0, "c", 1)),
    ]
    events = Step.of(sent).events()
    assert [event.text for request_id, event in events if request_id == 2 and isinstance(event, TextDelta)] == ["a", "b"]
    assert isinstance([event for request_id, event in events if request_id == 2][-1], Failed)
    assert [type(event) for request_id, event in events if request_id == 3] == [Accepted, TextDelta]
    assert len(events) == len(sent)


def test_steps_do_not_share_their_lists() -> None:
    Step.of([(1, Accepted(1))])
    assert Step.of([]).accepted == [] and Step(None).accepted == []


@pytest.mark.parametrize("frame", [b"", b"\xc1", encode({"type": "Surprise"}), encode(Stop())])
def test_server_refuses_what_is_no_frame_of_the_engine(frame: bytes) -> None:
    with pytest.raises(Exception, match=r"truncated|malformed|Invalid value"):
        decode_from_engine(frame)
