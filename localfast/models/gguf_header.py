"""Reads the header of a GGUF file: keys, tensor infos, special tokens. What they mean is the business of `models.gguf`.

A header is untrusted input: every count and length is bounded before it is used, and weights are never read. Versions 2 and 3,
little-endian, as llama.cpp's `ggml/src/gguf.cpp` writes them.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from localfast.errors import BadModelFile

HEADER_LIMIT_BYTES = 64 * 2**20
CHUNK_BYTES = 2 * 2**20
MAX_KEYS = 100_000
MAX_TENSORS = 100_000
MAX_ARRAY_ITEMS = 2_000_000
MAX_KEPT_ITEMS = 65_536
MAX_NAME_BYTES = 4_096
MAX_STRING_BYTES = 10_000_000
MAX_DIMENSION = 2**32
MAX_SHARDS = 1_000
MAX_SPECIAL_TOKENS = 16_384

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...]

# Weights per block, then the types with such blocks: number, name, bytes per block (`ggml/src/ggml-common.h`).
_TYPE_TABLE = """
1:   0 F32 4, 1 F16 2, 30 BF16 2, 28 F64 8, 24 I8 1, 25 I16 2, 26 I32 4, 27 I64 8
32:  2 Q4_0 18, 3 Q4_1 20, 6 Q5_0 22, 7 Q5_1 24, 8 Q8_0 34, 9 Q8_1 36, 20 IQ4_NL 18, 39 MXFP4 17
64:  40 NVFP4 36, 42 Q2_0 18
128: 41 Q1_0 18
256: 10 Q2_K 84, 11 Q3_K 110, 12 Q4_K 144, 13 Q5_K 176, 14 Q6_K 210, 15 Q8_K 292, 34 TQ1_0 54, 35 TQ2_0 66
256: 16 IQ2_XXS 66, 17 IQ2_XS 74, 18 IQ3_XXS 98, 19 IQ1_S 50, 21 IQ3_S 110, 22 IQ2_S 82, 23 IQ4_XS 136, 29 IQ1_M 56
"""
BLOCKS: dict[int, tuple[str, int, int]] = {
    int(number): (name, int(row.partition(":")[0]), int(size_bytes))
    for row in _TYPE_TABLE.strip().splitlines()
    for number, name, size_bytes in (entry.split() for entry in row.partition(":")[2].split(","))
}
"""By ggml type number: name, weights per block, bytes per block."""
REMOVED_TYPES = frozenset({4, 5, 31, 32, 33, 36, 37, 38})
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_CONTROL, _USER_DEFINED = 3, 4
_SHARD = re.compile(r"^(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: dimension 0 is the contiguous row; `offset` counts from the header's `data_offset`."""

    name: str
    dims: tuple[int, ...]
    type_name: str
    size_bytes: int
    offset: int

    @property
    def weights(self) -> int:
        product = 1
        for dim in self.dims:
            product *= dim
        return product


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of one file. Arrays of the tokenizer are not kept, only the texts of its special tokens."""

    path: str
    version: int
    values: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    file_bytes: int
    token_count: int = 0
    token_texts: Mapping[int, str] = field(default_factory=dict)
    control_tokens: frozenset[str] = frozenset()

    def token_text(self, token_id: int | None) -> str:
        """Text of a special token (any `*_token_id`, control or user-defined token); empty for all others."""
        return self.token_texts.get(token_id, "") if token_id is not None else ""

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key, default)
        return value if isinstance(value, str) else default

    def number(self, key: str, default: int = 0) -> int:
        """A count. Raises BadModelFile when the file holds something else under this key."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
            raise BadModelFile(self.path, f"'{key}' is not a sensible count")
        return value

    def numbers(self, key: str, length: int, default: int = 0) -> tuple[int, ...]:
        """A count per layer: the file may hold one number for all of them or an array; short arrays are filled with 0."""
        value = self.values.get(key, default)
        if not isinstance(value, tuple):
            return (self.number(key, default),) * length
        if not all(isinstance(item, int) and -(2**31) <= item < 2**32 for item in value):
            raise BadModelFile(self.path, f"'{key}' is not a list of sensible counts")
        counts = tuple(max(0, int(item)) for item in value[:length])
        return counts + (0,) * (length - len(counts))


def read_header(path: str | Path) -> GgufHeader:
    """Read one file's header. Raises BadModelFile for anything but a whole, little-endian GGUF v2 or v3 file."""
    try:
        size = Path(path).stat().st_size
        with Path(path).open("rb") as source:
            return parse_header(source, str(path), size)
    except OSError as error:
        raise BadModelFile(str(path), error.strerror or "it cannot be opened") from None


def parse_header(source: BinaryIO, path: str, file_bytes: int) -> GgufHeader:
    """The header of a file of `file_bytes` whose beginning `source` gives, wherever it lies. Raises BadModelFile."""
    return _HeaderParser(source, path, file_bytes).parse()


def shard_paths(path: str | Path) -> tuple[Path, ...]:
    """All files of the model that `path` belongs to, the first shard first; a model in one file is its own only shard."""
    path = Path(path)
    match = _SHARD.match(path.name)
    if not match:
        return (path,)
    count, width = int(match["count"]), 5
    if not 1 <= count <= MAX_SHARDS:
        raise BadModelFile(str(path), f"{count} parts are not a sensible number")
    suffix = path.suffix
    return tuple(path.with_name(f"{match['prefix']}-{n:0{width}}-of-{count:0{width}}{suffix}") for n in range(1, count + 1))


def read_headers(path: str | Path) -> tuple[GgufHeader, ...]:
    """Headers of all shards of a model. Raises BadModelFile when a part is missing or belongs elsewhere."""
    paths = shard_paths(path)
    for number, part in enumerate(paths, 1):
        if len(paths) > 1 and not part.is_file():
            raise BadModelFile(str(path), f"part {number} of {len(paths)} is missing ({part.name})")
    headers = tuple(read_header(part) for part in paths)
    check_shards(str(path), headers)
    return headers


def check_shards(path: str, headers: Sequence[GgufHeader]) -> None:
    """Raises BadModelFile unless these are the headers of one model's files, all of them, in order."""
    for number, header in enumerate(headers):
        if header.number("split.count", 1) not in (0, len(headers)) or header.number("split.no", number) != number:
            raise BadModelFile(header.path, "its name and its header disagree about which part of a split model it is")
    total = sum(len(header.tensors) for header in headers)
    if headers[0].number("split.tensors.count", total) != total:
        raise BadModelFile(path, "its parts do not hold the promised number of tensors")


class _HeaderParser:
    """A cursor over the growing start of a file."""

    def __init__(self, source: BinaryIO, path: str, file_bytes: int) -> None:
        self._source, self._path, self._file_bytes = source, path, file_bytes
        self._buffer = bytearray()
        self._at = 0
        self._tokens: tuple[int, int] = (0, 0)
        """Position of the first token's text and number of tokens."""
        self._token_types = array("i")

    def parse(self) -> GgufHeader:
        version, tensor_count, key_count = self._preamble()
        values: dict[str, Value] = {}
        for _ in range(key_count):
            key = self._string(MAX_NAME_BYTES)
            if key in values:
                raise self._bad(f"the key '{key[:80]}' appears twice")
            value = self._value(key)
            if value is not None:
                values[key] = value
        tensors = [self._tensor() for _ in range(tensor_count)]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise self._bad("its alignment is not a power of two")
        data_offset = -(-self._at // alignment) * alignment
        self._check_extents(tensors, data_offset)
        texts, control = self._special_tokens(values)
        return GgufHeader(
            self._path, version, values, tuple(tensors), data_offset, self._file_bytes, self._tokens[1], texts, control
        )

    def _preamble(self) -> tuple[int, int, int]:
        if self._file_bytes == 0:
            raise self._bad("it is empty (0 bytes)")
        if self._file_bytes < 24 or self._take(4) != b"GGUF":
            raise self._bad("it does not begin with the letters GGUF")
        version = self._unpack("<I")
        if version == 1:
            raise self._bad("it is GGUF version 1, which is no longer read; convert it again")
        if version & 0xFFFF == 0:
            raise self._bad("it is big-endian, made for another kind of processor")
        if version not in (2, 3):
            raise self._bad(f"it is GGUF version {version}; versions 2 and 3 are known")
        tensor_count, key_count = self._unpack("<Q"), self._unpack("<Q")
        if tensor_count > MAX_TENSORS or key_count > MAX_KEYS:
            raise self._bad(f"it claims {tensor_count} tensors and {key_count} keys, which is not sensible")
        return version, tensor_count, key_count

    def _value(self, key: str) -> Value | None:
        kind = self._unpack("<I")
        if kind == _STRING:
            return self._string(MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        return self._scalar(kind)

    def _array(self, key: str) -> tuple[Scalar, ...] | None:
        kind, count = self._unpack("<I"), self._unpack("<Q")
        if count > MAX_ARRAY_ITEMS:
            raise self._bad(f"the list '{key[:80]}' claims {count} items")
        keep = count <= MAX_KEPT_ITEMS and not key.startswith("tokenizer.ggml.")
        if key == "tokenizer.ggml.tokens" and kind == _STRING:
            self._tokens = (self._at, count)
        if kind == _STRING:
            if keep:
                return tuple(self._string(MAX_STRING_BYTES) for _ in range(count))
            self._skip_strings(count)
            return None
        if kind not in _SCALARS:
            raise self._bad(f"the list '{key[:80]}' has the unknown item type {kind}")
        if keep:
            return tuple(self._scalar(kind) for _ in range(count))
        raw = self._take(count * struct.calcsize(_SCALARS[kind]))
        if key == "tokenizer.ggml.token_type" and kind in (4, 5):
            self._token_types = array("i", struct.unpack(f"<{count}i", raw))
        return None

    def _tensor(self) -> TensorInfo:
        name = self._string(MAX_NAME_BYTES)
        rank = self._unpack("<I")
        if not 1 <= rank <= 4:
            raise self._bad(f"the tensor '{name[:80]}' has {rank} dimensions")
        dims = tuple(self._unpack("<Q") for _ in range(rank))
        kind, offset = self._unpack("<I"), self._unpack("<Q")
        if kind not in BLOCKS:
            what = "a type that was removed from GGUF" if kind in REMOVED_TYPES else f"the unknown type {kind}"
            raise self._bad(f"the tensor '{name[:80]}' has {what}")
        type_name, block_weights, block_bytes = BLOCKS[kind]
        if any(not 1 <= dim <= MAX_DIMENSION for dim in dims) or dims[0] % block_weights:
            raise self._bad(f"the tensor '{name[:80]}' has impossible dimensions")
        tensor = TensorInfo(name, dims, type_name, 0, offset)
        return TensorInfo(name, dims, type_name, tensor.weights // block_weights * block_bytes, offset)

    def _check_extents(self, tensors: Sequence[TensorInfo], data_offset: int) -> None:
        end = max((tensor.offset + tensor.size_bytes for tensor in tensors), default=0)
        if tensors and data_offset + end > self._file_bytes:
            raise self._bad(f"it is truncated: it has {self._file_bytes} of {data_offset + end} bytes")
        if sum(tensor.size_bytes for tensor in tensors) > self._file_bytes:
            raise self._bad("its tensors overlap")

    def _special_tokens(self, values: Mapping[str, Value]) -> tuple[dict[int, str], frozenset[str]]:
        wanted = {value for key, value in values.items() if key.endswith("_token_id") and isinstance(value, int)}
        control = {number for number, kind in enumerate(self._token_types) if kind in (_CONTROL, _USER_DEFINED)}
        wanted |= set(sorted(control)[:MAX_SPECIAL_TOKENS])
        self._at, count = self._tokens
        texts: dict[int, str] = {}
        for number in range(min(count, max(wanted, default=-1) + 1)):
            if number in wanted:
                texts[number] = self._string(MAX_STRING_BYTES)
            else:
                self._skip_strings(1)
        return texts, frozenset(text for number, text in texts.items() if number in control)

    def _scalar(self, kind: int) -> Scalar:
        if kind not in _SCALARS:
            raise self._bad(f"a value has the unknown type {kind}")
        value: Scalar = struct.unpack(_SCALARS[kind], self._take(struct.calcsize(_SCALARS[kind])))[0]
        return value

    def _unpack(self, form: str) -> int:
        value: int = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return value

    def _string(self, limit_bytes: int) -> str:
        length = self._unpack("<Q")
        if length > limit_bytes:
            raise self._bad(f"a text in its header claims {length} bytes")
        return self._take(length).decode("utf-8", errors="replace")

    def _skip_strings(self, count: int) -> None:
        """Move past `count` strings; a vocabulary has hundreds of thousands of them, so this loop calls nothing."""
        buffer, at = self._buffer, self._at
        unpack_length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > len(buffer):
                self._fill(at + 8)
            length: int = unpack_length(buffer, at)[0]
            at += 8 + length
            if at > len(buffer):
                self._fill(at)
        self._at = at

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._buffer):
            self._fill(end)
        piece = bytes(self._buffer[self._at : end])
        self._at = end
        return piece

    def _fill(self, end: int) -> None:
        if end > self._file_bytes:
            raise self._bad("it is truncated: it ends inside its header")
        if end > HEADER_LIMIT_BYTES:
            raise self._bad(f"its header is larger than {HEADER_LIMIT_BYTES // 2**20} MiB")
        self._buffer += self._source.read(max(end - len(self._buffer), CHUNK_BYTES))
        if end > len(self._buffer):
            raise self._bad("it is truncated: it ends inside its header")

    def _bad(self, reason: str) -> BadModelFile:
        return BadModelFile(self._path, reason)
