"""`localfast verify`: are the files still what was pulled? Hashes them all again and takes damaged ones out of use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.models.catalog import InstalledModel, Store, parse_name
from localfast.models.found import OWNERS
from localfast.settings import Settings

CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Finding:
    """`status` is ok, damaged, or unknown where nobody recorded a hash; `reason` says more in words."""

    model: InstalledModel
    status: str
    reason: str = ""


@click.command()
@click.argument("names", nargs=-1)
@render.json_option
@with_settings("storage")
def command(settings: Settings, names: tuple[str, ...], as_json: bool) -> None:
    """Read models again and compare them with the hashes they were pulled with; all models if none is named.

    A damaged model is no longer served; the exit code is 1 then.
    """
    store = Store(settings)
    models = [_named(name, store) for name in names] or [*store.recorded(), *(m for m in store.installed() if not m.removable)]
    findings = [_verify(model) for model in models]
    for finding in findings:
        if finding.status != "unknown":
            store.mark(finding.model, finding.status == "damaged")
    if as_json:
        render.print_json({"models": [_entry(finding) for finding in findings]})
    else:
        _print(findings)
    if any(finding.status == "damaged" for finding in findings):
        raise SystemExit(1)


def _named(name: str, store: Store) -> InstalledModel:
    """Also a damaged one, which `find` no longer shows. Raises ModelNotFound."""
    wanted = parse_name(name)
    recorded = (model for model in store.recorded() if str(wanted).lower() in (str(model).lower(), model.name.lower()))
    model = store.find(wanted) or next(recorded, None)
    if model is None:
        raise store.not_found(wanted)
    return model


def _verify(model: InstalledModel) -> Finding:
    with render.progress(str(model)) as report:
        problems = list(_problems(model, report))
    if problems:
        return Finding(model, "damaged", "; ".join(problems))
    if all(file.sha256 for file in model.files):
        return Finding(model, "ok")
    return Finding(model, "unknown", "no hash is known for it; the size is right")


def _problems(model: InstalledModel, report: Callable[[int, int | None], None]) -> Iterator[str]:
    """What is wrong with each file. A size that differs needs no hashing."""
    done_bytes = 0
    for file in model.files:
        path = model.folder / file.name
        try:
            size_bytes = path.stat().st_size
            if size_bytes != file.size_bytes:
                yield f"{file.name} has {size_bytes} bytes instead of {file.size_bytes}"
            elif file.sha256:
                sha256 = _sha256(path, lambda count, before=done_bytes: report(before + count, model.size_bytes))  # type: ignore[misc]
                if sha256 != file.sha256:
                    yield f"{file.name} has sha256 {sha256[:12]}… instead of {file.sha256[:12]}…"
        except OSError as error:
            yield f"{file.name} cannot be read: {error.strerror or error}"
        done_bytes += file.size_bytes


def _sha256(path: Path, report: Callable[[int], None]) -> str:
    digest, done_bytes = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done_bytes += len(chunk)
            report(done_bytes)
    return digest.hexdigest()


def _print(findings: Sequence[Finding]) -> None:
    if not findings:
        render.say("there is no model to verify")
    for finding in findings:
        style = {"damaged": "bold red", "unknown": "yellow"}.get(finding.status)
        render.say(f"{finding.status:<8} {finding.model}" + (f": {finding.reason}" if finding.reason else ""), style)
        if finding.status == "damaged":
            render.say(f"         {_next_step(finding.model)}")


def _next_step(model: InstalledModel) -> str:
    if model.removable:
        return f"it is out of use; fetch it again: localfast pull {model}"
    return f"{model.path} belongs to {OWNERS.get(model.kind, 'somebody else')}: fetch it again there"


def _entry(finding: Finding) -> dict[str, Any]:
    model = finding.model
    next_step = _next_step(model) if finding.status == "damaged" else None
    return {
        "name": model.name,
        "quant": model.quant,
        "path": str(model.path),
        "status": finding.status,
        "reason": finding.reason or None,
        "next_step": next_step,
    }
