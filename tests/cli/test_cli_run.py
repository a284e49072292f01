"""run: how a question is put together, and the real thing on the starter model in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from localfast.cli import cli

LOCALFAST = [sys.executable, "-m", "localfast"]
SMALL = ["--threads", "1", "--ctx", "1024", "--slots", "1"]


def start(*arguments: str, **options: object) -> subprocess.Popen[bytes]:
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*LOCALFAST, "run", *SMALL, *arguments], **{**streams, **options})  # type: ignore[call-overload, no-any-return]


def test_run_without_any_prompt_explains_itself_before_anything_is_fetched() -> None:
    result = CliRunner().invoke(cli, ["run", "smollm2-135m"], input=" \n")

    assert result.exit_code == 2 and "there is no prompt" in result.stderr


@pytest.mark.parametrize("flags", [["--max-tokens", "0"], ["--temperature", "-1"], ["--ctx", "-1"], ["--kv-type", "q5"]])
def test_run_refuses_bad_numbers(flags: list[str]) -> None:
    assert CliRunner().invoke(cli, ["run", "smollm2-135m", "hi", *flags]).exit_code == 2


@pytest.mark.model
def test_run_answers_prompt_and_pipe_with_nothing_else_on_stdout(starter_path: Path) -> None:
    flags = ("--temperature", "0", "--max-tokens", "4", "--system", "You explain at length.")
    split = start(str(starter_path), "Which animal is", *flags)
    split_out, split_err = split.communicate("this: a cat?".encode("utf-8-sig"), timeout=120)
    whole = start(str(starter_path), "Which animal is\n\nthis: a cat?", *flags, stdin=subprocess.DEVNULL)
    whole_out, _ = whole.communicate(timeout=120)

    assert (split.returncode, whole.returncode) == (0, 0), split_err
    assert split_out == whole_out
    answer = split_out.decode()
    assert answer.strip() and answer.endswith("\n") and "tokens/s" not in answer
    assert b"cut off" in split_err


@pytest.mark.model
@pytest.mark.skipif(sys.platform == "win32", reason="a signal cannot be sent to one process there")
def test_run_leaves_no_process_behind_after_ctrl_c(starter_path: Path) -> None:
    process = start(str(starter_path), "Write a very long story.", "--temperature", "0", stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.read(10)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=60)

    assert children and process.returncode == 1
    assert b"Traceback" not in complaints
    assert psutil.wait_procs(children, timeout=20)[1] == []


@pytest.mark.model
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_run_chat_survives_ctrl_c_and_remembers(starter_path: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    process = start(str(starter_path), "--temperature", "0", "--max-tokens", "200", **terminal)
    os.close(theirs)
    seen = b""

    def until(words: bytes) -> bytes:
        nonlocal seen
        while words not in seen:
            seen += os.read(ours, 4096)
        before, _, seen = seen.partition(words)
        return before

    def type_in(line: bytes) -> None:
        until(b">>> ")
        os.write(ours, line)

    type_in(b"Write a very long story about a dragon.\n")
    until(b" the ")
    process.send_signal(signal.SIGINT)
    until(b"(stopped)")
    type_in(b"Say hi.\n")
    assert b"tokens/s" in until(b"prompt of ")
    with_history = int(until(b" tokens in"))
    type_in(b"/clear\n")
    type_in(b"Say hi.\n")
    until(b"prompt of ")
    assert int(until(b" tokens in")) < with_history
    type_in(b"/exit\n")
    assert process.wait(60) == 0
    os.close(ours)
