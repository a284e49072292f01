"""engine list, install, use and remove, with wheels of a made-up engine in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from engines.fake_wheels import VERSION, engine_files, write_wheel

from localfast.cli import COMMANDS, cli
from localfast.engines.installed import pinned_version

pytestmark = pytest.mark.skipif(pinned_version() != VERSION, reason="the made-up engine has another version")


@pytest.fixture(autouse=True)
def known_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "engine", "engine")


def run(*arguments: str, answer: str = "") -> Result:
    return CliRunner().invoke(cli, ["engine", *arguments], input=answer)


def listed(*arguments: str) -> dict[str, object]:
    result = run("list", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    answer: dict[str, object] = json.loads(result.stdout)
    return answer


def names(answer: dict[str, object]) -> list[str]:
    return [row["name"] for row in answer["engines"] if row["name"] != "environment"]  # type: ignore[attr-defined, index]


def test_engine_list_of_a_fresh_home_says_what_suits() -> None:
    answer = listed()
    words = run("list").stdout

    assert names(answer) == [] and answer["active"] == "environment"
    assert any(one["build"] == "cpu" and one["suits"] for one in answer["suggestions"])  # type: ignore[attr-defined, index]
    assert "best first" in words and "runs without a GPU" in words


def test_engine_install_use_and_remove(tmp_path: Path) -> None:
    name = f"{VERSION}-cpu"
    write_wheel(tmp_path / "wheels", engine_files())
    done = run("install", "cpu", "--find-links", str(tmp_path / "wheels"))
    assert done.exit_code == 0, done.stderr
    assert f"{name} works: CPU" in done.stdout and "sha256" in done.stdout and "used from the next load on" in done.stdout
    assert names(answer := listed()) == [name] and answer["active"] == name
    assert f"{name} *" in run("list").stdout

    assert run("use", "environment").exit_code in (0, 1)  # 1: this Python has no engine
    assert run("use", "cpu").exit_code == 0 and listed()["reason"] == "chosen with 'localfast engine use'"
    kept = run("remove", name, "--yes")
    assert kept.exit_code == 1 and "in use" in kept.stderr and names(listed()) == [name]
    assert run("remove", name, "--force", answer="n\n").exit_code == 1 and names(listed()) == [name]
    gone = run("remove", "cpu", "--force", "--yes")
    assert gone.exit_code == 0 and "freed" in gone.stdout and names(listed()) == []


def test_engine_use_tries_a_build_first(clean_environ: Path) -> None:
    folder = clean_environ / "engines" / f"{VERSION}-cpu"
    (folder / "llama_cpp").mkdir(parents=True)
    result = run("use", "cpu")
    assert result.exit_code == 1 and "no readable record" in result.stderr
    assert "no readable record" in run("list").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("use", "cu124"), "there are: none"),
        (("remove", "cu124"), "there are: none"),
        (("install", "cu999"), "there are cu132"),
        (("install", "cpu", "--offline"), "offline setting"),
        (("install", "--offline"), "offline setting"),
        (("install", "cpu", "--cmake-args", "-DX=1"), "--from-source"),
    ],
)
def test_engine_refuses_in_words(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1 and words in result.stderr and "Traceback" not in result.output


def test_engine_setting_of_a_build_that_is_not_there_shows_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALFAST_ENGINE", "cu124")
    assert "LOCALFAST_ENGINE" in run("list").stdout and listed()["active"] == ""
