"""`localfast serve` as a user starts it: a process of its own, the real engine, real clients, signals and kills."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from live_server import wait_for

from localfast.cli.serve import take_port
from localfast.errors import InvalidSetting
from localfast.settings import load_settings

pytestmark = [pytest.mark.live, pytest.mark.model]
WINDOWS = sys.platform == "win32"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Write a long story about a fox."}]}


class Served:
    """One running `localfast serve`; `log` is what it printed so far."""

    def __init__(self, *arguments: str) -> None:
        flags = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP} if WINDOWS else {}  # type: ignore[attr-defined]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "localfast", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            **flags,
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log += line

    def __enter__(self) -> Served:
        found = wait_for(lambda: re.search(r"ready +(http://\S+)", self.log) or self.process.poll() is not None, "ready", 60)
        assert found is not True, self.log
        self.url = found[1]
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20)
        self._reader.join(20)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def interrupt(self) -> int:
        self.process.send_signal(signal.CTRL_BREAK_EVENT if WINDOWS else signal.SIGINT)  # type: ignore[attr-defined]
        return self.process.wait(30)

    @property
    def model(self) -> dict[str, Any]:
        (model,) = self.client.get("/v1/localfast/models").json()["models"]
        return dict(model)

    def stream(self, **body: Any) -> Iterator[dict[str, Any]]:
        """Frames of one chat; an `error` frame may be the last one."""
        with self.client.stream("POST", "/v1/chat/completions", json={**CHAT, **body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])

    def engine_children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def alive(process: psutil.Process) -> bool:
    """A zombie is gone; only its new parent has not looked yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def served(starter_path: Path) -> Iterator[Served]:
    with Served(str(starter_path), "--alias", "starter", "--ctx", "2048") as server:
        yield server


def run_serve(*arguments: str, prelude: str = "pass") -> subprocess.CompletedProcess[str]:
    program = f"import sys; {prelude}; from localfast.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, "serve", *arguments], capture_output=True, encoding="utf-8", timeout=60, check=False
    )


def test_serve_says_what_it_found_and_how_to_ask(served: Served) -> None:
    for fact in ("CPU cores", "31 layers", "2048 tokens per request", "4 requests at once", "curl -N", "served as 'starter'"):
        assert fact in served.log.replace("31/31", "31"), served.log
    assert served.client.get("/health").json()["status"] == "ok"
    assert served.client.get("/ready").json() == {"status": "ready", "loaded": ["starter"], "loading": []}


def test_serve_printed_curl_command_works(served: Served) -> None:
    command = wait_for(lambda: re.search(r"^curl -N (\S+) -H '([^']+)' -d '(.+)'$", served.log, re.MULTILINE), "the command")
    name, _, value = command[2].partition(": ")
    with httpx.stream("POST", command[1], content=command[3], headers={name: value}, timeout=60, trust_env=False) as response:
        assert response.read().rstrip().endswith(b"data: [DONE]")


def test_serve_eight_streams_at_once_share_batches(served: Served) -> None:
    before = served.model
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(lambda: list(served.stream(max_tokens=24, ignore_eos=True))) for _ in range(8)]
        answers = [job.result() for job in jobs]
    assert all(frames[-1]["choices"][0]["finish_reason"] == "length" for frames in answers)
    calls = served.model["decode_calls"] - before["decode_calls"]
    assert calls < 8 * 24 / 2, f"{calls} decode calls for {8 * 24} tokens"


def test_serve_official_client_streams_and_folds_the_same_text(served: Served) -> None:
    with httpx.Client(trust_env=False) as connections:
        check_official_client(openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", http_client=connections))


def check_official_client(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "starter", **CHAT, "max_completion_tokens": 12, "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage and chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    details = chunks[-1].usage.prompt_tokens_details
    assert details and details.cached_tokens == whole.usage.prompt_tokens - 1, "the second request reuses the first one's prompt"
    completion = client.completions.create(
        model="starter", prompt="1, 2, 3, 4,", max_tokens=6, temperature=0, logprobs=2, echo=True
    )
    assert completion.choices[0].text.startswith("1, 2, 3, 4, 5")
    assert [model.id for model in client.models.list()] == ["starter"]
    with pytest.raises(openai.NotFoundError, match="did you mean starter"):
        client.chat.completions.create(**{**arguments, "model": "startre"})
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**arguments, "messages": [{"role": "user", "content": "long " * 3000}]})
    assert caught.value.code == "context_length_exceeded" and caught.value.body["n_ctx"] == 2048  # type: ignore[index]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("text", ["Hi", "A very long prompt. " * 380], ids=["while it generates", "while it reads the prompt"])
def test_serve_client_that_hangs_up_frees_its_slot(served: Served, text: str, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": text}], "stream": stream, "ignore_eos": True}
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + content)
        wait_for(lambda: served.model["running"], "the start")
    after = wait_for(lambda: (model := served.model)["open_requests"] == 0 and model, "the end")
    assert after["running"] == 0
    assert after["used_cells"] < 2000, "it did not go on to the end of its context"
    assert served.client.post("/generate", json={"prompt": "Hi", "max_tokens": 2}).json()["tokens_generated"] == 2


def test_serve_killed_engine_ends_every_stream_cleanly_and_the_next_request_works(served: Served) -> None:
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(lambda: list(served.stream(ignore_eos=True))) for _ in range(4)]
        wait_for(lambda: served.model["running"] == 4, "four streams")
        os.kill(served.model["pid"], signal.SIGTERM if WINDOWS else signal.SIGKILL)
        for job in jobs:
            last = job.result()[-1]
            assert last["error"]["code"] == "engine_died" and "choices" not in last
    answer = served.client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    assert 'localfast_failures_total{code="engine_died"' in served.client.get("/metrics").text


def test_serve_interrupted_lets_requests_finish_and_leaves_no_process(served: Served) -> None:
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(lambda: list(served.stream(max_tokens=40, ignore_eos=True)))
        wait_for(lambda: served.model["running"], "the stream")
        children = served.engine_children()
        assert served.interrupt() == 0 or WINDOWS
        assert job.result()[-1]["choices"][0]["finish_reason"] == "length"
    assert children
    wait_for(lambda: not any(map(alive, children)), "the end of the engine")


def test_serve_interrupted_ends_long_requests_after_the_drain_time(starter_path: Path) -> None:
    with Served(str(starter_path), "--drain-s", "0.2") as server, ThreadPoolExecutor(1) as pool:
        job = pool.submit(lambda: list(server.stream(ignore_eos=True)))
        wait_for(lambda: server.model["running"], "the stream")
        server.interrupt()
        assert job.result()[-1]["error"]["code"] == "shutting_down"


def test_serve_whose_process_is_killed_leaves_no_engine(served: Served) -> None:
    children = served.engine_children()
    served.process.kill()
    wait_for(lambda: not any(map(alive, children)), "the end of the engine")


def test_serve_without_a_model_serves_all_that_are_installed(starter_path: Path) -> None:
    home = starter_path.parents[3]
    with Served("--home", str(home)) as server:
        assert "loaded on first use" in server.log
        assert server.client.get("/ready").status_code == 200
        assert server.client.post("/generate", json={"model": "smollm2-135m", "prompt": "Hi", "max_tokens": 2}).status_code == 200
        assert server.model["name"] == "smollm2-135m"


def test_serve_taken_port_names_its_owner_and_exits_3(starter_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_serve(str(starter_path), "--port", str(port))
    assert ended.returncode == 3
    assert f"port {port}" in ended.stderr and f"pid {os.getpid()}" in ended.stderr and f"--port {port + 1}" in ended.stderr


def test_serve_without_the_engine_says_the_next_command_and_exits_4() -> None:
    ended = run_serve(prelude="sys.modules['llama_cpp'] = None")
    assert ended.returncode == 4
    assert "run: localfast engine install" in ended.stderr and len(ended.stderr.splitlines()) == 2


def test_serve_for_others_without_a_key_is_refused_with_exit_2(starter_path: Path) -> None:
    ended = run_serve(str(starter_path), "--host", "0.0.0.0", "--port", "0")
    assert ended.returncode == 2 and "LOCALFAST_API_KEY" in ended.stderr


@pytest.mark.parametrize(("flag", "value"), [("--host", "192.0.2.1"), ("--host", "no.such.host.invalid"), ("--port", "99999")])
def test_serve_address_that_cannot_be_had_names_the_flag_and_exits_2(flag: str, value: str) -> None:
    ended = run_serve("--api-key", "secret", flag, value)
    assert ended.returncode == 2 and f"from flag {flag}: '{value}' cannot be listened on" in ended.stderr
    assert "secret" not in ended.stderr


def test_take_port_blames_nobody_for_an_address_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localfast.cli.serve.port_owner", lambda *_: "somebody over there (pid 1)")
    with pytest.raises(InvalidSetting) as caught:
        take_port(load_settings({"host": "192.0.2.1", "port": 8000}))
    assert caught.value.name == "host"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no-such-model", "no model 'no-such-model'"),
        ("/nowhere/x.gguf", "no model"),
        ("smollm2-135", "did you mean smollm2-135m"),
    ],
)
def test_serve_unknown_model_is_one_message(name: str, words: str) -> None:
    ended = run_serve(name, "--port", "0")
    assert ended.returncode == 1 and words in ended.stderr and "Traceback" not in ended.stderr


def test_serve_file_that_does_not_load_ends_with_the_reason(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00 and then nothing")
    ended = run_serve(str(broken), "--port", "0")
    assert ended.returncode == 1 and "is not a usable GGUF file" in ended.stderr and "Traceback" not in ended.stderr
