"""Every check runs through the whole application; a request that is refused must not have started an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeStart
from gguf_writer import llama_tensors, llama_values, write_gguf
from starlette.routing import Route

from localfast.app import create_app
from localfast.guard import KEYLESS_PATHS, is_loopback
from localfast.hardware import EngineBuild, Hardware
from localfast.models.catalog import model_at
from localfast.models.manager import ModelManager
from localfast.settings import Settings

HARDWARE = Hardware(
    ram_total_bytes=2**34, ram_available_bytes=2**33, physical_cores=2, engine=EngineBuild(installed=True, backends=("CPU",))
)
KEY = "sk-local"
ORIGIN = "http://localhost:3000"
PROMPT = b'{"prompt": "hi", "max_tokens": 4}'
JSON = {"content-type": "application/json"}
FAR_ORIGINS = [
    "https://evil.example",
    "null",
    "http://localhost.evil.com",
    "http://localhost.evil.com:80",
    "http://evil.example/http://localhost",
    "http://localhost@evil.example",
    "http://127.0.0.1.evil.example",
    "http://127.0.0.2",
    "ftp://localhost",
    "vscode-webview:x",
    "xvscode-webview://x",
    "http://localhost:3000\thttps://evil.example",
    "",
]
NEAR_ORIGINS = [
    ORIGIN,
    "http://localhost",
    "https://localhost:8443",
    "http://127.0.0.1:1",
    "http://[::1]:5173",
    "https://tauri.localhost",
    "tauri://localhost",
    "app://obsidian.md",
    "vscode-webview://0a1b2c",
    "vscode-file://vscode-app",
]
Headers = Mapping[str, str] | list[tuple[str, str]] | list[tuple[bytes, bytes]]


@dataclass
class Door:
    """The application of `settings` over one model and engines that record."""

    settings: Settings
    start: FakeStart
    app: Any

    def call(self, method: str, path: str, headers: Headers | None = None, body: bytes = b"") -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                request = client.build_request(method, path, headers=headers, content=body)
                return await client.send(request)

        return asyncio.run(send())

    def generate(self, headers: Headers | None = None, path: str = "/v1/completions") -> httpx.Response:
        """A good request with these headers; the media type is added."""
        pairs = headers.items() if isinstance(headers, Mapping) else headers or []
        return self.call("POST", path, [(_raw(n), _raw(v)) for n, v in (*pairs, *JSON.items())], PROMPT)

    @property
    def paths(self) -> list[tuple[str, str]]:
        """(method, path) of every route."""
        routes = [route for route in self.app.routes if isinstance(route, Route)]
        return [(m, r.path.replace("{name:path}", "x")) for r in routes for m in sorted(r.methods or ())]

    @property
    def engine_calls(self) -> int:
        return len(self.start.configs)


def _raw(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


@pytest.fixture
def open_door(tmp_path: Path) -> Callable[..., Door]:
    def make(**changes: Any) -> Door:
        settings = Settings(home=str(tmp_path / "home"), **changes)
        path = write_gguf(tmp_path / "tiny-Q4_K.gguf", llama_values(), llama_tensors())
        start = FakeStart()
        manager = ModelManager(settings, model_at(path), start_engine=start, detect_hardware=lambda: HARDWARE)
        return Door(settings, start, create_app(settings, manager))

    return make


def error_code(response: httpx.Response) -> str:
    content = response.json()["error"]
    assert {"message", "type", "param", "code"} <= set(content)
    return str(content["code"])


def test_good_request_passes_and_reaches_the_engine(open_door: Callable[..., Door]) -> None:
    door = open_door()
    response = door.generate()
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] == "Hello world"
    assert door.engine_calls == 1


# --- Host ---------------------------------------------------------------------------------------------------------------------

FAR_HOSTS: list[list[tuple[str, str]]] = [
    [("host", value)]
    for value in (
        "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.com", "127.0.0.2", "0.0.0.0", "",
        "evil.example@127.0.0.1", "127.0.0.1@evil.example", "127.0.0.1:port", "[::1", "127.0.0.1/evil.example",
        "localhost,evil.example",
    )
]  # fmt: skip


@pytest.mark.parametrize("hosts", [*FAR_HOSTS, [("host", "127.0.0.1"), ("host", "evil.example")]], ids=str)
def test_foreign_host_is_refused_on_every_route(open_door: Callable[..., Door], hosts: list[tuple[str, str]]) -> None:
    door = open_door()
    for method, path in door.paths:
        response = door.call(method, path, [*hosts, *JSON.items()], PROMPT if method == "POST" else b"")
        assert response.status_code == 403, (method, path)
        assert method == "HEAD" or error_code(response) == "forbidden"
    assert door.engine_calls == 0


def test_missing_host_is_refused(open_door: Callable[..., Door]) -> None:
    door = open_door()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": PROMPT}

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "headers": headers}
    asyncio.run(door.app(scope, receive, send))
    assert sent[0]["status"] == 403 and door.engine_calls == 0


@pytest.mark.parametrize(
    ("host", "changes"),
    [
        ("127.0.0.1:8000", {}),
        ("LocalHost", {}),
        ("[::1]:1", {}),
        ("192.168.1.5:8000", {"host": "192.168.1.5"}),
        ("my-pc.lan", {"host": "0.0.0.0", "allowed_hosts": ("My-PC.lan",)}),
    ],
)
def test_own_host_passes(open_door: Callable[..., Door], host: str, changes: dict[str, Any]) -> None:
    assert open_door(**changes).generate({"host": host}).status_code == 200


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_binding_to_all_addresses_does_not_open_every_host(open_door: Callable[..., Door], address: str) -> None:
    assert open_door(host=address).generate({"host": "192.168.1.5"}).status_code == 403


# --- Origin -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", FAR_ORIGINS)
def test_foreign_origin_is_refused_on_every_route(open_door: Callable[..., Door], origin: str) -> None:
    door = open_door()
    preflight = {"access-control-request-method": "POST"}
    for method, path in [*door.paths, ("OPTIONS", "/v1/chat/completions")]:
        headers = {"origin": origin, **JSON, **(preflight if method == "OPTIONS" else {})}
        response = door.call(method, path, headers, PROMPT if method == "POST" else b"")
        assert response.status_code == 403, (method, path)
        assert "access-control-allow-origin" not in response.headers
    assert door.engine_calls == 0


@pytest.mark.parametrize("origin", NEAR_ORIGINS)
def test_local_origin_passes_and_may_read_the_answer(open_door: Callable[..., Door], origin: str) -> None:
    response = open_door().generate({"origin": origin})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == origin
    assert "origin" in response.headers["vary"].lower()
    assert "access-control-allow-credentials" not in response.headers


def test_configured_origin_passes_and_no_other(open_door: Callable[..., Door]) -> None:
    door = open_door(allowed_origins=("https://chat.example",))
    response = door.generate({"origin": "https://chat.example"})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "https://chat.example")
    assert door.generate({"origin": "https://chat.example.evil.com"}).status_code == 403


def test_cross_site_request_without_origin_is_refused(open_door: Callable[..., Door]) -> None:
    door = open_door()
    assert door.call("GET", "/v1/models", {"sec-fetch-site": "cross-site"}).status_code == 403
    assert door.call("GET", "/v1/models", {"sec-fetch-site": "same-origin"}).status_code == 200


def test_preflight_needs_no_key_and_allows_the_headers_that_sdks_send(open_door: Callable[..., Door]) -> None:
    wanted = "authorization, content-type, x-api-key, x-stainless-os, anthropic-version"
    headers = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": wanted}
    response = open_door(api_key=KEY).call("OPTIONS", "/v1/chat/completions", headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in response.headers["access-control-allow-methods"]
    assert set(wanted.split(", ")) <= set(response.headers["access-control-allow-headers"].lower().split(", "))


@pytest.mark.parametrize(
    ("status", "method", "path", "headers", "body"),
    [
        (401, "GET", "/v1/models", {}, b""),
        (404, "GET", "/nothing", {"x-api-key": KEY}, b""),
        (404, "GET", "/v1/models/no-such", {"x-api-key": KEY}, b""),
        (405, "GET", "/v1/completions", {"x-api-key": KEY}, b""),
        (400, "POST", "/v1/completions", {"x-api-key": KEY, **JSON}, b"{"),
        (413, "POST", "/v1/completions", {"x-api-key": KEY, **JSON}, b" " * 2001),
        (415, "POST", "/v1/completions", {"x-api-key": KEY, "content-type": "text/plain"}, PROMPT),
    ],
)
def test_page_of_this_machine_may_read_errors(
    open_door: Callable[..., Door], status: int, method: str, path: str, headers: dict[str, str], body: bytes
) -> None:
    door = open_door(api_key=KEY, max_body_bytes=2000)
    response = door.call(method, path, {"origin": ORIGIN, **headers}, body)
    assert response.status_code == status
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert error_code(response)
    assert door.engine_calls == 0


# --- key ----------------------------------------------------------------------------------------------------------------------


def test_every_route_but_the_keyless_ones_wants_the_key(open_door: Callable[..., Door]) -> None:
    door = open_door(api_key=KEY)
    for method, path in door.paths:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            response = door.call(method, path, {**headers, **JSON}, PROMPT if method == "POST" else b"")
            assert (response.status_code == 401) == (path not in KEYLESS_PATHS), (method, path)
    assert door.engine_calls == 0


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": KEY},
        {"authorization": "Bearer"},
        {"authorization": ""},
        {"x-api-key": KEY.upper()},
        {"api-key": ""},
        {"cookie": f"key={KEY}"},
    ],
)
def test_missing_or_wrong_key_is_refused(open_door: Callable[..., Door], headers: dict[str, str]) -> None:
    door = open_door(api_key=KEY)
    response = door.generate(headers)
    assert (response.status_code, error_code(response)) == (401, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert KEY not in response.text
    assert door.engine_calls == 0
    assert door.call("GET", f"/v1/models?key={KEY}&api_key={KEY}").status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {KEY} "},
        {"x-api-key": KEY},
        {"api-key": KEY},
        {"authorization": "Bearer not-the-key", "x-api-key": KEY},
    ],
)
def test_right_key_passes_in_each_header(open_door: Callable[..., Door], headers: dict[str, str]) -> None:
    assert open_door(api_key=KEY).generate(headers).status_code == 200


def test_key_may_have_any_characters(open_door: Callable[..., Door]) -> None:
    door = open_door(api_key="schlüssel-à")
    assert door.generate([(b"x-api-key", "schlüssel-à".encode())]).status_code == 200
    assert door.generate([(b"x-api-key", b"schlussel-a")]).status_code == 401


def test_without_a_configured_key_any_key_passes(open_door: Callable[..., Door]) -> None:
    assert open_door().generate({"authorization": "Bearer whatever"}).status_code == 200


# --- media type ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "text/plain; charset=application/json", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
     "", "application/jsonx", "json"],
)  # fmt: skip
def test_what_a_web_form_can_send_is_refused(open_door: Callable[..., Door], content_type: str) -> None:
    door = open_door()
    posts = [path for method, path in door.paths if method == "POST"]
    assert posts
    for path in posts:
        response = door.call("POST", path, {"content-type": content_type}, PROMPT)
        assert (response.status_code, error_code(response)) == (415, "unsupported_media_type")
    assert door.engine_calls == 0


def test_post_without_a_content_type_is_refused(open_door: Callable[..., Door]) -> None:
    assert open_door().call("POST", "/generate", {}, PROMPT).status_code == 415


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
def test_json_passes(open_door: Callable[..., Door], content_type: str) -> None:
    assert open_door().call("POST", "/generate", {"content-type": content_type}, PROMPT).status_code == 200


@pytest.mark.parametrize(
    ("host", "inside"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("LOCALHOST", True), ("0.0.0.0", False), ("::", False),
     ("192.168.1.5", False), ("localhost.evil.com", False), ("", False)],
)  # fmt: skip
def test_is_loopback_knows_who_can_reach_it(host: str, inside: bool) -> None:
    assert is_loopback(host) is inside
