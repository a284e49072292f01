"""`localfast update`: the only way to another revision. Compares what was pulled with its source and pulls what changed.

The old model stays in its place until the new one is whole.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click
from filelock import FileLock

from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.errors import InvalidRequest, LocalfastError, ModelNotFound, Offline
from localfast.models.catalog import InstalledModel, Store
from localfast.models.found import OWNERS
from localfast.models.store import catalog_entry
from localfast.settings import Settings

if TYPE_CHECKING:
    from localfast.models.hub import PullPreview


@dataclass(frozen=True, slots=True)
class Outcome:
    """`status` is current, pinned, changed (with --dry-run), updated, gone or failed; `reason` is a sentence."""

    model: InstalledModel
    status: str
    reason: str


@click.command()
@click.argument("names", nargs=-1)
@click.option("--dry-run", is_flag=True, help="say what has changed, and fetch nothing")
@render.json_option
@with_settings("storage")
def command(settings: Settings, names: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Fetch the models that changed at their source; all that were pulled if none is named."""
    store = Store(settings)
    models = [_named(name, store) for name in names] or store.stored()
    if settings.offline and models:
        raise Offline(name=str(models[0]))
    outcomes = []
    for model in models:
        outcomes.append(_update(model, settings, dry_run))
        if not as_json:
            render.say(f"{outcomes[-1].status:<8} {model}: {outcomes[-1].reason}")
    if as_json:
        render.print_json({"dry_run": dry_run, "models": [_entry(outcome) for outcome in outcomes]})
    elif not outcomes:
        render.say("no model was pulled yet, so there is nothing to update")
    if any(outcome.status == "failed" for outcome in outcomes):
        raise SystemExit(1)


def _named(name: str, store: Store) -> InstalledModel:
    model = store.find(name)
    if model is None:
        raise store.not_found(name)
    if not model.removable:
        owner = OWNERS.get(model.kind, "somebody else")
        raise InvalidRequest(f"'{model}' ({model.path}) belongs to {owner}, which must update it", param="model")
    return model


def _update(model: InstalledModel, settings: Settings, dry_run: bool) -> Outcome:
    """One model that cannot be updated does not hold up the others."""
    from localfast.models.hub import describe

    if _is_pinned(model):
        return Outcome(model, "pinned", "the catalog names this very file, nothing to do")
    try:
        preview = describe(str(model), settings)
        if preview.quant != model.quant:
            raise ModelNotFound(name=str(model))
        reason = _difference(model, preview)
        if reason is None:
            return Outcome(model, "current", "nothing has changed")
        if dry_run:
            return Outcome(model, "changed", reason)
        return Outcome(_fetch_beside(model, preview, settings), "updated", reason)
    except ModelNotFound:
        return Outcome(model, "gone", f"its source ({model.source}) no longer has it; what is here stays")
    except (LocalfastError, OSError) as error:
        hint = error.hint.replace("localfast pull", "localfast update") if isinstance(error, LocalfastError) else ""
        return Outcome(model, "failed", f"{error}; what is here stays" + (f" ({hint})" if hint else ""))


def _is_pinned(model: InstalledModel) -> bool:
    """Whether the catalog of this version holds its hash, or a package's version."""
    entry = catalog_entry(model)
    offered = entry.quants.get(model.quant) if entry else None
    return bool(offered and offered.sha256 and offered.sha256 == model.sha256)


def _difference(model: InstalledModel, preview: PullPreview) -> str | None:
    """What is new at the source, in words; None when the files are the same. Without hashes the revision decides."""
    here = {file.name: file for file in model.files}
    for file in preview.files:
        old = here.get(file.name)
        if old is None or len(here) != len(preview.files):
            return f"its files are others now, such as {file.name}"
        if file.sha256 and old.sha256 and file.sha256 != old.sha256:
            return f"{file.name} changed, sha256 {old.sha256[:12]}… is {file.sha256[:12]}… now"
        if file.size_bytes not in (None, old.size_bytes):
            return f"{file.name} changed, {old.size_bytes} bytes are {file.size_bytes} now"
        if not (file.sha256 and old.sha256) and preview.revision != model.revision:
            return f"its source is at another revision, {preview.revision[:12]}, and gives no hash"
    return None


def _fetch_beside(model: InstalledModel, preview: PullPreview, settings: Settings) -> InstalledModel:
    """Fetch into an empty models folder inside ours, then move the whole model to its place; an interrupted one goes on there."""
    from localfast.models.hub import fetch

    store = Store(settings)
    beside = store.partial(model.name, model.quant)
    beside = beside.with_name(f"update-{beside.name}")
    lock = store.lock(model.name, model.quant)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        elsewhere = replace(settings, home=str(beside), reuse=False, models_dir=())
        with render.progress(str(model)) as report:
            updated = store.add(replace(fetch(preview, elsewhere, report), name=model.name, quant=model.quant))
        shutil.rmtree(beside, ignore_errors=True)
    return updated


def _entry(outcome: Outcome) -> dict[str, Any]:
    return render.model_entry(outcome.model) | {"status": outcome.status, "reason": outcome.reason}
