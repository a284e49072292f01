"""How commands print: tables, sizes, JSON, the bar of a download. Knows no command and decides nothing.

Results go to stdout, everything said along the way to stderr. Text that came from a file or the network is cleaned first: it
must not move the cursor of somebody's terminal. rich is imported when something is printed, not when a command is looked up.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from localfast.models.catalog import InstalledModel

# Into a pipe or a file no row is wrapped: what follows may be grep.
PIPE_COLUMNS = 1000
LEVEL_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}

json_option = click.option("--json", "as_json", is_flag=True, help="print one line of JSON, for programs")


def console(stderr: bool = False) -> Console:
    """A console that takes text as it is: no markup, no emoji names; colours on a terminal only."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=width)


def say(text: str, style: str | None = None, stderr: bool = False) -> None:
    """One line, however long: the terminal wraps it, and a pipe gets it whole."""
    console(stderr).print(printable(text), style=style, soft_wrap=True)


def print_json(value: Any) -> None:
    """One compact line, ASCII only: a pipe of Windows PowerShell would garble anything else."""
    click.echo(json.dumps(value, separators=(",", ":")))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table without lines. A heading that begins with `>` is for numbers: to the right, never broken."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        number = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        table.add_row(*(printable(cell) for cell in row))
    console().print(table)


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Label and value, one pair a line; what is empty is left out."""
    known = [(label, value) for label, value in fields if value]
    width = max((len(label) for label, _ in known), default=0) + 2
    for label, value in known:
        say(f"{label:<{width}}{' '.join(value.split())}")


def printable(text: str) -> str:
    """Without control characters, but for tabs and ends of lines."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text)


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[int, int | None], None]]:
    """A bar on stderr, told (bytes done, bytes in total or None); silent when stderr is no terminal."""
    from rich import progress as bars

    screen = console(stderr=True)
    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=None),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=screen, disable=not screen.is_terminal, expand=True) as bar:
        tasks: list[bars.TaskID] = []

        def report(done_bytes: int, total_bytes: int | None) -> None:
            if not tasks:  # speed and time left are those of this run: what is here already does not count
                tasks.append(bar.add_task(printable(title), total=total_bytes, completed=done_bytes))
            bar.update(tasks[0], completed=done_bytes, total=total_bytes)

        yield report


def busy(text: str) -> contextlib.AbstractContextManager[object]:
    """Something moves on a terminal while the context is open."""
    screen = console(stderr=True)
    return screen.status(printable(text)) if screen.is_terminal else contextlib.nullcontext()


# --- words --------------------------------------------------------------------------------------------------------------------


def file_size(size_bytes: int | None) -> str:
    """As disks are sold and sources count, in powers of 1000: "98 MB"."""
    if size_bytes is None:
        return "unknown size"
    return _scaled(size_bytes, 1000, ("B", "kB", "MB", "GB", "TB"))


def memory_size(size_bytes: int) -> str:
    """As memory is counted, in powers of 1024: "1.5 GiB"."""
    return _scaled(size_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def parameter_count(count: int | None) -> str:
    """As models are named: "8.2B", "135M"; empty when it is unknown."""
    return _scaled(count, 1000, ("", "K", "M", "B", "T")).replace(" ", "") if count else ""


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    """Three digits or so: "5.03 GB", "98.4 MB", "640 MB"."""
    for unit in units:
        if round(number) < step or unit == units[-1]:
            break
        number /= step
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"


def model_entry(model: InstalledModel) -> dict[str, Any]:
    """An installed model for programs."""
    return {
        "name": model.name,
        "quant": model.quant,
        "size_bytes": model.size_bytes,
        "licence": model.licence,
        "source": model.source,
        "revision": model.revision,
        "path": str(model.path),
        "sha256": model.sha256,
        "pulled_at": model.pulled_at,
    }
