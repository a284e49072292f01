"""The load generator against a real server with a scripted engine: what it counts, compares and says when a server misbehaves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from fakes import answer
from live_server import LiveServer

from localfast.bench import WORKS, Row, Sample, Target, ask, first_model, percentile, run, verdict
from localfast.cli import cli
from localfast.core import Accepted, Failed, TextDelta
from localfast.errors import EngineDied, MeasurementFailed, ServerUnreachable

pytestmark = pytest.mark.live


def target(server: LiveServer) -> Target:
    return Target(f"http://127.0.0.1:{server.port}", "tiny")


def test_bench_every_work_yields_its_numbers(tmp_path: Path) -> None:
    with LiveServer(tmp_path, lambda request: answer("a", "b", "c", n=request.n)) as server:
        rows = asyncio.run(run(target(server), None, list(WORKS), rounds=1))
    assert {row.work for row in rows} == set(WORKS)
    assert all(row.ours >= 0 and row.peer is None and row.ratio is None for row in rows)
    assert {row.number for row in rows if row.work == "streams-8"} >= {"tokens_per_s", "ttft_p50_ms", "gap_p99_ms", "gap_max_ms"}


def test_bench_counts_what_the_server_says_and_sends_the_same_prompts_to_both(tmp_path: Path) -> None:
    with LiveServer(tmp_path / "a") as ours, LiveServer(tmp_path / "b") as peer:
        sample = asyncio.run(ask(target(ours), "Hi", 8))
        assert (sample.text, sample.tokens, len(sample.stamps)) == ("Hello world", 2, 2)
        rows = asyncio.run(run(target(ours), target(peer), ["streams-2"], rounds=2))
        prompts = [[request.prompts for request in server.engine.submitted] for server in (ours, peer)]
    assert sorted(prompts[0][1:]) == sorted(prompts[1]) and len({*prompts[1]}) == 4
    assert all(row.peer is not None and row.ratio is not None for row in rows if row.number.endswith("_per_s"))


@pytest.mark.parametrize(
    ("row", "better"),
    [
        (Row("w", "tokens_per_s", 10, 5), True),
        (Row("w", "tokens_per_s", 4, 5), False),
        (Row("w", "ttft_p50_ms", 4, 5), True),
        (Row("w", "gap_max_ms", 6, 5), False),
        (Row("w", "gap_max_ms", 6, None), None),
    ],
)
def test_row_knows_which_direction_is_better(row: Row, better: bool | None) -> None:
    assert row.better is better


@pytest.mark.parametrize(("eight", "words"), [(300, "3.00 times"), (100, "busy computing"), (50, "each other's way")])
def test_verdict_names_what_eight_against_one_means(eight: float, words: str) -> None:
    rows = [Row("streams-1", "tokens_per_s", 100, None), Row("streams-8", "tokens_per_s", eight, None)]
    assert words in (verdict(rows) or "")
    assert verdict(rows[:1]) is None


def test_sample_measures_from_the_request_and_between_texts() -> None:
    sample = Sample(10.0, (10.5, 10.75, 11.0), 3, "abc")
    assert sample.ttft_s == 0.5 and sample.gaps_s == [0.25, 0.25]


@pytest.mark.parametrize(("part", "value"), [(50, 2), (95, 4), (99, 4), (1, 1)])
def test_percentile_is_a_measured_value(part: int, value: int) -> None:
    assert percentile([4, 1, 3, 2], part) == value


def test_bench_server_that_fails_is_an_error_with_its_words(tmp_path: Path) -> None:
    script = [Accepted(1), TextDelta(0, "a", 1), Failed(EngineDied(model="tiny", reason="SIGKILL"))]
    with LiveServer(tmp_path, lambda _: script) as server:
        with pytest.raises(MeasurementFailed, match="died"):
            asyncio.run(ask(target(server), "Hi", 8))
        with pytest.raises(MeasurementFailed, match="did you mean tiny"):
            asyncio.run(ask(Target(target(server).url, "tinny"), "Hi", 8))
        port = server.port
    with pytest.raises(ServerUnreachable):
        asyncio.run(first_model(f"http://127.0.0.1:{port}"))


def test_bench_command_prints_ratios_as_json_and_as_a_table(tmp_path: Path) -> None:
    with LiveServer(tmp_path / "a") as ours, LiveServer(tmp_path / "b") as peer:
        urls = ["--url", f"http://127.0.0.1:{ours.port}/v1", "--peer-url", f"http://127.0.0.1:{peer.port}"]
        arguments = ["bench", *urls, "--rounds", "1", "--only", "streams-1,long-prompt"]
        printed = CliRunner().invoke(cli, [*arguments, "--json"])
        table = CliRunner().invoke(cli, arguments)
    assert printed.exit_code == table.exit_code == 0, printed.output + table.output
    rows = json.loads(printed.stdout)["rows"]
    assert {row["work"] for row in rows} == {"streams-1", "long-prompt"} and all("ratio" in row for row in rows)
    assert "RATIO" in table.stdout and "tokens_per_s" in table.stdout


def test_bench_command_unknown_work_names_the_known_ones() -> None:
    ended = CliRunner().invoke(cli, ["bench", "--only", "nonsense"])
    assert ended.exit_code == 2 and "shared-prefix" in ended.output
