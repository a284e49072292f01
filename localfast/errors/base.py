"""The root of the error tree, and how an error crosses a pipe: as its code and facts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(eq=False)
class LocalfastError(Exception):
    """Base of all. To survive any of them: `except LocalfastError as error: print(error, error.hint)`."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    retry_after_s: ClassVar[int | None] = None
    sentence: ClassVar[str] = ""
    """What happened; facts in braces."""
    next_step: ClassVar[str] = ""
    """What to do now; facts in braces."""
    _by_code: ClassVar[dict[str, type[LocalfastError]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        LocalfastError._by_code[cls.code] = cls

    def __str__(self) -> str:
        return self.sentence.format(**self.facts)

    @property
    def hint(self) -> str:
        """The next step, or an empty string when there is none."""
        return self.next_step.format(**self.facts)

    @property
    def facts(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def to_wire(error: LocalfastError) -> tuple[str, dict[str, Any]]:
    return error.code, error.facts


def from_wire(code: str, facts: dict[str, Any]) -> LocalfastError:
    """Rebuild an error of the engine process; lists stand where it had tuples."""
    return LocalfastError._by_code[code](**facts)
