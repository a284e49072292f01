"""`localfast pull`, and the way from a name to a file on this disk that `run` and `serve` share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.errors import Offline
from localfast.models.catalog import InstalledModel, ModelName, Store, load_catalog, model_at, parse_name
from localfast.settings import Settings

if TYPE_CHECKING:
    from localfast.models.hub import PullPreview

STARTER = "smollm2-135m"
"""What a machine without any model is told to begin with."""


@click.command()
@click.argument("name")
@render.json_option
@with_settings("storage")
def command(settings: Settings, name: str, as_json: bool) -> None:
    """Download a model, after saying what it is.

    NAME is one of the catalog ('localfast list --catalog'), or org/repo of Hugging Face, each with an optional :QUANT.
    """
    wanted = wanted_name(name, settings)
    here = model_at(Path(wanted.base)) if wanted.kind == "path" else Store(settings).find(_with_default_quant(wanted))
    model = here or download(str(wanted), settings)
    if as_json:
        render.print_json({"already_installed": here is not None, **render.model_entry(model)})
        return
    render.say(f"{model} is already here: {model.path}" if here else f"{model} is installed: {model.path}")
    render.say(f"next: localfast serve {_quoted(str(model) if model.removable else name)}")


def wanted_name(name: str, settings: Settings) -> ModelName:
    """What the user typed, with the quant of the settings if the name has none. Raises ModelNotFound, InvalidRequest."""
    wanted = parse_name(name)
    if wanted.kind == "path" or wanted.quant or not settings.quant:
        return wanted
    return replace(wanted, quant=settings.quant.upper())


def find_installed(name: str, settings: Settings) -> InstalledModel | None:
    """The model on this disk that the owner of the machine means; a path may be anywhere. Raises ModelNotFound for a bad path."""
    wanted = wanted_name(name, settings)
    here = Store(settings).find(wanted)
    return model_at(Path(wanted.base)) if here is None and wanted.kind == "path" else here


def installed_or_pulled(name: str, settings: Settings) -> InstalledModel:
    """The model, fetched if it is not here yet. Raises what `models.hub.pull` raises."""
    return find_installed(name, settings) or download(str(wanted_name(name, settings)), settings)


def download(name: str, settings: Settings) -> InstalledModel:
    """Say on stderr what will be fetched, then fetch it under a bar. Raises what `models.hub.pull` raises."""
    from localfast.models.hub import describe, pull

    if settings.offline:
        raise Offline(name=name)
    preview = describe(name, settings)
    _print_preview(preview)
    with render.progress(str(preview)) as report:
        return pull(name, settings, report)


def _with_default_quant(wanted: ModelName) -> ModelName:
    """A catalog name means one quant when it is pulled, whatever others are here."""
    entry = load_catalog().find(wanted.base) if wanted.kind == "catalog" and not wanted.quant else None
    return replace(wanted, quant=entry.default_quant) if entry else wanted


def _print_preview(preview: PullPreview) -> None:
    def say(text: str, style: str | None = None) -> None:
        render.say(text, style, stderr=True)

    say(f"model    {preview}", "bold")
    say(f"licence  {preview.licence or 'unknown, see its source'}")
    say(f"source   {preview.source}")
    for file in preview.files:
        say(f"file     {file.path} ({render.file_size(file.size_bytes)})")
    if len(preview.files) > 1:
        say(f"size     {render.file_size(preview.size_bytes)} in {len(preview.files)} files")
    for warning in preview.warnings:
        say(f"warning  {warning}", "yellow")


def _quoted(name: str) -> str:
    return f'"{name}"' if " " in name else name
