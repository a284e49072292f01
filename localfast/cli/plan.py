"""`localfast plan`: how a model would run on this machine now, as a sum in words."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.cli.pull import find_installed, wanted_name
from localfast.errors import InvalidRequest
from localfast.models.catalog import Store, load_catalog
from localfast.plan import Plan
from localfast.settings import Settings


@click.command()
@click.argument("model")
@render.json_option
@with_settings("engine")
def command(settings: Settings, model: str, as_json: bool) -> None:
    """Say how MODEL (an installed one, or a path) would run here: layers, context, memory, and why."""
    from localfast.hardware import detect
    from localfast.models.gguf import read_facts
    from localfast.models.manager import wishes
    from localfast.plan import make_plan

    installed = find_installed(model, settings)
    if installed is None:
        raise _not_here(model, settings)
    plan = make_plan(detect(), read_facts(installed.path), wishes(settings))
    if as_json:
        render.print_json({"model": str(installed), "path": str(installed.path), **plan_entry(plan)})
        return
    render.say(str(installed), "bold")
    for sentence in plan.sentences():
        render.say(sentence, "yellow" if sentence.startswith("warning: ") else None)


def plan_entry(plan: Plan) -> dict[str, Any]:
    """A plan for programs: its numbers, and the memory of each device part by part."""
    entry = asdict(plan)
    for device, memory in zip(entry["memory"], plan.memory, strict=True):
        device["parts"] = [{"label": label, "size_bytes": size_bytes} for label, size_bytes in memory.parts]
        device |= {"needed_bytes": memory.needed_bytes, "usable_bytes": memory.usable_bytes, "fits": memory.fits}
    return entry | {"fits": plan.fits}


def _not_here(model: str, settings: Settings) -> Exception:
    wanted = wanted_name(model, settings)
    if wanted.kind == "catalog" and load_catalog().find(wanted.base) is None:
        return Store(settings).not_found(wanted)
    reason = f"'{wanted}' is not installed, and a plan needs its file; fetch it first: localfast pull {wanted}"
    return InvalidRequest(reason=reason, param="model")
