"""What a request must get past before any of our code looks at it: Host, Origin, media type and key.

A web page that a user visits can send requests to this machine. Its Origin gives it away, and where there is none (DNS
rebinding), its Host does. Pure ASGI; answers in the dialect's error shape through the application's own error response.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from localfast.errors import Forbidden, LocalfastError, Unauthorized, UnsupportedMediaType
from localfast.settings import Settings

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
# Pages of this machine: any port of localhost, desktop apps and editors.
LOCAL_ORIGINS = (
    r"https?://(localhost|127\.0\.0\.1|\[::1\]|tauri\.localhost)(:\d+)?|(app|file|tauri|vscode-webview|vscode-file)://.*"
)
# Answer without a key: they say nothing but that the server is there.
KEYLESS_PATHS = frozenset({"/health", "/ready"})

ErrorResponse = Callable[[Scope, LocalfastError], ASGIApp]


class _Check:
    """Middleware that answers with an error instead of passing a request on."""

    def __init__(self, app: ASGIApp, settings: Settings, error_response: ErrorResponse) -> None:
        self._app = app
        self._settings = settings
        self._error_response = error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self.examine(scope["method"], scope["path"], Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._error_response(scope, error) if error else self._app)(scope, receive, send)

    def examine(self, method: str, path: str, headers: Headers) -> LocalfastError | None:
        """Why this request may not pass, or None."""
        raise NotImplementedError


class OriginCheck(_Check):
    """Is the caller on this machine, and was it this server that it meant to call?"""

    def examine(self, method: str, path: str, headers: Headers) -> LocalfastError | None:
        settings = self._settings
        hosts = headers.getlist("host")
        known = {*LOCAL_NAMES, *map(str.lower, settings.allowed_hosts), *_bound_name(settings.host)}
        if len(hosts) != 1 or _host_name(hosts[0]) not in known:
            return Forbidden(header="Host", value=", ".join(hosts)[:200])
        origin = headers.get("origin")
        if origin is None:
            cross_site = headers.get("sec-fetch-site") == "cross-site"
            return Forbidden(header="Sec-Fetch-Site", value="cross-site") if cross_site else None
        if origin in settings.allowed_origins or re.fullmatch(LOCAL_ORIGINS, origin):
            return None
        return Forbidden(header="Origin", value=origin[:200])


class KeyCheck(_Check):
    """Does it bring the key, where one is set, and a body that a web form cannot make?"""

    def examine(self, method: str, path: str, headers: Headers) -> LocalfastError | None:
        if method == "POST" and not _is_json(headers.get("content-type", "")):
            return UnsupportedMediaType(content_type=headers.get("content-type", "")[:100])
        key = self._settings.api_key
        if key and path not in KEYLESS_PATHS and not _brings_key(headers, key.encode()):
            return Unauthorized()
        return None


def _brings_key(headers: Headers, key: bytes) -> bool:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    offered = [bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""), headers.get("api-key", "")]
    # All of them are compared, in constant time, so that the time taken says nothing.
    # Latin-1 gives back the bytes that were sent, which are UTF-8 for a key beyond ASCII.
    matches = [hmac.compare_digest(value.strip(" \t").encode("latin-1"), key) for value in offered]
    return any(matches)


def _host_name(host: str) -> str | None:
    """Name or address of a Host header, without its port; None when it is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return None
    return parts.hostname if "@" not in host and "/" not in host else None


def _bound_name(host: str) -> frozenset[str]:
    """A server bound to one address is reached by it; one bound to all needs the allowed_hosts setting for its names."""
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        wildcard = False
    return frozenset() if wildcard else frozenset({host.lower()})


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
