"""The command line. Composition root: the only package that puts server, manager and settings together.

Each command lives in a module of its own, imported when it is called: `localfast --version` must not wait for a web server,
and a spawned engine process imports this package again.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from typing import Any, cast

import click

from localfast import __version__
from localfast.errors import LocalfastError

# name -> module of this package whose `command` it is, in the order of the help page.
COMMANDS = {
    "serve": "serve",
    "run": "run",
    "pull": "pull",
    "list": "list",
    "show": "show",
    "rm": "rm",
    "verify": "verify",
    "update": "update",
    "prune": "prune",
    "ps": "ps",
    "plan": "plan",
    "engine": "engine",
    "config": "config",
    "doctor": "doctor",
    "bench": "bench",
}


class Commands(click.Group):
    """Loads a command when it is needed, and prints every LocalfastError as one message with its next step."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]  # `list` is also a module of this package

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"localfast.cli.{COMMANDS[cmd_name]}")
        return cast(click.Command, module.command)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LocalfastError as error:
            print_error(error)
            ctx.exit(error.exit_code)


def print_error(error: LocalfastError) -> None:
    click.echo(f"error: {error}", err=True)
    if error.hint:
        click.echo(f"  {error.hint}", err=True)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="localfast")
def cli() -> None:
    """Run language models on this machine, for every program on it."""


def main() -> None:
    multiprocessing.freeze_support()  # in a frozen program, an engine process begins here too
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")  # a Windows console may be set to something older
    cli.main(prog_name="localfast")
