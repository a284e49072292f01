from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localfast.errors import InvalidSetting
from localfast.hardware import Device, EngineBuild, Hardware, detect, read_inventory, to_json

GIB = 2**30
CARD = Device(
    backend="CUDA",
    name="NVIDIA GeForce RTX 3090",
    kind="gpu",
    pci_id="0000:01:00.0",
    total_bytes=24 * GIB,
    free_bytes=23 * GIB,
    in_engine=True,
    display=True,
    bandwidth_bytes_s=936e9,
    compute_capability=(8, 6),
)
MACHINE = Hardware(
    devices=(CARD,),
    ram_total_bytes=64 * GIB,
    ram_available_bytes=60 * GIB,
    physical_cores=8,
    driver_version="570.86",
    compute_capability=(8, 6),
    engine=EngineBuild(installed=True, version="0.3.36", backends=("CUDA", "CPU"), cpu_features=("AVX2",)),
    notes=("a note",),
)


def write(folder: Path, content: Any) -> Path:
    path = folder / "machine.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_inventory_stands_in_for_the_whole_machine(tmp_path: Path) -> None:
    assert detect(inventory=str(write(tmp_path, to_json(MACHINE)))) == MACHINE


def test_inventory_of_this_machine_survives_the_round_trip(tmp_path: Path) -> None:
    found = detect(ask_engine=False)
    assert read_inventory(write(tmp_path, to_json(found))) == found


counts = st.integers(0, 2**50)


@given(
    st.tuples(counts, counts), st.text(), st.sampled_from([None, True, False]), st.lists(st.text(alphabet="abc /\\"), max_size=2)
)
def test_inventory_round_trip_keeps_what_it_wrote(
    tmp_path_factory: pytest.TempPathFactory, memory: tuple[int, int], name: str, display: bool | None, log: list[str]
) -> None:
    card = replace(CARD, name=name, display=display, total_bytes=max(memory), free_bytes=min(memory))
    machine = replace(MACHINE, devices=(card, card), engine=EngineBuild(installed=True, log=tuple(log)))
    path = write(tmp_path_factory.mktemp("machine"), to_json(machine))
    assert to_json(read_inventory(path)) == to_json(machine)


def test_inventory_holds_nothing_personal() -> None:
    engine = EngineBuild(
        installed=True,
        path="/home/alice/engines/cuda",
        error="OSError: /home/alice/my venv/lib/libllama.so: undefined symbol",
        log=(r"failed to load C:\Users\Alice\engines\ggml-cuda.dll", "ggml_cuda_init: failed to initialize CUDA"),
    )
    machine = replace(MACHINE, engine=engine, notes=("the engine is installed but does not start: '/home/alice/x/libllama.so'",))
    text = json.dumps(to_json(machine))
    assert "alice" not in text.lower() and "home" not in text and "Users" not in text
    assert "libllama.so: undefined symbol" in text and "ggml-cuda.dll" in text and "failed to initialize CUDA" in text


def test_inventory_may_be_older_or_newer_than_this_program(tmp_path: Path) -> None:
    card = {"backend": "CUDA", "name": "Card", "kind": "gpu", "colour": "green"}
    found = read_inventory(write(tmp_path, {"format": 7, "moon": [1], "devices": [card], "ram_bandwidth_bytes_s": 5}))
    assert found == Hardware(devices=(Device(backend="CUDA", name="Card", kind="gpu"),), ram_bandwidth_bytes_s=5.0)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_inventory_may_have_gone_through_a_shell_of_windows(tmp_path: Path, encoding: str) -> None:
    assert read_inventory(write(tmp_path, json.dumps(to_json(MACHINE)).encode(encoding))) == MACHINE


def test_inventory_free_memory_is_clamped(tmp_path: Path) -> None:
    card = asdict(CARD) | {"free_bytes": 99 * GIB, "carve_out_bytes": 98 * GIB}
    (found,) = read_inventory(write(tmp_path, {"devices": [card]})).devices
    assert found.free_bytes == found.carve_out_bytes == 24 * GIB


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "does not describe a machine"),
        (b"{", "does not describe a machine"),
        (b"\xff\xfe\x00", "does not describe a machine"),
        (b"\x80\x81", "does not describe a machine"),
        (b"[" * 5000, "does not describe a machine"),
        ([], "Expected `object`, got `array`"),
        ({"ram_total_bytes": "16 GB"}, "Expected `int`, got `str` - at `$.ram_total_bytes`"),
        ({"ram_total_bytes": -1}, "ram_total_bytes is less than 0"),
        ({"physical_cores": 0}, "physical_cores is less than 1"),
        ({"devices": [{"backend": "CUDA", "name": "Card"}]}, "missing required field `kind` - at `$.devices[0]`"),
        ({"devices": [{"backend": "CUDA", "name": "Card", "kind": "toaster"}]}, "at `$.devices[0].kind`"),
        ({"devices": [asdict(CARD) | {"total_bytes": -5}]}, "devices[0].total_bytes is less than 0"),
        ({"devices": [asdict(CARD) | {"compute_capability": [8]}]}, "at `$.devices[0].compute_capability`"),
        (b" " * (2**20 + 1), "larger than 1024 KiB"),
    ],
)
def test_inventory_that_is_wrong_is_refused_in_words(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        detect(inventory=str(write(tmp_path, content)))
    assert words in str(refused.value) and refused.value.name == "hardware" and refused.value.exit_code == 2


@pytest.mark.parametrize("name", ["none.json", "", "no\0file", "~nobody-here/x.json"])
def test_inventory_that_cannot_be_read_is_refused_in_words(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidSetting, match="cannot be read"):
        read_inventory(Path(name) if name.startswith("~") else tmp_path / name)
