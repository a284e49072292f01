"""`localfast prune`: keep the models folder within a size, and clear what broken downloads left in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.errors import InvalidRequest
from localfast.models.catalog import InstalledModel, Store, parse_size
from localfast.settings import Settings

LEFTOVER_AGE_S = 24 * 3600.0


@click.command()
@click.option("--keep", metavar="SIZE", help="remove the models unused for longest until the rest takes no more, such as 50GB")
@click.option("--dry-run", is_flag=True, help="say what would go, and remove nothing")
@render.json_option
@with_settings()
def command(settings: Settings, keep: str | None, dry_run: bool, as_json: bool) -> None:
    """Remove unfinished downloads older than a day and, with --keep, the models that were unused for longest.

    The model used last always stays, and so does whatever is loaded now or belongs to another program.
    """
    keep_bytes = parse_size(keep) if keep is not None else None
    store = Store(settings)
    models = sorted(store.stored(), key=store.last_used)
    doomed = [] if keep_bytes is None else surplus(models, keep_bytes)
    removed, kept = _remove(doomed, store, dry_run)
    swept_bytes = 0
    for path in list(store.leftovers(LEFTOVER_AGE_S)):
        size_bytes = _size(path)
        swept_bytes += size_bytes if dry_run or store.sweep(path) else 0
    freed_bytes = swept_bytes + sum(model.size_bytes for model in removed)
    left_bytes = sum(model.size_bytes for model in models) - (freed_bytes - swept_bytes)
    if as_json:
        entries = [render.model_entry(model) for model in removed]
        sizes = {"leftovers_bytes": swept_bytes, "freed_bytes": freed_bytes, "models_bytes": left_bytes}
        render.print_json({"dry_run": dry_run, "removed": entries, "kept": kept, **sizes})
        return
    word = "would remove" if dry_run else "removed"
    for model in removed:
        render.say(f"{word} {model}: {render.file_size(model.size_bytes)}")
    for reason in kept:
        render.say(f"kept: {reason}", "yellow")
    if swept_bytes:
        render.say(f"{word} what unfinished downloads left: {render.file_size(swept_bytes)}")
    would = "would be " if dry_run else ""
    render.say(f"{render.file_size(freed_bytes)} {would}freed; the models take {render.file_size(left_bytes)}")


def surplus(models: Sequence[InstalledModel], keep_bytes: int) -> list[InstalledModel]:
    """Which models must go until the rest takes no more than this, of models in the order of last use. Never the last one."""
    left_bytes = sum(model.size_bytes for model in models)
    doomed = []
    for model in models[:-1]:
        if left_bytes <= keep_bytes:
            break
        doomed.append(model)
        left_bytes -= model.size_bytes
    return doomed


def _remove(doomed: Sequence[InstalledModel], store: Store, dry_run: bool) -> tuple[list[InstalledModel], list[str]]:
    """What went, and why the others stayed."""
    removed, kept = [], []
    for model in doomed:
        try:
            if not dry_run:
                store.remove(model)
            removed.append(model)
        except InvalidRequest as error:
            kept.append(str(error))
    return removed, kept


def _size(path: Path) -> int:
    try:
        return sum(file.lstat().st_size for file in (path, *path.rglob("*")) if file.is_file() and not file.is_symlink())
    except OSError:
        return 0
