"""`localfast rm`: delete an installed model, after asking."""

from __future__ import annotations

import click

from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.cli.pull import find_installed
from localfast.errors import InvalidRequest
from localfast.models.catalog import InstalledModel, Store, parse_name
from localfast.settings import Settings


@click.command()
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="do not ask")
@with_settings()
def command(settings: Settings, name: str, yes: bool) -> None:
    """Delete an installed model. Files outside localfast's own folder are left alone."""
    store = Store(settings)
    model = _the_one(name, store, settings)
    if model.removable and not yes:
        click.confirm(f"remove {model} ({render.file_size(model.size_bytes)}) from {model.folder}?", abort=True)
    store.remove(model)
    render.say(f"removed {model}: {render.file_size(model.size_bytes)} freed")


def _the_one(name: str, store: Store, settings: Settings) -> InstalledModel:
    """What goes must be named exactly: a quant of the settings, or the newest of several, would be a guess."""
    wanted = parse_name(name)
    model = find_installed(name, settings) if wanted.kind == "path" else store.find(wanted)
    if model is None:
        raise store.not_found(wanted)
    same = [str(other) for other in store.installed() if other.name.lower() == model.name.lower()]
    if wanted.kind != "path" and wanted.quant is None and len(same) > 1:
        raise InvalidRequest(reason=f"several quants of {model.name} are installed; name one: {', '.join(same)}", param="model")
    return model
