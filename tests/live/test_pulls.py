"""`/v1/localfast/pull` as clients see it: lines while bytes arrive, one download for all who ask, a stop that loses nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, tiny_model

from localfast.errors import NoSpace
from localfast.models.catalog import InstalledModel, model_at
from localfast.pulls import Progress

pytestmark = pytest.mark.live
URL = "/v1/localfast/pull"


class Source:
    """Fetches by hand: `go` lets it end, `calls` says how often it was asked."""

    def __init__(self, folder: Path) -> None:
        self.path = tiny_model(folder)
        self.calls: list[str] = []
        self.begun, self.go = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def __call__(self, name: str, progress: Progress) -> InstalledModel:
        self.calls.append(name)
        progress(10, 40)
        self.begun.set()
        while not self.go.wait(0.01):
            progress(20, 40)
        if self.error:
            raise self.error
        return model_at(self.path)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "source")


@pytest.fixture
def server(tmp_path: Path, source: Source) -> Iterator[LiveServer]:
    with LiveServer(tmp_path, fetch=source) as server:
        yield server
        source.go.set()


def lines(server: LiveServer, source: Source) -> list[dict[str, Any]]:
    """All that one client is told; the download ends once the first line was seen."""
    told = []
    with server.client.stream("POST", URL, json={"model": "org/tiny"}) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        for line in response.iter_lines():
            told.append(json.loads(line))
            source.go.set()
    return told


def test_pull_tells_how_far_it_is_and_ends_with_the_model(server: LiveServer, source: Source) -> None:
    told = lines(server, source)
    assert told[-1]["status"] == "done" and told[-1]["installed"].startswith("tiny")
    assert all(entry["done_bytes"] <= 40 for entry in told)
    assert server.client.get(URL).json() == {"pulls": []}


def test_pull_of_the_same_model_joins_the_one_that_runs(server: LiveServer, source: Source) -> None:
    streams = [server.client.stream("POST", URL, json={"model": "org/tiny"}) for _ in range(2)]
    with streams[0] as first, streams[1] as second:  # both were answered while it ran
        assert [len(server.client.get(URL).json()["pulls"]), len(source.calls)] == [1, 1]
        source.go.set()
        ends = [json.loads(list(response.iter_lines())[-1]) for response in (first, second)]
    assert [end["status"] for end in ends] == ["done", "done"] and source.calls == ["org/tiny"]


def test_pull_goes_on_when_its_client_leaves(server: LiveServer, source: Source) -> None:
    with server.client.stream("POST", URL, json={"model": "org/tiny"}) as response:
        next(response.iter_lines())
    assert [entry["model"] for entry in server.client.get(URL).json()["pulls"]] == ["org/tiny"]


def test_pull_can_be_stopped(server: LiveServer, source: Source) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.client.post, URL, json={"model": "org/tiny", "stream": False})
        assert source.begun.wait(20)
        stopped = server.client.delete(URL, params={"model": "org/tiny"}).json()
        assert waiting.result().status_code == 499
    assert stopped["status"] == "failed" and stopped["error"]["code"] == "download_stopped"
    assert "localfast pull" in stopped["error"]["hint"]
    assert server.client.delete(URL, params={"model": "org/tiny"}).status_code == 400


def test_pull_that_fails_says_why(server: LiveServer, source: Source) -> None:
    source.error = NoSpace(name="org/tiny", reason="it needs 3 GiB, 1 GiB is free")
    told = lines(server, source)
    assert told[-1]["error"]["code"] == "no_space" and "3 GiB" in told[-1]["error"]["message"]
    answer = server.client.post(URL, json={"model": "org/tiny", "stream": False})
    assert answer.status_code == 507 and answer.json()["error"]["code"] == "no_space"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "must name"),
        ({"model": 3}, "must name"),
        ({"model": "a/b", "stream": "no"}, "stream"),
        ({"model": "/etc/x.gguf"}, "path"),
    ],
)
def test_pull_refuses_what_it_cannot_mean(server: LiveServer, source: Source, body: dict[str, Any], words: str) -> None:
    answer = server.client.post(URL, json=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert source.calls == []
