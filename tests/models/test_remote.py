from __future__ import annotations

from pathlib import Path

import pytest
from fake_hub import FakeHub, HubFile
from gguf_writer import llama_tensors, llama_values, write_gguf

from localfast.errors import BadModelFile, DownloadFailed, GatedModel, HubBusy, LocalfastError, Offline
from localfast.models import remote, web
from localfast.models.gguf import facts_of, read_facts, read_headers
from localfast.models.hub import describe
from localfast.models.remote import read_remote_headers, remote_header_bytes, true_size
from localfast.models.web import Patience
from localfast.settings import Settings

KEYS = {
    "tokenizer.ggml.tokens": [f"<token {number}>" for number in range(40_000)],
    "tokenizer.ggml.token_type": [1] * 40_000,
    "tokenizer.ggml.eos_token_id": 39_999,
}


@pytest.fixture
def settings(tmp_path: Path, fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(web, "PATIENCE", Patience(attempts=4, first_wait_s=0, longest_wait_s=0))
    return Settings(home=str(tmp_path / "home"), hf_endpoint=fake_hub.endpoint, reuse=False)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A model of 33 MB, of which the first is the header."""
    return write_gguf(tmp_path / "tiny.gguf", llama_values(2, **KEYS), [*llama_tensors(), ("big", (32, 2**20), "Q8_0")])


def publish(hub: FakeHub, content: bytes, **faults: object) -> HubFile:
    file = HubFile(content, **faults)  # type: ignore[arg-type]
    hub.add("org/tiny", **{"tiny-Q4_K_M": file})
    return file


@pytest.mark.parametrize(
    "faults",
    [
        {},
        {"size_bytes": None},
        {"ignores_range": True},
        {"cuts": 3, "cut_at": 400_000},
        {"ignores_range": True, "cuts": 1, "cut_at": 400_000},
        {"refusals": [(429, {"Retry-After": "0"}), (500, {})]},
    ],
)
@pytest.mark.parametrize("first_range_bytes", [100_000, 2**23])
def test_remote_header_says_what_the_file_says(
    settings: Settings, fake_hub: FakeHub, local: Path, monkeypatch: pytest.MonkeyPatch, faults: dict[str, object],
    first_range_bytes: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(remote, "FIRST_RANGE_BYTES", first_range_bytes)
    content = local.read_bytes()
    publish(fake_hub, content, **faults)
    preview = describe("org/tiny", settings)

    headers = read_remote_headers(preview, settings)

    (real,) = read_headers(local)
    (header,) = headers
    assert (header.tensors, header.values, header.token_texts) == (real.tensors, real.values, real.token_texts)
    if "cuts" not in faults:
        assert sum(fake_hub.sent_bytes.values()) < len(content) / 2, "the weights stay where they are"
    assert (header.file_bytes, header.data_offset) == (len(content), real.data_offset)
    facts, whole = facts_of(headers), read_facts(local)
    assert (facts.per_layer, facts.size_bytes, facts.eos_token) == (whole.per_layer, whole.size_bytes, whole.eos_token)
    kept = remote_header_bytes(preview, preview.files[0], settings)
    assert kept.read_bytes() == content[: real.data_offset] and true_size(kept) == len(content)


def test_remote_header_grows_its_range_by_doubling(
    settings: Settings, fake_hub: FakeHub, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_RANGE_BYTES", 400_000)
    publish(fake_hub, local.read_bytes())
    read_remote_headers(describe("org/tiny", settings), settings)
    assert fake_hub.header("Range")[:3] == ["bytes=0-399999", "bytes=400000-799999", "bytes=800000-1599999"]


def test_remote_header_is_fetched_once_and_then_read_offline(settings: Settings, fake_hub: FakeHub, local: Path) -> None:
    publish(fake_hub, local.read_bytes())
    preview = describe("org/tiny", settings)
    first = read_remote_headers(preview, settings)
    fake_hub.requests.clear()
    offline = Settings(home=settings.home, hf_endpoint=settings.hf_endpoint, offline=True)

    assert read_remote_headers(preview, offline) == first
    assert fake_hub.requests == []

    kept = remote_header_bytes(preview, preview.files[0], settings)
    kept.write_bytes(kept.read_bytes()[:1000])
    with pytest.raises(Offline):
        read_remote_headers(preview, offline)
    assert read_remote_headers(preview, settings) == first, "a damaged one is fetched again"


def test_remote_headers_of_shards_are_all_read(settings: Settings, fake_hub: FakeHub, tmp_path: Path) -> None:
    tensors = llama_tensors()
    for number, part in ((1, tensors[:2]), (2, tensors[2:])):
        values = llama_values() if number == 1 else {}
        split = {"split.no": number - 1, "split.count": 2, "split.tensors.count": len(tensors)}
        write_gguf(tmp_path / f"{number}", {**values, **split}, part)
    shards = {f"tiny-Q4_K_M-0000{number}-of-00002": (tmp_path / f"{number}").read_bytes() for number in (1, 2)}
    fake_hub.add("org/tiny", **shards)

    headers = read_remote_headers(describe("org/tiny", settings), settings)

    assert facts_of(headers).size_bytes == sum(map(len, shards.values()))
    fake_hub.repos["org/tiny"].commit = "d" * 40
    fake_hub.repos["org/tiny"].files["tiny-Q4_K_M-00002-of-00002.gguf"].content = next(iter(shards.values()))
    with pytest.raises(BadModelFile, match="disagree"):
        read_remote_headers(describe("org/tiny", settings), settings)


@pytest.mark.parametrize(
    ("content", "faults", "error", "words"),
    [
        (b"<!DOCTYPE html>" * 100, {}, BadModelFile, "letters GGUF"),
        (b"<!DOCTYPE html>" * 100, {"kind": "text/html", "ignores_range": True}, DownloadFailed, "web page"),
        (b"", {}, BadModelFile, "empty"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16 + bytes(99), {}, BadModelFile, "not sensible"),
        (b"GGUF\x03\0\0\0" + bytes(8) + b"\x01" + bytes(7) + b"\xff" * 200, {}, BadModelFile, "claims"),
        (b"GGUF\x03\0\0\0" + bytes(8) + b"\x01" + bytes(7), {}, BadModelFile, "truncated"),
        (b"GGUF" + bytes(100), {"size_bytes": 10**9}, BadModelFile, "are promised"),
        (b"GGUF" + bytes(100), {"gone": True}, DownloadFailed, "no longer"),
        (b"GGUF" + bytes(100), {"refusals": [(503, {})] * 9}, HubBusy, "503"),
        (b"GGUF" + bytes(100), {"cuts": 99, "cut_at": 0}, DownloadFailed, "broke"),
        (b"GGUF" + bytes(100), {"chunked": True, "size_bytes": None, "ignores_range": True}, DownloadFailed, "how large"),
        (b"GGUF" + bytes(100), {"shift": 1}, DownloadFailed, "other bytes"),
    ],
)
def test_remote_header_of_something_else_is_refused_in_words(
    settings: Settings, fake_hub: FakeHub, content: bytes, faults: dict[str, object], error: type[LocalfastError], words: str
) -> None:
    publish(fake_hub, content, **faults)
    with pytest.raises(error, match=words):
        read_remote_headers(describe("org/tiny", settings), settings)
    assert not list(settings.facts_dir.rglob("*.gguf"))


def test_remote_header_of_a_gated_model_says_what_to_do(settings: Settings, fake_hub: FakeHub, local: Path) -> None:
    publish(fake_hub, local.read_bytes())
    fake_hub.repos["org/tiny"].gated = True
    with pytest.raises(GatedModel):
        read_remote_headers(describe("org/tiny", settings), settings)


def test_remote_headers_of_a_package_are_not_to_be_had_and_of_a_path_are_read_there(settings: Settings, local: Path) -> None:
    with pytest.raises(DownloadFailed, match="package"):
        read_remote_headers(describe("smollm2-135m", settings), settings)
    assert tuple(read_remote_headers(describe(str(local), settings), settings)) == read_headers(local)


def test_remote_headers_are_kept_up_to_a_limit(
    settings: Settings, fake_hub: FakeHub, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "CACHE_LIMIT_BYTES", 2_500_000)
    publish(fake_hub, local.read_bytes())
    for commit in "abcdef":
        fake_hub.repos["org/tiny"].commit = commit * 40
        read_remote_headers(describe("org/tiny", settings), settings)
    kept = [path.stat().st_size for path in settings.facts_dir.rglob("*.gguf")]
    assert 0 < sum(kept) <= 2_500_000
