"""From the bytes of tokens to the text a client may see: whole characters, nothing of a stop string, nothing lost.

Owns what one sequence holds back. Everything here is feed and flush: the concatenation of what was given back does not
depend on how the input was cut. Pure; runs in the engine's step loop once per token, so it must stay cheap.
"""

from __future__ import annotations

import codecs
import re


class Utf8Assembler:
    """Bytes in, whole characters out; equals `bytes.decode("utf-8", "replace")` of everything fed.

    An incomplete character is held back (at most three bytes). Bytes that can never become one turn into U+FFFD at once.
    """

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, piece: bytes) -> str:
        if self._pending:
            piece = self._pending + piece
        elif piece.isascii():
            return piece.decode("ascii")
        text, consumed = codecs.utf_8_decode(piece, "replace", False)
        self._pending = piece[consumed:]
        return text

    def flush(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class StopScanner:
    """Text in, the text before the first stop string out. Empty stop strings are ignored.

    The stop string whose last character comes first wins: generation ends as soon as any of them is complete. Of several
    that end at the same character the longest wins, so that no part of it gets out. The winner is in `stopped`; it
    and everything after it are dropped. Held back is only the longest tail that is the beginning of a stop string.
    """

    __slots__ = ("_first", "_held", "_longest", "_stops", "stopped")

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._longest = max(map(len, self._stops), default=0)
        self._first = re.compile("|".join(sorted({re.escape(stop[0]) for stop in self._stops})) or r"(?!)")
        self._held = ""
        self.stopped: str | None = None

    def feed(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + text
        if not self._stops or self._first.search(text) is None:
            return text
        start = self._match(text)
        if start is None:
            start = self._tail(text)
            self._held = text[start:]
        else:
            self._held = ""
        return text[:start]

    def flush(self) -> str:
        """The end of the text: what was held back did not become a stop string after all."""
        held, self._held = self._held, ""
        return held

    def _match(self, text: str) -> int | None:
        """Where the winning stop string begins, after making it `stopped`."""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        end, start = min(found)
        self.stopped = text[start:end]
        return start

    def _tail(self, text: str) -> int:
        """Where the longest tail begins that may grow into a stop string; the length of the text if there is none."""
        position = max(0, len(text) - self._longest + 1)
        while candidate := self._first.search(text, position):
            position = candidate.start()
            tail = text[position:]
            for stop in self._stops:
                if stop.startswith(tail):
                    return position
            position += 1
        return len(text)


class TextAssembler:
    """The bytes of a sequence's tokens in, the text to send out: `Utf8Assembler` followed by `StopScanner`."""

    __slots__ = ("_characters", "_scanner", "stopped")

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._characters = Utf8Assembler()
        self._scanner = StopScanner(stops) if any(stops) else None
        self.stopped: str | None = None
        """The stop string that ended the text; nothing is given back after it."""

    def feed(self, piece: bytes) -> str:
        text = self._characters.feed(piece)
        if self._scanner is None or not text:
            return text
        text = self._scanner.feed(text)
        self.stopped = self._scanner.stopped
        return text

    def flush(self) -> str:
        """The end of the sequence: whatever is still held back, unless a stop string ended it."""
        text = self._characters.flush()
        if self._scanner is None:
            return text
        text = self._scanner.feed(text) + self._scanner.flush()
        self.stopped = self._scanner.stopped
        return text
