"""Models that others have on this disk: the Hugging Face cache, LM Studio, Ollama, and the folders that the user named.

Looks only: nothing is written, moved or linked, and every model is used where it lies. What is broken, foreign, unreadable or
without end is passed over, the bounds below keep any disk from holding a caller up, and a place where nothing changed since the
last look is not read again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice, zip_longest
from pathlib import Path, PurePath
from typing import Any

from localfast.models.installed import InstalledModel, ModelFile
from localfast.models.names import is_model_file, quant_label, shard_names, without_label
from localfast.models.shipped import REPOSITORY
from localfast.settings import Settings

OWNERS = {
    "huggingface-cache": "the Hugging Face cache",
    "lmstudio": "LM Studio",
    "ollama": "Ollama",
    "folder": "a folder of yours",
}
"""Kind of place, and whose it is in words."""

MAX_FOLDERS = 2_000
MAX_ENTRIES = 20_000
MAX_DEPTH = 6
MAX_MANIFEST_BYTES = 256 * 1024
SETTLED_S = 2.0
"""A folder changed less than this before it was read may change again within one tick of its clock: it is read again."""

_OLLAMA_SYSTEM = Path("/usr/share/ollama/.ollama/models")
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_HASH = re.compile(r"[0-9a-f]{64}")

Listing = tuple[list[str], list[str]]


@dataclass(frozen=True, slots=True)
class Place:
    """A folder with models of somebody; `kind` is one of OWNERS."""

    kind: str
    root: Path


def places(settings: Settings, home: Path | None = None) -> tuple[Place, ...]:
    """Where to look. A folder of `models_dir` that is laid out like Hugging Face's or Ollama's is read as such."""
    known: list[Place] = []
    if settings.reuse:
        with contextlib.suppress(RuntimeError):  # nobody knows a home folder
            user = home or Path.home()
            known = [
                Place("huggingface-cache", user / ".cache" / "huggingface" / "hub"),
                Place("lmstudio", user / ".lmstudio" / "models"),
                Place("lmstudio", user / ".cache" / "lm-studio" / "models"),
                Place("ollama", user / ".ollama" / "models"),
            ]
        known += [] if home else [Place("ollama", _OLLAMA_SYSTEM)]
    for text in settings.models_dir:
        with contextlib.suppress(RuntimeError, ValueError):
            known.append(Place("folder", Path(text).expanduser().absolute()))
    return tuple(known)


def find_models(known: Iterable[Place]) -> list[InstalledModel]:
    """Every GGUF model in these places, as often as it is there; of one name and quant in one place, the first."""
    return [model for place in known for model in _models_of(place)]


_looks: dict[Place, tuple[dict[str, Any], tuple[InstalledModel, ...]]] = {}


def _models_of(place: Place) -> tuple[InstalledModel, ...]:
    looked = _looks.get(place)
    if looked is not None and all(_signature(path) == signature for path, signature in looked[0].items()):
        return looked[1]
    walk = _Walk()
    models: dict[str, InstalledModel] = {}
    for model in _READERS[_layout(place, walk)](place.root, walk):
        models.setdefault(str(model).lower(), model)
    found = tuple(models.values())
    if walk.settled:
        _looks[place] = (walk.signatures, found)
    return found


def _layout(place: Place, walk: _Walk) -> str:
    folders = _read_folder(place.root, MAX_ENTRIES)[0] if place.kind == "folder" and walk.stat(place.root) else []
    if "manifests" in folders and "blobs" in folders:
        return "ollama"
    return "huggingface-cache" if any(name.startswith("models--") for name in folders) else place.kind


# --- layouts ------------------------------------------------------------------------------------------------------------------


def _in_hub_cache(root: Path, walk: _Walk) -> Iterator[InstalledModel]:
    """models--org--repo/snapshots/<revision>/...: links to ../../blobs/<sha256>; refs/main names the newest revision."""
    for name in walk.look(root)[0]:
        repository = name.removeprefix("models--").replace("--", "/", 1)
        if not name.startswith("models--") or not REPOSITORY.fullmatch(repository):
            continue
        snapshots = root / name / "snapshots"
        main = (walk.read_text(root / name / "refs" / "main") or "").strip()
        for revision in sorted(walk.look(snapshots)[0], key=lambda revision: revision != main):
            for folder, files in walk.tree(snapshots / revision, depth=2):
                for group in _groups(folder.relative_to(snapshots), files):
                    made = _model(walk, folder, group, [_linked_hash(folder / file, name) for file in group])
                    if made:
                        label = quant_label(str(folder.relative_to(snapshots / revision) / group[0]))
                        yield made.named(repository, label, f"huggingface-cache:{repository}", revision)


def _in_lm_studio(root: Path, walk: _Walk) -> Iterator[InstalledModel]:
    """publisher/repo/file.gguf; what lies elsewhere goes by its file's name."""
    for folder, files in walk.tree(root, MAX_DEPTH):
        inner = folder.relative_to(root)
        for group in _groups(inner, files):
            if made := _model(walk, folder, group):
                repository = "/".join(inner.parts[:2])
                name = repository if REPOSITORY.fullmatch(repository) else _plain_name(group[0])
                yield made.named(name, quant_label(str(inner / group[0])), f"lmstudio:{name}")


def _in_folder(root: Path, walk: _Walk) -> Iterator[InstalledModel]:
    """Any GGUF at any depth, under its file's name; a second one of a name gets its folder's name before it."""
    names: set[str] = set()
    for folder, files in walk.tree(root, MAX_DEPTH):
        inner = folder.relative_to(root)
        for group in _groups(inner, files):
            if made := _model(walk, folder, group):
                label, name = quant_label(str(inner / group[0])), _plain_name(group[0])
                if f"{name}:{label}".lower() in names:
                    name = _plain_name(f"{without_label(folder.name)}-{name}")
                names.add(f"{name}:{label}".lower())
                yield made.named(name, label, f"folder:{root}")


def _in_ollama(root: Path, walk: _Walk) -> Iterator[InstalledModel]:
    """manifests/<registry>/<namespace>/<model>/<tag> is JSON; its model layer names blobs/sha256-<hex>, a plain GGUF."""
    manifests = root / "manifests"
    for folder, tags in walk.tree(manifests, depth=3):
        parts = folder.relative_to(manifests).parts
        for tag in tags if len(parts) == 3 else ():
            full_name = parts[2] if parts[1] == "library" else f"{parts[1]}/{parts[2]}"
            layers, label = _read_manifest(walk, root, folder / tag)
            if len(layers) != 1 or not (made := _model(walk, root / "blobs", (f"sha256-{layers[0]}",), layers)):
                continue
            label = label or quant_label(tag)
            rest = without_label(tag)
            name = full_name if tag == "latest" or not rest else f"{full_name}-{rest}"
            if not REPOSITORY.fullmatch(name):
                name = _plain_name(f"{name.replace('/', '-')}.gguf")
            yield made.named(name, label, f"ollama:{full_name}:{tag}")


def _read_manifest(walk: _Walk, root: Path, path: Path) -> tuple[list[str], str | None]:
    """Hashes of the model layers of an Ollama manifest, and the quantization that its configuration tells of."""
    manifest = _read_json(walk, path)
    layers = manifest.get("layers")
    models = [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
    hashes = [_digest(layer) for layer in models if layer.get("mediaType") == _OLLAMA_MODEL]
    told = manifest.get("config")
    configuration = _digest(told) if isinstance(told, dict) else None
    about = _read_json(walk, root / "blobs" / f"sha256-{configuration}") if configuration else {}
    return [text for text in hashes if text], quant_label(str(about.get("file_type", ""))[:40])


def _digest(layer: Mapping[str, Any]) -> str | None:
    digest = _DIGEST.fullmatch(str(layer.get("digest", "")))
    return digest[1] if digest else None


_READERS = {"huggingface-cache": _in_hub_cache, "lmstudio": _in_lm_studio, "folder": _in_folder, "ollama": _in_ollama}


# --- files --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Files:
    folder: Path
    files: tuple[ModelFile, ...]
    changed_at: str

    def named(self, name: str, label: str | None, source: str, revision: str = "") -> InstalledModel:
        return InstalledModel(
            name=name,
            quant=label or "",
            source=source,
            files=self.files,
            folder=self.folder,
            revision=revision,
            pulled_at=self.changed_at,
            removable=False,
        )


def _groups(inner: PurePath, files: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """The models among a folder's files, each with all its shards."""
    present = set(files)
    for file in sorted(present, key=lambda file: (len(file), file)):
        shards = shard_names(file)
        if shards[0] == file and present.issuperset(shards) and is_model_file((inner / file).as_posix()):
            yield shards


def _model(walk: _Walk, folder: Path, names: Iterable[str], hashes: Iterable[str] = ()) -> _Files | None:
    """The files with their sizes, or None when one is not there, cannot be read or is no GGUF."""
    try:
        files = []
        changed_s = 0.0
        for name, sha256 in zip_longest(names, hashes, fillvalue=""):
            status = walk.stat(folder / name)
            if status is None or not _is_gguf(folder / name, status):
                return None
            files.append(ModelFile(name, status.st_size, sha256))
            changed_s = max(changed_s, status.st_mtime)
        return _Files(folder, tuple(files), datetime.fromtimestamp(changed_s, UTC).isoformat())
    except (OSError, ValueError, OverflowError):
        return None


def _is_gguf(path: Path, status: os.stat_result) -> bool:
    if not stat.S_ISREG(status.st_mode):
        return False  # opening a pipe would wait for ever
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _linked_hash(path: Path, repository_folder: str) -> str:
    """The sha256 that the cache names its blobs by. Only the first link counts: a shared store has another hash behind it."""
    with contextlib.suppress(OSError, ValueError):
        target = Path(os.path.normpath(path.parent / path.readlink()))
        if target.parent.name == "blobs" and target.parent.parent.name == repository_folder and _HASH.fullmatch(target.name):
            return target.name
    return ""


def _plain_name(file_name: str) -> str:
    """A model's name from its file's: without quantization, and of letters that a name may have."""
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", without_label(re.sub(r"\.gguf$", "", file_name, flags=re.IGNORECASE)))
    # What ends in .gguf would be taken for a path.
    return re.sub(r"\.(?=gguf$)", "-", text.strip("-._")[:80].rstrip("-._"), flags=re.IGNORECASE) or "model"


def _read_json(walk: _Walk, path: Path) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(walk.read_text(path) or "{}")
        if isinstance(content, dict):
            return content
    return {}


@dataclass(slots=True)
class _Walk:
    """One look at one place: no more than the bounds allow, and no folder twice, so links in a circle end.

    Remembers by their signatures what it looked at; as long as those are the same, another look would find the same.
    """

    folders_left: int = MAX_FOLDERS
    entries_left: int = MAX_ENTRIES
    seen: set[tuple[int, int]] = field(default_factory=set)
    signatures: dict[str, Any] = field(default_factory=dict)
    settled: bool = True

    def stat(self, path: Path) -> os.stat_result | None:
        """None for what is not there or may not be seen."""
        status = None
        with contextlib.suppress(OSError, ValueError):
            status = path.stat()
        self.signatures[str(path)] = _sign(status)
        return status

    def look(self, folder: Path) -> Listing:
        """Names of the folders and of the files in it, in order; nothing where it cannot or may not be read."""
        status = self.stat(folder)
        if status is None or self.folders_left <= 0 or self.entries_left <= 0:
            return [], []
        identity = (status.st_dev, status.st_ino)
        if status.st_ino and identity in self.seen:
            return [], []
        self.seen.add(identity)
        self.settled &= time.time() - status.st_mtime > SETTLED_S
        folders, files = _read_folder(folder, self.entries_left)
        self.folders_left -= 1
        self.entries_left -= len(folders) + len(files)
        return folders, files

    def tree(self, root: Path, depth: int) -> Iterator[tuple[Path, list[str]]]:
        """Every folder down to `depth` with its files, the upper ones first. Hidden folders are left out."""
        level = [root]
        for _ in range(depth + 1):
            below: list[Path] = []
            for folder in level:
                folders, files = self.look(folder)
                below += (folder / name for name in folders if not name.startswith("."))
                yield folder, files
            level = below

    def read_text(self, path: Path) -> str | None:
        """A small text file; None when it is not one."""
        status = self.stat(path)
        with contextlib.suppress(OSError, ValueError):
            if status is not None and stat.S_ISREG(status.st_mode) and status.st_size <= MAX_MANIFEST_BYTES:
                return path.read_text(encoding="utf-8")
        return None


def _signature(path: str) -> Any:
    try:
        return _sign(os.stat(path))  # noqa: PTH116 (hundreds at each look, and making a Path of each takes longer than that)
    except (OSError, ValueError):
        return None


def _sign(status: os.stat_result | None) -> Any:
    return status and (status.st_mtime_ns, status.st_size, status.st_ino)


def _read_folder(folder: Path, most_entries: int) -> Listing:
    """Names of folders and files, without those that could not be shown or given to the engine."""
    folders: list[str] = []
    files: list[str] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in islice(entries, most_entries):
            if entry.name.isprintable():
                (folders if _is_folder(entry) else files).append(entry.name)
    return sorted(folders), sorted(files)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):  # a link to itself
        return entry.is_dir()
    return False
