from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localfast.errors import InvalidSetting
from localfast.settings import OPTIONS, Settings, flag, load_settings, variable


def write_config(tmp_path: Path, text: str) -> dict[str, str]:
    """An environment whose home holds this config.toml."""
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    return {"LOCALFAST_HOME": str(tmp_path)}


def refusal(flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(InvalidSetting) as caught:
        load_settings(flags, environ or {})
    return str(caught.value)


# --- precedence ---------------------------------------------------------------------------------------------------------------


def test_load_prefers_flag_then_variable_then_file_then_default(tmp_path: Path) -> None:
    environ = write_config(tmp_path, "port = 1\nctx = 2\nslots = 3\n") | {"LOCALFAST_PORT": "4", "LOCALFAST_CTX": "5"}
    settings = load_settings({"port": 6, "ctx": None}, environ)
    assert (settings.port, settings.ctx, settings.slots, settings.batch) == (6, 5, 3, 0)
    assert settings.explain("port") == "flag --port"
    assert settings.explain("ctx") == "environment variable LOCALFAST_CTX"
    assert settings.explain("slots") == str(tmp_path / "config.toml")
    assert settings.explain("batch") == "default"


def test_load_takes_false_and_zero_from_a_flag_as_given() -> None:
    settings = load_settings({"offline": False, "port": 0}, {"LOCALFAST_OFFLINE": "1", "LOCALFAST_PORT": "9"})
    assert (settings.offline, settings.port) == (False, 0)


def test_load_takes_an_empty_variable_as_not_set() -> None:
    settings = load_settings(environ={"LOCALFAST_PORT": "", "LOCALFAST_OFFLINE": "", "HF_ENDPOINT": ""})
    assert settings == Settings()


def test_load_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch, clean_environ: Path) -> None:
    monkeypatch.setenv("LOCALFAST_CTX", "77")
    settings = load_settings()
    assert (settings.ctx, settings.home) == (77, str(clean_environ))


def test_hf_endpoint_answers_to_both_names_and_prefers_ours() -> None:
    foreign = load_settings(environ={"HF_ENDPOINT": "https://mirror"})
    assert (foreign.hf_endpoint, foreign.explain("hf_endpoint")) == ("https://mirror", "environment variable HF_ENDPOINT")
    both = load_settings(environ={"HF_ENDPOINT": "https://mirror", "LOCALFAST_HF_ENDPOINT": "https://ours"})
    assert (both.hf_endpoint, both.explain("hf_endpoint")) == ("https://ours", "environment variable LOCALFAST_HF_ENDPOINT")


# --- values -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("host", "::1", "::1"),
        ("port", "8080", 8080),
        ("gpu_layers", "-1", -1),
        ("drain_s", "2.5", 2.5),
        ("drain_s", "3", 3.0),
        *(("offline", word, True) for word in ("1", "true", "Yes", "ON")),
        *(("offline", word, False) for word in ("0", "false", "No", "OFF")),
        ("allowed_hosts", "a, b,,c ", ("a", "b", "c")),
        ("kv_type", "q8_0", "q8_0"),
    ],
)
def test_variable_is_converted_to_the_type_of_its_row(name: str, text: str, value: Any) -> None:
    found = getattr(load_settings(environ={variable(name): text}), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("port = 8080", "port", 8080),
        ('port = "8080"', "port", 8080),
        ("drain_s = 3", "drain_s", 3.0),
        ("offline = true", "offline", True),
        ('allowed_hosts = ["a", "b"]', "allowed_hosts", ("a", "b")),
        ('allowed_hosts = "a,b"', "allowed_hosts", ("a", "b")),
        ("allowed_hosts = []", "allowed_hosts", ()),
    ],
)
def test_config_value_is_converted_to_the_type_of_its_row(tmp_path: Path, line: str, name: str, value: Any) -> None:
    found = getattr(load_settings(environ=write_config(tmp_path, line)), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("port", "http", "is not a whole number"),
        ("port", "80.5", "is not a whole number"),
        ("drain_s", "soon", "is not a number"),
        ("drain_s", "nan", "is not a number"),
        ("drain_s", "inf", "is not a number"),
        ("offline", "perhaps", "is not true or false"),
        ("port", "-1", "is less than 0"),
        ("heartbeat_s", "0", "is less than 0.1"),
        ("kv_type", "f17", "is none of auto, f16, bf16, q8_0, q4_0"),
    ],
)
def test_wrong_value_is_refused_with_its_source(name: str, text: str, reason: str) -> None:
    assert refusal(environ={variable(name): text}) == (
        f"setting '{name}' from environment variable {variable(name)}: '{text}' {reason}"
    )
    assert refusal(flags={name: text}).startswith(f"setting '{name}' from flag {flag(name)}: ")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("port = 80.5", "'port'.*'80.5' is not a whole number"),
        ("port = true", "'port'.*is not a whole number"),
        ("port = [1]", "'port'.*is not a whole number"),
        ("drain_s = true", "'drain_s'.*is not a number"),
        ("drain_s = {}", "'drain_s'.*is not a number"),
        ("host = 1", "'host'.*is not text"),
        ("offline = 2", "'offline'.*is not true or false"),
        ("allowed_hosts = [1]", "'allowed_hosts'.*is not a list of texts"),
        ("allowed_hosts = 1", "'allowed_hosts'.*is not a list of texts"),
        ("allowed_hosts = {a = 1}", "'allowed_hosts'.*is not a list of texts"),
        ("kv_type = ''", "'kv_type'.*is none of"),
        ("prot = 8000", "'prot'.*is not a setting"),
        ("home = '/x'", "'home'.*is not a setting that this file can hold"),
        ("[server]\nport = 1", "'server'.*is not a setting"),
        ("port = ", "'config.toml'.*cannot be read"),
        ("port = 1\nport = 2", "'config.toml'.*cannot be read"),
    ],
)
def test_wrong_config_is_refused_with_its_path(tmp_path: Path, line: str, words: str) -> None:
    message = refusal(environ=write_config(tmp_path, line))
    assert re.search(words, message), message
    assert str(tmp_path / "config.toml") in message


def test_config_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b"host = '\xff'")
    assert "cannot be read" in refusal(environ={"LOCALFAST_HOME": str(tmp_path)})


def test_config_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert load_settings(environ=write_config(tmp_path, "\ufeffport = 1")).port == 1


def test_unused_wrong_config_value_does_not_stop_a_flag(tmp_path: Path) -> None:
    assert load_settings({"port": 1}, write_config(tmp_path, "port = -5")).port == 1


# --- folders ------------------------------------------------------------------------------------------------------------------


def test_home_moves_everything(tmp_path: Path) -> None:
    settings = load_settings(environ={"LOCALFAST_HOME": str(tmp_path)})
    for path in (settings.config_path, settings.store_dir, settings.logs_dir):
        assert path.is_relative_to(tmp_path)


def test_home_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    settings = Settings(home="~/models")
    for path in (settings.config_path, settings.store_dir, settings.logs_dir):
        assert path.is_relative_to(tmp_path / "models")


def test_home_from_a_flag_decides_which_config_is_read(tmp_path: Path) -> None:
    write_config(tmp_path, "ctx = 9")
    assert load_settings({"home": str(tmp_path)}, {"LOCALFAST_HOME": str(tmp_path / "other")}).ctx == 9


def test_without_home_the_platform_folders_are_used() -> None:
    settings = Settings()
    assert settings.config_path.name == "config.toml" and settings.store_dir.name == "models"
    assert all("localfast" in str(path) for path in (settings.config_path, settings.store_dir, settings.logs_dir))


# --- the table ----------------------------------------------------------------------------------------------------------------


@given(st.sampled_from(OPTIONS))
def test_every_option_is_complete(row: dataclasses.Field[Any]) -> None:
    assert row.metadata["help"] and not row.metadata["help"].endswith(".")
    assert row.metadata["group"] in ("server", "engine", "storage")
    assert row.metadata["group"] in (Settings.__doc__ or "")
    assert flag(row.name).startswith("--") and "_" not in flag(row.name)
    default = row.default
    text = ",".join(default) if isinstance(default, tuple) else str(default)
    if text:  # the default may be written wherever a value may be
        assert getattr(load_settings(environ={variable(row.name): text}), row.name) == default
    assert not row.metadata["choices"] or default in row.metadata["choices"]


def test_every_field_but_sources_is_an_option() -> None:
    assert {field.name for field in dataclasses.fields(Settings)} == {row.name for row in OPTIONS} | {"sources"}


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().port = 1  # type: ignore[misc]
