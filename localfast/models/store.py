"""The models on this disk: those localfast fetched, in its own folder, and those that others have, where they lie.

Owns the layout of the models folder and finds a model by what users type. Never touches the network and never writes outside
its folder.

Layout: `<store_dir>/<name>/<quant>/` holds the GGUF file(s), `model.json` and `last_used`; a repository's `org/repo` becomes
`org--repo`, lower case. `.partial/` holds what is being made or thrown away, `.locks/` one lock per model and quant.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import cast

import psutil
from filelock import FileLock, Timeout

from localfast.errors import InvalidRequest, LocalfastError, ModelNotFound
from localfast.models.found import OWNERS, find_models, places
from localfast.models.installed import InstalledModel, ModelFile, model_at
from localfast.models.names import ModelName, is_file_name, near_names, parse_name
from localfast.models.shipped import CATALOG_NAME, CatalogEntry, load_catalog
from localfast.settings import Settings

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([KMGT])(i?)B", re.IGNORECASE | re.ASCII)
_DAMAGED = "damaged"
_LAST_USED = "last_used"


class Store:
    """The models that these settings show. Reads the disk at each call; several processes may use it at once."""

    def __init__(self, settings: Settings, home: Path | None = None) -> None:
        """`home` is the folder in which other programs keep theirs: the user's own if it is not given."""
        self.root = settings.store_dir
        self._places = places(settings, home)

    # --- what there is --------------------------------------------------------------------------------------------------------

    def installed(self) -> list[InstalledModel]:
        """Every whole model: those of the store, then those found elsewhere; each by name, newest first within a name.

        What is there twice, by content or by name, is listed once, and the store's own comes first.
        """
        return _once([*self.stored(), *self.found()])

    def stored(self) -> list[InstalledModel]:
        """The whole models of the store. Damaged and half-made folders are left out."""
        return [model for model in self.recorded() if _is_whole(model)]

    def recorded(self) -> list[InstalledModel]:
        """Every model of the store that has a readable record, also when its files are damaged."""
        records = (_read_record(path) for path in self.root.glob("[!.]*/*/model.json"))
        return _in_order(model for model in records if model)

    def found(self) -> list[InstalledModel]:
        """What others have on this disk, as often as it is there. A catalog's name is theirs only if the file is that model."""
        models = []
        for model in find_models(self._places):
            entry = catalog_entry(model)
            if entry is not None:
                models.append(replace(model, licence=entry.licence))
            elif load_catalog().find(model.name) is not None:
                models.append(replace(model, name=f"{model.kind}/{model.name}"))
            else:
                models.append(model)
        return _in_order(models)

    def find(self, name: str | ModelName) -> InstalledModel | None:
        """The installed model of this name; without a quant the newest one.

        A path is found only when it is exactly an installed file or the bare name of one in the store, and never opened.
        """
        wanted = parse_name(name) if isinstance(name, str) else name
        models = [*self.stored(), *self.found()]
        match, listed = _match(models, wanted), _once(models)
        if match is None or match in listed:
            return match
        return next(model for model in listed if _marks(model) & _marks(match))

    def not_found(self, name: str | ModelName) -> ModelNotFound:
        """The error for a name that is neither here nor in the catalog, with what may have been meant."""
        known = (*load_catalog().names, *(model.name for model in self.installed()))
        return ModelNotFound(name=str(name), near=near_names(str(name), known))

    # --- places ---------------------------------------------------------------------------------------------------------------

    def folder(self, name: str, quant: str) -> Path:
        """Where a model is kept, present or not."""
        return self.root / self.slug(name) / quant

    def slug(self, name: str) -> str:
        """A model's folder name. The name must have come out of `parse_name`."""
        slug = name.lower().replace("/", "--")
        assert CATALOG_NAME.fullmatch(slug[:96]) and len(slug) < 200, "only parsed names make paths"
        return slug

    def partial(self, name: str, quant: str) -> Path:
        """Where a model is put together before it appears; on the same disk, so that a rename finishes it."""
        return self.root / ".partial" / f"{self.slug(name)}--{quant}"

    def lock(self, name: str, quant: str) -> Path:
        """The file that whoever writes this model holds locked."""
        return self.root / ".locks" / f"{self.slug(name)}--{quant}.lock"

    # --- changes --------------------------------------------------------------------------------------------------------------

    def add(self, model: InstalledModel) -> InstalledModel:
        """Move the complete folder `model.folder` to its place, with its record; it replaces an older one.

        The older one goes when the new one is there; if that fails, it is put back.
        """
        record = asdict(model)
        del record["folder"], record["removable"]
        temporary = model.folder / "model.json.new"
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        temporary.replace(model.folder / "model.json")
        target = self.folder(model.name, model.quant)
        target.parent.mkdir(parents=True, exist_ok=True)
        old = self._put_away(target)
        try:
            model.folder.replace(target)
        except OSError:
            if old is not None:
                old.replace(target)
            raise
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
        return cast(InstalledModel, _read_record(target / "model.json"))

    def check_removable(self, model: InstalledModel) -> None:
        """Raises InvalidRequest, in words, when a model is not ours to delete or a program has it loaded."""
        if not model.removable or self.folder(model.name, model.quant) != model.folder:
            owner = OWNERS.get(model.kind)
            whose = f"belongs to {owner}" if owner else "is not in the models folder"
            raise InvalidRequest(f"'{model}' ({model.path}) {whose} and is left alone", param="model")
        if (program := using(model)) is not None:
            raise InvalidRequest(f"'{model}' is loaded by {program}; stop that first, then remove it", param="model")

    def remove(self, model: InstalledModel) -> None:
        """Delete a model. Raises what `check_removable` raises."""
        self.check_removable(model)
        folder = model.folder
        try:
            trash = self._put_away(folder)
        except PermissionError as error:
            raise InvalidRequest(f"'{model}' cannot be removed, something is using it: {error}", param="model") from None
        if trash is not None:
            shutil.rmtree(trash, ignore_errors=True)
        with contextlib.suppress(OSError):  # the last quant's; else it is not empty
            folder.parent.rmdir()

    def touch(self, model: InstalledModel) -> None:
        """Note that a model is used now. Costs nothing much, and never fails: it only orders what `prune` removes."""
        if model.removable:
            with contextlib.suppress(OSError):
                (model.folder / _LAST_USED).touch()

    def last_used(self, model: InstalledModel) -> float:
        """When a model of the store was last used, else when it was pulled; seconds since 1970."""
        times = [0.0]
        for path in (model.folder / _LAST_USED, model.path):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
                break
        with contextlib.suppress(ValueError, OverflowError, OSError):
            times.append(datetime.fromisoformat(model.pulled_at).timestamp())
        return max(times)

    def mark(self, model: InstalledModel, damaged: bool) -> None:
        """Take a damaged model out of what is installed, so that it can be pulled anew, or put a sound one back."""
        mark = model.folder / _DAMAGED
        with contextlib.suppress(OSError):
            if model.removable and damaged:
                mark.touch()
            elif model.removable:
                mark.unlink(missing_ok=True)

    def leftovers(self, older_than_s: float) -> Iterator[Path]:
        """What unfinished downloads and deletions left behind: trash, and parts that nobody wrote to for this long."""
        with contextlib.suppress(OSError):
            for folder in sorted((self.root / ".partial").iterdir()):
                if folder.name.startswith("trash-") or time.time() - _newest_change(folder) > older_than_s:
                    yield folder

    def sweep(self, leftover: Path) -> bool:
        """Delete one of the leftovers. False, and it stays, when somebody is at work there or it cannot be deleted."""
        lock = self.root / ".locks" / f"{leftover.name.removeprefix('update-')}.lock"
        try:
            with FileLock(lock).acquire(blocking=False) if lock.exists() else contextlib.nullcontext():
                if leftover.is_dir() and not leftover.is_symlink():
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink()
        except (Timeout, OSError):
            return False
        return True

    def _put_away(self, folder: Path) -> Path | None:
        """Out of sight in one step, to be deleted then: a half-deleted model is never visible. None when it is not there."""
        if not folder.exists():
            return None
        trash = self.root / ".partial" / f"trash-{folder.parent.name}-{folder.name}-{os.getpid()}"
        trash.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(trash, ignore_errors=True)
        folder.replace(trash)
        return trash


def parse_size(text: str) -> int:
    """Bytes of "50GB" (powers of 1000) or "46.5 GiB" (of 1024). Raises InvalidRequest for anything else."""
    size = _SIZE.fullmatch(text.strip())
    if size is None:
        raise InvalidRequest(f"'{text[:40]}' is not a size; write it as 50GB, 1.5TB or 512MiB")
    return int(float(size[1]) * (1024 if size[3] else 1000) ** (" KMGT".index(size[2].upper())))


def using(model: InstalledModel) -> str | None:
    """The program that has a file of the model open or in its memory, in words; None when nobody has, or nobody can tell."""
    paths = {str((model.folder / file.name).resolve()) for file in model.files}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError, NotImplementedError):
            held = {file.path for file in process.open_files()}
            if not held & paths and hasattr(process, "memory_maps"):
                held = {mapped.path for mapped in process.memory_maps()}
            if held & paths and process.pid != os.getpid():
                return f"{process.name()} (process {process.pid})"
    return None


def catalog_entry(model: InstalledModel) -> CatalogEntry | None:
    """The catalog's entry for a model: of the same name, or its repository's. A found one must be that very model."""
    entry = load_catalog().find(model.name)
    offered = entry.quants.get(model.quant) if entry else None
    if entry is not None and (model.removable or (offered and offered.size_bytes == model.size_bytes)):
        return entry
    entry = _entries_by_repository().get(model.name.lower())
    offered = entry.quants.get(model.quant) if entry else None
    pinned = offered.sha256 if offered else None
    return None if pinned and model.sha256 and pinned != model.sha256 else entry


def draft_model(settings: Settings, model: InstalledModel) -> InstalledModel | None:
    """The smaller model that guesses ahead for this one, as the draft setting says. Raises ModelNotFound for one not here."""
    if not settings.draft:
        return None
    store, wanted = Store(settings), settings.draft
    if wanted == "auto":
        entry = catalog_entry(model)
        draft = store.find(entry.draft) if entry and entry.draft else None
    else:
        draft = store.find(wanted) or (model_at(Path(wanted)) if parse_name(wanted).kind == "path" else None)
        if draft is None:
            raise store.not_found(wanted)
    return draft if draft and draft.path != model.path else None


@functools.cache
def _entries_by_repository() -> Mapping[str, CatalogEntry]:
    return {entry.repo.lower(): entry for entry in reversed(load_catalog().entries) if entry.repo}


def _match(models: Sequence[InstalledModel], wanted: ModelName) -> InstalledModel | None:
    if wanted.kind == "path":
        # The bare name of somebody else's file must not hide the user's own in the folder they stand in.
        bare = (model for model in models if model.removable and wanted.base == model.path.name)
        return next((model for model in models if wanted.base == str(model.path)), next(bare, None))
    base, entry = wanted.base.lower(), load_catalog().find(wanted.base)

    def answers(model: InstalledModel) -> bool:
        return model.name.lower() == base or model.source.lower() == f"hf:{base}" or _is_entry(model, entry)

    same = [model for model in models if answers(model)]
    if entry is not None and wanted.quant is None:  # what others have by chance comes after what the catalog would fetch
        same.sort(key=lambda model: not model.removable and model.quant != entry.default_quant)
    for quant in (wanted.quant, f"UD-{wanted.quant}"):
        for model in same:
            if quant in (None, model.quant.upper()):
                return model
    tags = {f"ollama:{wanted}".lower(), f"ollama:{wanted}:latest".lower()}
    return next((model for model in models if model.source.lower() in tags), None)


def _is_entry(model: InstalledModel, entry: CatalogEntry | None) -> bool:
    return entry is not None and catalog_entry(model) is entry


def _in_order(models: Iterable[InstalledModel]) -> list[InstalledModel]:
    newest = sorted(models, key=lambda model: model.pulled_at, reverse=True)
    return sorted(newest, key=lambda model: model.name.lower())


def _once(models: Sequence[InstalledModel]) -> list[InstalledModel]:
    """Without found ones that are there already, by name or by content."""
    seen: set[object] = set()
    kept = []
    for model in models:
        marks = _marks(model)
        if model.removable or not marks & seen:
            kept.append(model)
        seen |= marks
    return kept


def _marks(model: InstalledModel) -> set[object]:
    """What two listings of one model have in common."""
    marks: set[object] = {str(model).lower()}
    if model.sha256:
        marks.add(model.sha256)
    with contextlib.suppress(OSError):
        status = model.path.stat()
        if status.st_ino:
            marks.add((status.st_dev, status.st_ino))
    return marks


def _newest_change(folder: Path) -> float:
    newest = 0.0
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):
            newest = max(newest, path.lstat().st_mtime)
    return newest


def _read_record(path: Path) -> InstalledModel | None:
    """The model that a model.json describes, or None when the record is not what it should be."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        files = tuple(ModelFile(**file) for file in record.pop("files"))
        model = InstalledModel(**record, files=files, folder=path.parent)
        texts: Sequence[object] = (model.name, model.quant, model.source, model.revision, model.licence, model.pulled_at)
        named = all(isinstance(text, str) for text in texts) and parse_name(str(model)).kind != "path"
        return model if named and files and all(is_file_name(file.name) for file in files) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, LocalfastError):
        return None


def _is_whole(model: InstalledModel) -> bool:
    """Whether all files are there in full, and no check found them damaged."""
    try:
        sizes = [(model.folder / file.name).stat().st_size for file in model.files]
        return sizes == [file.size_bytes for file in model.files] and not (model.folder / _DAMAGED).exists()
    except OSError:
        return False
