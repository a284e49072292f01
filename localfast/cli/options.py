"""Turns rows of the settings table into command line flags, so that no flag is written twice."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from localfast.settings import OPTIONS, flag, load_settings

Command = Callable[..., Any]


def with_settings(*groups: str) -> Callable[[Command], Command]:
    """Give a command a flag for every setting of `groups` (and `--home`, `--offline`), and call it with `settings=`."""

    def decorate(command: Command) -> Command:
        rows = [row for row in OPTIONS if row.metadata["group"] in groups or row.name in ("home", "offline")]

        @functools.wraps(command)
        def configured(**arguments: Any) -> Any:
            flags = {row.name: arguments.pop(row.name) for row in rows}
            return command(settings=load_settings(flags), **arguments)

        wrapped: Command = configured
        for row in reversed(rows):
            wrapped = _option(row)(wrapped)
        return wrapped

    return decorate


def _option(row: Any) -> Callable[[Command], Command]:
    kinds: dict[str, Any] = {"int": click.INT, "float": click.FLOAT, "str": click.STRING, "tuple[str, ...]": click.STRING}
    default = row.default if row.default not in ("", ()) else None
    text = row.metadata["help"] + (f"  [default: {default}]" if default is not None and row.type != "bool" else "")
    if row.type == "bool":
        return click.option(f"{flag(row.name)}/--no-{row.name.replace('_', '-')}", row.name, default=None, help=text)
    kind = click.Choice(row.metadata["choices"]) if row.metadata["choices"] else kinds[row.type]
    return click.option(flag(row.name), row.name, default=None, type=kind, help=text)
