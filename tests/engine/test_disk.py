from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localfast.engine.disk import HEADER_BYTES, DiskStates
from localfast.engine.states import RamStates, Saved

GIB = 2**30
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def saved(*tokens: int, state: bytes | None = None) -> Saved:
    """Of 100 bytes in a file, whatever it stands for; the state tells the tokens."""
    if state is None:
        state = bytes(tokens).ljust(100 - HEADER_BYTES - 4 * len(tokens), b"x")
    return Saved(tokens, state)


def opened(folder: Path, key: str = "model", limit_bytes: int = GIB, cuttable: bool = True) -> DiskStates:
    return DiskStates(folder, key, limit_bytes, cuttable)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def written(disk: DiskStates, folder: Path, state: Saved, used_s: float) -> Path:
    """The file that the write made, last used at that time."""
    before = set(files(folder))
    assert disk.write(state)
    (path,) = set(files(folder)) - before
    os.utime(path, (used_s, used_s))
    return path


def same(found: Saved | None, expected: Saved) -> bool:
    return found is not None and (found.tokens, found.state) == (expected.tokens, expected.state)


@pytest.mark.parametrize("cuttable", [True, False])
def test_disk_what_was_written_is_found_also_after_a_restart(tmp_path: Path, cuttable: bool) -> None:
    state = saved(1, -2, 2**31 - 1, state=os.urandom(5000))
    disk = opened(tmp_path, cuttable=cuttable)
    assert disk.write(state)
    for instance in (disk, opened(tmp_path, cuttable=cuttable)):
        assert same(instance.find([1, -2, 2**31 - 1, 4], 2), state)
        assert instance.find([1, -2, 2**31 - 1, 4], 3) is None
        assert instance.find([2], 0) is None
        assert instance.has((1, -2, 2**31 - 1)) and not instance.has((1, -2, 7))
        assert (instance.entries, instance.used_bytes) == (1, files(tmp_path)[0].stat().st_size)


@pytest.mark.parametrize("cuttable", [True, False])
@settings(max_examples=40, deadline=None)
@given(states=st.lists(TOKENS, max_size=6), wanted=TOKENS, restart=st.booleans())
def test_disk_finds_what_unlimited_ram_would(
    cuttable: bool, states: list[tuple[int, ...]], wanted: tuple[int, ...], restart: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        disk, ram = opened(Path(name), cuttable=cuttable), RamStates(GIB, cuttable)
        for tokens in states:
            assert disk.write(saved(*tokens))
            ram.put(saved(*tokens))
        if restart:
            disk = opened(Path(name), cuttable=cuttable)
        expected, length = ram.best(wanted)
        found = disk.find(list(wanted), 0)
        assert (found and (found.tokens, found.state)) == (expected and (expected.tokens, expected.state))
        assert disk.find(list(wanted), length) is None
        assert disk.entries == len(ram.saved()) == len(files(Path(name)))


# --- damage -------------------------------------------------------------------------------------------------------------------


def damaged(content: bytes) -> Iterator[bytes]:
    for position in range(len(content)):
        yield content[:position]
        for flip in (1, 0x80, 0xFF):
            yield content[:position] + bytes([content[position] ^ flip]) + content[position + 1 :]
    yield content + b"\0"
    yield bytes(len(content))


@pytest.mark.parametrize("before_start", [True, False])
def test_disk_every_flipped_byte_and_every_truncation_is_a_miss(tmp_path: Path, before_start: bool) -> None:
    path = written(opened(tmp_path), tmp_path, saved(1, 2, 3), 1)
    content = path.read_bytes()
    for wrong in damaged(content):
        path.write_bytes(wrong if before_start else content)
        disk = opened(tmp_path)
        path.write_bytes(wrong) if path.exists() else None
        assert disk.find([1, 2, 3, 4], 0) is None
        assert not path.exists(), "what is damaged is deleted"
        assert disk.entries == 0


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=200), keep=st.integers(0, 100), before_start=st.booleans())
def test_disk_any_other_content_is_a_miss(content: bytes, keep: int, before_start: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = written(opened(folder), folder, saved(1, 2, 3), 1)
        right = path.read_bytes()
        wrong = right[:keep] + content
        disk = opened(folder)
        path.write_bytes(wrong)
        disk = opened(folder) if before_start else disk
        found = disk.find([1, 2, 3], 0)
        assert same(found, saved(1, 2, 3)) if wrong == right else found is None


def test_disk_behind_a_damaged_file_the_next_best_is_found(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    assert disk.write(saved(1, 2, 9))
    path = written(disk, tmp_path, saved(1, 2, 3, 4), 1)
    path.write_bytes(path.read_bytes()[:-1])
    assert same(disk.find([1, 2, 3, 4], 0), saved(1, 2, 9))
    assert len(files(tmp_path)) == 1


def test_disk_file_of_another_model_in_the_wrong_place_is_a_miss(tmp_path: Path) -> None:
    path = written(opened(tmp_path, "other"), tmp_path, saved(1, 2, 3), 1)
    own = written(opened(tmp_path), tmp_path, saved(5), 1)
    shutil.copy(path, own.parent / path.name)
    disk = opened(tmp_path)
    assert disk.find([1, 2, 3], 0) is None and disk.find([5], 0) is not None


def test_disk_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    own = written(opened(tmp_path), tmp_path, saved(1), 1)
    odd = own.parent / ("0" * 32 + ".state")
    odd.mkdir()
    (tmp_path / "a file").write_text("x")
    disk = opened(tmp_path)
    assert disk.write(saved(2)) and disk.entries == 2
    assert odd.is_dir() and (tmp_path / "a file").exists()


# --- limits -------------------------------------------------------------------------------------------------------------------


def test_disk_least_recently_used_goes_first_whatever_its_model(tmp_path: Path) -> None:
    first, second = opened(tmp_path, "first", 300), opened(tmp_path, "second", 300)
    old = written(first, tmp_path, saved(1), 10)
    older = written(second, tmp_path, saved(2), 5)
    newer = written(first, tmp_path, saved(3), 20)
    assert second.write(saved(4))
    assert old.exists() and newer.exists() and not older.exists()
    assert first.write(saved(5))
    assert not old.exists() and len(files(tmp_path)) == 3
    assert first.find([1], 0) is None and second.find([2], 0) is None
    assert (first.entries, first.used_bytes, second.entries) == (2, 200, 1)


def test_disk_found_or_written_again_is_used(tmp_path: Path) -> None:
    disk = opened(tmp_path, limit_bytes=300)
    paths = [written(disk, tmp_path, saved(number), number) for number in (1, 2, 3)]
    assert disk.find([1, 7], 0) is not None
    assert disk.write(saved(2))
    assert disk.write(saved(4))
    assert [path.exists() for path in paths] == [True, True, False]


def test_disk_folder_of_a_model_goes_with_its_last_state(tmp_path: Path) -> None:
    other = written(opened(tmp_path, "other"), tmp_path, saved(1), 1)
    assert opened(tmp_path, limit_bytes=150).write(saved(2))
    assert not other.parent.exists()


def test_disk_smaller_limit_is_kept_from_the_start(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    for number in range(5):
        written(disk, tmp_path, saved(number), number)
    assert opened(tmp_path, limit_bytes=250).entries == 2
    assert [path.stat().st_mtime for path in sorted(files(tmp_path), key=lambda path: path.stat().st_mtime)] == [3, 4]


def test_disk_state_larger_than_the_limit_is_refused_and_costs_nobody_else(tmp_path: Path) -> None:
    disk = opened(tmp_path, limit_bytes=250)
    assert disk.write(saved(1))
    assert not disk.write(saved(2, state=bytes(300)))
    assert disk.find([1], 0) is not None and len(files(tmp_path)) == 1


def test_disk_limit_0_reads_writes_and_creates_nothing(tmp_path: Path) -> None:
    opened(tmp_path).write(saved(1))
    before = files(tmp_path)
    off = opened(tmp_path, limit_bytes=0)
    assert off.find([1], 0) is None and not off.write(saved(2)) and not off.has((1,)) and off.entries == 0
    assert files(tmp_path) == before
    opened(tmp_path / "new", limit_bytes=0).write(saved(1))
    assert not (tmp_path / "new").exists()


def test_disk_keeps_part_of_the_disk_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one keeps 1 GiB, a small one 5 %: old states go for it, but not in vain."""
    disk = opened(tmp_path)
    old = written(disk, tmp_path, saved(1), 1)
    new = written(disk, tmp_path, saved(2), 2)
    for total, reserve in ((1000 * GIB, GIB), (GIB, GIB // 20)):
        usage = Usage(total, 0, reserve - 101)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        assert not disk.write(saved(3))
        assert old.exists() and new.exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(GIB, 0, GIB // 20 + 50))
    assert disk.write(saved(3))
    assert not old.exists() and new.exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(GIB, 0, GIB // 20 + 100))
    assert disk.write(saved(4))
    assert len(files(tmp_path)) == 3


# --- writing ------------------------------------------------------------------------------------------------------------------


def test_disk_longer_state_takes_the_place_of_its_beginnings(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    for tokens in ((1,), (1, 2), (7,), (1, 2, 3)):
        assert disk.write(saved(*tokens))
    assert disk.entries == len(files(tmp_path)) == 2
    assert same(disk.find([1, 2], 0), saved(1, 2, 3))
    assert disk.write(saved(1, 2)) and disk.has((1, 2)) and len(files(tmp_path)) == 2


def test_disk_room_for_a_longer_state_is_taken_from_its_beginnings_first(tmp_path: Path) -> None:
    disk = opened(tmp_path, limit_bytes=200)
    other = written(disk, tmp_path, saved(7), 1)
    written(disk, tmp_path, saved(1), 2)
    assert disk.write(saved(1, 2))
    assert other.exists() and len(files(tmp_path)) == 2


def test_disk_states_that_cannot_be_cut_stay_beside_each_other(tmp_path: Path) -> None:
    disk = opened(tmp_path, cuttable=False)
    for tokens in ((1,), (1, 2, 3), (1, 2)):
        assert not disk.has(tokens)
        assert disk.write(saved(*tokens)) and disk.write(saved(*tokens))
    assert same(disk.find([1, 2, 9], 0), saved(1, 2)) and len(files(tmp_path)) == 3


def test_disk_state_gets_its_name_when_all_of_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[tuple[str, int]]] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append([(p.suffix, p.stat().st_size) for p in files(tmp_path)]))
    assert opened(tmp_path).write(saved(1))
    assert seen == [[(".tmp", 100)]]


def test_disk_failing_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = opened(tmp_path)
    assert disk.write(saved(1))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not disk.write(saved(1, 2))
    assert len(files(tmp_path)) == 1 and same(disk.find([1, 2], 0), saved(1)) and not disk.has((1, 2))


def test_disk_process_that_dies_in_the_middle_of_a_write_does_no_harm(tmp_path: Path) -> None:
    assert opened(tmp_path).write(saved(1))
    program = (
        "import os; from pathlib import Path; from localfast.engine.disk import *; os.fsync = lambda descriptor: os._exit(7);"
        f"DiskStates(Path({str(tmp_path)!r}), 'model', 10**9, True).write(Saved((1, 2), bytes(100000)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 7
    (leftover,) = (path for path in files(tmp_path) if path.suffix == ".tmp")
    disk = opened(tmp_path)
    assert same(disk.find([1, 2], 0), saved(1)) and disk.entries == 1
    assert leftover.exists(), "its writer could be alive"
    os.utime(leftover, (1, 1))
    opened(tmp_path, "another model")
    assert not leftover.exists() and len(files(tmp_path)) == 1


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_disk_prompts_are_for_their_owner_only(tmp_path: Path) -> None:
    disk = opened(tmp_path / "cache" / "states")
    assert disk.write(saved(1))
    (path,) = files(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [folder.stat().st_mode & 0o777 for folder in (path.parent, path.parents[1])] == [0o700, 0o700]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="for root no folder is read-only")
def test_disk_read_only_folder_is_read_and_not_written(tmp_path: Path) -> None:
    path = written(opened(tmp_path), tmp_path, saved(1), 1)
    path.parent.chmod(0o500)
    disk = opened(tmp_path)
    assert not disk.write(saved(2)) and same(disk.find([1], 0), saved(1))
    path.parent.chmod(0o700)


def test_disk_that_refuses_every_change_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(opened(tmp_path), tmp_path, saved(1), 1)
    path = written(opened(tmp_path), tmp_path, saved(2), 2)
    path.write_bytes(path.read_bytes()[:-1])
    disk = opened(tmp_path, limit_bytes=250)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for owner, name in ((os, "utime"), (Path, "unlink"), (Path, "mkdir"), (tempfile, "mkstemp")):
        monkeypatch.setattr(owner, name, refuse)
    assert not disk.write(saved(3)) and not disk.write(saved(1))
    assert same(disk.find([1], 0), saved(1)) and disk.find([2], 0) is None


def test_disk_folder_that_cannot_be_is_a_miss(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    disk = opened(tmp_path / "file" / "states")
    assert not disk.write(saved(1)) and disk.find([1], 0) is None


# --- others -------------------------------------------------------------------------------------------------------------------


def test_disk_vanished_folder_is_a_miss_and_made_again(tmp_path: Path) -> None:
    disk = opened(tmp_path / "states")
    assert disk.write(saved(1)) and disk.write(saved(2)) and disk.write(saved(3))
    shutil.rmtree(tmp_path / "states")
    assert disk.find([1], 0) is None
    assert disk.write(saved(2)), "its file is gone, so it is written again"
    assert same(disk.find([2], 0), saved(2)) and disk.entries == 1


def test_disk_two_servers_share_a_folder(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    assert one.write(saved(1)) and two.write(saved(2))
    assert same(two.find([1], 0), saved(1)), "the other's states were seen while writing"
    assert one.write(saved(2)) and len(files(tmp_path)) == 2
    assert one.write(saved(1, 1))
    assert two.find([1], 0) is None, "replaced by the other one"
    assert two.write(saved(3)) and same(two.find([1, 1], 0), saved(1, 1))
    assert two.entries == 3


def test_disk_lookups_go_on_while_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = opened(tmp_path)
    assert disk.write(saved(1))
    found: list[Saved | None] = []

    def look(descriptor: int) -> None:
        reader = threading.Thread(target=lambda: found.append(disk.find([1], 0)), daemon=True)
        reader.start()
        reader.join(30)

    monkeypatch.setattr(os, "fsync", look)
    assert disk.write(saved(2))
    assert len(found) == 1 and same(found[0], saved(1))


@pytest.mark.parametrize("cuttable", [True, False])
def test_disk_readers_beside_two_writers_never_get_a_wrong_state(tmp_path: Path, cuttable: bool) -> None:
    instances = [opened(tmp_path, limit_bytes=1000, cuttable=cuttable) for _ in range(2)]
    prompts = [tuple(range(first, first + length)) for first in range(0, 40, 8) for length in (3, 5, 8)]
    failures: list[object] = []
    done = threading.Event()

    def write(disk: DiskStates, order: list[tuple[int, ...]]) -> None:
        try:
            for tokens in order * 2:
                disk.write(saved(*tokens))
        except BaseException as error:
            failures.append(error)

    def read(disk: DiskStates) -> None:
        try:
            while not done.is_set():
                for tokens in prompts:
                    found = disk.find(tokens, 0)
                    if found is not None and not same(found, saved(*found.tokens)):
                        failures.append(found)
        except BaseException as error:
            failures.append(error)

    writers = [threading.Thread(target=write, args=case) for case in zip(instances, (prompts, prompts[::-1]), strict=True)]
    readers = [threading.Thread(target=read, args=(disk,)) for disk in instances]
    for thread in [*writers, *readers]:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert failures == []
    assert not [path for path in files(tmp_path) if path.suffix == ".tmp"]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 1100
