"""pull, as a user meets it when things go wrong: cut off, stopped, refused, full."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_hub import FakeHub, Hold, HubFile

from localfast.cli import cli
from localfast.errors import DownloadStopped
from localfast.models import fetching, web
from localfast.models.hub import pull
from localfast.models.web import Patience
from localfast.settings import load_settings

BIG = b"GGUF" + random.Random(2).randbytes(2 * 2**20)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.fixture
def file(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> HubFile:
    """The only file of org/big."""
    monkeypatch.setattr(web, "PATIENCE", Patience(attempts=3, first_wait_s=0, longest_wait_s=0))
    monkeypatch.setenv("LOCALFAST_HF_ENDPOINT", fake_hub.endpoint)
    monkeypatch.setenv("LOCALFAST_REUSE", "0")
    big = HubFile(BIG)
    fake_hub.add("org/big", **{"big-Q4_K_M": big})
    return big


def test_cli_pull_says_where_it_goes_on(file: HubFile) -> None:
    file.hold, stop = Hold(1_000_000), threading.Event()
    with pytest.raises(DownloadStopped):
        pull("org/big", load_settings(), lambda done_bytes, _: stop.set() if done_bytes == 1_000_000 else None, stop=stop)
    file.hold = None

    result = run("pull", "org/big", "--json")

    assert result.exit_code == 0, result.stderr
    assert "resume   going on at 1 MB of 2.1 MB" in result.stderr
    assert json.loads(result.stdout)["quant"] == "Q4_K_M"
    assert "resume" not in run("pull", "org/big").stderr


def test_cli_pull_says_nothing_of_going_on_at_the_first_try(file: HubFile) -> None:
    assert "resume" not in run("pull", "org/big").stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C goes to a whole group of processes there")
def test_cli_pull_stopped_with_ctrl_c_says_how_to_go_on(file: HubFile, clean_environ: Path) -> None:
    file.hold = Hold(1_000_000)
    command = [sys.executable, "-m", "localfast", "pull", "org/big"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        file.hold.wait_until_reached()
        os.kill(child.pid, signal.SIGINT)
        _, said = child.communicate()

    assert child.returncode == DownloadStopped.exit_code
    assert "it was cancelled" in said and "localfast pull org/big:Q4_K_M" in said
    assert "Traceback" not in said
    assert not list(clean_environ.rglob("model.json")), "it is no model yet"


@pytest.mark.parametrize(
    ("faults", "words", "next_step"),
    [
        ({"gone": True}, "no longer in the repository", "try again"),
        ({"served": BIG[:-1] + b"?"}, "sha256", "try again"),
        ({"refusals": [(503, {})] * 9}, "503", "wait a minute, then go on where it stopped"),
        ({"refusals": [(401, {"X-Error-Code": "GatedRepo"})]}, "accepted the terms at http", "HF_TOKEN"),
    ],
)
def test_cli_pull_that_fails_says_why_and_what_to_do(
    file: HubFile, faults: dict[str, object], words: str, next_step: str
) -> None:
    for name, value in faults.items():
        setattr(file, name, value)
    result = run("pull", "org/big", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert words in result.stderr and next_step in result.stderr
    assert run("list").stdout.count("org/big") == 0


def test_cli_pull_without_space_says_both_numbers(file: HubFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "SPACE_FACTOR", 10**9)
    result = run("pull", "org/big")
    assert result.exit_code == 1
    assert "GiB are free in" in result.stderr and "LOCALFAST_HOME" in result.stderr
