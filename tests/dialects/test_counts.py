"""What an answer says about cache and speculation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localfast.core import Accepted, CacheMiss, Finished, SequenceFinished, TextDelta, Timings, Usage
from localfast.dialects import Head, openai, simple

HEAD = Head("1", 2, "m")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream_options": {"include_usage": True}}


def events(usage: Usage, miss: CacheMiss | None) -> list[Any]:
    return [Accepted(9), TextDelta(0, "a", 1), SequenceFinished(0, "stop"), Finished(usage, Timings(), miss)]


def both(usage: Usage, miss: CacheMiss | None) -> list[dict[str, Any]]:
    """The counts of a whole answer and of a stream."""
    call = openai.parse_chat(CHAT)
    encoder = call.encoder(HEAD)
    frames = b"".join(encoder.feed(event) for event in events(usage, miss)).split(b"\n\n")
    return [call.fold(HEAD, events(usage, miss)), json.loads(frames[-3].removeprefix(b"data: "))]


def test_counts_drafts_are_named_as_openai_and_llama_cpp_name_them() -> None:
    for answer in both(Usage(9, 8, 4, drafted_tokens=7, accepted_tokens=5), None):
        assert answer["usage"]["completion_tokens_details"] == {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}
        assert (answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"]) == (7, 5)
        assert "cache_miss" not in answer


def test_counts_without_drafts_say_nothing_of_them() -> None:
    for answer in both(Usage(9, 8, 4), None):
        assert "completion_tokens_details" not in answer["usage"] and "draft_n" not in answer["timings"]


@pytest.mark.parametrize(
    ("miss", "entry"),
    [
        (
            CacheMiss("differs", 4, " red", " blue"),
            {"reason": "differs", "position": 4, "cached_text": " red", "prompt_text": " blue"},
        ),
        (CacheMiss("new", 0), {"reason": "new", "position": 0}),
    ],
)
def test_counts_say_where_the_cache_missed(miss: CacheMiss, entry: dict[str, Any]) -> None:
    for answer in both(Usage(9, 8, 4), miss):
        assert answer["cache_miss"] == entry
    call = simple.parse({"prompt": "Hi"}, stream=False)
    assert call.fold(HEAD, events(Usage(9, 8, 4), miss))["cache_miss"] == entry
