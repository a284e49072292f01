from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub, Hold, HubFile

from localfast.errors import DownloadFailed, DownloadStopped, GatedModel, HashMismatch, HubBusy, LocalfastError, NoSpace
from localfast.models import fetching, hub, transfer, web
from localfast.models.catalog import Store
from localfast.models.hub import describe, fetch, pull
from localfast.models.web import Patience
from localfast.settings import Settings

BIG = b"GGUF" + random.Random(1).randbytes(3 * 2**20)
PATH = "big-Q4_K_M.gguf"
PARTIAL = Path(".partial") / "org--big--Q4_K_M" / "model" / PATH


@pytest.fixture
def settings(tmp_path: Path, fake_hub: FakeHub) -> Settings:
    return Settings(home=str(tmp_path / "home"), hf_endpoint=fake_hub.endpoint, reuse=False)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "PATIENCE", Patience(attempts=4, first_wait_s=0, longest_wait_s=0, stall_s=3600))


def publish(hub: FakeHub, **faults: object) -> HubFile:
    file = HubFile(BIG, **faults)  # type: ignore[arg-type]
    hub.add("org/big", **{"big-Q4_K_M": file})
    return file


def kept(settings: Settings) -> Path:
    return settings.store_dir / PARTIAL


def stop_at(settings: Settings, file: HubFile, place: int) -> None:
    """A pull that is stopped when `place` bytes of the file are on the disk."""
    file.hold = Hold(place)
    stop = threading.Event()
    with pytest.raises(DownloadStopped):
        pull("org/big", settings, lambda done_bytes, _: stop.set() if done_bytes >= place else None, stop=stop)
    file.hold.free.set()
    assert kept(settings).stat().st_size == place


def assert_right(settings: Settings) -> None:
    (model,) = Store(settings).stored()
    assert model.path.read_bytes() == BIG and model.sha256 == hashlib.sha256(BIG).hexdigest()
    assert not list((settings.store_dir / ".partial").iterdir())


# --- going on -----------------------------------------------------------------------------------------------------------------


def test_transfer_goes_on_where_it_was_stopped(settings: Settings, fake_hub: FakeHub) -> None:
    file = publish(fake_hub)
    stop_at(settings, file, 1_000_000)
    assert Store(settings).installed() == []
    seen: list[tuple[int, int | None]] = []

    pull("org/big", settings, lambda *numbers: seen.append(numbers))

    assert_right(settings)
    assert seen[0] == (1_000_000, len(BIG)) and seen[-1] == (len(BIG), len(BIG))
    assert fake_hub.header("Range") == [None, "bytes=1000000-"]
    assert fake_hub.sent_bytes[PATH] <= len(BIG) + 2**20, "the rest was fetched, not all of it"


def test_transfer_goes_on_when_only_the_revision_is_another(settings: Settings, fake_hub: FakeHub) -> None:
    stop_at(settings, publish(fake_hub), 1_000_000)
    fake_hub.repos["org/big"].commit = "d" * 40

    assert pull("org/big", settings).revision == "d" * 40
    assert fake_hub.header("Range")[-1] == "bytes=1000000-", "the hash says that it is the same file"


def test_transfer_begins_again_when_the_hash_is_another(settings: Settings, fake_hub: FakeHub) -> None:
    file = publish(fake_hub)
    stop_at(settings, file, 1_000_000)
    file.content = BIG[::-1]

    assert pull("org/big", settings).path.read_bytes() == BIG[::-1]
    assert fake_hub.header("Range") == [None, None]


@pytest.mark.parametrize("place", [1, 65_536, len(BIG) - 1])
def test_transfer_survives_cuts_anywhere(settings: Settings, fake_hub: FakeHub, place: int) -> None:
    publish(fake_hub, cuts=2, cut_at=place)
    pull("org/big", settings)
    assert_right(settings)
    assert fake_hub.sent_bytes[PATH] == len(BIG), "no byte twice"


@pytest.mark.parametrize(
    ("faults", "requests"),
    [
        ({"refusals": [(429, {"Retry-After": "0"}), (503, {}), (500, {})]}, 4),
        ({"ignores_range": True, "cuts": 2}, 3),
        ({"length_error": 5, "size_bytes": None, "hashed": False}, None),
        ({"chunked": True}, 1),
        ({"chunked": True, "size_bytes": None}, 1),
        ({"size_bytes": None}, 1),
        ({"etag": ""}, 1),
        ({"etag": 'W/"weak"', "hashed": False, "cuts": 1}, 2),
    ],
)
def test_transfer_gets_the_right_file_or_none(
    settings: Settings, fake_hub: FakeHub, faults: dict[str, object], requests: int | None
) -> None:
    publish(fake_hub, **faults)
    if requests is None:
        with pytest.raises(LocalfastError):
            pull("org/big", settings)
        assert Store(settings).installed() == []
    else:
        pull("org/big", settings)
        assert_right(settings)
        assert fake_hub.count("resolve") == requests


@pytest.mark.parametrize(
    ("faults", "error", "words"),
    [
        ({"served": BIG[:-1] + b"!"}, HashMismatch, "sha256"),
        ({"served": BIG[:-9]}, HashMismatch, "bytes"),
        ({"served": BIG + b"more"}, HashMismatch, "bytes"),
        ({"served": BIG + b"more", "chunked": True}, HashMismatch, "more than"),
        ({"served": BIG[:-9], "chunked": True}, HashMismatch, "bytes"),
        ({"length_error": -7}, HashMismatch, "bytes"),
        ({"length_error": 7}, HashMismatch, "bytes"),
        ({"gone": True}, DownloadFailed, "no longer in the repository"),
        ({"refusals": [(429, {"Retry-After": "3600"})]}, HubBusy, "too many requests"),
        ({"refusals": [(503, {})] * 9}, HubBusy, "4th try"),
        ({"refusals": [(418, {})]}, DownloadFailed, "418"),
        ({"refusals": [(302, {"Location": "ftp://127.0.0.1/x"})]}, DownloadFailed, "address"),
        ({"kind": "text/html", "hashed": False}, DownloadFailed, "web page"),
        ({"served": b"<!DOCTYPE html>".ljust(len(BIG)), "hashed": False}, HashMismatch, "no GGUF"),
        ({"cuts": 99, "cut_at": 0}, DownloadFailed, "broke"),
    ],
)
def test_transfer_refuses_what_is_wrong_and_keeps_nothing(
    settings: Settings, fake_hub: FakeHub, faults: dict[str, object], error: type[LocalfastError], words: str
) -> None:
    publish(fake_hub, **faults)
    with pytest.raises(error, match=words) as caught:
        pull("org/big", settings)
    assert caught.value.hint
    assert Store(settings).installed() == []
    assert not list((settings.store_dir / ".partial").iterdir())


def test_transfer_answered_with_other_bytes_than_asked_begins_again(settings: Settings, fake_hub: FakeHub) -> None:
    file = publish(fake_hub)
    stop_at(settings, file, 1_000_000)
    file.shift = 100
    pull("org/big", settings)
    assert_right(settings)


def test_transfer_answered_with_416_begins_again(settings: Settings, fake_hub: FakeHub) -> None:
    file = publish(fake_hub)
    stop_at(settings, file, 1_000_000)
    file.refusals = [(416, {"Content-Range": "bytes */10"})]
    pull("org/big", settings)
    assert_right(settings)


def test_transfer_with_a_bad_beginning_is_fetched_once_more(settings: Settings, fake_hub: FakeHub) -> None:
    file = publish(fake_hub)
    stop_at(settings, file, 1_000_000)
    with kept(settings).open("r+b") as partial:
        partial.write(b"lost with the power")
    pull("org/big", settings)
    assert_right(settings)


def test_transfer_without_a_hash_begins_again_when_the_content_changed(settings: Settings, fake_hub: FakeHub) -> None:
    file = publish(fake_hub, hashed=False)
    stop_at(settings, file, 1_000_000)
    file.content = b"GGUF" + BIG[::-1][4:]

    assert pull("org/big", settings).path.read_bytes() == file.content
    assert fake_hub.header("Range") == [None, "bytes=1000000-"], "If-Range made the server begin again by itself"


def test_transfer_without_hash_and_etag_trusts_no_part(settings: Settings, fake_hub: FakeHub) -> None:
    stop_at(settings, publish(fake_hub, hashed=False, etag=""), 1_000_000)
    pull("org/big", settings)
    assert_right(settings)
    assert fake_hub.header("Range") == [None, None]


def test_transfer_without_a_hash_names_the_etag(settings: Settings, fake_hub: FakeHub) -> None:
    stop_at(settings, publish(fake_hub, hashed=False), 1_000_000)
    pull("org/big", settings)
    assert_right(settings)
    assert fake_hub.header("If-Range") == [None, f'"{hashlib.sha256(BIG).hexdigest()}"']


def test_transfer_that_stalls_is_taken_up_again(settings: Settings, fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "PATIENCE", Patience(attempts=50, first_wait_s=0, stall_s=0.5))
    publish(fake_hub, hold=Hold(1_000_000))
    pull("org/big", settings)
    assert_right(settings)
    assert "bytes=1000000-" in fake_hub.header("Range")


# --- redirects, tokens, mirrors -----------------------------------------------------------------------------------------------


@pytest.fixture
def cdn() -> Iterator[FakeHub]:
    with FakeHub() as other:
        yield other


def test_transfer_follows_to_another_host_without_the_token(
    settings: Settings, fake_hub: FakeHub, cdn: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    stored = publish(cdn)
    publish(fake_hub, redirect=cdn)
    repo = fake_hub.repos["org/big"]
    repo.gated, repo.token = True, "hf_very_secret"
    stop_at(settings, stored, 1_000_000)

    pull("org/big", settings)

    assert_right(settings)
    assert fake_hub.header("Authorization") == ["Bearer hf_very_secret"] * 2
    assert cdn.header("Authorization") == [None, None]
    assert cdn.header("Range") == [None, "bytes=1000000-"]


def test_transfer_asks_for_a_new_signature_when_the_old_one_ran_out(settings: Settings, fake_hub: FakeHub, cdn: FakeHub) -> None:
    publish(cdn, refusals=[(403, {})])
    publish(fake_hub, redirect=cdn)
    pull("org/big", settings)
    assert_right(settings)


def test_transfer_believes_the_hub_that_the_content_is_another(settings: Settings, fake_hub: FakeHub, cdn: FakeHub) -> None:
    publish(cdn, hold=Hold(65_536))
    file = publish(fake_hub, redirect=cdn)
    preview = describe("org/big", settings)
    file.content = BIG[::-1]
    with pytest.raises(HashMismatch, match="at its source now"):
        fetch(preview, settings)
    assert cdn.sent_bytes[PATH] <= 65_536


def test_transfer_of_a_gated_file_never_shows_the_token(
    settings: Settings, fake_hub: FakeHub, cdn: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    publish(fake_hub)
    fake_hub.repos["org/big"].gated = True
    with pytest.raises(GatedModel) as caught:
        pull("org/big", settings)
    assert f"{fake_hub.endpoint}/org/big" in str(caught.value) and "HF_TOKEN" in caught.value.hint
    assert "hf_of" not in f"{caught.value}{caught.value.hint}{caught.value.__cause__!r}"
    assert "signature" not in str(caught.value)


def test_transfer_works_through_a_mirror_under_a_path(tmp_path: Path) -> None:
    with FakeHub(prefix="/hf/mirror") as mirror:
        publish(mirror)
        settings = Settings(home=str(tmp_path), hf_endpoint=f"{mirror.endpoint}/", reuse=False)
        pull("org/big", settings)
        assert_right(settings)


# --- stopping, shards, other processes ----------------------------------------------------------------------------------------


def test_transfer_is_stopped_while_the_server_is_silent(settings: Settings, fake_hub: FakeHub) -> None:
    """A server that never answers and never ends: only a real cancel gets out of this."""
    file = publish(fake_hub, hold=Hold(0))
    assert file.hold
    stop = threading.Event()
    threading.Thread(target=lambda: (file.hold.wait_until_reached(), stop.set()), daemon=True).start()  # type: ignore[union-attr]
    with pytest.raises(DownloadStopped) as caught:
        pull("org/big", settings, stop=stop)
    assert "goes on" in caught.value.hint or "go on" in caught.value.hint


def test_transfer_is_stopped_by_what_its_progress_raises(settings: Settings, fake_hub: FakeHub) -> None:
    file = publish(fake_hub, hold=Hold(1_000_000))

    def interrupt(done_bytes: int, _: int | None) -> None:
        if done_bytes == 1_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("org/big", settings, interrupt)
    assert kept(settings).stat().st_size == 1_000_000
    assert file.hold and not file.hold.free.is_set()


def test_transfer_brings_shards_side_by_side_and_keeps_those_that_are_whole(settings: Settings, fake_hub: FakeHub) -> None:
    names = [f"big-Q4_K_M-0000{number}-of-00003" for number in (1, 2, 3)]
    files = {name: HubFile(BIG + name.encode()) for name in names}
    fake_hub.add("org/big", **files)
    files[names[0]].hold = Hold(len(BIG))  # waits for the others, which therefore travel at the same time
    files[names[2]].gone = True

    def free(done_bytes: int, _: int | None) -> None:
        if done_bytes > 2 * len(BIG):
            files[names[0]].hold.free.set()  # type: ignore[union-attr]

    with pytest.raises(DownloadFailed, match="no longer"):
        pull("org/big", settings)
    files[names[2]].gone = False
    seen: list[int] = []
    model = pull("org/big", settings, lambda done_bytes, total_bytes: (free(done_bytes, total_bytes), seen.append(done_bytes)))

    assert [(model.folder / file.name).read_bytes() for file in model.files] == [files[name].content for name in names]
    assert seen[-1] == model.size_bytes
    assert not list((settings.store_dir / ".partial").iterdir())


CHILD = """
import sys
from localfast.models.hub import pull
from localfast.settings import Settings

home, endpoint = sys.argv[1:]
pull("org/big", Settings(home=home, hf_endpoint=endpoint, reuse=False), lambda done, total: print(done, flush=True))
"""


def start_pull(settings: Settings) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, settings.home, settings.hf_endpoint]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_transfer_killed_ten_times_fetches_hardly_a_byte_twice(settings: Settings, fake_hub: FakeHub) -> None:
    content = BIG * 4
    fake_hub.add("org/big", **{"big-Q4_K_M": (file := HubFile(content))})
    places = sorted(random.Random(7).sample(range(1, len(content)), 10))
    for place in places:
        file.hold = Hold(place)
        with start_pull(settings) as child:
            assert child.stdout
            for line in child.stdout:
                if int(line) == place:
                    os.kill(child.pid, signal.SIGKILL)
        file.hold.free.set()
        assert Store(settings).installed() == []
    file.hold = None

    assert pull("org/big", settings).path.read_bytes() == content
    assert fake_hub.sent_bytes[PATH] <= 1.2 * len(content), places
    assert fake_hub.count("resolve") == 11


def test_transfer_of_two_processes_is_one_and_the_other_sees_it_grow(settings: Settings, fake_hub: FakeHub) -> None:
    file = publish(fake_hub, hold=Hold(1_000_000))
    assert file.hold
    seen: list[int] = []

    def follow(done_bytes: int, _: int | None) -> None:
        seen.append(done_bytes)
        if done_bytes == 1_000_000:
            file.hold.free.set()  # type: ignore[union-attr]

    with start_pull(settings) as child:
        file.hold.wait_until_reached()
        model = pull("org/big", settings, follow)
    assert child.returncode == 0 and 1_000_000 in seen
    assert model.path.read_bytes() == BIG
    assert fake_hub.count("GET /org/big/resolve") == 1


# --- the disk -----------------------------------------------------------------------------------------------------------------


def test_transfer_wants_half_as_much_again_as_remains(
    settings: Settings, fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = publish(fake_hub)
    stop_at(settings, file, 1_000_000)
    needed_bytes = 1.5 * (len(BIG) - 1_000_000)

    class Usage:
        free = needed_bytes - 1

    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(NoSpace, match=r"needs .* GiB, .* GiB are free"):
        pull("org/big", settings)
    assert fake_hub.count("resolve") == 1 and kept(settings).stat().st_size == 1_000_000
    Usage.free = needed_bytes
    pull("org/big", settings)
    assert_right(settings)


def test_transfer_onto_a_disk_that_fills_up_keeps_what_arrived(
    settings: Settings, fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(fake_hub)
    write = transfer._Transfer._write

    def fill_up(self: transfer._Transfer, file: object, chunk: bytes) -> None:
        if self.have_bytes > 1_000_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, file, chunk)  # type: ignore[arg-type]

    monkeypatch.setattr(transfer._Transfer, "_write", fill_up)
    with pytest.raises(NoSpace, match="the disk is full"):
        pull("org/big", settings)
    assert Store(settings).installed() == [] and kept(settings).stat().st_size > 1_000_000

    monkeypatch.setattr(transfer._Transfer, "_write", write)
    pull("org/big", settings)
    assert_right(settings)
    assert fake_hub.header("Range")[0] is None and fake_hub.header("Range")[1] is not None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 4 MiB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = sys.platform == "linux" and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode != 0:
        pytest.skip("no disk can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_transfer_onto_a_real_full_disk_leaves_everything_else_intact(
    small_disk: Path, fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(home=str(small_disk), hf_endpoint=fake_hub.endpoint, reuse=False)
    fake_hub.add("org/small", **{"small-Q4_K_M": b"GGUF" + bytes(2**20)})
    small = pull("org/small", settings)
    publish(fake_hub)
    with pytest.raises(NoSpace, match="are free"):
        pull("org/big", settings)
    monkeypatch.setattr(fetching, "SPACE_FACTOR", 0)
    (small_disk / "ballast").write_bytes(bytes(2**20))

    with pytest.raises(NoSpace, match="the disk is full"):
        pull("org/big", settings)

    assert Store(settings).stored() == [small] and small.path.stat().st_size == 2**20 + 4
    (small_disk / "ballast").unlink()
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    assert pull("org/big", settings).path.read_bytes() == BIG
    assert fake_hub.header("Range", "big")[-1] is not None


def test_transfer_of_a_busy_hub_is_asked_again(settings: Settings, fake_hub: FakeHub) -> None:
    publish(fake_hub)
    fake_hub.refusals = [(503, {}), (429, {})]
    assert hub.describe("org/big", settings).revision == COMMIT
    fake_hub.refusals = [(503, {})] * 99
    with pytest.raises(HubBusy, match="503"):
        hub.describe("org/big", settings)
