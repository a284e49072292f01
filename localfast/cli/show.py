"""`localfast show`: everything known about one model, from the catalog and from its file. Never touches the network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.cli.pull import find_installed, wanted_name
from localfast.errors import ModelNotFound
from localfast.models.catalog import CatalogEntry, InstalledModel, Store, load_catalog
from localfast.models.gguf import ModelFacts, read_facts
from localfast.models.hub import licence_warnings
from localfast.models.store import catalog_entry
from localfast.settings import Settings


@click.command()
@click.argument("name")
@render.json_option
@with_settings("storage")
def command(settings: Settings, name: str, as_json: bool) -> None:
    """Show all that is known about a model: NAME is installed, in the catalog, or the path of a .gguf file."""
    installed = find_installed(name, settings)
    wanted = wanted_name(name, settings)
    entry = catalog_entry(installed) if installed else load_catalog().find(wanted.base)
    if installed is None and entry is None:
        raise Store(settings).not_found(name)
    if installed is None and entry is not None and wanted.quant and wanted.quant not in entry.quants:
        raise ModelNotFound(name=str(wanted), near=tuple(f"{entry.name}:{label}" for label in entry.quants))
    facts = read_facts(installed.path) if installed else None
    known = describe_model(entry, installed, facts, wanted.quant)
    if as_json:
        render.print_json(known)
    else:
        _print(known)


def describe_model(
    entry: CatalogEntry | None, installed: InstalledModel | None, facts: ModelFacts | None, quant: str | None
) -> dict[str, Any]:
    """All keys always, None where nobody knows. What the file says goes before what the catalog says."""
    label = installed.quant if installed else quant or (entry.default_quant if entry else "")
    offered = entry.quants.get(label) if entry else None
    licence = (installed.licence if installed else "") or (entry.licence if entry else "")
    return {
        "name": installed.name if installed else entry.name if entry else "",
        "licence": licence or None,
        "description": entry.description if entry else facts.name if facts else None,
        "roles": list(entry.roles) if entry else None,
        "parameters": facts.parameters if facts else entry.parameters if entry else None,
        "quant": label or (facts.quant if facts else None),
        "quants": list(entry.quants) if entry else None,
        "size_bytes": installed.size_bytes if installed else offered.size_bytes if offered else None,
        "context_length": (facts.train_context if facts else None) or (entry.context_length if entry else None),
        "architecture": facts.architecture if facts else None,
        "layers": facts.layers if facts else None,
        "has_chat_template": facts.has_chat_template if facts else None,
        "installed": installed is not None and installed.removable,
        "path": str(installed.path) if installed else None,
        "sha256": (installed.sha256 if installed else offered.sha256 if offered else None) or None,
        "source": installed.source if installed else entry.source if entry else None,
        "revision": (installed.revision if installed else None) or None,
        "pulled_at": (installed.pulled_at if installed else None) or None,
        "draft": entry.draft if entry else None,
        "warnings": list(_warnings(entry, facts, licence)),
    }


def _warnings(entry: CatalogEntry | None, facts: ModelFacts | None, licence: str) -> Iterator[str]:
    yield from licence_warnings(entry, licence)
    if facts and not facts.has_chat_template:
        yield "the file has no chat template: chats are given to it in a plain form, and a base model only continues text"


def _print(known: dict[str, Any]) -> None:
    template = {True: "yes", False: "no", None: ""}[known["has_chat_template"]]
    context = f"{known['context_length']} tokens" if known["context_length"] else ""
    absent = "no, it is used where it lies" if known["path"] else f"no; to fetch it: localfast pull {known['name']}"
    render.say(known["name"], "bold")
    render.print_fields(
        (
            ("licence", known["licence"] or "unknown, see its source"),
            ("description", known["description"] or ""),
            ("roles", ", ".join(known["roles"] or ())),
            ("parameters", render.parameter_count(known["parameters"])),
            ("quant", known["quant"] or ""),
            ("quants", ", ".join(known["quants"] or ())),
            ("size", render.file_size(known["size_bytes"]) if known["size_bytes"] else ""),
            ("context", context),
            ("architecture", known["architecture"] or ""),
            ("layers", str(known["layers"] or "")),
            ("chat template", template),
            ("installed", "yes" if known["installed"] else absent),
            ("path", known["path"] or ""),
            ("sha256", known["sha256"] or ""),
            ("source", known["source"] or ""),
            ("revision", known["revision"] or ""),
            ("pulled", known["pulled_at"] or ""),
            ("draft", known["draft"] or ""),
        )
    )
    for warning in known["warnings"]:
        render.say(f"warning: {warning}", "yellow")
