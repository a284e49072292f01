"""Saved states on disk: one file each, under a limit for all models together. Survives the engine and the server.

A file may vanish or be damaged at any time, and other processes use the same folder: all of that is a miss, never an error. The
lock guards the index alone and is never held while a file is touched. A file: FIELDS, CHECKSUM, the tokens as int32, the state.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Collection
from collections.abc import Sequence as Tokens
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from localfast.engine.states import Beginnings, Saved, token_bytes

MAGIC = b"lf-state"
VERSION = 1
FIELDS = struct.Struct("<8sI16sIQ")
"""Magic, version, hash of the key, token count, bytes of the state."""
CHECKSUM = struct.Struct("<I")
"""CRC-32 of all the rest: 2.2 GB/s on one core. blake2b (0.5) would take about as long as a GPU needs to compute the tokens.
It is there against damage; an enemy who can write files can write a right checksum too."""
HEADER_BYTES = FIELDS.size + CHECKSUM.size

STATE_SUFFIX = ".state"
TEMPORARY_SUFFIX = ".tmp"
ABANDONED_S = 3600.0
"""A temporary file that nobody wrote to for so long belongs to a dead process."""
RESERVE_BYTES = 2**30
RESERVE_SHARE = 0.05
"""Kept free on the disk, whichever of the two is less."""


UNUSABLE = (OSError, ValueError, MemoryError)
"""What reading a file may raise; it is deleted then."""


@dataclass(frozen=True, slots=True)
class _Beginning:
    """What a file says before the state itself: tokens, size of the state, checksum, and what that is of all so far."""

    key: bytes
    state_bytes: int
    checksum: int
    checksum_so_far: int


@dataclass(frozen=True, slots=True)
class _Stored:
    key: bytes
    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    size_bytes: int
    used_ns: int


class DiskStates:
    """States under `key` (model and settings that a state depends on). `limit_bytes` is for the whole folder; 0 touches nothing.

    `find` and `has` may be called from any thread, `write` from one.
    """

    def __init__(self, folder: Path, key: str, limit_bytes: int, cuttable: bool) -> None:
        self.limit_bytes = limit_bytes
        self._cuttable = cuttable
        self._key = _digest(key.encode())
        self._root = folder
        self._folder = folder / self._key.hex()
        self._lock = threading.Lock()
        self._index: Beginnings[_Stored] = Beginnings()
        self._stored: dict[Path, _Stored] = {}
        if limit_bytes:
            with suppress(OSError):
                self._make_room(0)

    @property
    def entries(self) -> int:
        """States of this key."""
        return len(self._stored)

    @property
    def used_bytes(self) -> int:
        """Size of the files of this key; other keys share the limit."""
        with self._lock:
            return sum(stored.size_bytes for stored in self._stored.values())

    def has(self, tokens: Tokens[int]) -> bool:
        """Whether `write` would have nothing to add."""
        return bool(self._stored) and self._standing_for(token_bytes(tokens)) is not None

    def find(self, tokens: Tokens[int], at_least: int) -> Saved | None:
        """The state with the longest usable beginning of `tokens`, if that is longer than `at_least` tokens."""
        wanted = token_bytes(tokens)
        while True:
            with self._lock:
                stored, length = self._index.longest(wanted) if self._cuttable else self._index.longest_within(wanted)
            if stored is None or length <= at_least:
                return None
            saved = self._read(stored.path)
            if saved is not None:
                _touch(stored.path)
                return saved
            self._delete(stored.path)

    def write(self, saved: Saved) -> bool:
        """Keep the state. False: it is too large, or the disk cannot take it."""
        key = token_bytes(saved.tokens)
        size_bytes = HEADER_BYTES + len(key) + len(saved.state)
        if not key or size_bytes > self.limit_bytes:
            return False
        there = self._standing_for(key)
        if there is not None and _touch(there.path):
            return True
        stored = _Stored(key, self._folder / _file_name(key), size_bytes)
        try:
            for folder in (self._root, self._folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._make_room(size_bytes, self._useless_beside(key)):
                return False
            self._store(stored, saved.state)
        except OSError:
            return False
        useless = self._useless_beside(key)
        self._add(stored)
        for path in useless:
            self._delete(path)
        return True

    # --- index ----------------------------------------------------------------------------------------------------------------

    def _standing_for(self, key: bytes) -> _Stored | None:
        with self._lock:
            return self._index.beyond(key) if self._cuttable else self._index.at(key)

    def _useless_beside(self, key: bytes) -> set[Path]:
        """Files of shorter beginnings of `key`."""
        with self._lock:
            return {stored.path for stored, _ in self._index.within(key) if stored.key != key} if self._cuttable else set()

    def _add(self, stored: _Stored) -> None:
        with self._lock:
            self._index.add(stored.key, stored)
            self._stored[stored.path] = stored

    def _forget(self, path: Path) -> None:
        with self._lock:
            stored = self._stored.pop(path, None)
            if stored is not None:
                self._index.remove(stored.key)

    def _refresh(self, paths: set[Path]) -> None:
        """Other processes write and delete here too: follow what the folder really holds."""
        with self._lock:
            known = set(self._stored)
        for path in known - paths:
            self._forget(path)
        for path in paths - known:
            try:
                with path.open("rb") as file:
                    beginning = self._read_beginning(file, path)
            except UNUSABLE:
                self._delete(path)
            else:
                self._add(_Stored(beginning.key, path, HEADER_BYTES + len(beginning.key) + beginning.state_bytes))

    # --- files ----------------------------------------------------------------------------------------------------------------

    def _read(self, path: Path) -> Saved | None:
        """None: it is damaged or gone."""
        try:
            with path.open("rb") as file:
                beginning = self._read_beginning(file, path)
                state = file.read(beginning.state_bytes)
        except UNUSABLE:
            return None
        if len(state) != beginning.state_bytes or zlib.crc32(state, beginning.checksum_so_far) != beginning.checksum:
            return None
        return Saved(struct.unpack(f"<{len(beginning.key) // 4}i", beginning.key), state)

    def _read_beginning(self, file: BinaryIO, path: Path) -> _Beginning:
        """Raises ValueError for damage. Sizes are held against the size of the file before so much is read."""
        header = file.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            raise ValueError("shorter than a header")
        magic, version, key, count, state_bytes = FIELDS.unpack_from(header)
        (checksum,) = CHECKSUM.unpack_from(header, FIELDS.size)
        if (magic, version, key) != (MAGIC, VERSION, self._key):
            raise ValueError("not a state of this key")
        size_bytes = os.fstat(file.fileno()).st_size
        if HEADER_BYTES + 4 * count + state_bytes != size_bytes:
            raise ValueError("not as large as it says")
        tokens = file.read(4 * count)
        if _file_name(tokens) != path.name:
            raise ValueError("not the tokens of its name")
        return _Beginning(tokens, state_bytes, checksum, zlib.crc32(tokens, zlib.crc32(header[: FIELDS.size])))

    def _store(self, stored: _Stored, state: bytes) -> None:
        """Write a temporary file and give it its name once all of it is on the disk: no reader ever sees half a state."""
        fields = FIELDS.pack(MAGIC, VERSION, self._key, len(stored.key) // 4, len(state))
        checksum = zlib.crc32(state, zlib.crc32(stored.key, zlib.crc32(fields)))
        descriptor, name = tempfile.mkstemp(TEMPORARY_SUFFIX, dir=self._folder)  # readable by its owner only
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                for part in (fields, CHECKSUM.pack(checksum), stored.key, state):
                    file.write(part)
                file.flush()
                os.fsync(descriptor)
            temporary.replace(stored.path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _make_room(self, size_bytes: int, useless: Collection[Path] = ()) -> bool:
        """Delete files of any key until so much fits, `useless` ones first, then the least recently used. False: it does not."""
        files = _scan(self._root)
        self._refresh({file.path for file in files if file.path.parent == self._folder})
        disk = shutil.disk_usage(self._root)
        used_bytes = sum(file.size_bytes for file in files)
        spare_bytes = min(self.limit_bytes - used_bytes, disk.free - min(RESERVE_BYTES, int(disk.total * RESERVE_SHARE)))
        excess_bytes = size_bytes - spare_bytes
        if excess_bytes > used_bytes:
            return False  # nobody has to go in vain
        for file in sorted(files, key=lambda file: (file.path not in useless, file.used_ns)):
            if excess_bytes <= 0:
                break
            if self._delete(file.path):
                excess_bytes -= file.size_bytes
        return excess_bytes <= 0

    def _delete(self, path: Path) -> bool:
        """False: it is still there. It counts as gone nevertheless, until the folder is looked through again."""
        self._forget(path)
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return False
        if path.parent != self._folder:
            with suppress(OSError):  # others are in it
                path.parent.rmdir()
        return True


def _scan(root: Path) -> list[_File]:
    """All states of all keys; deletes what dead writers left behind."""
    files = []
    for folder in _listing(root):
        for entry in _listing(folder.path) if folder.is_dir(follow_symlinks=False) else ():
            try:
                stat = entry.stat(follow_symlinks=False)
                if entry.name.endswith(STATE_SUFFIX) and entry.is_file(follow_symlinks=False):
                    files.append(_File(Path(entry.path), stat.st_size, stat.st_mtime_ns))
                elif entry.name.endswith(TEMPORARY_SUFFIX) and stat.st_mtime < time.time() - ABANDONED_S:
                    Path(entry.path).unlink()
            except OSError:
                continue  # gone meanwhile
    return files


def _listing(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _touch(path: Path) -> bool:
    """It was used now. False: it is gone."""
    try:
        os.utime(path)
    except OSError:
        return False
    return True


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _file_name(tokens: bytes) -> str:
    """The same tokens get the same name, so that servers that share a folder share files."""
    return _digest(tokens).hex() + STATE_SUFFIX
