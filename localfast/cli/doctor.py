"""`localfast doctor`: look at this machine and say what keeps models from running well."""

from __future__ import annotations

from dataclasses import asdict

import click

from localfast import __version__
from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.settings import Settings


@click.command()
@render.json_option
@with_settings()
@click.pass_context
def command(context: click.Context, settings: Settings, as_json: bool) -> None:
    """Check the engine, GPUs, memory, folders and the port. Exit code 1 if there is a problem."""
    from localfast.doctor import examine
    from localfast.hardware import detect

    with render.busy("looking at this machine"):
        hardware = detect()
        findings = examine(settings, hardware)
    if as_json:
        render.print_json(
            {"version": __version__, "findings": [asdict(finding) for finding in findings], "notes": list(hardware.notes)}
        )
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            style = None if finding.level == "ok" else render.LEVEL_STYLES[finding.level]
            render.say(f"{finding.level:<9}{finding.name:<{width}}  {finding.fact}", style)
            if finding.fix:
                render.say(f"{'':<{width + 11}}{finding.fix}")
        for note in hardware.notes:
            render.say(f"{'note':<9}{note}")
    if any(finding.level == "problem" for finding in findings):
        context.exit(1)
