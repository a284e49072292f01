from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localfast.engine.text import StopScanner, TextAssembler, Utf8Assembler

MIXED = "aß€😀\n".encode() + b"\xe2\x28\xff\xf0\x9f\x98" + "é".encode()
BYTES = st.lists(st.sampled_from([b"a", b"b", b"c", b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac", b"\xed\xa0", b"\xf4\x90"])).map(
    b"".join
)
STOPS = st.lists(st.text("abcé", min_size=1, max_size=4), max_size=4).map(tuple)


def pieces_of(whole: bytes, cuts: Iterable[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(whole) + 1) for cut in cuts), len(whole)]
    return [whole[a:b] for a, b in pairwise(edges)]


def cut_at_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The rule, spelled out: the first end at which any stop string is complete, the longest of those."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(stops: tuple[str, ...], pieces: Iterable[bytes]) -> tuple[str, str | None]:
    assembler = TextAssembler(stops)
    text = "".join([assembler.feed(piece) for piece in pieces])
    return text + assembler.flush(), assembler.stopped


def test_utf8_assembler_equals_whole_decode_at_every_pair_of_cuts() -> None:
    for cuts in combinations(range(len(MIXED) + 1), 2):
        assembler = Utf8Assembler()
        text = "".join(assembler.feed(piece) for piece in pieces_of(MIXED, cuts)) + assembler.flush()
        assert text == MIXED.decode("utf-8", "replace")


def test_utf8_assembler_gives_a_character_with_its_last_byte() -> None:
    assembler = Utf8Assembler()
    assert [assembler.feed(bytes([byte])) for byte in "€a".encode()] == ["", "", "€", "a"]


def test_utf8_assembler_holds_back_only_what_can_become_a_character() -> None:
    points = [point for point in range(0x80, 0x110000, 16) if not 0xD800 <= point < 0xE000]
    beginnings = {character[:cut] for point in points for character in [chr(point).encode()] for cut in range(1, len(character))}
    for head in product(range(0x70, 0x100, 3), range(0x70, 0x100)):
        for size in (1, 2):
            fed = bytes(head[:size])
            text = Utf8Assembler().feed(fed)
            held = fed[len(text.replace("\ufffd", "?").encode()) :]
            assert not held or held in beginnings


def test_utf8_assembler_flush_replaces_an_incomplete_tail_and_forgets_it() -> None:
    assembler = Utf8Assembler()
    assert assembler.feed(b"a\xf0\x9f") == "a"
    assert (assembler.flush(), assembler.flush(), assembler.feed(b"b")) == ("\ufffd", "", "b")


def test_stop_scanner_without_stops_gives_everything_at_once() -> None:
    scanner = StopScanner(("",))
    assert (scanner.feed("any text"), scanner.flush(), scanner.stopped) == ("any text", "", None)


def test_stop_scanner_holds_back_the_shortest_tail() -> None:
    scanner = StopScanner(("\n\nUser:", "<|end|>"))
    assert scanner.feed("one\n") == "one"
    assert scanner.feed("two\n\nUs") == "\ntwo"
    assert scanner.feed("e <|") == "\n\nUse "
    assert scanner.flush() == "<|"


def test_stop_scanner_falls_back_to_a_shorter_tail() -> None:
    scanner = StopScanner(("aab",))
    assert [scanner.feed(letter) for letter in "aaab"] == ["", "", "a", ""]
    assert (scanner.stopped, scanner.feed("more"), scanner.flush()) == ("aab", "", "")


@pytest.mark.parametrize(
    ("stops", "text", "shown", "stopped"),
    [
        (("b", "a"), "xaby", "x", "a"),
        (("ab", "abc"), "xabc", "x", "ab"),
        (("abcd", "c"), "xabcd", "xab", "c"),
        (("c", "abc"), "xabc", "x", "abc"),
        (("é",), "café", "caf", "é"),
    ],
)
def test_text_assembler_first_completed_stop_wins_then_the_longest(
    stops: tuple[str, ...], text: str, shown: str, stopped: str
) -> None:
    assert cut_at_stop(text, stops) == (shown, stopped)
    whole = text.encode()
    for count in range(4):
        for cuts in combinations(range(len(whole) + 1), count):
            assert run(stops, pieces_of(whole, cuts)) == (shown, stopped)


def test_text_assembler_finds_a_stop_string_made_by_the_last_replacement() -> None:
    assert run(("\ufffd",), [b"a\xe2"]) == ("a", "\ufffd")


@settings(deadline=None)
@given(BYTES, STOPS, st.lists(st.integers(0, 60), max_size=8))
def test_text_assembler_output_does_not_depend_on_the_cuts(whole: bytes, stops: tuple[str, ...], cuts: list[int]) -> None:
    assert run(stops, pieces_of(whole, cuts)) == cut_at_stop(whole.decode("utf-8", "replace"), stops)


@settings(deadline=None)
@given(st.text("abc", max_size=12), STOPS)
def test_text_assembler_never_holds_more_than_a_beginning_of_a_stop(text: str, stops: tuple[str, ...]) -> None:
    assembler, shown = TextAssembler(stops), ""
    for end, letter in enumerate(text, 1):
        shown += assembler.feed(letter.encode())
        if assembler.stopped is not None:
            return
        held = text[len(shown) : end]
        assert text.startswith(shown) and not any(stop in text[:end] for stop in stops)
        tails = [text[start:end] for start in range(end)]
        assert held == next((tail for tail in tails if any(stop.startswith(tail) for stop in stops)), "")
