"""`localfast bench`: measure a running server, alone or in turns with a peer."""

from __future__ import annotations

import asyncio
import shlex
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import click

from localfast.bench import (
    DEFAULT_WORKS,
    WORKS,
    Report,
    Row,
    Target,
    first_model,
    html_page,
    machine,
    run,
    shown,
    standing,
    verdict,
)
from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.cli.ps import server_url
from localfast.settings import Settings


@click.command()
@click.option("--url", help="server to measure; by default the one of these settings")
@click.option("--model", help="its model; by default the first that it lists")
@click.option("--pid", type=int, help="its process, for its memory; by default the one that listens at its port")
@click.option("--peer-url", help="another server that speaks OpenAI's protocol, measured in turns with ours")
@click.option("--peer-model", help="the peer's model; by default the first that it lists")
@click.option("--peer-pid", type=int, help="the peer's process; by default the one that listens at its port")
@click.option("--rounds", type=click.IntRange(1, 20), default=3, show_default=True, help="rounds per work; the median counts")
@click.option("--only", help=f"works to run, with commas between; all but crowded by default: {','.join(WORKS)}")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="also write a report with plots to this file")
@render.json_option
@with_settings()
def command(
    settings: Settings,
    *,
    url: str | None,
    model: str | None,
    pid: int | None,
    peer_url: str | None,
    peer_model: str | None,
    peer_pid: int | None,
    rounds: int,
    only: str | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Measure a running server: speed at 1 to 16 streams, time to first text, gaps, long prompts, edits, hang-ups, memory.

    Nothing else should run on the machine meanwhile. With --peer-url both servers take turns; the ratio is what counts.
    """
    works = only.split(",") if only else list(DEFAULT_WORKS)
    if unknown := [name for name in works if name not in WORKS]:
        raise click.BadParameter(f"no such work: {', '.join(unknown)}; there are {', '.join(WORKS)}", param_hint="--only")
    if html is not None and not html.absolute().parent.is_dir():  # said before the measuring, not after
        raise click.BadParameter(f"'{html.parent}' is not a folder", param_hint="--html")

    async def measure() -> Report:
        ours = await _target(url or server_url(settings), model, settings.api_key, pid)
        peer = await _target(peer_url, peer_model, "", peer_pid) if peer_url else None
        rows = await run(ours, peer, works, rounds, lambda text: render.say(text, "dim", stderr=True))
        return _report(rows, rounds, ours, peer)

    report = asyncio.run(measure())
    if html is not None:
        html.write_text(html_page(report), encoding="utf-8", newline="\n")
    if as_json:
        rows = [asdict(row) | {"ratio": row.ratio} for row in report.rows]
        render.print_json(asdict(report) | {"rows": rows, "verdict": verdict(report.rows)})
        return
    columns = ("WORK", "NUMBER", ">OURS", *((">PEER", ">RATIO", "") if peer_url else ()))
    render.print_table(columns, [_cells(row, peer_url is not None) for row in report.rows])
    for sentence in (verdict(report.rows), standing(report.rows)):
        if sentence:
            render.say(sentence)


def _report(rows: list[Row], rounds: int, ours: Target, peer: Target | None) -> Report:
    return Report(
        rows=rows,
        rounds=rounds,
        ours=f"{ours.model} at {ours.url}",
        peer=f"{peer.model} at {peer.url}" if peer else None,
        machine=machine(),
        command=shlex.join(["localfast", *sys.argv[1:]]),
        when=datetime.now().astimezone().isoformat(" ", "minutes"),
    )


async def _target(url: str, model: str | None, key: str, pid: int | None) -> Target:
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith("http://"):
        raise click.BadParameter(f"'{url}' does not begin with http://", param_hint="--url")
    return Target(url, model or await first_model(url, key), key, pid)


def _cells(row: Row, compared: bool) -> tuple[str, ...]:
    peer = "" if row.peer is None else shown(row.peer)
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return (row.work, row.number, shown(row.ours), *((peer, ratio, row.standing) if compared else ()))
