"""What users type and what files are called: names of models, quants and shards, taken apart and compared.

Never looks at the disk or the network. A name that came from outside is matched; whoever makes a path of one checks it first.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from localfast.errors import InvalidRequest, ModelNotFound
from localfast.models.shipped import CATALOG_NAME, REPOSITORY, load_catalog

MAX_NAME_CHARACTERS = 1024

# A quant of ours, or a tag of Ollama's such as 0.6b or 8b-instruct-q4_K_M.
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(?<!\.)")
_HUB_PREFIX = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
_FILE_NAME = re.compile(r"[\w][\w .()+=@,-]{0,250}", re.ASCII)
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_NOT_A_MODEL = re.compile(r"mmproj|imatrix|-vocab|(?:^|/)mtp[-/]|(?:^|[-_./])(?:lora|adapter)(?:[-_.]|$)", re.IGNORECASE)
# Longer labels first: MXFP4_MOE is not MXFP4.
_LABEL = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:MXFP4_MOE|MXFP4|NVFP4|IQ[1-4]_(?:XXS|XS|NL|S|M)(?:_XL|_L)?|TQ[12]_0|"
    r"Q[2-8]_(?:K_(?:XXL|XL|XS|S|M|L)|K|[01])(?:_[48]_[48])?|BF16|F16|F32)(?![A-Za-z0-9])",
    re.IGNORECASE,
)


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
    if not quant or _TAG.fullmatch(quant):
        label = quant.upper() or None
        if REPOSITORY.fullmatch(base):
            return ModelName("hub", base, label)
        if not on_hub and CATALOG_NAME.fullmatch(base.lower()):
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


def without_label(text: str) -> str:
    """A file's or tag's name without its quantization, shard numbers and what joined them: "Qwen3-8B" of Qwen3-8B-Q4_K_M."""
    text = re.sub(r"-\d{5}-of-\d{5}$", "", text)
    labels = list(_LABEL.finditer(text))
    if labels:
        text = text[: labels[-1].start()] + text[labels[-1].end() :]
    return text.strip(" -_.")


def is_model_file(path: str) -> bool:
    """Whether a file is a model by its name: a .gguf that is no projector, importance matrix, adapter or vocabulary."""
    return path.lower().endswith(".gguf") and not _NOT_A_MODEL.search(path)
