"""`localfast plan`: how a model would run on this machine now: a table of its quants, the choice in words, and its sum."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import click

from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.cli.pull import find_installed, wanted_name
from localfast.errors import ModelNotFound
from localfast.models.catalog import InstalledModel, draft_model
from localfast.plan import QuantTable, Wishes
from localfast.plan.entries import plan_entry, quant_table_entry
from localfast.plan.words import speed_words
from localfast.settings import Settings


@click.command()
@click.argument("model")
@render.json_option
@with_settings("engine", "storage")
def command(settings: Settings, model: str, as_json: bool) -> None:
    """Say how MODEL would run here, in every quant there is of it: layers, context, memory, speed, and why.

    A model that is not installed is planned from its header, without a download.
    """
    from localfast.choosing import plan_model
    from localfast.fit import Fitter, wishes

    wanted, installed = wanted_name(model, settings), find_installed(model, settings)
    fitter = Fitter(settings)
    choice = plan_model(wanted, installed, fitter, _with_draft(wishes(settings), installed, settings))
    here = installed and (not choice.table.chosen or installed.quant in ("", choice.table.chosen))
    last_load = fitter.learned(choice.hardware).last_load(installed.content_key) if here and installed else ()
    name = str(installed) if here else ":".join(filter(None, (wanted.base, choice.table.chosen)))
    if as_json:
        path = {"path": str(installed.path)} if here and installed else {}
        numbers = plan_entry(choice.plan) if choice.plan else {}
        render.print_json({"model": name, **path, **numbers, "last_load": list(last_load), **quant_table_entry(choice.table)})
        return
    render.say(installed.name if installed else wanted.base, "bold")
    print_quant_table(choice.table)
    if choice.plan:
        render.say("")
        render.say(name, "bold")
        print_sentences((*choice.plan.sentences(), *(f"at the last load, {line}" for line in last_load)))


def _with_draft(wished: Wishes, installed: InstalledModel | None, settings: Settings) -> Wishes:
    from localfast.models.gguf import read_facts

    with contextlib.suppress(ModelNotFound):  # the plan's warnings say that it is not here
        if installed and (draft := draft_model(settings, installed)):
            return replace(wished, draft_facts=read_facts(draft.path))
    return wished


def print_quant_table(table: QuantTable) -> None:
    """Every quant in a row, best quality first, then the choice in words."""
    devices = [memory.device for memory in table.rows[0].plan.memory] if table.rows else []
    gpus = [f">{device}" for device in devices[1:]]
    columns = ("quant", ">size", "loss", ">RAM", *gpus, ">layers on GPU", ">context", "cache", ">tokens/s", "verdict")
    render.print_table(
        columns,
        (
            (
                row.label + (" *" if row.installed else ""),
                render.file_size(row.size_bytes),
                row.loss_words,
                *(render.memory_size(memory.needed_bytes) for memory in row.plan.memory),
                row.layers,
                str(row.plan.context_tokens),
                row.plan.kv_type,
                speed_words(row.plan.tokens_per_s),
                row.verdict,
            )
            for row in table.rows
        ),
    )
    print_sentences(table.sentences)


def print_sentences(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        render.say(sentence, "yellow" if sentence.startswith("warning: ") else None)
