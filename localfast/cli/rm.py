"""`localfast rm`: delete models that localfast fetched, after asking."""

from __future__ import annotations

import click

from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.cli.pull import find_installed
from localfast.errors import InvalidRequest
from localfast.models.catalog import InstalledModel, Store, parse_name
from localfast.settings import Settings


@click.command()
@click.argument("names", nargs=-1, required=True)
@click.option("--yes", "-y", is_flag=True, help="do not ask")
@with_settings()
def command(settings: Settings, names: tuple[str, ...], yes: bool) -> None:
    """Delete models. Files outside localfast's own folder are left alone."""
    store = Store(settings)
    models = list({str(model): model for model in (_the_one(name, store, settings) for name in names)}.values())
    for model in models:
        store.check_removable(model)
    for model in models:
        if not yes:
            click.confirm(f"remove {model} ({render.file_size(model.size_bytes)}) from {model.folder}?", abort=True)
    for model in models:
        store.remove(model)
        render.say(f"removed {model}: {render.file_size(model.size_bytes)} freed")
    if len(models) > 1:
        render.say(f"{render.file_size(sum(model.size_bytes for model in models))} freed in all")


def _the_one(name: str, store: Store, settings: Settings) -> InstalledModel:
    """What goes must be named exactly: a quant of the settings, or the newest of several, would be a guess."""
    wanted = parse_name(name)
    model = find_installed(name, settings) if wanted.kind == "path" else store.find(wanted) or _damaged(name, store)
    if model is None:
        raise store.not_found(wanted)
    same = [str(other) for other in store.recorded() if other.name.lower() == model.name.lower()]
    if model.removable and wanted.kind != "path" and wanted.quant is None and len(same) > 1:
        raise InvalidRequest(reason=f"several quants of {model.name} are installed; name one: {', '.join(same)}", param="model")
    return model


def _damaged(name: str, store: Store) -> InstalledModel | None:
    """One that is no longer offered to anybody can still be thrown away."""
    wanted = name.strip().lower()
    return next((model for model in store.recorded() if wanted in (str(model).lower(), model.name.lower())), None)
