"""What models there are, in one place: the shipped catalog, the names users type, and the models on this disk.

Owns nothing itself; the parts are `models.shipped`, `names`, `installed` and `store`. None of them touches the network
(`models.hub` does), and none joins a name that came from outside to a path.
"""

from __future__ import annotations

from localfast.models.installed import InstalledModel, ModelFile, model_at
from localfast.models.names import (
    MAX_NAME_CHARACTERS,
    ModelName,
    is_file_name,
    is_model_file,
    near_names,
    parse_name,
    quant_label,
    shard_names,
)
from localfast.models.shipped import Catalog, CatalogEntry, CatalogQuant, Role, load_catalog, parse_catalog
from localfast.models.store import Store, draft_model, parse_size

__all__ = [
    "MAX_NAME_CHARACTERS",
    "Catalog",
    "CatalogEntry",
    "CatalogQuant",
    "InstalledModel",
    "ModelFile",
    "ModelName",
    "Role",
    "Store",
    "draft_model",
    "is_file_name",
    "is_model_file",
    "load_catalog",
    "model_at",
    "near_names",
    "parse_catalog",
    "parse_name",
    "parse_size",
    "quant_label",
    "shard_names",
]
