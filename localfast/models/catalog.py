"""What models there are: the shipped catalog, the names users type, and the store of installed files.

Owns models.toml's meaning and the layout of the models folder. Never touches the network (`models.hub` does) and never joins
a name that came from outside to a path: names are matched, paths are made of checked parts only.

Layout: `<store_dir>/<name>/<quant>/` holds the GGUF file(s) and `model.json`; a repository's `org/repo` becomes `org--repo`,
lower case. `.partial/` holds what is being made or thrown away, `.locks/` one lock per model and quant.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast, get_args

from localfast.errors import BadModelFile, InvalidRequest, LocalfastError, ModelNotFound
from localfast.settings import Settings

Role = Literal["chat", "code", "fim", "embed", "rerank", "vision", "base"]
MAX_NAME_CHARACTERS = 1024

_CATALOG_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")
_REPOSITORY = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9][\w.-]{0,95}(?<![.-])/[A-Za-z0-9][\w.-]{0,95}(?<![.-])", re.ASCII)
_QUANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_HUB_PREFIX = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
_FILE_NAME = re.compile(r"[\w][\w .()+=@,-]{0,250}", re.ASCII)
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_PINNED_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!]+")
# Longer labels first: MXFP4_MOE is not MXFP4.
_LABEL = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:MXFP4_MOE|MXFP4|NVFP4|IQ[1-4]_(?:XXS|XS|NL|S|M)(?:_XL|_L)?|TQ[12]_0|"
    r"Q[2-8]_(?:K_(?:XXL|XL|XS|S|M|L)|K|[01])(?:_[48]_[48])?|BF16|F16|F32)(?![A-Za-z0-9])",
    re.IGNORECASE,
)


# --- the shipped catalog ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogQuant:
    """One quantization of an entry. `file` may hold `*`; `sha256`, when given, must match what is downloaded."""

    file: str
    size_bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A curated model. Exactly one of `repo` and `packages` is set; models.toml explains every field."""

    name: str
    description: str
    quants: Mapping[str, CatalogQuant]
    default_quant: str
    roles: tuple[Role, ...]
    repo: str = ""
    packages: tuple[str, ...] = ()
    licence: str = ""
    parameters: int | None = None
    context_length: int | None = None
    draft: str | None = None
    mmproj: str | None = None
    gated: bool = False
    commercial: bool = True

    @property
    def source(self) -> str:
        """Where the files come from, in one word: `hf:org/repo` or `pypi:package==version`."""
        return f"hf:{self.repo}" if self.repo else f"pypi:{self.packages[0]}"


@dataclass(frozen=True, slots=True)
class Catalog:
    entries: tuple[CatalogEntry, ...]

    def find(self, name: str) -> CatalogEntry | None:
        """The entry of this name (without a quant), in whatever case and with or without `:latest`."""
        wanted = name.lower().removesuffix(":latest")
        return next((entry for entry in self.entries if entry.name == wanted), None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries)


@functools.cache
def load_catalog() -> Catalog:
    """The catalog inside the installed package, or next to the source tree when there is none (editable installs)."""
    shipped = resources.files("localfast") / "models.toml"
    if shipped.is_file():
        return parse_catalog(shipped.read_text(encoding="utf-8"))
    return parse_catalog((Path(__file__).parents[2] / "models.toml").read_text(encoding="utf-8"))


def parse_catalog(text: str) -> Catalog:
    """Raises ValueError, naming the model and the key, for anything models.toml must not hold."""
    tables = tomllib.loads(text).get("model", [])
    catalog = Catalog(tuple(_parse_entry(table) for table in tables))
    if len(set(catalog.names)) != len(catalog.names):
        raise ValueError("models.toml: two models have the same name")
    for entry in catalog.entries:
        if entry.draft is not None and (entry.draft == entry.name or catalog.find(entry.draft) is None):
            raise ValueError(f"models.toml: {entry.name}: draft '{entry.draft}' is not another model of the catalog")
    return catalog


_ENTRY_TYPES: dict[str, type] = {
    "name": str, "description": str, "repo": str, "packages": list, "default_quant": str, "licence": str, "roles": list,
    "parameters": int, "context_length": int, "draft": str, "mmproj": str, "gated": bool, "commercial": bool, "quants": dict,
}  # fmt: skip
_QUANT_TYPES: dict[str, type] = {"file": str, "size_bytes": int, "sha256": str}


def _parse_entry(table: dict[str, Any]) -> CatalogEntry:
    name = str(table.get("name", "?"))

    def require(fine: object, reason: str) -> None:
        if not fine:
            raise ValueError(f"models.toml: {name}: {reason}")

    def check_keys(found: dict[str, Any], types: dict[str, type], needed: Iterable[str]) -> None:
        for key, value in found.items():
            require(key in types, f"unknown key '{key}'")
            require(type(value) is types[key], f"'{key}' must be {types[key].__name__}")
        for key in needed:
            require(found.get(key), f"'{key}' is missing")

    check_keys(table, _ENTRY_TYPES, ("name", "description", "quants", "default_quant", "roles"))
    require(_CATALOG_NAME.fullmatch(name), "the name may hold a-z, 0-9, '.', '_' and '-'")
    require(set(table["roles"]) <= set(get_args(Role)), f"roles are {', '.join(get_args(Role))}")
    require(("repo" in table) != ("packages" in table), "needs either 'repo' or 'packages'")
    require(_REPOSITORY.fullmatch(table.get("repo", "a/b")), "'repo' is not org/repo")
    require(all(_PINNED_PACKAGE.fullmatch(str(spec)) for spec in table.get("packages", ())), "packages are name==version")
    require(table["default_quant"] in table["quants"], "'default_quant' is not one of the quants")
    for label, quant in table["quants"].items():
        require(_QUANT.fullmatch(label) and label == label.upper(), f"'{label}' is not a quant label")
        require(isinstance(quant, dict), f"quant {label} must be a table")
        check_keys(quant, _QUANT_TYPES, ("file",))
        require(re.fullmatch(r"[0-9a-f]{64}", quant.get("sha256", "0" * 64)), f"quant {label}: sha256 is not 64 hex digits")
        require("repo" in table or {"size_bytes", "sha256"} <= quant.keys(), f"quant {label}: packages need size and sha256")
    values = table | {
        "quants": {label: CatalogQuant(**quant) for label, quant in table["quants"].items()},
        "roles": tuple(table["roles"]),
        "packages": tuple(table.get("packages", ())),
    }
    return CatalogEntry(**values)


# --- names --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelName:
    """A name as users type it, taken apart. `base` is a catalog name, `org/repo`, or the path of a .gguf file."""

    kind: Literal["catalog", "hub", "path"]
    base: str
    quant: str | None = None

    def __str__(self) -> str:
        return f"{self.base}:{self.quant}" if self.quant else self.base


def parse_name(text: str) -> ModelName:
    """Take `name[:quant]`, `[hf.co/]org/repo[:quant]` or the path of a .gguf file apart; nothing is looked up or opened.

    Case does not matter and `:latest` means nothing. Raises InvalidRequest for what cannot be a name of anything (empty, too
    long, control characters) and ModelNotFound for what has the form of no name.
    """
    text = text.strip()
    if not text or len(text) > MAX_NAME_CHARACTERS or any(ord(character) < 32 for character in text):
        raise InvalidRequest(f"a model name is 1 to {MAX_NAME_CHARACTERS} printable characters", param="model")
    on_hub = _HUB_PREFIX.match(text)
    if not on_hub and text.lower().endswith(".gguf"):
        return ModelName("path", text)
    base, _, quant = text[on_hub.end() if on_hub else 0 :].partition(":")
    if quant.lower() == "latest":
        quant = ""
    if not quant or _QUANT.fullmatch(quant):
        label = quant.upper() or None
        if _REPOSITORY.fullmatch(base):
            return ModelName("hub", base, label)
        if not on_hub and _CATALOG_NAME.fullmatch(base.lower()):
            return ModelName("catalog", base.lower(), label)
    raise ModelNotFound(name=text[:100], near=near_names(text, load_catalog().names))


def near_names(text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Up to three known names that `text` may have been meant to be, best first."""
    wanted = text.lower()[:100].removesuffix(":latest").replace(":", "-")
    candidates = {name.lower(): name for name in known}
    close = difflib.get_close_matches(wanted, candidates, n=3, cutoff=0.6)
    inside = [name for name in candidates if len(wanted) > 2 and wanted in name and name not in close]
    return tuple(candidates[name] for name in [*close, *sorted(inside, key=len)][:3])


def quant_label(file_name: str) -> str | None:
    """The quantization a file name tells of, upper case; the last match counts, a folder's name when the file's has none."""
    for part in reversed(PurePosixPath(file_name).parts):
        if labels := _LABEL.findall(part):
            return str(labels[-1]).upper()
    return None


def is_file_name(text: str) -> bool:
    """Whether a name can be given to a file in the store: no folders, nothing that Windows refuses."""
    return _FILE_NAME.fullmatch(text) is not None and not text.endswith((" ", "."))


def shard_names(file_name: str) -> tuple[str, ...]:
    """All shards of a split file, first one first; the name itself when it is not split."""
    shard = _SHARD.search(file_name)
    if shard is None or not 1 <= int(shard[1]) <= int(shard[2]) <= 1000:
        return (file_name,)
    count = int(shard[2])
    return tuple(f"{file_name[: shard.start()]}-{number:05}-of-{count:05}{file_name[-5:]}" for number in range(1, count + 1))


# --- the store ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model: bare name, size in bytes, sha256 in hex (empty when nobody knows it)."""

    name: str
    size_bytes: int
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledModel:
    """A model whose files are on this disk. `files` has the first shard first; `pulled_at` is ISO 8601 in UTC."""

    name: str
    quant: str
    source: str
    files: tuple[ModelFile, ...]
    folder: Path = field(compare=False)
    revision: str = ""
    licence: str = ""
    pulled_at: str = ""
    removable: bool = True

    def __str__(self) -> str:
        return f"{self.name}:{self.quant}" if self.removable else self.name

    @property
    def path(self) -> Path:
        """What the engine opens: the only file, or the first shard."""
        return self.folder / self.files[0].name

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def sha256(self) -> str:
        """Hash of the (first) file; it tells models apart."""
        return self.files[0].sha256


def model_at(path: Path) -> InstalledModel:
    """A .gguf file somewhere on the disk, with its other shards, used where it lies; it cannot be removed from here.

    For paths that the owner of the machine typed, never for a name out of a request.
    Raises ModelNotFound when there is no such file, BadModelFile when a shard is missing.
    """
    path = path.expanduser().absolute()
    if not path.is_file():
        raise ModelNotFound(name=str(path))
    files = [path.with_name(name) for name in shard_names(path.name)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise BadModelFile(path=str(path), reason=f"{len(missing)} of {len(files)} shards are missing: {missing[0]}")
    return InstalledModel(
        name=path.name.removesuffix(".gguf"),
        quant=quant_label(path.name) or "",
        source=f"file:{path}",
        files=tuple(ModelFile(file.name, file.stat().st_size) for file in files),
        folder=path.parent,
        removable=False,
    )


class Store:
    """The models folder of these settings. Reads the disk at each call; several processes may use it at once."""

    def __init__(self, settings: Settings) -> None:
        self.root = settings.store_dir

    def installed(self) -> list[InstalledModel]:
        """Every whole model, by name, newest first within a name. Damaged and half-made folders are left out."""
        models = [_read_record(path) for path in self.root.glob("[!.]*/*/model.json")]
        whole = sorted((model for model in models if model), key=lambda model: model.pulled_at, reverse=True)
        return sorted(whole, key=lambda model: model.name.lower())

    def find(self, name: str | ModelName) -> InstalledModel | None:
        """The installed model of this name; without a quant the newest one.

        A path is found only when it is exactly a stored file or the bare name of one; nothing outside the store is looked at.
        """
        wanted = parse_name(name) if isinstance(name, str) else name
        installed = self.installed()
        if wanted.kind == "path":
            return next((model for model in installed if wanted.base in (str(model.path), model.path.name)), None)
        same = [model for model in installed if model.name.lower() == wanted.base.lower()]
        for quant in (wanted.quant, f"UD-{wanted.quant}"):
            for model in same:
                if quant in (None, model.quant.upper()):
                    return model
        return None

    def not_found(self, name: str | ModelName) -> ModelNotFound:
        """The error for a name that is neither here nor in the catalog, with what may have been meant."""
        known = (*load_catalog().names, *(model.name for model in self.installed()))
        return ModelNotFound(name=str(name), near=near_names(str(name), known))

    def folder(self, name: str, quant: str) -> Path:
        """Where a model is kept, present or not."""
        return self.root / self.slug(name) / quant

    def slug(self, name: str) -> str:
        """A model's folder name. The name must have come out of `parse_name`."""
        slug = name.lower().replace("/", "--")
        assert _CATALOG_NAME.fullmatch(slug[:96]) and len(slug) < 200, "only parsed names make paths"
        return slug

    def partial(self, name: str, quant: str) -> Path:
        """Where a model is put together before it appears; on the same disk, so that a rename finishes it."""
        return self.root / ".partial" / f"{self.slug(name)}--{quant}"

    def lock(self, name: str, quant: str) -> Path:
        """The file that whoever writes this model holds locked."""
        return self.root / ".locks" / f"{self.slug(name)}--{quant}.lock"

    def add(self, model: InstalledModel) -> InstalledModel:
        """Move the complete folder `model.folder` to its place, with its record; it replaces an older one."""
        record = asdict(model)
        del record["folder"], record["removable"]
        temporary = model.folder / "model.json.new"
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        temporary.replace(model.folder / "model.json")
        target = self.folder(model.name, model.quant)
        self._discard(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        model.folder.replace(target)
        return cast(InstalledModel, _read_record(target / "model.json"))

    def remove(self, model: InstalledModel) -> None:
        """Delete a model. Raises InvalidRequest when it is not ours to delete or a program has it open."""
        folder = self.folder(model.name, model.quant) if model.removable else None
        if folder is None or folder != model.folder:
            raise InvalidRequest(f"'{model}' is not in the models folder and is left alone", param="model")
        try:
            self._discard(folder)
        except PermissionError as error:
            raise InvalidRequest(f"'{model}' cannot be removed, something is using it: {error}", param="model") from None
        if not any(folder.parent.iterdir()):
            folder.parent.rmdir()

    def _discard(self, folder: Path) -> None:
        """Out of sight in one step, then gone: a half-deleted model is never visible."""
        if not folder.exists():
            return
        trash = self.root / ".partial" / f"trash-{folder.parent.name}-{folder.name}-{os.getpid()}"
        trash.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(trash, ignore_errors=True)
        folder.replace(trash)
        shutil.rmtree(trash, ignore_errors=True)


def _read_record(path: Path) -> InstalledModel | None:
    """The model that a model.json describes, or None when the record or any of its files is not what it should be."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        files = tuple(ModelFile(**file) for file in record.pop("files"))
        model = InstalledModel(**record, files=files, folder=path.parent)
        texts: Sequence[object] = (model.name, model.quant, model.source, model.revision, model.licence, model.pulled_at)
        named = all(isinstance(text, str) for text in texts) and parse_name(str(model)).kind != "path"
        whole = files and all(
            is_file_name(file.name) and (path.parent / file.name).stat().st_size == file.size_bytes for file in files
        )
        return model if named and whole else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, LocalfastError):
        return None
