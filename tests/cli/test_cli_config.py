"""config show, path, set and unset on real files."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from localfast.cli import cli
from localfast.settings import OPTIONS, load_settings

FILE = """\
# my machine
port = 8001  # not 8000

allowed_hosts = [
    "box",  # port = 1
    "box.local",
]
drain_s = 2.5
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["config", *arguments])


@pytest.fixture
def file(clean_environ: Path) -> Path:
    clean_environ.mkdir()
    path = clean_environ / "config.toml"
    path.write_text(FILE)
    return path


def test_config_show_names_every_setting_with_its_source(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALFAST_SLOTS", "3")

    shown = json.loads(run("show", "--json").stdout)["settings"]
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in run("show").stdout.splitlines()}

    assert set(shown) == {row.name for row in OPTIONS}
    assert shown["port"] == {"value": 8001, "source": str(file)}
    assert shown["slots"] == {"value": 3, "source": "environment variable LOCALFAST_SLOTS"}
    assert shown["ctx"] == {"value": 0, "source": "default"}
    assert lines["port"] == ["8001", str(file)]
    assert lines["allowed_hosts"][0] == "box,box.local"


def test_config_show_keeps_the_key_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALFAST_API_KEY", "sesame")

    assert "sesame" not in run("show").output + run("show", "--json").output
    assert "sesame" not in run("set", "api-key", "sesame").output


def test_config_path_is_the_file_that_set_writes(clean_environ: Path) -> None:
    path = Path(run("path").stdout.strip())
    assert not path.exists()

    result = run("set", "max-queue", "7")

    assert result.stdout == f"max_queue = 7 in {path}\n"
    assert path == clean_environ / "config.toml" and path.read_text() == "max_queue = 7\n"


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("port", "9000", "port = 9000"),
        ("gpu_layers", "-1", "gpu_layers = -1"),
        ("offline", "yes", "offline = true"),
        ("heartbeat_s", "3", "heartbeat_s = 3.0"),
        ("alias", 'a "b" ä', 'alias = "a \\"b\\" ä"'),
        ("allowed_hosts", "a, b", 'allowed_hosts = ["a", "b"]'),
    ],
)
def test_config_set_writes_each_type_as_toml(file: Path, name: str, value: str, line: str) -> None:
    assert run("set", name, value).exit_code == 0
    assert line in file.read_text(encoding="utf-8").splitlines()
    assert load_settings().explain(name) == str(file)


def test_config_set_replaces_its_own_lines_and_keeps_the_others(file: Path) -> None:
    run("set", "allowed_hosts", "other")
    assert file.read_text() == FILE[: FILE.index("allowed_hosts")] + 'allowed_hosts = ["other"]\n' + "drain_s = 2.5\n"

    run("unset", "allowed-hosts")
    run("set", "slots", "2")
    assert file.read_text() == FILE[: FILE.index("allowed_hosts")] + "drain_s = 2.5\nslots = 2\n"


def test_config_set_appends_after_a_last_line_without_end(file: Path) -> None:
    file.write_text("port = 8001")

    run("set", "slots", "2")

    assert file.read_text() == "port = 8001\nslots = 2\n"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("port", "many", "is not a whole number"),
        ("port", "-1", "is less than 0"),
        ("kv_type", "q5", "is none of auto, f16"),
        ("prot", "1", "is not for a setting"),
        ("home", "/x", "is not for a setting"),
    ],
)
def test_config_set_refuses_what_the_settings_would_and_changes_nothing(file: Path, name: str, value: str, reason: str) -> None:
    result = run("set", name, value)

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: setting '{name}' from the command line: '{value}' {reason}")
    assert file.read_text() == FILE
    assert sorted(path.name for path in file.parent.iterdir()) == ["config.toml"]


def test_config_set_and_unset_repair_a_file_that_nothing_else_can_use(file: Path) -> None:
    file.write_text('port = "many"\nslotz = 3\n')
    assert run("show").exit_code == 2

    assert "setting 'slotz'" in run("set", "port", "8001").stderr, "the other mistake is named, with the file it is in"
    assert run("unset", "slotz").exit_code == 2
    file.write_text('port = "many"\n')
    assert run("set", "port", "8001").exit_code == 0
    assert run("show").exit_code == 0


def test_config_set_leaves_a_file_that_is_no_toml_alone(file: Path) -> None:
    file.write_text("port = [1,\n")

    result = run("set", "slots", "2")

    assert result.exit_code == 2 and "cannot be changed" in result.stderr
    assert file.read_text() == "port = [1,\n"


def test_config_set_says_when_something_stronger_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALFAST_PORT", "9")

    assert "environment variable LOCALFAST_PORT is stronger" in run("set", "port", "8001").stderr


def test_config_unset_of_what_is_not_there_is_fine(file: Path) -> None:
    result = run("unset", "ctx")

    assert (result.exit_code, result.stdout) == (0, f"ctx is not in {file}\n")
    assert file.read_text() == FILE


@pytest.mark.skipif(sys.platform == "win32", reason="files have no mode there")
def test_config_file_is_for_its_owner_and_keeps_the_mode_it_has(clean_environ: Path) -> None:
    path = clean_environ / "config.toml"

    run("set", "api_key", "sesame")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    run("set", "api_key", "open")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
