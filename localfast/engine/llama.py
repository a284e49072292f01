"""The only file that imports `llama_cpp`: model, context, batch and memory, as objects that own their native handles.

Engine process only. Tokenizing may run beside decoding (the vocabulary is read-only); everything else belongs to the step loop's
thread. Every field of the native parameter structs is set on purpose: several defaults of the library cost memory or speed.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import llama_cpp
import llama_cpp.llama_cpp as bindings
import numpy as np
import numpy.typing as npt

from localfast.engine.messages import EngineConfig
from localfast.errors import LoadFailed

__all__ = ["ENGINE_VERSION", "Context", "FloatRow", "Model", "NativeLog", "bindings", "context_params", "model_params"]

ENGINE_VERSION: str = llama_cpp.__version__
KV_TYPES = {"f16": 1, "bf16": 30, "q8_0": bindings.GGML_TYPE_Q8_0, "q4_0": 2}
WINDOW_ONLY: int = bindings.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_BUFFER_LINE = re.compile(r"(\S+)\s+(model|KV|RS|compute|output) buffer size\s*=\s*([\d.]+) MiB")

FloatRow = npt.NDArray[np.float32]


class Fed(Protocol):
    """Tokens of one slot in a batch, such as a scheduler's chunk; the last `outputs` of them yield logits."""

    @property
    def slot(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...


class NativeLog:
    """Sends the library's log to stderr and keeps the lines that say how much memory each device really got."""

    def __init__(self) -> None:
        self.buffers: list[tuple[str, str, int]] = []
        self.last_error = ""
        self._callback = bindings.llama_log_callback(self._take)
        bindings.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _take(self, level: int, text: bytes, _user: ctypes.c_void_p) -> None:
        line = text.decode("utf-8", "replace")
        if level == 4:  # errors
            self.last_error = line.strip()
        if level == 1:  # debug
            return
        sys.stderr.write(line)
        for device, use, mebibytes in _BUFFER_LINE.findall(line):
            if float(mebibytes) > 0:
                self.buffers.append((device, use, int(float(mebibytes) * 2**20)))


def model_params(config: EngineConfig, no_alloc: bool = False) -> Any:
    """The native struct. It must outlive the model, which keeps its pointers. `no_alloc`: sizes are counted only."""
    params = bindings.llama_model_default_params()
    params.n_gpu_layers = config.gpu_layers
    params.split_mode = bindings.LLAMA_SPLIT_MODE_LAYER
    params.main_gpu = 0
    params.load_mode = bindings.LLAMA_LOAD_MODE_MMAP if config.use_mmap and not no_alloc else bindings.LLAMA_LOAD_MODE_NONE
    params.use_extra_bufts = True
    params.check_tensors = False
    params.no_alloc = no_alloc
    if any(share > 0 for share in config.split):
        shares = (ctypes.c_float * max(len(config.split), bindings.llama_max_devices()))(*config.split)
        params.tensor_split = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))
    if config.cpu_experts > 0:
        layers = "|".join(map(str, range(config.cpu_experts)))
        pattern = rf"blk\.({layers})\.ffn_(up|down|gate|gate_up)_exps".encode()
        params.overrides = (_Override * 2)(_Override(pattern, _cpu_buffer_type()), _Override(None, None))
        params.tensor_buft_overrides = ctypes.addressof(params.overrides)
    return params


def context_params(config: EngineConfig, max_outputs: int) -> Any:
    """The native struct of a context in which at most `max_outputs` tokens of one batch yield logits."""
    params = bindings.llama_context_default_params()
    params.n_ctx = config.cells
    params.n_batch = config.batch_tokens
    params.n_ubatch = min(config.ubatch_tokens, config.batch_tokens)
    params.n_seq_max = config.slots
    params.n_outputs_max = max_outputs
    params.n_threads = params.n_threads_batch = config.threads
    params.flash_attn_type = bindings.LLAMA_FLASH_ATTN_TYPE_AUTO
    params.type_k = params.type_v = KV_TYPES[config.kv_type]
    params.embeddings = False
    params.offload_kqv = True
    params.op_offload = True
    params.no_perf = True
    params.swa_full = False  # the default keeps all of a sliding window's past: 2 to 6 times the memory
    params.kv_unified = True
    return params


class _Override(ctypes.Structure):
    """`struct llama_model_tensor_buft_override` of llama.h: tensors whose name matches go to this kind of buffer."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


def _cpu_buffer_type() -> int:
    libraries = [bindings._lib]
    if sys.platform == "win32":  # there a symbol is not looked for in what a library itself imports
        libraries.append(ctypes.CDLL(str(bindings._base_path / "ggml-base.dll"), winmode=0))
    function = next(lib.ggml_backend_cpu_buffer_type for lib in libraries if hasattr(lib, "ggml_backend_cpu_buffer_type"))
    function.restype = ctypes.c_void_p
    return int(function())


class Model:
    """Weights and vocabulary. Raises LoadFailed with the library's last error line when the file does not load."""

    def __init__(self, config: EngineConfig, log: NativeLog) -> None:
        self.log = log  # as long as the model lives the library may call it, and a collected callback is a crash
        bindings.llama_backend_init()
        self._params = model_params(config)  # the library goes on reading the arrays it points to
        self.handle = bindings.llama_model_load_from_file(config.path.encode(), self._params)
        if not self.handle:
            raise LoadFailed(model=config.model, reason=log.last_error or "llama.cpp could not read the file")
        self.vocab = bindings.llama_model_get_vocab(self.handle)
        self.vocabulary: int = bindings.llama_vocab_n_tokens(self.vocab)
        self.layers: int = bindings.llama_model_n_layer(self.handle) + 1
        self.train_context_tokens: int = bindings.llama_model_n_ctx_train(self.handle)
        self.parameters: int = bindings.llama_model_n_params(self.handle)
        self.size_bytes: int = bindings.llama_model_size(self.handle)
        self.bos: int = bindings.llama_vocab_bos(self.vocab)
        self.adds_bos: bool = bindings.llama_vocab_get_add_bos(self.vocab)
        self._pieces: dict[int, bytes] = {}
        self._eog = {token for token in range(self.vocabulary) if bindings.llama_vocab_is_eog(self.vocab, token)}

    @property
    def description(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        bindings.llama_model_desc(self.handle, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    @property
    def window(self) -> int:
        """How much of the past a cut must leave in the cache, as Scheduler wants it."""
        if bindings.llama_model_is_recurrent(self.handle) or bindings.llama_model_is_hybrid(self.handle):
            return 1
        return int(bindings.llama_model_n_swa(self.handle))

    def tokenize(self, text: str) -> list[int]:
        """Special tokens in the text are parsed; BOS is added where the model wants it, once even if the text has it too."""
        raw = text.encode("utf-8", "replace")
        size = len(raw) + 8
        while True:
            tokens = (bindings.llama_token * size)()
            count = bindings.llama_tokenize(self.vocab, raw, len(raw), tokens, size, True, True)
            if count >= 0:
                break
            size = -count
        result = list(tokens[:count])
        if self.adds_bos and result[:2] == [self.bos, self.bos]:
            del result[0]
        return result

    def piece(self, token: int) -> bytes:
        """The token's bytes; control tokens have none, so they never leak into text."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._read_piece(token)
        return piece

    def _read_piece(self, token: int) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = bindings.llama_token_to_piece(self.vocab, token, buffer, size, 0, False)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation (end of text, end of turn)."""
        return token in self._eog

    @property
    def ends(self) -> frozenset[int]:
        return frozenset(self._eog)

    def close(self) -> None:
        bindings.llama_model_free(self.handle)


class Context:
    """KV cache and compute buffers of one loaded model, and the batch that feeds them."""

    def __init__(self, model: Model, config: EngineConfig, max_outputs: int) -> None:
        self.model = model
        self.handle = bindings.llama_init_from_model(model.handle, context_params(config, max_outputs))
        if not self.handle:
            raise LoadFailed(model=config.model, reason="there is not enough memory for its context")
        self.memory = bindings.llama_get_memory(self.handle)
        self.cells: int = bindings.llama_n_ctx(self.handle)
        self._threads = config.threads
        self._batch = _BatchArrays(config.batch_tokens)

    def set_threads(self, threads: int) -> None:
        if threads != self._threads:
            bindings.llama_set_n_threads(self.handle, threads, threads)
            self._threads = threads

    def truncate(self, slot: int, length: int) -> None:
        bindings.llama_memory_seq_rm(self.memory, slot, length, -1)

    def share(self, source: int, target: int, length: int) -> None:
        """Let the empty `target` share the first `length` cells of `source`."""
        bindings.llama_memory_seq_cp(self.memory, source, target, 0, length)
        if self.model.window > 1:
            # The cells of a sliding window that two slots share are never reused, until no slot can go on. So each gets its own.
            self.write_state(target, self.read_state(target, WINDOW_ONLY), WINDOW_ONLY)

    def read_state(self, slot: int, flags: int = 0) -> bytes:
        """All that the cache holds of a slot."""
        size = bindings.llama_state_seq_get_size_ext(self.handle, slot, flags)
        state = np.empty(size, np.uint8)
        address = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        written = bindings.llama_state_seq_get_data_ext(self.handle, address, size, slot, flags)
        return state[:written].data  # type: ignore[return-value]  # a view: some of them are hundreds of megabytes

    def write_state(self, slot: int, state: bytes, flags: int = 0) -> bool:
        """Fill an empty slot with what `read_state` gave. False: it does not fit this context, and the slot is empty."""
        source = np.frombuffer(state, np.uint8)
        address = source.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if bindings.llama_state_seq_set_data_ext(self.handle, address, source.size, slot, flags) == source.size:
            return True
        self.truncate(slot, 0)
        return False

    def decode(self, chunks: Sequence[Fed]) -> bool:
        """Compute all chunks in one call. False: the cache has no room for them, and nothing changed.

        Raises RuntimeError when the library cannot compute (a lost device, an internal error): the process is then of no use.
        """
        batch = self._batch.fill(chunks)
        result = bindings.llama_decode(self.handle, batch)
        if result == 1:
            return False
        if result != 0:
            raise RuntimeError(f"llama_decode failed with code {result}")
        bindings.llama_synchronize(self.handle)  # a GPU is asked for the logits next anyway, and so the step's time is known
        return True

    def logits(self, row: int) -> FloatRow:
        """The row of a token of the last batch, by its place in that batch; a view that the next decode overwrites."""
        pointer = bindings.llama_get_logits_ith(self.handle, row)
        # numpy's own way from a pointer to an array takes ten times as long.
        address = ctypes.addressof(pointer.contents)
        return np.frombuffer((ctypes.c_float * self.model.vocabulary).from_address(address), np.float32)  # type: ignore

    def oldest_positions(self, slots: int) -> dict[int, int]:
        """First position of each slot that is still in the cache; of one that has nothing, a position nobody reaches."""
        oldest = {slot: bindings.llama_memory_seq_pos_min(self.memory, slot) for slot in range(slots)}
        return {slot: position if position >= 0 else sys.maxsize for slot, position in oldest.items()}

    def warm_up(self) -> None:
        """One real decode, so that late allocations fail here and not in the first request; leaves the cache empty."""
        token = self.model.bos if self.model.bos >= 0 else 0
        batch = self._batch.fill_one(token)
        result = bindings.llama_decode(self.handle, batch)
        bindings.llama_memory_clear(self.memory, True)
        if result != 0:
            raise RuntimeError(f"the first decode failed with code {result}")

    def close(self) -> None:
        bindings.llama_free(self.handle)


class _BatchArrays:
    """A llama_batch over numpy memory that is allocated once and filled by slices."""

    def __init__(self, size: int) -> None:
        self.tokens = np.zeros(size, np.int32)
        self.positions = np.zeros(size, np.int32)
        self.slots = np.zeros(size, np.int32)
        self.outputs = np.zeros(size, np.int8)
        self._counts = np.ones(size, np.int32)  # every token belongs to exactly one slot
        self._pointers = self.slots.ctypes.data + np.arange(size, dtype=np.uint64) * self.slots.itemsize
        self._struct = bindings.llama_batch(
            0,
            self._address(self.tokens, ctypes.c_int32),
            None,
            self._address(self.positions, ctypes.c_int32),
            self._address(self._counts, ctypes.c_int32),
            self._address(self._pointers, ctypes.POINTER(ctypes.c_int32)),
            self._address(self.outputs, ctypes.c_int8),
        )

    @staticmethod
    def _address(array: npt.NDArray[np.generic], kind: type) -> object:
        return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))

    def fill(self, chunks: Sequence[Fed]) -> bindings.llama_batch:
        end = 0
        for chunk in chunks:
            start, end = end, end + chunk.count
            self.tokens[start:end] = chunk.tokens
            self.positions[start:end] = range(chunk.start, chunk.start + chunk.count)
            self.slots[start:end] = chunk.slot
            self.outputs[start:end] = 0
            self.outputs[end - chunk.outputs : end] = 1
        self._struct.n_tokens = end
        return self._struct

    def fill_one(self, token: int) -> bindings.llama_batch:
        self.tokens[0], self.positions[0], self.slots[0], self.outputs[0] = token, 0, 0, 1
        self._struct.n_tokens = 1
        return self._struct
