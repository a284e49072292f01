from __future__ import annotations

import hashlib
import os
import sys
import threading
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from fake_hub import COMMIT, FakeHub, HubFile
from hypothesis import given
from hypothesis import strategies as st

from localfast.errors import (
    DownloadFailed,
    DownloadStopped,
    GatedModel,
    HashMismatch,
    LocalfastError,
    ModelNotFound,
    NoSpace,
    Offline,
)
from localfast.models import hub, web
from localfast.models.catalog import ModelName, Store, is_file_name, parse_catalog
from localfast.models.hub import choose_files, describe, fetch, offers, pull
from localfast.models.offers import quants_of
from localfast.models.web import Patience
from localfast.settings import Settings

TINY = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def settings(tmp_path: Path, fake_hub: FakeHub) -> Settings:
    return Settings(home=str(tmp_path / "home"), hf_endpoint=fake_hub.endpoint, reuse=False)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "PATIENCE", Patience(attempts=4, first_wait_s=0, longest_wait_s=0))


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

    offline = Settings(home=settings.home, offline=True, reuse=False)
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


def test_pull_of_a_file_that_vanished_shows_no_half_model(settings: Settings, fake_hub: FakeHub) -> None:
    fake_hub.add("org/half", **{"h-Q4_K_M-00001-of-00002": TINY, "h-Q4_K_M-00002-of-00002": HubFile(TINY, gone=True)})
    with pytest.raises(DownloadFailed, match="no longer in the repository"):
        pull("org/half", settings)
    assert Store(settings).installed() == []


def test_pull_of_a_gated_repository_says_what_to_do(settings: Settings, fake_hub: FakeHub) -> None:
    fake_hub.add("org/locked", **{"x-Q4_K_M": TINY}).gated = True
    with pytest.raises(GatedModel) as caught:
        pull("org/locked", settings)
    assert "HF_TOKEN" in caught.value.hint and f"{fake_hub.endpoint}/org/locked" in str(caught.value)
    assert_nothing_left(settings)


def test_pull_without_space_fetches_no_byte(settings: Settings, fake_hub: FakeHub) -> None:
    fake_hub.add("org/huge", **{"huge-Q4_K_M": HubFile(TINY, size_bytes=10**18)})
    with pytest.raises(NoSpace, match="GiB are free"):
        pull("org/huge", settings)
    assert fake_hub.count("resolve") == 0
    assert_nothing_left(settings)


def test_pull_offline_or_without_a_hub_says_so(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(Offline):
        pull("org/tiny", Settings(home=settings.home, offline=True, reuse=False))
    with pytest.raises(Offline):
        pull("smollm2-135m", Settings(home=settings.home, offline=True, reuse=False))
    with pytest.raises(DownloadFailed, match="cannot be reached"):
        pull("org/tiny", Settings(home=settings.home, hf_endpoint="http://127.0.0.1:9", reuse=False))
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


# --- what there is, and what suits ----------------------------------------------------------------------------------------------


def test_offers_lists_all_quants_and_companions_with_one_question(settings: Settings, fake_hub: FakeHub) -> None:
    repo = fake_hub.add(
        "org/tiny", **{"tiny-Q4_K_M": TINY, "tiny-Q8_0": TINY * 2, "mmproj-BF16": b"GGUF", "mmproj-F16": b"GGUF!"}
    )
    repo.files["UD-Q6_K/t-00001-of-00002.gguf"] = repo.files["UD-Q6_K/t-00002-of-00002.gguf"] = HubFile(TINY)
    repo.files["tiny-IQ2_M-00001-of-00009.gguf"] = HubFile(TINY)
    repo.gated = True

    found = offers("org/tiny", settings)

    assert list(found.quants) == ["Q4_K_M", "UD-Q6_K", "Q8_0"] and found.default == "Q4_K_M"
    assert [found.size_bytes(label) for label in found.quants] == [len(TINY), len(TINY) * 2, len(TINY) * 2]
    assert [file.sha256 for file in found.quants["Q4_K_M"]] == [hashlib.sha256(TINY).hexdigest()]
    assert [(file.name, file.size_bytes) for file in found.companions] == [("mmproj-F16.gguf", 5), ("mmproj-BF16.gguf", 4)]
    assert (found.revision, found.licence, found.gated, found.name) == (COMMIT, "apache-2.0", True, "org/tiny")
    assert fake_hub.requests == ["GET /api/models/org/tiny"]
    assert found.preview("Q6_K").files == found.quants["UD-Q6_K"]
    with pytest.raises(DownloadFailed, match="8 of 9 shards"):
        found.preview("IQ2_M")
    with pytest.raises(ModelNotFound) as caught:
        found.preview("Q3_K_M")
    assert "org/tiny:Q8_0" in caught.value.near


def test_offers_of_a_repository_without_models_says_so(settings: Settings, fake_hub: FakeHub) -> None:
    fake_hub.add("org/safetensors", **{"mmproj-F16": b"GGUF"})
    with pytest.raises(DownloadFailed, match="holds no GGUF"):
        offers("org/safetensors", settings)


def test_offers_of_packages_and_paths_are_known_without_the_hub(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "my-Q8_0.gguf"
    path.write_bytes(TINY)
    assert list(offers(str(path), settings).quants) == ["Q8_0"]
    packed = offers("smollm2-135m", settings)
    assert packed.default in packed.quants and packed.packages and packed.preview().packages == packed.packages


@pytest.mark.parametrize(
    ("name", "quant", "installed", "pulled"),
    [
        ("org/tiny", "", "", "Q8_0"),  # nothing says which: the plan does
        ("org/tiny:q2_k", "", "", "Q2_K"),
        ("org/tiny", "q2_k", "", "Q2_K"),
        ("org/tiny", "", "Q4_K_M", "Q4_K_M"),
        ("org/tiny:Q2_K", "Q8_0", "Q4_K_M", "Q2_K"),
    ],
)
def test_pull_asks_for_a_choice_only_when_nothing_else_decides(
    settings: Settings, fake_hub: FakeHub, name: str, quant: str, installed: str, pulled: str
) -> None:
    fake_hub.add("org/tiny", **{f"tiny-{label}": TINY + label.encode() for label in ("Q4_K_M", "Q8_0", "Q2_K")})
    if installed:
        pull(f"org/tiny:{installed}", settings)
    chosen = Settings(home=settings.home, hf_endpoint=settings.hf_endpoint, quant=quant, reuse=False)
    assert pull(name, chosen, choose=lambda found: list(found.quants)[1]).quant == pulled


def test_describe_of_something_that_is_no_hub_says_so(settings: Settings, fake_hub: FakeHub) -> None:
    fake_hub.refusals = [(200, {"Content-Type": "application/json"})]  # an answer, but not that of a hub
    with pytest.raises(DownloadFailed):
        describe("org/tiny", settings)


def test_fetch_goes_through_the_proxy_of_the_environment(
    settings: Settings, fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_hub.add("org/tiny", **{"tiny-Q4_K_M": TINY})
    preview = describe("org/tiny", settings)
    monkeypatch.setenv("http_proxy", fake_hub.endpoint)
    monkeypatch.setenv("no_proxy", "")
    elsewhere = Settings(home=settings.home, hf_endpoint="http://hub.invalid", reuse=False)
    assert fetch(preview, elsewhere).path.read_bytes() == TINY


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


@given(
    st.lists(
        st.from_regex(r"[a./\\ ]{0,6}(-?(Q4_0|Q8_0|UD-Q4_0|mmproj))?(-0000[0-3]-of-0000[0-2])?(\.gguf|\.GGUF)", fullmatch=True)
    )
)
def test_quants_of_any_listing_are_whole_and_have_safe_names(paths: list[str]) -> None:
    whole, broken = quants_of(paths, None)
    for shards in whole.values():
        assert set(shards) <= set(paths)
        assert all(is_file_name(PurePosixPath(path).name) and ".." not in path.split("/") for path in shards)
    assert not set(whole) & set(broken)


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


@pytest.mark.skipif(sys.platform == "win32", reason="a script stands in for Python")
def test_pull_of_a_package_is_stopped_while_pip_is_silent(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, TINY)
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    silent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(silent))
    stop = threading.Event()
    with pytest.raises(DownloadStopped):
        pull("packed", settings, lambda done_bytes, total_bytes: stop.set(), stop=stop)
    assert_nothing_left(settings)
