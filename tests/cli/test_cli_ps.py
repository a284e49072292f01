"""ps against a real server in a thread, and against what is none."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from live_server import LiveServer

from localfast.cli import cli
from localfast.cli.ps import server_url
from localfast.engine.messages import EngineStats
from localfast.settings import Settings

MIB = 2**20
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def run(*arguments: str, **environ: str) -> Result:
    return CliRunner(env={"COLUMNS": "80", **environ}).invoke(cli, ["ps", *arguments])


def test_ps_shows_what_is_loaded_and_what_it_does(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as server:
        url = f"http://127.0.0.1:{server.port}"
        assert "has no model loaded" in run("--url", url).stdout
        assert server.client.post("/v1/chat/completions", json=CHAT).status_code == 200
        buffers = (("CPU", "model", 90 * MIB), ("CPU", "KV", 10 * MIB), ("CUDA0", "model", 3 * 512 * MIB))
        server.engine.facts = replace(server.engine.facts, buffers=buffers, gpu_layers=3)
        server.engine.stats = EngineStats(running=2, waiting=1)

        shown = run(LOCALFAST_PORT=str(server.port)).stdout.splitlines()
        model = json.loads(run("--json", "--url", url).stdout)["models"][0]

    assert shown[0].split() == ["NAME", "QUANT", "PID", "ON", "GPU", "MEMORY", "CONTEXT", "BUSY", "WAITING"]
    row = shown[1].split()
    assert row[0] == "tiny" and {"4711", "3/5", "2/4", "1"} <= set(row)
    assert "CPU 100 MiB" in shown[1] and "CUDA0 1.5 GiB" in shown[2]
    assert max(map(len, shown)) <= 80
    assert (model["name"], model["running"], model["pid"]) == ("tiny", 2, 4711)


def test_ps_sends_the_key_and_says_when_it_is_the_wrong_one(tmp_path: Path) -> None:
    with LiveServer(tmp_path, api_key="sesame") as server:
        port = str(server.port)
        assert run(LOCALFAST_PORT=port, LOCALFAST_API_KEY="sesame").exit_code == 0
        wrong = run(LOCALFAST_PORT=port, LOCALFAST_API_KEY="tulip")
        without = run(LOCALFAST_PORT=port)

    assert wrong.exit_code == without.exit_code == 2
    assert "LOCALFAST_API_KEY" in wrong.stderr and "tulip" not in wrong.stderr


def test_ps_goes_around_a_proxy_to_this_machine(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as server:
        result = run(LOCALFAST_PORT=str(server.port), http_proxy="http://127.0.0.1:9", no_proxy="")

    assert result.exit_code == 0, result.stderr


def test_ps_without_a_server_says_how_to_start_one() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        result = run(LOCALFAST_PORT=str(port))

    assert result.exit_code == 1
    assert result.stderr == f"error: no localfast server answers at http://127.0.0.1:{port}\n  start one: localfast serve\n"


@pytest.mark.parametrize("body", [b"<html>hello</html>", b'{"models": 3}', b"[]", b'{"error": "no"}'])
def test_ps_takes_no_other_server_for_ours(body: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        result = run("--url", f"http://127.0.0.1:{other.server_port}/")
        thread.join()

    assert result.exit_code == 1 and "no localfast server answers" in result.stderr


@pytest.mark.parametrize("url", ["file:///etc/passwd", "localhost:8000", "http://[::1"])
def test_ps_refuses_what_is_no_address_of_a_server(url: str) -> None:
    result = run("--url", url)

    assert result.exit_code == 2 and "--url" in result.stderr


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:1"), ("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1"), ("box", "http://box:1")],
)
def test_server_url_is_an_address_that_can_be_reached(host: str, url: str) -> None:
    assert server_url(Settings(host=host, port=1)) == url
