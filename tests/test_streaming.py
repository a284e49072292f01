"""Streams over a real connection: when bytes arrive, what ends a request, and that whoever leaves is noticed."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import TIMINGS, USAGE, answer
from live_server import LiveServer, wait_for

from localfast.core import Accepted, Failed, Finished, SequenceFinished, TextDelta
from localfast.errors import ContextLengthExceeded, EngineDied, QueueFull

pytestmark = pytest.mark.live
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"model": "tiny", "prompt": "Hi"}),
    ("/generate", {"prompt": "Hi"}),
]


def frames(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: "):
            yield "[DONE]" if line == "data: [DONE]" else json.loads(line[6:])
        elif line:
            yield line


def silent(_: object) -> list[Any]:
    return [Accepted(5)]


def test_stream_text_arrives_while_the_engine_still_works(tmp_path: Path) -> None:
    with (
        LiveServer(tmp_path, silent) as server,
        server.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response,
    ):
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        received = frames(response.iter_lines())
        assert next(received)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        server.push(1, TextDelta(0, "first", 1))
        assert next(received)["choices"][0]["delta"] == {"content": "first"}
        server.push(1, TextDelta(0, "second", 1), SequenceFinished(0, "stop"), Finished(USAGE, TIMINGS))
        assert next(received)["choices"][0]["delta"] == {"content": "second"}
        assert next(received)["choices"][0]["finish_reason"] == "stop"
        assert next(received) == "[DONE]"


def test_stream_ends_with_done_and_the_connection_is_reused(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as server:
        for _ in range(2):
            with server.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
                assert list(frames(response.iter_lines()))[-1] == "[DONE]"


def test_stream_of_the_simple_pair_closes_with_the_counts(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as server:
        with server.client.stream("POST", "/generate_stream", json={"prompt": "Hi"}) as response:
            received = list(frames(response.iter_lines()))
        assert [frame.get("text") for frame in received[:-1]] == ["Hello", " world"]
        assert received[-1]["done"] is True and received[-1]["tokens_generated"] == 2


def test_stream_that_is_silent_sends_signs_of_life(tmp_path: Path) -> None:
    with (
        LiveServer(tmp_path, silent, heartbeat_s=0.1) as server,
        server.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response,
    ):
        received = frames(response.iter_lines())
        next(received)
        assert [next(received), next(received)] == [":", ":"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_client_that_hangs_up_aborts_its_request(tmp_path: Path, path: str, body: dict[str, Any], stream: bool) -> None:
    path = "/generate_stream" if path == "/generate" and stream else path
    content = json.dumps({**body, "stream": stream} if path.startswith("/v1") else body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with LiveServer(tmp_path, silent) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + content)
            wait_for(lambda: server.start.engines, "the load")
            assert server.engine.submitted_one.wait(10)
        assert server.engine.abandoned_one.wait(10), "the engine was not told"
        assert server.engine.open_requests == 0
        page = server.client.get("/metrics").text
        assert f'localfast_requests_total{{model="tiny",route="{path}",status="cancelled"}} 1.0' in page


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status"), [(ContextLengthExceeded(prompt_tokens=9000, context_tokens=2048), 400), (EngineDied(model="tiny"), 503)]
)
def test_failure_before_the_first_text_has_its_real_status(tmp_path: Path, error: Any, status: int, stream: bool) -> None:
    with LiveServer(tmp_path, lambda _: [Failed(error)]) as server:
        response = server.client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        assert response.status_code == status
        assert response.json()["error"]["code"] == error.code
        assert response.headers.get("retry-after") == (str(error.retry_after_s) if error.retry_after_s else None)


def test_failure_in_the_middle_of_a_stream_is_its_last_frame(tmp_path: Path) -> None:
    script = [Accepted(5), TextDelta(0, "Hel", 1), Failed(EngineDied(model="tiny", reason="SIGKILL"))]
    with LiveServer(tmp_path, lambda _: script) as server:
        with server.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            received = list(frames(response.iter_lines()))
        assert received[-1]["error"]["code"] == "engine_died" and "choices" not in received[-1]
        whole = server.client.post("/v1/chat/completions", json=CHAT)
        assert whole.status_code == 503, "an answer in one piece can still have its status"


def test_full_queue_is_503_with_retry_after(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as server:
        server.client.post("/v1/chat/completions", json=CHAT)
        server.engine.refuse = QueueFull(waiting=64)
        response = server.client.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")


def test_answers_say_which_parameters_they_ignored(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as server:
        body = {**CHAT, "mirostat": 2, "user": "me"}
        whole = server.client.post("/v1/chat/completions", json=body)
        assert whole.json()["warnings"] == ["ignored parameter 'mirostat'"]
        stream = server.client.post("/v1/chat/completions", json={**body, "stream": True})
        assert stream.headers["x-localfast-ignored"] == "mirostat"


def test_requests_for_a_model_that_is_loading_all_share_the_load(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as server, ThreadPoolExecutor(8) as pool:

        async def close_gate() -> None:
            server.start.gate = asyncio.Event()

        async def open_gate() -> None:
            assert server.start.gate is not None
            server.start.gate.set()

        asyncio.run_coroutine_threadsafe(close_gate(), server.loop).result(10)
        url = f"http://127.0.0.1:{server.port}"
        answers = [pool.submit(httpx.post, f"{url}/v1/chat/completions", json=CHAT, trust_env=False) for _ in range(8)]
        wait_for(lambda: server.start.configs, "the load")
        assert server.client.get("/health").status_code == 200, "the server is alive while a model loads"
        assert server.client.get("/ready").status_code == 503
        asyncio.run_coroutine_threadsafe(open_gate(), server.loop).result(10)
        assert [future.result(20).status_code for future in answers] == [200] * 8
        assert len(server.start.configs) == 1
        assert server.client.get("/ready").json()["loaded"] == ["tiny"]


def test_body_over_the_limit_is_413_declared_or_chunked(tmp_path: Path) -> None:
    with LiveServer(tmp_path, max_body_bytes=1000) as server:
        large = json.dumps({**CHAT, "padding": "x" * 2000}).encode()
        for content in (large, iter([large[:900], large[900:]])):
            response = server.client.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("body", [b"{", b"", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_body_that_is_no_json_object_is_400(tmp_path: Path, body: bytes) -> None:
    with LiveServer(tmp_path) as server:
        response = server.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_request"


def test_unknown_model_is_404_with_the_near_name(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as server:
        error = server.client.post("/v1/chat/completions", json={**CHAT, "model": "tinny"}).json()["error"]
        assert error["code"] == "model_not_found" and "did you mean tiny" in error["message"]


def test_unknown_path_and_method_have_the_error_shape(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as server:
        for method, path, status in [("GET", "/nothing", 404), ("GET", "/v1/chat/completions", 405), ("POST", "/health", 405)]:
            response = server.client.request(method, path, json={} if method == "POST" else None)
            assert response.status_code == status
            assert set(response.json()["error"]) >= {"message", "type", "param", "code"}


def test_models_list_names_what_can_be_asked_for(tmp_path: Path) -> None:
    with LiveServer(tmp_path, alias="my-model") as server:
        assert [entry["id"] for entry in server.client.get("/v1/models").json()["data"]] == ["my-model"]
        answered = server.client.post("/v1/chat/completions", json={**CHAT, "model": "my-model"}).json()
        assert answered["model"] == "my-model"
        entry = server.client.get("/v1/models/my-model").json()
        assert entry["meta"]["loaded"] and entry["context_length"] > 0
        assert server.client.get("/v1/models/other").status_code == 404


def test_choices_of_the_answer_are_numbered(tmp_path: Path) -> None:
    with LiveServer(tmp_path, lambda request: answer("a", "b", n=request.n)) as server:
        choices = server.client.post("/v1/chat/completions", json={**CHAT, "n": 3}).json()["choices"]
        assert [(choice["index"], choice["message"]["content"]) for choice in choices] == [(0, "ab"), (1, "ab"), (2, "ab")]
