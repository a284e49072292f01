"""What a source offers, before the first byte: the quants of a model, their files, and which of them a user would take.

Pure: plain lists of files in, choices out. Who asks the source is `models.hub`; who fetches is `models.transfer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from localfast.errors import DownloadFailed, ModelNotFound
from localfast.models.catalog import CatalogEntry, ModelName, is_file_name, is_model_file, quant_label, shard_names

UNLABELLED = "GGUF"
"""The quant of a file whose name tells none."""

# fmt: off
_PREFERENCE = (
    "Q4_K_M", "Q4_K_L", "Q4_K_XL", "Q4_K_S", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4", "MXFP4_MOE", "NVFP4", "Q4_1", "Q4_0",
    "Q5_K_M", "Q5_K_L", "Q5_K_XL", "Q5_K_S", "Q5_K", "Q5_1", "Q5_0", "Q6_K", "Q6_K_L", "Q6_K_XL", "Q3_K_XL", "Q3_K_L", "Q3_K_M",
    "IQ3_M", "Q8_0", "Q8_K_XL", "Q3_K_S", "IQ3_S", "IQ3_XS", "IQ3_XXS", "Q2_K_L", "Q2_K", "BF16", "F16", "F32",
)
# fmt: on
_PROJECTOR = re.compile(r"mmproj.*\.gguf$", re.IGNORECASE)


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
    gated: bool = False
    packages: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}:{self.quant}"

    @property
    def repo(self) -> str:
        """`org/repo`, or empty when it does not come from a repository."""
        return self.source.removeprefix("hf:") if self.source.startswith("hf:") else ""

    @property
    def size_bytes(self) -> int | None:
        sizes = [file.size_bytes for file in self.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """All whole quants of one model at its source, best first by the order of preference; `default` is what is taken unasked.

    `companions` are projectors for pictures and sound that lie beside the model. `broken` are labels with missing shards.
    """

    name: str
    source: str
    default: str
    quants: Mapping[str, tuple[RemoteFile, ...]]
    revision: str = ""
    licence: str = ""
    gated: bool = False
    packages: tuple[str, ...] = ()
    companions: tuple[RemoteFile, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def size_bytes(self, label: str) -> int | None:
        return self.preview(label).size_bytes

    def preview(self, label: str | None = None) -> PullPreview:
        """One of them; UD- or not does not matter. Raises ModelNotFound, whose `near` lists them, and DownloadFailed."""
        known = nearest((*self.quants, *self.broken), label or self.default)
        if known is None:
            raise ModelNotFound(name=f"{self.name}:{label}", near=tuple(f"{self.name}:{known}" for known in self.quants))
        if known in self.broken:
            raise DownloadFailed(name=f"{self.name}:{known}", reason=self.broken[known])
        files = self.quants[known]
        return PullPreview(
            name=self.name,
            quant=known,
            source=self.source,
            files=files,
            revision=self.revision,
            licence=self.licence,
            gated=self.gated,
            packages=self.packages,
            warnings=(*self.notes, *_unchecked(files)),
        )


def licence_warnings(entry: CatalogEntry | None, licence: str, gated: bool = False) -> Iterator[str]:
    """What a user must know before using the model at all."""
    if gated or (entry and entry.gated):
        yield "gated: it can be fetched only with the token of an account that accepted its terms (HF_TOKEN)"
    if (entry and not entry.commercial) or re.search(r"\bnc\b|non-?commercial|research", licence, re.IGNORECASE):
        yield f"the licence ({licence or 'see the model page'}) does not allow commercial use"


def _unchecked(files: Sequence[RemoteFile]) -> Iterator[str]:
    if unchecked := [file.name for file in files if not file.sha256]:
        yield f"its source gives no hash for {', '.join(unchecked)}: only the size can be checked"


def quants_of(paths: Iterable[str], entry: CatalogEntry | None) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """The quants in a repository's file list: label to file(s), all shards in order, best label first; and what is broken."""
    present = set(paths)
    whole: dict[str, tuple[str, ...]] = {}
    broken: dict[str, str] = {}
    by_label = _by_label(present, entry)
    for label in sorted(by_label, key=_rank):
        shards = shard_names(by_label[label])
        if missing := [shard for shard in shards if shard not in present]:
            broken[label] = f"{len(missing)} of {len(shards)} shards are not there: {missing[0]}"
        else:
            whole[label] = shards
    return whole, broken


def choose_files(paths: Iterable[str], name: ModelName, entry: CatalogEntry | None) -> tuple[str, tuple[str, ...]]:
    """The quant to take out of a repository's file list, and its file(s), all shards in order.

    The quant asked for, else the catalog's default, else Q4_K_M, else the next best. Raises ModelNotFound, whose `near` lists
    the quants there are, and DownloadFailed when shards are missing. Pure.
    """
    whole, broken = quants_of(paths, entry)
    label = nearest((*whole, *broken), name.quant) if name.quant else default_label((*whole, *broken), entry)
    if label is None:
        raise ModelNotFound(name=str(name), near=tuple(f"{name.base}:{label}" for label in sorted((*whole, *broken), key=_rank)))
    if label in broken:
        raise DownloadFailed(name=str(name), reason=broken[label])
    return label, whole[label]


def default_label(labels: Sequence[str], entry: CatalogEntry | None) -> str | None:
    """What is taken when nobody asks for a quant; None when there is nothing."""
    return (nearest(labels, entry.default_quant) if entry else None) or nearest(labels, None)


def nearest(labels: Iterable[str], wanted: str | None) -> str | None:
    """The label meant by `wanted`, with or without UD-; the best one when nothing is wanted."""
    ordered = sorted(labels, key=_rank)
    if wanted is None:
        return ordered[0] if ordered else None
    plain = wanted.removeprefix("UD-")
    return next((label for same in (wanted, plain, f"UD-{plain}") for label in ordered if label == same), None)


def companions_of(paths: Iterable[str]) -> list[str]:
    """Projectors that belong to a model: F16 first, then BF16, then Q8_0, then the others."""
    order = ("F16", "BF16", "Q8_0")
    found = [path for path in paths if _PROJECTOR.search(PurePosixPath(path).name) and is_file_name(PurePosixPath(path).name)]

    def rank(path: str) -> tuple[int, str]:
        label = quant_label(path) or ""
        return (order.index(label) if label in order else len(order), path)

    return sorted(found, key=rank)


def _by_label(present: set[str], entry: CatalogEntry | None) -> dict[str, str]:
    first_files = sorted(filter(_is_first_file, present), key=lambda path: (len(path), path))
    by_label = {quant_label(path) or UNLABELLED: path for path in reversed(first_files)}
    return by_label | (_curated(entry, first_files) if entry else {})


def _is_first_file(path: str) -> bool:
    """Whether this is a model, or the first shard of one, under a name that can be given to a file."""
    pure = PurePosixPath(path)
    clean = is_file_name(pure.name) and not pure.is_absolute() and ".." not in pure.parts and "\\" not in path
    return clean and is_model_file(path) and shard_names(path)[0] == path


def _curated(entry: CatalogEntry, first_files: Sequence[str]) -> dict[str, str]:
    """The files that the catalog names, where they are there; a split file goes by its name without the shard numbers."""
    found: dict[str, str] = {}
    for label, quant in entry.quants.items():
        for path in first_files:
            whole = re.sub(r"-\d{5}-of-\d{5}(?=\.gguf$)", "", path.lower())
            if fnmatchcase(whole, quant.file.lower()) or fnmatchcase(PurePosixPath(whole).name, quant.file.lower()):
                found.setdefault(label, path)
    return found


def _rank(label: str) -> tuple[int, bool, str]:
    plain = label.removeprefix("UD-")
    return (_PREFERENCE.index(plain) if plain in _PREFERENCE else len(_PREFERENCE), plain != label, label)
