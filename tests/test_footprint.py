"""footprint: sums that can be checked by hand, and one real load."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from plain_models import HYBRID, QWEN3_8B, SMALL, WINDOWED

from localfast.engine.messages import SPARE_OUTPUT_ROWS
from localfast.footprint import MIB, RAM, Shape, footprint, layer_places
from localfast.models.gguf import read_facts


def test_footprint_memory_of_known_model_matches_the_published_sums() -> None:
    parts = footprint(QWEN3_8B, Shape(gpu_layers=37, cells=8192, slots=1, ubatch_tokens=512))
    sizes = {(part.device, part.label): part.size_bytes / MIB for part in parts}
    assert sizes[0, "chat memory"] == 1152 and abs(sizes[0, "work space"] - 112) < 1
    assert 5171 <= sizes[0, "model"] <= 5171 * 1.006 and sizes[RAM, "model"] == pytest.approx(400)


def test_footprint_windowed_layers_keep_only_their_window() -> None:
    shape = Shape(gpu_layers=0, cells=32_768, slots=4, ubatch_tokens=128)
    sizes = {part.label: part.size_bytes for part in footprint(WINDOWED, shape)}
    assert sizes["chat memory"] == 2048 * 2 * (2 * 32_768 + 10 * 2304)  # pad256(4 * 512 + 128) = 2304


def test_footprint_recurrent_layers_cost_state_per_slot_and_no_cache() -> None:
    shape = Shape(gpu_layers=0, cells=4096, slots=4, ubatch_tokens=128)
    sizes = {part.label: part.size_bytes for part in footprint(HYBRID, shape)}
    assert sizes["chat memory"] == 2048 * 2 * 3 * 4096 and sizes["recurrent state"] == 9 * 4 * 4 * 2**20


def test_footprint_tied_embeddings_are_copied_only_when_the_output_is_offloaded() -> None:
    tied = replace(SMALL, tied_embeddings=True, output_bytes=SMALL.input_bytes)
    for gpu_layers, in_ram, on_gpu in [(0, 60 + 12 * 20, 0), (13, 60, (60 + 12 * 20) * 1.005)]:
        parts = footprint(tied, Shape(gpu_layers=gpu_layers, cells=256, slots=1, ubatch_tokens=32))
        sizes = {part.device: part.size_bytes / MIB for part in parts if part.label == "model"}
        assert sizes[RAM] == pytest.approx(in_ram) and sizes.get(0, 0) == pytest.approx(on_gpu, abs=0.01)


def test_footprint_layers_go_back_to_front_and_split_by_free_memory() -> None:
    assert layer_places(4, 0, (1.0,)) == (RAM,) * 5
    assert layer_places(4, 1, (1.0,)) == (RAM, RAM, RAM, RAM, 0)
    assert layer_places(4, 5, (3.0, 2.0)) == (0, 0, 0, 1, 1)
    assert layer_places(4, 99, (1.0, 0.0)) == (0,) * 5


@pytest.mark.model
def test_footprint_predicts_the_starter_models_real_memory(starter_path: Path) -> None:
    script = (
        "import ctypes, sys\n"
        "from localfast.engine.llama import bindings as b\n"
        "log = b.llama_log_callback(lambda level, text, user: sys.stdout.write(text.decode('utf-8', 'replace')) and None)\n"
        "b.llama_log_set(log, ctypes.c_void_p(0))\n"
        "b.llama_backend_init()\n"
        "model = b.llama_model_load_from_file(sys.argv[1].encode(), b.llama_model_default_params())\n"
        "p = b.llama_context_default_params()\n"
        "p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max, p.n_outputs_max = 4096, 128, 128, 4, 4 + int(sys.argv[2])\n"
        "p.kv_unified, p.swa_full, p.flash_attn_type = True, False, b.LLAMA_FLASH_ATTN_TYPE_AUTO\n"
        "b.llama_free(b.llama_init_from_model(model, p))\n"
    )
    log = subprocess.run(
        [sys.executable, "-c", script, str(starter_path), str(SPARE_OUTPUT_ROWS)], capture_output=True, text=True, check=True
    ).stdout
    real = {use: float(size) for use, size in re.findall(r"(model|KV|compute) buffer size =\s+([\d.]+) MiB", log)}
    parts = footprint(read_facts(starter_path), Shape(gpu_layers=0, cells=4096, slots=4, ubatch_tokens=128))
    planned = {part.label: part.size_bytes / MIB for part in parts}
    assert planned["chat memory"] == real["KV"]
    assert planned["model"] == pytest.approx(real["model"], rel=0.01)
    assert planned["work space"] == pytest.approx(real["compute"], rel=0.1)
