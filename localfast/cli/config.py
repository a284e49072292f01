"""`localfast config`: show every setting with where it came from, and edit config.toml line by line.

A new file is read back through the table of settings before it takes the place of the old one. `path`, `set` and `unset` do not
load the file as settings first: they must work when a value in it is wrong.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.errors import InvalidSetting
from localfast.settings import OPTIONS, Settings, load_settings, variable

SECRETS = ("api_key",)
home_option = click.option("--home", envvar=variable("home"), default="", help="folder for models, config and logs")


@click.group(name="config")
def command() -> None:
    """Show and change settings."""


@command.command()
@render.json_option
@with_settings()
def show(settings: Settings, as_json: bool) -> None:
    """Show every setting, its value, and where the value came from."""
    rows = [(row.name, _shown(row.name, getattr(settings, row.name)), settings.explain(row.name)) for row in OPTIONS]
    if as_json:
        entries = {name: {"value": value, "source": source} for name, value, source in rows}
        render.print_json({"config_path": str(settings.config_path), "settings": entries})
    else:
        render.print_table(("SETTING", "VALUE", "SOURCE"), [(name, _words(value), source) for name, value, source in rows])


@command.command()
@home_option
def path(home: str) -> None:
    """Print where config.toml is, or would be."""
    click.echo(str(Settings(home=home).config_path))


@command.command(name="set", context_settings={"ignore_unknown_options": True})  # a value may be -1
@click.argument("name")
@click.argument("value")
@home_option
def set_(name: str, value: str, home: str) -> None:
    """Write NAME = VALUE to config.toml; a list is written a,b,c."""
    name, config_path = _name(name, value), Settings(home=home).config_path
    with tempfile.TemporaryDirectory() as nowhere:  # a home without a file: only this value is looked at
        try:
            converted = getattr(load_settings({name: value, "home": nowhere}, environ={}), name)
        except InvalidSetting as error:
            raise InvalidSetting(name=name, value=value, source="the command line", reason=error.reason) from None
    _replace(config_path, name, f"{name} = {json.dumps(converted, ensure_ascii=False)}\n")
    render.say(f"{name} = {_words(_shown(name, converted))} in {config_path}")
    source = load_settings({"home": home or None}).explain(name)
    if source != str(config_path):
        render.say(f"warning: the {source} is stronger than this file", "yellow", stderr=True)


@command.command()
@click.argument("name")
@home_option
def unset(name: str, home: str) -> None:
    """Take NAME out of config.toml; its default holds again."""
    name, config_path = name.replace("-", "_"), Settings(home=home).config_path
    found = _replace(config_path, name, "")
    render.say(f"{name} is no longer in {config_path}" if found else f"{name} is not in {config_path}")


# --- values -------------------------------------------------------------------------------------------------------------------


def _name(name: str, value: str) -> str:
    """A setting's name, in a flag's spelling or its own. Raises InvalidSetting."""
    plain = name.removeprefix("--").replace("-", "_")
    if plain not in {row.name for row in OPTIONS} - {"home"}:
        reason = "is not for a setting that config.toml can hold"
        raise InvalidSetting(name=name, value=value, source="the command line", reason=reason)
    return plain


def _shown(name: str, value: Any) -> Any:
    return "***" if name in SECRETS and value else value


def _words(value: Any) -> str:
    """As it would be typed."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


# --- the file -----------------------------------------------------------------------------------------------------------------


def _replace(config_path: Path, name: str, line: str) -> bool:
    """Put `line` where `name` is set, or at the end; every other line stays. Returns whether the name was there."""
    try:
        old = config_path.read_text(encoding="utf-8") if config_path.exists() else ""
        statements = list(_statements(old))
        found = any(name in keys for keys, _ in statements)
        if not found and not line:
            return False
        new = "".join(line if name in keys else text for keys, text in statements)
        if not found:
            new += ("\n" if new and not new.endswith("\n") else "") + line
        _write(config_path.resolve(), new)
    except InvalidSetting as error:  # it names the file that was tried, which nobody has ever seen
        raise InvalidSetting(name=error.name, value=error.value, source=str(config_path), reason=error.reason) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = f"cannot be changed: {error}"
        raise InvalidSetting(name="config.toml", value=str(config_path), source="this file", reason=reason) from None
    return found


def _statements(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The file in pieces that are TOML on their own, with the keys they set: mostly a line, more for a list over several."""
    pending = ""
    for line in text.splitlines(keepends=True):
        pending += line
        try:
            keys = tuple(tomllib.loads(pending))
        except tomllib.TOMLDecodeError:
            continue
        yield keys, pending
        pending = ""
    if pending:
        tomllib.loads(pending)  # raises: it never became whole


def _write(config_path: Path, text: str) -> None:
    """Raises InvalidSetting if the settings would not accept the file; then, and on any failure, the old one stays."""
    config_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=config_path.parent, prefix=".config-") as folder:
        new = Path(folder) / "config.toml"
        new.write_text(text, encoding="utf-8")
        load_settings({"home": folder}, environ={})
        if config_path.exists():
            shutil.copymode(config_path, new)
        else:
            new.chmod(0o600)  # it may hold the key
        new.replace(config_path)
