"""`localfast doctor`: look at this machine and say what keeps models from running well; write it to a file for a bug report."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from localfast import __version__
from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.doctor import Finding, examine
from localfast.fit import Fitter
from localfast.hardware import Hardware, to_json
from localfast.settings import Settings


@click.command()
@render.json_option
@click.option("--export", is_flag=False, flag_value="-", metavar="[FILE]", help="write this machine as JSON; no FILE: print it")
@with_settings()
@click.pass_context
def command(context: click.Context, settings: Settings, as_json: bool, export: str | None) -> None:
    """Check the engine, GPUs, memory, folders and the port. Exit code 1 if there is a problem.

    What --export writes names no user, host, folder or serial number, and stands in for the machine with LOCALFAST_HARDWARE.
    """
    with render.busy("looking at this machine"):
        hardware = Fitter(settings).hardware()
        findings = examine(settings, hardware) if export is None else []
    if export is not None:
        _export(hardware, export)
        return
    if as_json:
        render.print_json(
            {"version": __version__, "findings": [asdict(finding) for finding in findings], "notes": list(hardware.notes)}
        )
    else:
        _print(findings, hardware)
    if any(finding.level == "problem" for finding in findings):
        context.exit(1)


def _export(hardware: Hardware, target: str) -> None:
    text = json.dumps(to_json(hardware) | {"localfast": __version__}, indent=2)
    if target == "-":
        click.echo(text)
        return
    try:
        Path(target).write_text(text + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise click.BadParameter(f"'{target}' cannot be written: {reason}", param_hint="--export") from None
    render.say(f"this machine is described in {target}", stderr=True)


def _print(findings: list[Finding], hardware: Hardware) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        style = None if finding.level == "ok" else render.LEVEL_STYLES[finding.level]
        render.say(f"{finding.level:<9}{finding.name:<{width}}  {finding.fact}", style)
        if finding.fix:
            render.say(f"{'':<{width + 11}}{finding.fix}")
    for note in hardware.notes:
        render.say(f"{'note':<9}{note}")
