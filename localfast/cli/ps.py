"""`localfast ps`: ask a running server which models are loaded and what they are doing."""

from __future__ import annotations

import http.client
import ipaddress
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import click

from localfast.cli import render
from localfast.cli.options import with_settings
from localfast.errors import Forbidden, InvalidSetting, ServerUnreachable
from localfast.settings import Settings

TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 16 * 2**20


@click.command()
@click.option("--url", help="address of the server  [default: the host and port of the settings]")
@render.json_option
@with_settings()
def command(settings: Settings, url: str | None, as_json: bool) -> None:
    """Show the models that a running server has loaded."""
    url = _checked(url) if url else server_url(settings)
    answer = ask(f"{url}/v1/localfast/models", settings)
    if as_json:
        render.print_json(answer)
        return
    if answer["models"]:
        columns = ("NAME", "QUANT", ">PID", ">ON GPU", ">MEMORY", ">CONTEXT", ">BUSY", ">WAITING")
        render.print_table(columns, [_row(model) for model in answer["models"]])
    elif not answer["loading"]:
        render.say(f"the server at {url} has no model loaded; the first request loads one")
    for name in answer["loading"]:
        render.say(f"loading {name}")


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url.rstrip("/")
    except ValueError:
        pass  # not an address at all
    raise click.BadParameter(f"'{url}' is not like http://127.0.0.1:8000", param_hint="--url")


def server_url(settings: Settings) -> str:
    """Where a server with these settings is reached from this machine."""
    host = settings.host or "127.0.0.1"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{settings.port}"
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"http://[{address}]:{settings.port}" if address.version == 6 else f"http://{address}:{settings.port}"


def ask(url: str, settings: Settings) -> dict[str, Any]:
    """The server's answer, with lists under `models` and `loading`.

    Raises ServerUnreachable when nobody answers or somebody else does, InvalidSetting for a wrong key, Forbidden for a name that
    the server does not know itself by.
    """
    from localfast.guard import is_loopback

    parts = urlsplit(url)
    unreachable = ServerUnreachable(url=f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}")
    proxies = [urllib.request.ProxyHandler({})] if is_loopback(parts.hostname or "") else []
    try:
        request = urllib.request.Request(url, headers={"Accept": "application/json"})
        if settings.api_key:  # not to be taken along to wherever a redirect leads
            request.add_unredirected_header("Authorization", f"Bearer {settings.api_key}")
        with urllib.request.build_opener(*proxies).open(request, timeout=TIMEOUT_S) as response:
            answer = json.loads(response.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 401:
            raise _wrong_key(settings, unreachable.url) from None
        raise (Forbidden(header="Host", value=parts.netloc) if error.code == 403 else unreachable) from None
    except (OSError, ValueError, http.client.HTTPException):
        raise unreachable from None
    if not isinstance(answer, dict) or not all(isinstance(answer.get(key), list) for key in ("models", "loading")):
        raise unreachable
    return answer


def _wrong_key(settings: Settings, url: str) -> InvalidSetting:
    value, reason = "***" if settings.api_key else "", f"is not the key of the server at {url}; set LOCALFAST_API_KEY"
    return InvalidSetting(name="api_key", value=value, source=settings.explain("api_key"), reason=reason)


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    memory: dict[str, int] = {}
    for buffer in model["buffers"]:
        memory[buffer["device"]] = memory.get(buffer["device"], 0) + buffer["size_bytes"]
    return (
        model["name"],
        model["quant"],
        str(model["pid"]),
        f"{model['gpu_layers']}/{model['layers']}",
        "\n".join(f"{device} {render.memory_size(size_bytes)}" for device, size_bytes in memory.items()),
        str(model["context_tokens"]),
        f"{model['running']}/{model['slots']}",
        str(model["waiting"]),
    )
