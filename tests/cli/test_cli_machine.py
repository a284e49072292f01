"""plan and doctor on the machine that runs the tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from gguf_writer import llama_tensors, llama_values, write_gguf
from tiny_models import tiny_model

from localfast.cli import cli


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", llama_values(), llama_tensors())


def test_plan_says_the_sum_in_words_and_numbers(tmp_path: Path) -> None:
    path = tiny_model("full", tmp_path)
    words = run("plan", str(path), "--ctx", "1024", "--draft", "smaller")
    assert words.exit_code == 0, words.stderr
    numbers = json.loads(run("plan", str(path), "--ctx", "1024", "--slots", "3", "--json").stdout)

    assert "one request may use 1024 tokens; the model was trained for 2048" in words.stdout
    assert "warning: draft model 'smaller' is not here" in words.stdout
    assert (numbers["context_tokens"], numbers["slots"], numbers["layers"]) == (1024, 3, 3)
    assert numbers["memory"][0]["device"] == "RAM"
    for device in numbers["memory"]:
        assert device["needed_bytes"] == sum(part["size_bytes"] for part in device["parts"])


def test_plan_of_a_model_that_is_not_here_says_how_to_get_it() -> None:
    result = run("plan", "qwen3-8b")

    assert result.exit_code == 1 and "localfast pull qwen3-8b" in result.stderr


def test_plan_of_an_unknown_model_suggests_near_ones() -> None:
    result = run("plan", "qwen3-8")

    assert result.exit_code == 1 and "did you mean qwen3-8b" in result.stderr


def test_doctor_prints_each_finding_and_fails_only_on_a_problem(tmp_path: Path) -> None:
    found = json.loads((fine := run("doctor", "--json")).stdout)["findings"]
    assert {"python", "engine", "gpu", "ram", "models folder"} <= {finding["name"] for finding in found}
    assert fine.exit_code == any(finding["level"] == "problem" for finding in found)

    (tmp_path / "models").write_text("in the way of a folder")
    broken = run("doctor", "--home", str(tmp_path))
    lines = broken.stdout.splitlines()

    assert broken.exit_code == 1
    problem = next(number for number, line in enumerate(lines) if line.startswith("problem  models folder"))
    assert "cannot be written" in lines[problem] and "LOCALFAST_HOME" in lines[problem + 1]
