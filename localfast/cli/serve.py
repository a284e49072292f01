"""`localfast serve`: take the port, find the model, start the server, say what is going on, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import platform
import socket
from dataclasses import replace

import click
import uvicorn
from rich.console import Console

from localfast.app import create_app
from localfast.cli.options import with_settings
from localfast.cli.ps import server_url
from localfast.cli.pull import STARTER, installed_or_pulled
from localfast.doctor import port_owner
from localfast.engines.builds import offer_engine
from localfast.engines.installed import active, in_environment
from localfast.errors import EngineMissing, InvalidSetting, LocalfastError, PortTaken
from localfast.fit import Fitter
from localfast.guard import is_loopback
from localfast.hardware import Hardware, detect
from localfast.models.catalog import InstalledModel, Store
from localfast.models.manager import LoadedModel, ModelManager
from localfast.settings import Settings

# After the drain time every request has been ended by us; whoever still holds a connection then is cut off.
FORCED_END_S = 5

console = Console(stderr=True, highlight=False, soft_wrap=True)


@click.command()
@click.argument("model", required=False)
@with_settings("server", "engine", "storage")
def command(settings: Settings, model: str | None) -> None:
    """Serve MODEL, or every installed model, each loaded on first use. A fresh machine gets a small starter model."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("localfast").setLevel(logging.INFO)
    if not active(settings).path and not in_environment():
        raise EngineMissing(reason="none is installed", offer=offer_engine(detect(ask_engine=False), platform.machine()))
    if not is_loopback(settings.host) and not settings.api_key:
        reason = "would let others in without a key; set one with LOCALFAST_API_KEY"
        raise InvalidSetting(name="host", value=settings.host, source=settings.explain("host"), reason=reason)
    with contextlib.closing(take_port(settings)) as listener:
        pinned = choose_model(settings, model)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(settings, listener, pinned))


def take_port(settings: Settings) -> socket.socket:
    """A listening socket, before any time is spent on a model. Raises PortTaken with the owner, InvalidSetting for a bad host."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(settings.host).version == 6 else socket.AF_INET
    except ValueError:
        family = socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # Windows would let two servers share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(256)
    except (OSError, OverflowError) as error:
        listener.close()
        code = error.errno if isinstance(error, OSError) else None
        # Windows says "access denied" when the other server does not share its port.
        owner = port_owner(settings.host, settings.port) if code in (errno.EADDRINUSE, errno.EACCES) else None
        if owner or code == errno.EADDRINUSE:
            raise PortTaken(host=settings.host, port=settings.port, owner=owner or "another process") from None
        wrong_port = code in (None, errno.EACCES)  # out of range, or reserved for the system
        name, value = ("port", str(settings.port)) if wrong_port else ("host", settings.host)
        reason = f"cannot be listened on: {error}"
        raise InvalidSetting(name=name, value=value, source=settings.explain(name), reason=reason) from None
    return listener


def choose_model(settings: Settings, name: str | None) -> InstalledModel | None:
    """The one model to serve, fetched if need be; None to serve all that are installed."""
    if name is None:
        if Store(settings).installed():
            return None
        console.print(f"no model is installed yet: fetching the starter, {STARTER}")
        name = STARTER
    return installed_or_pulled(name, settings)


async def serve(settings: Settings, listener: socket.socket, pinned: InstalledModel | None) -> None:
    """Serve until a signal. Raises the error of a pinned model that does not load."""
    manager = ModelManager(settings, pinned)
    server = Server(create_app(settings, manager), manager, settings)
    url = server_url(replace(settings, port=listener.getsockname()[1]))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    failure: LocalfastError | None = None
    if pinned is None:
        print_catalog(manager, await asyncio.to_thread(Fitter(settings).hardware), url)
    else:
        console.print(f"loading {pinned} ({pinned.path}); {url}/health answers already")
        try:
            async with manager.lease("") as model:
                print_model(model, url)
        except LocalfastError as error:
            failure = error
            server.should_exit = True
    await serving
    if failure is not None:
        raise failure


class Server(uvicorn.Server):
    """uvicorn, with our way of stopping: requests get `drain_s` to finish, then each ends with an error that says why."""

    def __init__(self, app: object, manager: ModelManager, settings: Settings) -> None:
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="on",
            timeout_graceful_shutdown=round(settings.drain_s + FORCED_END_S),
        )
        super().__init__(config)
        self._manager = manager
        self._drain_s = settings.drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        open_requests = sum(model.engine.open_requests for model in self._manager.loaded())
        console.print(f"stopping; {open_requests} running requests get {self._drain_s:g} s" if open_requests else "stopping")
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_requests(self) -> None:
        await asyncio.sleep(self._drain_s)
        await self._manager.close(FORCED_END_S)


def print_model(model: LoadedModel, url: str) -> None:
    facts, plan = model.engine.facts, model.plan
    print_hardware(model.hardware)
    console.print(
        f"[bold]model[/]    {model.installed} ({facts.description}), served as '{model.name}', loaded in {facts.load_s:.1f} s"
    )
    console.print(f"[bold]layers[/]   {plan.summary}")
    console.print(
        f"[bold]context[/]  {facts.context_tokens} tokens per request, {facts.cells} in all; {facts.slots} requests at once"
    )
    for warning in plan.warnings:
        console.print(f"[yellow]warning[/]  {warning}")
    _print_ready(model.name, url)


def print_catalog(manager: ModelManager, hardware: Hardware, url: str) -> None:
    print_hardware(hardware)
    served = manager.served()
    for name, model in served:
        console.print(f"[bold]model[/]    {name} ({model.quant}, {model.size_bytes / 1e9:.2f} GB), loaded on first use")
    _print_ready(served[0][0], url)


def print_hardware(hardware: Hardware) -> None:
    gib = 2**30
    for device in hardware.devices:
        if device.kind != "cpu":
            used = "" if device.in_engine else " (the engine does not see it)"
            console.print(
                f"[bold]found[/]    {device.name}: {device.free_bytes / gib:.1f} of {device.total_bytes / gib:.1f} GiB free{used}"
            )
    ram = f"{hardware.ram_available_bytes / gib:.1f} of {hardware.ram_total_bytes / gib:.1f} GiB RAM free"
    console.print(f"[bold]found[/]    {hardware.physical_cores} CPU cores, {ram}")
    for note in hardware.notes:
        console.print(f"[yellow]note[/]     {note}")


def _print_ready(name: str, url: str) -> None:
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}], "stream": true}}'
    console.print(f"[bold green]ready[/]    {url}   (OpenAI clients: {url}/v1)   Ctrl-C stops\n")
    console.print(f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n", markup=False)
