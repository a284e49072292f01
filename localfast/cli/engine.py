"""`localfast engine`: builds of the native engine: which are here, which suits this machine, which is used."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.errors import InvalidRequest, LocalfastError
from localfast.settings import Settings

if TYPE_CHECKING:
    from localfast.engines.builds import Suggestion
    from localfast.engines.installed import Installed
    from localfast.hardware import EngineBuild, Hardware


@click.group(name="engine")
def command() -> None:
    """Install and choose builds of the native engine."""


@command.command(name="list")
@click.option("--check", is_flag=True, help="start each build once more to see whether it works")
@render.json_option
@with_settings()
def list_(settings: Settings, check: bool, as_json: bool) -> None:
    """List installed builds, and those that suit this machine."""
    from localfast.engines import builds, install, installed
    from localfast.hardware import ask_engine_devices

    with render.busy("looking at this machine"):
        hardware = _look(settings)
        suggestions = builds.judge(hardware, platform.machine())
        found = installed.installed(settings)
        if check:
            found = tuple(install.check_again(build) for build in found)
        own, devices, notes = ask_engine_devices(20.0) if installed.in_environment() else (None, (), [])
    own_row = _environment(own, [f"{device.name} ({device.backend})" for device in devices], notes)
    rows = [*(_entry(build) for build in found), *([own_row] if installed.in_environment() else [])]
    name, why = _active(settings)
    for row in rows:
        row["active"] = row["name"] == name
    if as_json:
        words = [{"build": one.variant, "backend": one.backend, "suits": one.suits, "reason": one.reason} for one in suggestions]
        render.print_json({"active": name, "reason": why, "engines": rows, "suggestions": words})
        return
    _print_engines(rows, name, why)
    _print_suggestions(suggestions, [build.name for build in found if not build.problem])


@command.command()
@click.argument("build", required=False)
@click.option("--from-source", is_flag=True, help="build it here: takes minutes and a compiler, and suits this CPU best")
@click.option("--cmake-args", default="", help="more arguments for a build from source, such as '-DGGML_RPC=ON'")
@click.option("--index-url", default=None, help="where wheels are; the build's name is put behind it")
@click.option("--find-links", default="", help="folder that holds the wheel, in place of an index")
@click.option("--again", is_flag=True, help="replace a build that is installed and works")
@with_settings()
def install(settings: Settings, build: str | None, from_source: bool, again: bool, **places: Any) -> None:
    """Install BUILD (such as cu124, vulkan, cpu), or what suits this machine best."""
    from localfast.engines import builds
    from localfast.engines import install as installing

    variant = build or ""
    if from_source:
        variant = builds.SOURCE + build.removeprefix(builds.SOURCE) if build else builds.source_variant(_look(settings))
    order = installing.Order(variant=variant, again=again, **{name: value for name, value in places.items() if value})
    if variant and not order.from_source:
        _warn(variant, _look(settings))
    with _stages() as say:
        if variant:
            done = installing.install(settings, order, say)
        else:
            done = installing.install_best(settings, _look(settings), platform.machine(), order, say)
    assert done.record is not None
    record = done.record
    render.say(f"{done.name} works: {', '.join(record.probe.backends)}; {render.file_size(record.size_bytes)} in {done.path}")
    render.say(f"  sha256 {record.sha256}  {record.wheel}")
    if not record.probe.devices and record.backend != "CPU":
        render.say(f"warning: it starts, but sees no GPU for {record.backend}", "yellow", stderr=True)
    name, why = _active(settings)
    used = "it is used from the next load on" if name == done.name else f"{name} stays in use ({why})"
    render.say(used + ("" if name == done.name else f"; to change that: localfast engine use {done.name}"))


@command.command()
@click.argument("name")
@with_settings()
def use(settings: Settings, name: str) -> None:
    """Use the build NAME from the next load on; 'environment': the one in this Python; 'auto': the best one."""
    from localfast.engines import install, installed

    if name == "auto":
        installed.choose(settings, "")
    elif name == installed.ENVIRONMENT:
        if not installed.in_environment():
            reason = 'this Python environment holds no engine; pip install "localfast[engine]" would bring one'
            raise InvalidRequest(reason=reason, param="name")
        installed.choose(settings, name)
    else:
        build = installed.require(settings, name)
        with render.busy("trying it"):
            build = install.check_again(build)
        if build.problem:
            raise InvalidRequest(reason=f"{build.name} is not used: it {build.problem}", param="name")
        installed.choose(settings, build.name)
    now, why = _active(settings)
    render.say(f"{now} is used from the next load on: {why}")


@command.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="also when it is the one in use")
@click.option("--yes", "-y", is_flag=True, help="do not ask")
@with_settings()
def remove(settings: Settings, name: str, force: bool, yes: bool) -> None:
    """Delete an installed build."""
    from localfast.engines import installed

    build = installed.require(settings, name)
    if build.name == _active(settings)[0] and not force:
        reason = f"{build.name} is in use; choose another with 'localfast engine use', or add --force"
        raise InvalidRequest(reason=reason, param="name")
    size = render.file_size(installed.size_of(build.path))
    if not yes:
        click.confirm(f"remove {build.name} ({size}) from {build.path}?", abort=True)
    installed.remove(settings, build)
    render.say(f"removed {build.name}: {size} freed")
    render.say("from the next load on: {} ({})".format(*_active(settings)))


# --- words --------------------------------------------------------------------------------------------------------------------


def _look(settings: Settings) -> Hardware:
    from localfast.hardware import detect

    return detect(ask_engine=False, inventory=settings.hardware)


def _active(settings: Settings) -> tuple[str, str]:
    """Name and reason; no name when the setting asks for one that cannot be used."""
    from localfast.engines.installed import active

    try:
        found = active(settings)
    except LocalfastError as error:
        return "", str(error)
    return found.name, found.reason


def _entry(build: Installed) -> dict[str, Any]:
    record = build.record
    return {
        "name": build.name,
        "version": record.version if record else "",
        "backends": list(record.probe.backends) if record else [],
        "devices": list(record.probe.devices) if record else [],
        "size_bytes": record.size_bytes if record else None,
        "problem": build.problem,
        "path": str(build.path),
        "source": record.source if record else "",
        "sha256": record.sha256 if record else "",
        "installed_at": record.installed_at if record else "",
    }


def _environment(own: EngineBuild | None, devices: list[str], notes: Sequence[str]) -> dict[str, Any]:
    return {
        "name": "environment",
        "version": own.version if own else "",
        "backends": list(own.backends) if own else [],
        "devices": devices,
        "size_bytes": None,
        "problem": (f"does not start: {own.error}" if own.error else "") if own else "; ".join(notes),
        "path": "",
        "source": "this Python environment",
        "sha256": "",
        "installed_at": "",
    }


def _print_engines(rows: Sequence[dict[str, Any]], name: str, why: str) -> None:
    if rows:
        cells = [
            (
                row["name"] + (" *" if row["active"] else ""),
                row["version"],
                " ".join(row["backends"]),
                ", ".join(row["devices"]) or "CPU only",
                render.file_size(row["size_bytes"]) if row["size_bytes"] else "",
                row["problem"] or "works",
            )
            for row in rows
        ]
        render.print_table(("NAME", "VERSION", "BUILT FOR", "SEES", ">SIZE", "STATE"), cells)
        render.say(f"\n* used from the next load on: {why}" if name else f"\nno engine can be used: {why}")
    else:
        render.say("no engine is installed yet: localfast engine install")


def _print_suggestions(suggestions: Sequence[Suggestion], present: Sequence[str]) -> None:
    def verdict(one: Suggestion) -> str:
        return "installed" if any(name.endswith(f"-{one.variant}") for name in present) else "suits" if one.suits else "no"

    render.say("\nfor this machine, best first:")
    render.print_table(("BUILD", "SUITS", "WHY"), [(one.variant, verdict(one), one.reason) for one in suggestions])


def _warn(variant: str, hardware: Hardware) -> None:
    from localfast.engines.builds import judge

    for one in judge(hardware, platform.machine()):
        if one.variant == variant and not one.suits:
            render.say(f"warning: {variant} may not work here: {one.reason}", "yellow", stderr=True)


@contextlib.contextmanager
def _stages() -> Iterator[Callable[[str], None]]:
    """The newest words on a terminal's line; elsewhere one line for each stage, without its counting."""
    screen = render.console(stderr=True)
    if screen.is_terminal:
        with screen.status("") as status:
            yield lambda words: status.update(render.printable(words))
        return
    last = [""]

    def say(words: str) -> None:
        stage = words.partition(": ")[0]
        if stage != last[0]:
            render.say(words, stderr=True)
        last[0] = stage

    yield say
