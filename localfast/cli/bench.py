"""`localfast bench`: measure a running server, alone or in turns with a peer."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import click

from localfast.bench import WORKS, Row, Target, first_model, run, verdict
from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.cli.ps import server_url
from localfast.settings import Settings


@click.command()
@click.option("--url", help="server to measure; by default the one of these settings")
@click.option("--model", help="its model; by default the first that it lists")
@click.option("--peer-url", help="another server that speaks OpenAI's protocol, measured in turns with ours")
@click.option("--peer-model", help="the peer's model; by default the first that it lists")
@click.option("--rounds", type=click.IntRange(1, 20), default=3, show_default=True, help="rounds per work; the median counts")
@click.option("--only", help=f"works to run, with commas between; all: {','.join(WORKS)}")
@render.json_option
@with_settings()
def command(
    settings: Settings,
    *,
    url: str | None,
    model: str | None,
    peer_url: str | None,
    peer_model: str | None,
    rounds: int,
    only: str | None,
    as_json: bool,
) -> None:
    """Measure a running server: speed at 1 to 16 streams, time to first text, gaps, long prompts, shared prefixes, hang-ups.

    Nothing else should run on the machine meanwhile. With --peer-url both servers take turns; the ratio is what counts.
    """
    works = only.split(",") if only else list(WORKS)
    if unknown := [name for name in works if name not in WORKS]:
        raise click.BadParameter(f"no such work: {', '.join(unknown)}; there are {', '.join(WORKS)}", param_hint="--only")

    async def measure() -> list[Row]:
        ours = await _target(url or server_url(settings), model, settings.api_key)
        peer = await _target(peer_url, peer_model, "") if peer_url else None
        return await run(ours, peer, works, rounds, lambda text: render.say(text, "dim", stderr=True))

    rows = asyncio.run(measure())
    if as_json:
        entries = [asdict(row) | {"ratio": row.ratio} for row in rows]
        render.print_json({"rounds": rounds, "rows": entries, "verdict": verdict(rows)})
        return
    columns = ("WORK", "NUMBER", "OURS", *(("PEER", "RATIO", "") if peer_url else ()))
    render.print_table(columns, [_cells(row) for row in rows])
    if sentence := verdict(rows):
        render.say(sentence)


async def _target(url: str, model: str | None, key: str) -> Target:
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith("http://"):
        raise click.BadParameter(f"'{url}' does not begin with http://", param_hint="--url")
    return Target(url, model or await first_model(url, key), key)


def _cells(row: Row) -> tuple[str, ...]:
    if row.peer is None or row.ratio is None:
        return (row.work, row.number, f"{row.ours:.1f}")
    return (row.work, row.number, f"{row.ours:.1f}", f"{row.peer:.1f}", f"{row.ratio:.2f}", "" if row.better else "behind")
