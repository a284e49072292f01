"""What is written is checked: generated pages are fresh, everything has a text, and the README names only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from localfast.cli import cli
from localfast.cli.pages import commands_page, settings_page, walk_commands
from localfast.settings import OPTIONS, flag, variable

ROOT = Path(__file__).parents[1]
COMMANDS = dict(walk_commands(cli, "localfast"))


@pytest.mark.parametrize(("name", "text"), [("settings.md", settings_page()), ("cli.md", commands_page())])
def test_generated_page_is_fresh(name: str, text: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, "run scripts/docs"


def test_settings_page_has_a_row_for_every_setting() -> None:
    rows = re.findall(r"^\| `(--[\w-]+)` \|.*`(LOCALFAST_\w+)`", settings_page(), re.MULTILINE)

    assert sorted(rows) == sorted((flag(row.name), variable(row.name)) for row in OPTIONS)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_and_its_options_have_help(name: str) -> None:
    command = COMMANDS[name]
    silent = [option.name for option in command.params if isinstance(option, click.Option) and not option.help]

    assert command.help and not silent
    assert f"## {name}\n" in commands_page()


@pytest.mark.parametrize("page", ["README.md"])
def test_page_names_only_commands_and_flags_that_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    wrong = []
    for line in re.findall(r"\blocalfast ((?:[a-z]+)\b[^\n`|&;)#]*)", _code_of(text)):
        words = line.split()
        name = f"localfast {words[0]}"
        if f"{name} {' '.join(words[1:2])}" in COMMANDS:
            name = f"{name} {words[1]}"
        flags = {word.partition("=")[0] for word in words if word.startswith("--")} - {"--help"}
        known = (
            {spelling for option in COMMANDS[name].params for spelling in (*option.opts, *option.secondary_opts)}
            if (name in COMMANDS)
            else set()
        )
        wrong += [line] if name not in COMMANDS or flags - known else []
    assert wrong == []


def _code_of(markdown: str) -> str:
    """Fenced blocks and inline code; prose may say "localfast is"."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL))
    return "\n".join([*fenced, *inline])
