"""How much prompt a step may hold, from what steps cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localfast.engine.pace import Pace


def learned(plain_s: float, token_s: float, *, stall_s: float = 0.25, decoders: int = 4) -> Pace:
    pace = Pace(stall_s, 8, 512)
    for _ in range(20):
        pace.observe(decoders, 0, plain_s)
        further = pace.prompt_tokens(decoders)
        pace.observe(decoders, further, plain_s + further * token_s)
    return pace


@given(plain_s=st.floats(0.001, 0.2), token_s=st.floats(1e-5, 0.02))
def test_pace_step_takes_no_longer_than_a_stream_may_wait(plain_s: float, token_s: float) -> None:
    tokens = learned(plain_s, token_s).prompt_tokens(4)
    assert tokens in (8, 512) or plain_s + tokens * token_s <= 0.25 * 1.01
    assert tokens in (8, 512) or plain_s + (tokens + 2) * token_s >= 0.25 * 0.98, "time that nobody minds is used"


def test_pace_slow_machine_still_gets_on() -> None:
    assert learned(0.4, 0.1).prompt_tokens(4) == 8


def test_pace_fast_machine_fills_its_batch() -> None:
    assert learned(0.004, 1e-5).prompt_tokens(4) == 512


def test_pace_more_streams_leave_less_for_prompts() -> None:
    pace = learned(0.04, 0.005)
    assert pace.prompt_tokens(16) < pace.prompt_tokens(4) < pace.prompt_tokens(0)


def test_pace_deeper_prompts_make_smaller_steps() -> None:
    pace = learned(0.04, 0.005)
    before = pace.prompt_tokens(4)
    pace.observe(4, before, 0.04 + before * 0.01)
    assert pace.prompt_tokens(4) < before


def test_pace_first_step_is_a_small_one() -> None:
    assert Pace(0.25, 8, 512).prompt_tokens(0) == 32


def test_pace_draft_costs_what_a_further_token_costs_beside_a_stream_s_own() -> None:
    assert abs(learned(0.04, 0.005).draft_cost(4) - 0.5) < 0.01
    assert learned(0.04, 0.005).draft_cost(8) < 0.6
    assert Pace(0.25, 8, 512).draft_cost(1) == 1, "nothing is guessed before the price is known"
