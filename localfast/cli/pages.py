"""Writes docs/settings.md and docs/cli.md out of the settings table and the commands, so that they cannot say anything else.

Pure: texts in, texts out. `scripts/docs` writes the files, a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from localfast.cli import COMMANDS, cli
from localfast.settings import FOREIGN_VARIABLES, OPTIONS, flag, variable

_GENERATED = "<!-- Written by scripts/docs; do not edit. -->\n"
_GROUPS = {
    "server": "How it is reached, and how much it takes on.",
    "engine": "How a model runs. Most are best left to the plan (`localfast plan NAME` shows it).",
    "storage": "Where things are kept, and where they come from.",
}
_TYPES = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false", "tuple[str, ...]": "list of texts"}
_SETTING_FLAGS = {flag(row.name) for row in OPTIONS}


def settings_page() -> str:
    """The text of docs/settings.md."""
    lines = [
        _GENERATED,
        "# Settings\n",
        "A value comes from, strongest first: a flag, an environment variable, `config.toml`, the default.",
        "`localfast config show` prints every value with where it came from, `localfast config set NAME VALUE` writes",
        "`config.toml`, and `localfast config path` says where that is. `--home` cannot be set in the file. A list is written",
        '`a,b,c`, in `config.toml` also `["a", "b"]`.\n',
    ]
    for group, about in _GROUPS.items():
        lines += [
            f"## {group.capitalize()}\n",
            f"{about}\n",
            "| setting | default | variable | what it is |",
            "|---|---|---|---|",
        ]
        lines += [_setting_row(row) for row in OPTIONS if row.metadata["group"] == group]
        lines.append("")
    return "\n".join(lines)


def _setting_row(row: Any) -> str:
    default = "" if row.default in ("", ()) else str(row.default).lower() if row.type == "bool" else str(row.default)
    choices = f" ({', '.join(row.metadata['choices'])})" if row.metadata["choices"] else ""
    about = f"{_cell(row.metadata['help'])}; {_TYPES[str(row.type)]}{choices}"
    variables = ", ".join(f"`{name}`" for name in (variable(row.name), FOREIGN_VARIABLES.get(row.name)) if name)
    return f"| `{flag(row.name)}` | {f'`{default}`' if default else 'empty'} | {variables} | {about} |"


def commands_page() -> str:
    """The text of docs/cli.md."""
    lines = [
        _GENERATED,
        "# Commands\n",
        "Every error is one line that begins with `error:`, with the next step under it. Exit codes: 0 fine, 1 failed, 2 a wrong",
        "flag or setting, 3 the port is taken, 4 the engine is not installed. Where there is `--json`, it prints one line for",
        "programs, with sizes in bytes. Colours appear on a terminal only. Settings that a command takes as flags are explained",
        "in [settings.md](settings.md).\n",
    ]
    for name, command in walk_commands(cli, "localfast"):
        lines += _command_section(name, command)
    return "\n".join(lines)


def walk_commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """Every command with its full name, groups before what is in them; not `group` itself."""
    with click.Context(group) as context:
        for part in COMMANDS if group is cli else group.commands:
            command = group.get_command(context, part)
            assert command is not None, part
            yield f"{name} {part}", command
            if isinstance(command, click.Group):
                yield from walk_commands(command, f"{name} {part}")


def _command_section(name: str, command: click.Command) -> Iterator[str]:
    yield f"## {name}\n"
    with click.Context(command, info_name=name) as context:
        yield f"`{' '.join((name, *command.collect_usage_pieces(context)))}`\n"
    yield " ".join(str(command.help).split()) + "\n"
    options = [option for option in command.params if isinstance(option, click.Option)]
    own = [option for option in options if option.opts[0] not in _SETTING_FLAGS]
    if own:
        yield "| option | what it does |\n|---|---|"
        yield from (f"| {_spelling(option)} | {_cell(option.help or '')} |" for option in own)
        yield ""
    if flags := [option.opts[0] for option in options if option.opts[0] in _SETTING_FLAGS]:
        yield f"Settings: {', '.join(f'`{name}`' for name in flags)}.\n"


def _spelling(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    return names if option.is_flag else f"{names} {(option.metavar or option.type.name.upper()).split()[0]}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
