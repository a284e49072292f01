"""Loading, unloading and looking at models through the server's own routes, as a client sees them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import answer
from live_server import LiveServer

from localfast.core import Accepted, TextDelta

pytestmark = pytest.mark.live
MODELS = "/v1/localfast/models"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(tmp_path, keep_alive_s=600, drain_s=0.1) as running:
        yield running


def post(server: LiveServer, path: str, **body: Any) -> httpx.Response:
    return server.client.post(path, json=body)


def test_load_without_a_request_answers_the_entry_of_ps(server: LiveServer) -> None:
    loaded = post(server, f"{MODELS}/tiny/load").json()
    (listed,) = server.client.get(MODELS).json()["models"]
    assert loaded["name"] == "tiny" and loaded["steps"] == [] and loaded["load_s"] > 0
    assert {key for key in loaded if key not in listed} == set()
    assert (listed["users"], listed["goes_next"], listed["restarts"], listed["keep_alive_left_s"]) == (0, True, 0, None)
    (ram,) = listed["memory"]
    assert ram["device"] == "RAM" and ram["planned_bytes"] > 0 and ram["real_bytes"] > 0


def test_unload_gives_the_place_back_and_the_next_request_loads_again(server: LiveServer) -> None:
    assert post(server, f"{MODELS}/tiny/unload").json() == {"name": "tiny", "unloaded": False}
    post(server, f"{MODELS}/tiny/load")
    assert post(server, f"{MODELS}/tiny/unload").json() == {"name": "tiny", "unloaded": True}
    assert server.engine.stopped and server.client.get(MODELS).json()["models"] == []
    assert post(server, "/generate", prompt="Hi").status_code == 200
    assert len(server.start.engines) == 2


def test_unload_busy_model_is_refused_and_forced(tmp_path: Path) -> None:
    with (
        LiveServer(tmp_path, lambda request: [Accepted(1), TextDelta(0, "Hello", 1)], drain_s=0.1) as server,
        server.client.stream("POST", "/generate_stream", json={"prompt": "Hi"}) as stream,
    ):
        refused = post(server, f"{MODELS}/tiny/unload")
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "model_in_use"
        assert server.client.get(MODELS).json()["models"][0]["users"] == 1
        assert post(server, f"{MODELS}/tiny/unload", force=True).json()["unloaded"] is True
        assert server.engine.stopped
        server.push(1, *answer()[1:])
        assert stream.read()


@pytest.mark.parametrize(
    ("path", "content", "status", "code"),
    [
        ("tiny/load", b"[]", 400, "invalid_request"),
        ("tiny/load", b"{", 400, "invalid_request"),
        ("tiny/load", b"\xff\xfe", 400, "invalid_request"),
        ("tiny/load", b"[" * 4000, 400, "invalid_request"),
        ("tiny/load", b'{"keep_alive_s": "5m"}', 400, "invalid_request"),
        ("tiny/load", b'{"keep_alive_s": true}', 400, "invalid_request"),
        ("tiny/load", b'{"keep_alive_s": 1e300}', 400, "invalid_request"),
        ("tiny/load", b'{"ctx": 5}', 400, "invalid_request"),
        ("tiny/unload", b'{"force": "yes"}', 400, "invalid_request"),
        ("tiny/unload", b" " * 5000, 413, None),
        ("other/load", b"", 404, "model_not_found"),
        ("../../etc/passwd/unload", b"{}", 404, None),
    ],
)
def test_load_and_unload_refuse_what_they_do_not_understand(
    server: LiveServer, path: str, content: bytes, status: int, code: str | None
) -> None:
    response = server.client.post(f"{MODELS}/{path}", content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    assert code is None or response.json()["error"]["code"] == code
    assert server.start.configs == []


def test_plan_says_how_a_model_would_be_loaded(server: LiveServer) -> None:
    plan = server.client.get("/v1/localfast/plan", params={"model": "tiny"}).json()
    assert plan["model"] == "tiny" and plan["fits"] is True and plan["reasons"]
    ram = plan["memory"][0]
    assert ram["needed_bytes"] == sum(part["size_bytes"] for part in ram["parts"]) <= ram["usable_bytes"]
    assert server.start.configs == [], "nothing was loaded for it"
    assert server.client.get("/v1/localfast/plan", params={"model": "no"}).status_code == 404


def test_load_takes_names_with_slashes(server: LiveServer) -> None:
    assert post(server, f"{MODELS}/org/repo:Q4/load").json()["error"]["code"] == "model_not_found"
