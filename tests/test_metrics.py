from __future__ import annotations

import asyncio

import httpx
import pytest
from fakes import answer
from prometheus_client.parser import text_string_to_metric_families

from localfast import __version__
from localfast.app import create_app
from localfast.core import Failed, Finished, TextDelta, Timings, Usage
from localfast.engine.messages import EngineStats
from localfast.errors import LocalfastError, QueueFull
from localfast.metrics import Metrics
from localfast.models.manager import ModelManager
from localfast.settings import Settings

STATS = EngineStats(
    decode_calls=10, batched_tokens=20, generated_tokens=30, parked=1, running=2, waiting=3, used_cells=400
)  # fmt: skip
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(page: bytes) -> Samples:
    """(sample name, labels) -> value; refuses a page that Prometheus could not read."""
    families = list(text_string_to_metric_families(page.decode()))
    assert all(family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(found) == len(samples), "a series appears twice"
    return found


def metrics() -> Metrics:
    return Metrics(lambda: [("tiny", STATS), ("other", EngineStats())])


def observe(target: Metrics, usage: Usage, timings: Timings, route: str = "/v1/completions") -> None:
    observer = target.observe(route)
    observer.model = "tiny"
    for event in (*answer("Hello", " world")[:-1], Finished(usage, timings)):
        observer.feed(event)


def test_page_counts_requests_tokens_and_times() -> None:
    target = metrics()
    observe(target, Usage(10, 5, 4), Timings(queue_s=0.3, prefill_s=1, decode_s=0.4))
    observe(target, Usage(20, 1, 0), Timings(queue_s=0.0, prefill_s=1, decode_s=9))
    page = scrape(target.page())
    model = (("model", "tiny"),)
    routed = (("model", "tiny"), ("route", "/v1/completions"))
    assert page["localfast_requests_total", (*routed, ("status", "ok"))] == 2
    assert page["localfast_prompt_tokens_total", model] == 30
    assert page["localfast_prompt_tokens_cached_total", model] == 4
    assert page["localfast_completion_tokens_total", model] == 6
    assert page["localfast_time_to_first_token_seconds_count", model] == 2
    assert page["localfast_request_duration_seconds_count", routed] == 2
    assert page["localfast_queue_wait_seconds_sum", model] == pytest.approx(0.3)
    assert page["localfast_queue_wait_seconds_bucket", (("le", "0.25"), *model)] == 1
    assert page["localfast_queue_wait_seconds_bucket", (("le", "0.5"), *model)] == 2
    # 0.4 s between 5 tokens; a single token has no rate
    assert page["localfast_time_per_output_token_seconds_count", model] == 1
    assert page["localfast_time_per_output_token_seconds_sum", model] == pytest.approx(0.1)


def test_page_counts_failures_by_code_and_cancels_apart() -> None:
    target = metrics()
    failing, refused, cancelled = (target.observe("/generate") for _ in range(3))
    failing.model = "tiny"
    failing.feed(TextDelta(0, "x", 1))
    failing.feed(Failed(QueueFull(waiting=3)))
    refused.close("invalid_request")
    cancelled.close("cancelled")
    page = scrape(target.page())
    requests = {dict(labels)["status"]: value for (name, labels), value in page.items() if name == "localfast_requests_total"}
    failures = {dict(labels)["code"]: value for (name, labels), value in page.items() if name == "localfast_failures_total"}
    assert requests == {"failed": 1, "cancelled": 1} and failures == {"queue_full": 1, "invalid_request": 1}
    by_model = {dict(labels)["model"] for name, labels in page if name == "localfast_failures_total"}
    assert by_model == {"tiny", "unknown"}


def test_request_is_counted_once_however_often_it_ends() -> None:
    target = metrics()
    observer = target.observe("/generate")
    observer.feed(Finished(Usage(1, 1, 0), Timings()))
    observer.close("cancelled")
    observer.close("engine_died")
    page = scrape(target.page())
    assert [value for (name, _), value in page.items() if name == "localfast_requests_total"] == [1]
    assert not [value for (name, _), value in page.items() if name == "localfast_failures_total"]


def test_page_shows_engines_and_version_at_the_time_of_the_scrape() -> None:
    engines = [("tiny", STATS)]
    target = Metrics(lambda: engines)
    page = scrape(target.page())
    labels = (("model", "tiny"),)
    assert page["localfast_build_info", (("version", __version__),)] == 1
    assert page["localfast_running_sequences", labels] == 2
    assert page["localfast_waiting_sequences", labels] == 3
    assert page["localfast_kv_cache_used_cells", labels] == 400
    assert page["localfast_decode_calls_total", labels] == 10
    assert page["localfast_generated_tokens_total", labels] == 30
    assert page["localfast_parked_total", labels] == 1
    engines.clear()
    assert not [name for name, labels in scrape(target.page()) if labels == (("model", "tiny"),)]


def test_servers_in_one_process_do_not_share_counts() -> None:
    first, second = metrics(), metrics()
    first.observe("/generate").close("ok")
    assert not [name for name, _ in scrape(second.page()) if name == "localfast_requests_total"]


def test_page_of_a_server_holds_nothing_that_a_client_wrote() -> None:
    """Unknown paths, models and prompts are counted without becoming labels."""
    manager = ModelManager(Settings())
    canary = "canary-7f3a"

    async def calls() -> str:
        transport = httpx.ASGITransport(create_app(Settings(), manager))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"model": canary, "prompt": canary, "messages": [{"role": "user", "content": canary}], canary: canary}
            for path in ("/v1/completions", "/v1/chat/completions", "/generate", f"/v1/{canary}"):
                response = await client.post(path, json=body)
                assert response.status_code == 404
            await client.post("/generate", json={"prompt": {canary: 1}})
            return (await client.get("/metrics")).text

    page = asyncio.run(calls())
    assert canary not in page
    routes = {dict(labels)["route"] for name, labels in scrape(page.encode()) if name == "localfast_requests_total"}
    assert routes == {"/v1/completions", "/v1/chat/completions", "/generate"}
    codes = {dict(labels)["code"] for name, labels in scrape(page.encode()) if name == "localfast_failures_total"}
    assert codes <= set(LocalfastError._by_code)
