"""plan, through the command line, on a machine that a file describes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_hub import FakeHub
from gguf_writer import llama_tensors, llama_values, write_gguf
from machines import nvidia

from localfast.cli import cli
from localfast.hardware import to_json


def run(*arguments: str, width: int = 400) -> Result:
    return CliRunner(env={"COLUMNS": str(width)}).invoke(cli, arguments)


@pytest.fixture(autouse=True)
def eight_gb_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(to_json(nvidia(8))))
    monkeypatch.setenv("LOCALFAST_HARDWARE", str(path))


@pytest.fixture
def pulled(fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model that is installed in two quants."""
    monkeypatch.setenv("LOCALFAST_HF_ENDPOINT", fake_hub.endpoint)
    contents = {
        f"tiny-{label}": write_gguf(tmp_path / f"{label}.gguf", llama_values(), llama_tensors(type_name=kind)).read_bytes()
        for label, kind in (("Q4_K_M", "Q4_K"), ("Q8_0", "Q8_0"))
    }
    fake_hub.add("org/tiny", **contents)
    for label in ("Q4_K_M", "Q8_0"):
        result = run("pull", f"org/tiny:{label}")
        assert result.exit_code == 0, result.stderr
    return "org/tiny"


def test_plan_shows_every_installed_quant_the_choice_and_its_sum(pulled: str) -> None:
    result = run("plan", pulled)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[1].split()[:4] == ["quant", "size", "loss", "RAM"] and "NVIDIA 8 GB" in lines[1]
    rows = {line.split()[0]: line for line in lines[2:4]}
    assert set(rows) == {"Q8_0", "Q4_K_M"} and "chosen, all on the GPU" in rows["Q8_0"] and "3/3" in rows["Q8_0"]
    assert any(line.startswith("not Q4_K_M: ") for line in lines)
    assert any(line.startswith("NVIDIA 8 GB: 8.00 GiB - 0.68 used - 0.29 driver") and line.endswith(": fits") for line in lines)


def test_plan_of_a_named_quant_is_about_that_one(pulled: str) -> None:
    entry = json.loads(run("plan", f"{pulled}:Q4_K_M", "--json").stdout)
    assert entry["chosen"] == "Q4_K_M" and [quant["quant"] for quant in entry["quants"]] == ["Q4_K_M"]
    assert "was asked for" in entry["why"][0]


def test_plan_for_programs_has_the_numbers_of_the_chosen_quant_and_of_all(pulled: str) -> None:
    entry = json.loads(run("plan", pulled, "--ctx", "2048", "--vram-limit", "2GB", "--json").stdout)
    assert (entry["chosen"], entry["gpu_layers"], entry["layers"], entry["context_tokens"]) == ("Q8_0", 3, 3, 2048)
    assert entry["fits"] and entry["model"].endswith("Q8_0")
    for memory in entry["memory"]:
        assert memory["needed_bytes"] == sum(part["size_bytes"] for part in memory["parts"]) <= memory["usable_bytes"] <= 32e9
    assert entry["memory"][1]["usable_bytes"] <= 2e9 and entry["memory"][1]["forbidden_bytes"] > 0
    for quant in entry["quants"]:
        assert quant["installed"] and quant["fits"] and quant["stage"] == "gpu" and quant["tokens_per_s"] > 0
        assert quant["total_bytes"] == sum(quant["memory"].values())


def test_plan_of_a_file_without_a_label_names_the_type_of_its_weights(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama_values(), llama_tensors())
    entry = json.loads(run("plan", str(path), "--json").stdout)
    assert entry["chosen"] == "Q4_K" and entry["path"] == str(path)


def test_plan_warnings_are_lines_of_their_own(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama_values(), llama_tensors())
    result = run("plan", str(path), "--ctx", "9000", "--split", "a,b", "--draft", "smaller")
    assert "warning: a context of 9000 is longer than the 4096 tokens of the training" in result.stdout.splitlines()


def test_plan_of_a_model_that_is_not_here_needs_its_headers_only(pulled: str, fake_hub: FakeHub, tmp_path: Path) -> None:
    sizes = {"Q4_K_M": 400_000, "Q8_0": 700_000}
    contents = {
        f"other-{label}": write_gguf(tmp_path / f"o{label}.gguf", llama_values(), llama_tensors(type_name=kind)).read_bytes()
        for label, kind in (("Q4_K_M", "Q4_K"), ("Q8_0", "Q8_0"))
    }
    fake_hub.add("org/other", **contents)
    entry = json.loads(run("plan", "org/other", "--json").stdout)
    assert {quant["quant"]: quant["installed"] for quant in entry["quants"]} == dict.fromkeys(sizes, False)
    assert entry["chosen"] == "Q8_0" and entry["model"] == "org/other:Q8_0" and "path" not in entry
    assert entry["fits"] and not json.loads(run("list", "--json").stdout)["models"][2:]


def test_plan_of_a_model_without_a_source_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("plan", "org/nowhere", "--offline")
    assert result.exit_code == 1 and "offline" in result.stderr
