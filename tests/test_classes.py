"""The class of a request and whom it replaces, from its headers."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_server import LiveServer

from localfast.classes import classify
from localfast.core import GenerateRequest
from localfast.errors import InvalidRequest

REQUEST = GenerateRequest(model="m", prompts=("x",), request_class="chat")


def test_classes_route_decides_unless_a_header_does() -> None:
    assert classify(REQUEST, {}, "127.0.0.1").request_class == "chat"
    assert classify(REQUEST, {"x-localfast-class": "batch"}, "127.0.0.1").request_class == "batch"


def test_classes_unknown_one_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match="'urgent' is no class; there are interactive, fim, chat, batch"):
        classify(REQUEST, {"x-localfast-class": "urgent"}, "")


def test_classes_same_client_and_file_replace_each_other() -> None:
    def name(**headers: str) -> str:
        return classify(REQUEST, {key.replace("_", "-"): value for key, value in headers.items()}, "127.0.0.1").replaces

    assert name(x_localfast_file="a.py") == name(x_localfast_file="a.py") != ""
    assert name(x_localfast_file="a.py") != name(x_localfast_file="b.py")
    assert name(x_localfast_file="a.py", user_agent="one") != name(x_localfast_file="a.py", user_agent="two")
    assert name(x_localfast_file="a.py", x_localfast_client="me", user_agent="one") == name(
        x_localfast_file="a.py", x_localfast_client="me", user_agent="two"
    )
    assert name() == "", "without a file nobody is replaced"


@pytest.mark.live
def test_classes_headers_reach_the_engine_on_every_route(tmp_path: Path) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/completions": {"prompt": "Hi"},
        "/generate": {"prompt": "Hi"},
    }
    with LiveServer(tmp_path) as server:
        for path, body in bodies.items():
            headers = {"X-Localfast-Class": "fim", "X-Localfast-File": "a.py"}
            body |= {"t_max_prompt_ms": 500, "t_max_predict_ms": -1}
            assert server.client.post(path, json=body, headers=headers).status_code == 200
            assert server.client.post(path, json=body, headers={"X-Localfast-Class": "now"}).status_code == 400
        submitted = server.engine.submitted
        assert [request.request_class for request in submitted] == ["fim"] * 3
        assert len({request.replaces for request in submitted}) == 1 and submitted[0].replaces.endswith("a.py")
        assert [(request.prompt_time_s, request.generate_time_s) for request in submitted] == [(0.5, None)] * 3
        assert server.client.post("/generate", json=bodies["/generate"]).json()["text"] == "Hello world"


@pytest.mark.live
def test_classes_cache_page_shows_every_level(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as server:
        assert server.client.get("/v1/localfast/cache").json() == {"models": []}
        server.client.post("/generate", json={"prompt": "Hi"})
        (model,) = server.client.get("/v1/localfast/cache").json()["models"]
        assert model["name"] == "tiny" and model["slots"] == [{"id": 0, "tokens": 40, "running": False}]
        assert model["ram"] == {"entries": 1, "used_bytes": 100, "limit_bytes": 1000}
        assert set(model) == {"name", "cells", "used_cells", "slots", "ram", "disk", "parked"}
