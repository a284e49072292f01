"""The load generator against a real server with a scripted engine: what it sends, counts and says when a server misbehaves."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner
from fakes import answer
from live_server import LiveServer, wait_for

from localfast.bench import NUMBERS, WORKS, Sample, Target, ask, first_model, percentile, run
from localfast.bench.works import crowded, together
from localfast.cli import cli
from localfast.core import Accepted, Event, Failed, GenerateRequest, TextDelta
from localfast.engine.messages import EngineStats
from localfast.errors import EngineDied, MeasurementFailed, ServerUnreachable

pytestmark = pytest.mark.live


def target(server: LiveServer) -> Target:
    return Target(f"http://127.0.0.1:{server.port}", "tiny")


def test_bench_every_work_yields_numbers_that_the_table_knows(tmp_path: Path) -> None:
    with LiveServer(tmp_path, lambda request: answer("a", "b", "c", n=request.n)) as server:
        rows = asyncio.run(run(target(server), None, list(WORKS), rounds=1))
        direct = asyncio.run(WORKS["edit"](target(server), random.Random(1)))
    assert {row.work for row in rows} == set(WORKS) and direct.keys() <= NUMBERS.keys()
    assert all(row.ours >= 0 and row.peer is None and row.ratio is None for row in rows)
    assert {row.number for row in rows if row.work == "streams-8"} >= {"tokens_per_s", "ttft_p50_ms", "gap_p99_ms", "gap_max_ms"}
    assert {row.work for row in rows if row.number == "peak_rss_mib" and row.ours > 1} == set(WORKS)


def test_bench_counts_what_the_server_says_and_sends_the_same_prompts_to_both(tmp_path: Path) -> None:
    with LiveServer(tmp_path / "a") as ours, LiveServer(tmp_path / "b") as peer:
        sample = asyncio.run(ask(target(ours), "Hi", 8))
        assert (sample.text, sample.tokens, len(sample.stamps)) == ("Hello world", 2, 2)
        rows = asyncio.run(run(target(ours), target(peer), ["streams-2"], rounds=2))
        prompts = [[request.prompts for request in server.engine.submitted] for server in (ours, peer)]
    assert sorted(prompts[0][1:]) == sorted(prompts[1]) and len({*prompts[1]}) == 5  # one of them only loads the model
    assert all(row.peer is not None and row.ratio is not None for row in rows if row.number.endswith("_per_s"))


def test_bench_takes_turns_at_being_first(tmp_path: Path) -> None:
    said: list[str] = []
    with LiveServer(tmp_path / "a") as ours, LiveServer(tmp_path / "b") as peer:
        asyncio.run(run(target(ours), target(peer), ["streams-1"], rounds=2, tell=said.append))
        order = [str(ours.port), str(peer.port), str(peer.port), str(ours.port)]
    assert [line.rpartition(":")[2] for line in said] == order


def test_bench_tells_what_our_engine_spends_outside_the_model(tmp_path: Path) -> None:
    numbers = count(1)

    def script(request: GenerateRequest) -> Iterable[Event]:
        done = next(numbers)
        server.engine.stats = EngineStats(
            decode_calls=done * 10, batched_tokens=done * 25, decode_s=done * 0.98, step_s=done * 1.0,
            drafted_tokens=done * 8, accepted_tokens=done * 6,
        )  # fmt: skip
        return answer("a", "b")

    with LiveServer(tmp_path, script) as server:
        rows = asyncio.run(run(target(server), None, ["streams-4"], rounds=1))
    seen = {row.number: row.ours for row in rows}
    assert seen["overhead_percent"] == pytest.approx(2) and seen["overhead_us_per_step"] == pytest.approx(2000)
    assert (seen["tokens_per_call"], seen["drafted_tokens"], seen["accepted_tokens"]) == (2.5, 32, 24)


def test_burst_hangs_up_on_each_keystroke_but_the_last(tmp_path: Path) -> None:
    numbers = count(1)
    with LiveServer(tmp_path, lambda _: answer("a", "b") if next(numbers) == 10 else [Accepted(5)]) as server:
        assert asyncio.run(WORKS["burst-fim"](target(server), random.Random(1)))["last_ttft_ms"] > 0
        wait_for(lambda: set(range(1, 11)) <= set(server.engine.abandoned), "hanging up")
        asked = server.engine.submitted
    assert {request.request_class for request in asked} == {"fim"}
    assert len({request.replaces for request in asked}) == 1 and asked[0].replaces.endswith("a.py")
    assert len({request.prompts for request in asked}) == len(asked) == 10


def test_crowded_counts_requests_that_failed_and_answers_that_are_too_short(tmp_path: Path) -> None:
    numbers = count(1)
    broken = [Accepted(5), Failed(EngineDied(model="tiny", reason="out of memory"))]
    with LiveServer(tmp_path, lambda _: broken if next(numbers) <= 3 else answer("a", "b")) as server:
        found = asyncio.run(crowded(target(server), random.Random(1)))
        enough = asyncio.run(crowded(target(server), random.Random(1), answer_tokens=2))
        url = target(server)
    assert (found["finished"], found["truncated"]) == (13, 13)
    assert (enough["finished"], enough["truncated"]) == (16, 0)
    with pytest.raises(ServerUnreachable):
        asyncio.run(crowded(url, random.Random(1)))


def test_together_is_how_many_answers_were_written_at_once() -> None:
    queued = [Sample(0.0, (number + 0.1, number + 0.9), 2, "ab") for number in range(4)]
    assert together(queued) == 1
    assert together([Sample(0.0, (number / 10, 5.0), 2, "ab") for number in range(4)]) == 4


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


@pytest.mark.parametrize("sent", [b"", b"5\r\nda", b"zz\r\n", b"c\r\ndata: [DONE]\r\n"])
def test_bench_an_answer_cut_off_is_an_error(sent: bytes) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + sent)
        await writer.drain()
        writer.close()

    async def measure() -> Sample:
        async with await asyncio.start_server(cut, "127.0.0.1", 0) as server:
            return await ask(Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m"), "Hi", 8)

    with pytest.raises(MeasurementFailed, match="broke"):
        asyncio.run(measure())


# --- the command --------------------------------------------------------------------------------------------------------------


@contextmanager
def two_servers(folder: Path) -> Iterator[list[str]]:
    with LiveServer(folder / "a") as ours, LiveServer(folder / "b") as peer:
        urls = ["--url", f"http://127.0.0.1:{ours.port}/v1", "--peer-url", f"http://127.0.0.1:{peer.port}"]
        yield ["bench", *urls, "--rounds", "1", "--only", "streams-1,long-prompt"]


def test_bench_command_prints_ratios_as_json_and_as_a_table(tmp_path: Path) -> None:
    with two_servers(tmp_path) as arguments:
        printed = CliRunner().invoke(cli, [*arguments, "--json"])
        table = CliRunner().invoke(cli, arguments)
    assert printed.exit_code == table.exit_code == 0, printed.output + table.output
    report = json.loads(printed.stdout)
    assert {row["work"] for row in report["rows"]} == {"streams-1", "long-prompt"} and all(
        "ratio" in row for row in report["rows"]
    )
    assert report["rounds"] == 1 and report["ours"].startswith("tiny at ") and report["machine"] and report["when"]
    assert "RATIO" in table.stdout and "tokens_per_s" in table.stdout and "At least as good as the peer in" in table.stdout


def test_bench_command_writes_a_page_beside_what_it_prints(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    with two_servers(tmp_path) as arguments:
        ended = CliRunner().invoke(cli, [*arguments, "--html", str(page)])
        refused = CliRunner().invoke(cli, [*arguments, "--html", str(tmp_path / "absent" / "report.html")])
        asked = [len(line) for line in refused.output.splitlines() if "round 1" in line]
    assert ended.exit_code == 0 and "streams-1" in ended.stdout
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "tiny at http://127.0.0.1" in text
    assert refused.exit_code == 2 and "is not a folder" in refused.output and not asked


def test_bench_command_unknown_work_names_the_known_ones() -> None:
    ended = CliRunner().invoke(cli, ["bench", "--only", "nonsense"])
    assert ended.exit_code == 2 and "shared-prefix" in ended.output
