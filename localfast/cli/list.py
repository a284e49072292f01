"""`localfast list`: the models on this disk, or all that the catalog offers."""

from __future__ import annotations

from collections.abc import Sequence

import click

from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.cli.pull import STARTER
from localfast.models.catalog import CatalogEntry, InstalledModel, Store, load_catalog
from localfast.models.store import catalog_entry
from localfast.settings import Settings


@click.command()
@click.option("--catalog", is_flag=True, help="list what can be pulled instead of what is installed")
@render.json_option
@with_settings("storage")
def command(settings: Settings, catalog: bool, as_json: bool) -> None:
    """List the models on this disk: those that were pulled, and those that other programs have."""
    store = Store(settings)
    installed = store.installed()
    if catalog:
        _list_catalog(installed, as_json)
    elif as_json:
        entries = [render.model_entry(model) | {"removable": model.removable} for model in installed]
        render.print_json({"models": entries})
    elif installed:
        _list_installed(installed)
    else:
        render.say("no model is installed yet")
        render.say(f"  {f'localfast pull {STARTER}':<33} fetches a small one to begin with")
        render.say(f"  {'localfast list --catalog':<33} shows all there are")
    if not catalog:
        _warn_of_damaged(store, installed)


def _list_installed(installed: Sequence[InstalledModel]) -> None:
    rows = [
        (
            model.name,
            model.quant,
            render.file_size(model.size_bytes),
            model.licence or "unknown",
            _source(model),
            model.pulled_at[:10],
        )
        for model in installed
    ]
    render.print_table(("NAME", "QUANT", ">SIZE", "LICENCE", "SOURCE", ">PULLED"), rows)
    if theirs := [model for model in installed if not model.removable]:
        render.say("\nused where they lie, and left alone:")
        for model in theirs:
            render.say(f"  {model}  {model.path}")


def _source(model: InstalledModel) -> str:
    """Without the repository where the name is just that, and without a folder, whose files are named below."""
    kind, _, place = model.source.partition(":")
    return kind if kind == "folder" or place.lower() == model.name.lower() else model.source


def _warn_of_damaged(store: Store, installed: Sequence[InstalledModel]) -> None:
    here = {str(model) for model in installed if model.removable}
    for model in store.recorded():
        if str(model) not in here:
            render.say(f"warning: {model} is damaged; fetch it again: localfast pull {model}", "yellow", stderr=True)


def _list_catalog(installed: Sequence[InstalledModel], as_json: bool) -> None:
    entries = load_catalog().entries
    quants = {entry.name: [model.quant for model in installed if catalog_entry(model) is entry] for entry in entries}
    if as_json:
        render.print_json({"models": [_entry(entry, quants[entry.name]) for entry in entries]})
        return
    rows = [
        (
            entry.name + (" *" if quants[entry.name] else ""),
            render.parameter_count(entry.parameters),
            entry.default_quant,
            " ".join(entry.roles),
            entry.licence or "unknown",
        )
        for entry in entries
    ]
    render.print_table(("NAME", ">WEIGHTS", "QUANT", "ROLES", "LICENCE"), rows)
    render.say("\n* installed. 'localfast show NAME' tells more, 'localfast pull NAME' fetches it.")


def _entry(entry: CatalogEntry, installed_quants: Sequence[str]) -> dict[str, object]:
    return {
        "name": entry.name,
        "description": entry.description,
        "roles": list(entry.roles),
        "parameters": entry.parameters,
        "context_length": entry.context_length,
        "default_quant": entry.default_quant,
        "quants": {label: quant.size_bytes for label, quant in entry.quants.items()},
        "licence": entry.licence,
        "commercial": entry.commercial,
        "gated": entry.gated,
        "source": entry.source,
        "installed_quants": list(installed_quants),
    }
