"""The shipped catalog: what models.toml means, checked when it is read, and what its names look like.

Knows nothing of this disk or the network: `models.store` says what is installed, `models.hub` fetches.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

Role = Literal["chat", "code", "fim", "embed", "rerank", "vision", "base"]

CATALOG_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")
REPOSITORY = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9][\w.-]{0,95}(?<![.-])/[A-Za-z0-9][\w.-]{0,95}(?<![.-])", re.ASCII)
QUANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_PINNED_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!]+")


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
    require(CATALOG_NAME.fullmatch(name), "the name may hold a-z, 0-9, '.', '_' and '-'")
    require(set(table["roles"]) <= set(get_args(Role)), f"roles are {', '.join(get_args(Role))}")
    require(("repo" in table) != ("packages" in table), "needs either 'repo' or 'packages'")
    require(REPOSITORY.fullmatch(table.get("repo", "a/b")), "'repo' is not org/repo")
    require(all(_PINNED_PACKAGE.fullmatch(str(spec)) for spec in table.get("packages", ())), "packages are name==version")
    require(table["default_quant"] in table["quants"], "'default_quant' is not one of the quants")
    for label, quant in table["quants"].items():
        require(QUANT.fullmatch(label) and label == label.upper(), f"'{label}' is not a quant label")
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
