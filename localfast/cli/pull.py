"""`localfast pull`, and the way from a name to a file on this disk that `run` and `serve` share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.errors import DownloadStopped, Offline
from localfast.models.catalog import InstalledModel, ModelName, Store, model_at, parse_name
from localfast.settings import Settings

if TYPE_CHECKING:
    from localfast.models.hub import Choose, PullPreview

STARTER = "smollm2-135m"
"""What a machine without any model is told to begin with."""


@click.command()
@click.argument("name")
@render.json_option
@with_settings("engine", "storage")
def command(settings: Settings, name: str, as_json: bool) -> None:
    """Download a model, after saying what it is. What was cut off, goes on where it stopped.

    NAME is one of the catalog ('localfast list --catalog'), or org/repo of Hugging Face, each with an optional :QUANT.
    """
    here = find_installed(name, settings)
    model = here or download(str(wanted_name(name, settings)), settings)
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


def installed_or_pulled(name: str, settings: Settings, choose: Choose | None = None) -> InstalledModel:
    """The model, fetched if it is not here yet. Raises what `models.hub.fetch` raises."""
    return find_installed(name, settings) or download(str(wanted_name(name, settings)), settings, choose)


def download(name: str, settings: Settings, choose: Choose | None = None) -> InstalledModel:
    """Say on stderr what will be fetched, then fetch it under a bar. Raises what `models.hub.describe` and `fetch` raise."""
    from localfast.models.hub import describe, fetch

    if settings.offline:
        raise Offline(name=name)
    preview = describe(name, settings, choose or _chooser(settings))
    _print_preview(preview)
    try:
        with _bar(preview) as report:
            return fetch(preview, settings, report)
    except KeyboardInterrupt:
        raise DownloadStopped(name=str(preview)) from None


def _chooser(settings: Settings) -> Choose:
    """Asks the plan, and says why it is that quant."""
    from localfast.choosing import chooser
    from localfast.fit import Fitter, wishes

    def tell(sentences: Sequence[str]) -> None:
        for sentence in sentences:
            _say(f"quant    {sentence}")

    return chooser(Fitter(settings), wishes(settings), tell)


@contextlib.contextmanager
def _bar(preview: PullPreview) -> Iterator[Callable[[int, int | None], None]]:
    """Says first what an earlier run has brought."""
    with render.progress(str(preview)) as show:
        begun = False

        def report(done_bytes: int, total_bytes: int | None) -> None:
            nonlocal begun
            if done_bytes and not begun:
                goal = f" of {render.file_size(total_bytes)}" if total_bytes else ""
                _say(f"resume   going on at {render.file_size(done_bytes)}{goal}")
            begun = True
            show(done_bytes, total_bytes)

        yield report


def _print_preview(preview: PullPreview) -> None:
    _say(f"model    {preview}", "bold")
    _say(f"licence  {preview.licence or 'unknown, see its source'}")
    _say(f"source   {preview.source}")
    for file in preview.files:
        _say(f"file     {file.path} ({render.file_size(file.size_bytes)})")
    if len(preview.files) > 1:
        _say(f"size     {render.file_size(preview.size_bytes)} in {len(preview.files)} files")
    for warning in preview.warnings:
        _say(f"warning  {warning}", "yellow")


def _say(text: str, style: str | None = None) -> None:
    render.say(text, style, stderr=True)


def _quoted(name: str) -> str:
    return f'"{name}"' if " " in name else name
