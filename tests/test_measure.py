"""Measured memory: what answers of the engine mean, the oracle made of them, children that fail, and what loads taught."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from gguf_writer import llama_tensors, llama_values, write_gguf
from hypothesis import given
from hypothesis import strategies as st

from localfast.footprint import MIB, RAM, Part, Shape, footprint
from localfast.hardware import Device, Hardware
from localfast.measure import (
    DryRuns,
    Failure,
    HeaderSource,
    Key,
    Learned,
    Machine,
    Measure,
    Measurement,
    Shard,
    compare,
    corrected,
    device_number,
    dryruns,
    engine_build,
    key_of,
    machine_of,
    settle,
)
from localfast.measure.answers import Answer, Cache, parts_of
from localfast.models.gguf import ModelFacts, read_facts

SHAPE = Shape(gpu_layers=0, cells=1024, slots=1, ubatch_tokens=64)
GPUS = ["CUDA0", "CUDA1"]
MACHINE = Machine("550.1", "build", "RAM 64")
EXPERTS = ("blk.0.ffn_up_exps.weight", (256, 512, 4), "Q4_K")


def model(folder: Path, tied: bool = True, experts: bool = False, layers: int = 2) -> Path:
    tensors = llama_tensors(layers, tied) + ([EXPERTS] if experts else [])
    return write_gguf(folder / "model.gguf", llama_values(layers), tensors)


def facts_in(folder: Path, **options: bool) -> ModelFacts:
    return read_facts(model(folder, **options))


def sizes(parts: tuple[Part, ...]) -> dict[tuple[int, str], int]:
    return {(part.device, part.label): part.size_bytes for part in parts}


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("CUDA0", 0),
        ("CUDA1", 1),
        ("CUDA_Host", RAM),
        ("CPU", RAM),
        ("CPU_REPACK", RAM),
        ("CPU_Mapped", RAM),
        ("MTL0_Mapped", 2),
        ("RPC0[127.0.0.1:50052]", 3),
        ("CUDA10", RAM),
        ("", RAM),
    ],
)
def test_measure_buffer_belongs_to_its_device(name: str, number: int) -> None:
    assert device_number(name, [*GPUS, "MTL0", "RPC0"]) == number


# --- what an answer means -----------------------------------------------------------------------------------------------------


def test_measure_input_stays_in_ram_and_a_tied_output_is_copied(tmp_path: Path) -> None:
    facts = facts_in(tmp_path)
    parts = sizes(parts_of(Answer(gpus=GPUS, layers=["CUDA0", "CUDA1", "CUDA1"]), facts, SHAPE))
    assert parts[RAM, "model"] == facts.input_bytes
    assert parts[0, "model"] == facts.per_layer[0].weight_bytes
    assert parts[1, "model"] == facts.per_layer[1].weight_bytes + facts.output_bytes
    assert facts.output_bytes > facts.input_bytes


@pytest.mark.parametrize("tied", [True, False])
def test_measure_weights_in_ram_alone_are_those_of_the_file(tmp_path: Path, tied: bool) -> None:
    facts = facts_in(tmp_path, tied=tied)
    parts = sizes(parts_of(Answer(layers=["CPU"] * 3), facts, SHAPE))
    assert parts[RAM, "model"] == facts.weight_bytes


def test_measure_experts_of_leading_layers_and_unused_tensors(tmp_path: Path) -> None:
    facts = facts_in(tmp_path, experts=True)
    answer = Answer(gpus=GPUS, layers=["CUDA0"] * 3)
    before = sizes(parts_of(answer, facts, SHAPE))
    after = sizes(parts_of(answer, facts, replace(SHAPE, cpu_experts=1)))
    moved = facts.per_layer[0].expert_bytes
    assert moved > 0
    assert after[0, "model"] == before[0, "model"] - moved
    assert after[RAM, "model"] == before[RAM, "model"] + moved
    unused = msgspec.structs.replace(answer, unused=[("blk.1.ffn_up.weight", 1000)])
    assert sizes(parts_of(unused, facts, SHAPE))[0, "model"] == before[0, "model"] - 1000


def test_measure_cache_is_shared_by_the_devices_of_its_layers(tmp_path: Path) -> None:
    caches = [Cache(False, 8 * MIB, [(0, "CPU"), (1, "CUDA0")]), Cache(True, 6 * MIB, [(1, "CUDA0")])]
    buffers = [("CUDA0", "compute", 5), ("CUDA_Host", "compute", 2), ("CPU", "compute", 3), ("CPU", "output", 100)]
    answer = Answer(gpus=["CUDA0"], layers=["CPU", "CUDA0", "CUDA0"], caches=caches, buffers=buffers)
    parts = sizes(parts_of(answer, facts_in(tmp_path), SHAPE))
    assert parts[RAM, "chat memory"] == parts[0, "chat memory"] == 4 * MIB
    assert parts[0, "recurrent state"] == 6 * MIB
    assert (parts[0, "work space"], parts[RAM, "work space"]) == (5, 5)


def test_measure_other_layers_than_the_header_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="counts 2 layers, the header 3"):
        parts_of(Answer(layers=["CPU", "CPU"]), facts_in(tmp_path), SHAPE)


# --- the oracle ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "shares", "written"),
    [
        (replace(SHAPE, gpu_layers=3), (30.0, 10.0), (0.75, 0.25)),
        (replace(SHAPE, gpu_layers=3), (7e9,), (1.0,)),
        (SHAPE, (30.0, 10.0), ()),
        (replace(SHAPE, gpu_layers=3), (), ()),
        (replace(SHAPE, gpu_layers=3), (0.0, 0.0), ()),
    ],
)
def test_measure_shares_that_mean_the_same_are_the_same(
    shape: Shape, shares: tuple[float, ...], written: tuple[float, ...]
) -> None:
    assert key_of(shape, shares) == (shape, written)


def test_measure_oracle_is_exact_where_it_measured_and_corrects_beside_it(tmp_path: Path) -> None:
    facts = facts_in(tmp_path)
    formula = sizes(footprint(facts, SHAPE, ()))
    real = {**formula, (RAM, "chat memory"): formula[RAM, "chat memory"] // 2, (RAM, "work space"): 7 * MIB}
    parts = tuple(Part(device, label, size) for (device, label), size in real.items())
    measure = corrected(facts, {key_of(SHAPE, ()): parts})
    assert measure(facts, SHAPE, (1.0,)) == parts
    longer = replace(SHAPE, cells=4096)
    expected = sizes(footprint(facts, longer, ()))
    found = sizes(measure(facts, longer, (1.0,)))
    assert found[RAM, "chat memory"] == expected[RAM, "chat memory"] // 2
    assert found[RAM, "work space"] - expected[RAM, "work space"] == 7 * MIB - formula[RAM, "work space"]
    assert found[RAM, "model"] == expected[RAM, "model"]


def test_measure_oracle_of_another_model_is_the_formula(tmp_path: Path) -> None:
    facts = facts_in(tmp_path)
    other = replace(facts, quant="Q8_0")
    measure = corrected(facts, {key_of(SHAPE, ()): (Part(RAM, "model", 1),)})
    assert measure(other, SHAPE, (1.0,)) == footprint(other, SHAPE, (1.0,))
    assert corrected(facts, {})(facts, SHAPE, (1.0,)) == footprint(facts, SHAPE, (1.0,))


shapes = st.builds(
    Shape,
    gpu_layers=st.integers(0, 4),
    cells=st.integers(1, 40_000),
    slots=st.integers(1, 8),
    ubatch_tokens=st.sampled_from([1, 32, 128, 512]),
    kv_type=st.sampled_from(["f16", "q8_0", "q4_0"]),
    cpu_experts=st.integers(0, 3),
)
measured_parts = st.lists(
    st.builds(
        Part,
        st.integers(-1, 2),
        st.sampled_from(["model", "chat memory", "recurrent state", "work space", "server"]),
        st.integers(0, 2**40),
    ),
    max_size=8,
).map(tuple)


@given(known=st.lists(st.tuples(shapes, measured_parts), max_size=4), asked=shapes)
def test_measure_oracle_answers_for_every_shape(
    tmp_path_factory: pytest.TempPathFactory, known: list[tuple[Shape, tuple[Part, ...]]], asked: Shape
) -> None:
    facts = facts_in(tmp_path_factory.mktemp("model"))
    measured = {key_of(shape, (2.0, 1.0)): parts for shape, parts in known}
    parts = corrected(facts, measured)(facts, asked, (2.0, 1.0))
    if key_of(asked, (2.0, 1.0)) not in measured:
        assert all(part.size_bytes > 0 for part in parts)
        assert len({(part.device, part.label) for part in parts}) == len(parts)


@dataclass(frozen=True)
class Chosen:
    shape: Shape
    shares: tuple[float, ...] = (1.0,)


def longest_within(facts: ModelFacts, budget: int) -> Callable[[Measure], Chosen]:
    def decide(measure: Measure) -> Chosen:
        candidates = [replace(SHAPE, cells=cells) for cells in range(8192, 0, -256)]
        fitting = (s for s in candidates if sum(part.size_bytes for part in measure(facts, s, (1.0,))) <= budget)
        return Chosen(next(fitting, candidates[-1]))

    return decide


def test_measure_settles_on_a_measured_shape_that_fits(tmp_path: Path) -> None:
    """The formula promises half of what the engine takes: the first choice does not fit, a later one does."""
    facts = facts_in(tmp_path)

    def ask(shape: Shape, shares: tuple[float, ...]) -> tuple[Mapping[Key, tuple[Part, ...]], str]:
        real = tuple(replace(part, size_bytes=part.size_bytes * 2) for part in footprint(facts, shape, shares))
        return {key_of(shape, shares): real}, ""

    budget = sum(part.size_bytes for part in footprint(facts, replace(SHAPE, cells=4096), ())) * 2
    settled = settle(longest_within(facts, budget), ask, facts)
    assert settled.exact
    assert sum(part.size_bytes for part in settled.measured[key_of(settled.decision.shape, ())]) <= budget
    assert settled.decision.shape.cells >= 4096 - 256


def test_measure_settle_ends_with_the_reason_when_nothing_is_measured(tmp_path: Path) -> None:
    facts = facts_in(tmp_path)
    settled = settle(longest_within(facts, 2**40), lambda shape, shares: ({}, "the engine is not installed"), facts)
    assert not settled.exact
    assert settled.reason == "the engine is not installed"
    assert settled.decision.shape.cells == 8192


def test_measure_settle_ends_when_every_round_decides_anew(tmp_path: Path) -> None:
    facts = facts_in(tmp_path)
    asked: list[Shape] = []

    def ask(shape: Shape, shares: tuple[float, ...]) -> tuple[Mapping[Key, tuple[Part, ...]], str]:
        asked.append(shape)
        return {key_of(shape, shares): footprint(facts, shape, shares)}, ""

    settled = settle(lambda measure: Chosen(replace(SHAPE, cells=256 + len(asked))), ask, facts, rounds=3)
    assert len(asked) == 3
    assert not settled.exact and "3 rounds" in settled.reason


# --- children that fail, and the answers on disk ------------------------------------------------------------------------------


def fake_engine(folder: Path, source: str) -> str:
    package = folder / "engine" / "llama_cpp"
    (package / "lib").mkdir(parents=True)
    (package / "lib" / "libllama.so").write_bytes(b"")
    (package / "__init__.py").write_text(source, encoding="utf-8")
    return str(package.parent)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", "does not start: libcudart.so.12"),
        ("raise RuntimeError('no library')", "does not start: no library"),
        ("import os; os._exit(3)", "exit code 3"),
        ("import os; print('chatter', flush=True); os.abort()", "ended early"),
        ("import threading; threading.Event().wait()", "took longer than 1 s"),
    ],
)
def test_measure_engine_that_fails_is_a_reason(tmp_path: Path, source: str, words: str) -> None:
    path = model(tmp_path)
    runs = DryRuns(tmp_path / "answers", fake_engine(tmp_path, source), 1.0 if "longer" in words else 30.0)
    found = runs.measure(HeaderSource.on_disk(path), read_facts(path), [SHAPE])
    assert words in found.reason
    assert not found.parts and found.refused is None


def test_measure_without_an_engine_or_a_header_is_a_reason(tmp_path: Path) -> None:
    path = model(tmp_path)
    source, facts = HeaderSource.on_disk(path), read_facts(path)
    assert DryRuns(tmp_path, str(tmp_path / "nowhere")).measure(source, facts, [SHAPE]).reason == "the engine is not installed"
    gone = HeaderSource((Shard("model.gguf", tmp_path / "gone.gguf", 100, 1000),))
    engine = fake_engine(tmp_path, "")
    assert "header cannot be read" in DryRuns(tmp_path, engine).measure(gone, facts, [SHAPE]).reason


class Child:
    """Stands in for the child process: answers in the order asked, as often as it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: object, reason: str = "it ended early") -> None:
        self.asked: list[list[dict[str, object]]] = []
        self._answers = answers
        self._reason = reason
        monkeypatch.setattr(dryruns, "_run_child", self)

    def __call__(self, order: str, timeout_s: float) -> tuple[bytes, str]:
        self.asked.append([json.loads(line) for line in order.splitlines()][1:])
        return b"\n".join(msgspec.json.encode(answer) for answer in self._answers), self._reason


GOOD = {"layers": ["CPU", "CPU", "CPU"], "buffers": [["CPU", "compute", 123]]}


def ask(tmp_path: Path, *asked: Shape, machine: str = "") -> Measurement:
    path = tmp_path / "model.gguf"
    if not path.exists():
        model(tmp_path)
        fake_engine(tmp_path, "")
    runs = DryRuns(tmp_path / "answers", str(tmp_path / "engine"), machine=machine)
    return runs.measure(HeaderSource.on_disk(path), read_facts(path), asked, (1.0,))


def test_measure_asks_once_for_each_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch, GOOD)
    assert sizes(ask(tmp_path, SHAPE).parts[key_of(SHAPE, ())])[RAM, "work space"] == 123
    assert ask(tmp_path, SHAPE, SHAPE).reason == ""
    assert len(child.asked) == 1
    ask(tmp_path, SHAPE, replace(SHAPE, cells=2048))
    assert [shape["cells"] for shape in child.asked[1]] == [2048]


def test_measure_answers_of_another_engine_or_machine_are_of_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch, GOOD)
    ask(tmp_path, SHAPE)
    ask(tmp_path, SHAPE, machine="another card")
    assert len(child.asked) == 2
    before = engine_build(str(tmp_path / "engine"))
    (tmp_path / "engine/llama_cpp/lib/libggml-cuda.so").write_bytes(b"x")
    assert engine_build(str(tmp_path / "engine")) != before
    ask(tmp_path, SHAPE, machine="another card")
    assert len(child.asked) == 3


@pytest.mark.parametrize("damage", [b"", b"{", b"[1, 2]", b'{"engine": 5, "answers": {}}', b"\xff\xfe", b"[" * 100_000])
def test_measure_damaged_answers_are_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes) -> None:
    child = Child(monkeypatch, GOOD)
    ask(tmp_path, SHAPE)
    (file,) = (tmp_path / "answers").iterdir()
    file.write_bytes(damage)
    assert ask(tmp_path, SHAPE).parts
    assert len(child.asked) == 2
    assert ask(tmp_path, SHAPE).parts
    assert len(child.asked) == 2


def test_measure_answers_on_disk_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Child(monkeypatch, *[GOOD] * 40)
    monkeypatch.setattr(dryruns, "MAX_SHAPES", 25)
    monkeypatch.setattr(dryruns, "MAX_MODELS", 2)
    ask(tmp_path, *(replace(SHAPE, cells=cells) for cells in range(256, 256 + 40)))
    for number in range(4):
        (tmp_path / "answers" / f"{number}.json").write_bytes(b"")
    ask(tmp_path, replace(SHAPE, cells=9000))
    kept = list((tmp_path / "answers").iterdir())
    assert len(kept) == 2
    assert max(len(json.loads(path.read_bytes() or b'{"answers": 0}').get("answers") or ()) for path in kept) == 25


def test_measure_more_shapes_than_are_kept_are_all_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Child(monkeypatch, *[GOOD] * 6)
    monkeypatch.setattr(dryruns, "MAX_SHAPES", 2)
    assert len(ask(tmp_path, *(replace(SHAPE, cells=cells) for cells in range(256, 262))).parts) == 6


def test_measure_what_was_answered_before_the_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch, GOOD)
    longer = replace(SHAPE, cells=2048)
    found = ask(tmp_path, SHAPE, longer)
    assert list(found.parts) == [key_of(SHAPE, ())]
    assert found.reason == "it ended early"
    ask(tmp_path, SHAPE, longer)
    assert [shape["cells"] for shape in child.asked[1]] == [2048]


@pytest.mark.parametrize(
    ("answer", "reason", "refused"),
    [
        ({"refused": "unknown model architecture: 'x'"}, "unknown model architecture: 'x'", True),
        ({"error": "quantized V cache was requested"}, "quantized V cache was requested", False),
        ({"layers": ["CPU"]}, "the engine counts 1 layers, the header 3", False),
        ({"layers": "nonsense"}, "it ended early", False),
        ({"failed": "the engine does not start"}, "the engine does not start", False),
    ],
)
def test_measure_refusals_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: object, reason: str, refused: bool
) -> None:
    Child(monkeypatch, answer)
    found = ask(tmp_path, SHAPE)
    assert found.reason == reason
    assert not found.parts
    assert bool(found.refused) is refused
    assert not refused or reason in str(found.refused)


def test_measure_digest_is_the_same_before_the_download(tmp_path: Path) -> None:
    path = model(tmp_path)
    whole = HeaderSource.on_disk(path)
    (shard,) = whole.shards
    header = tmp_path / "cached-header"
    header.write_bytes(path.read_bytes()[: shard.header_bytes + 100])
    remote = HeaderSource((replace(shard, path=header),))
    assert remote.digest() == whole.digest()
    assert HeaderSource((replace(shard, size_bytes=1),)).digest() != whole.digest()


# --- what loads taught --------------------------------------------------------------------------------------------------------


def test_measure_compares_a_load_with_its_plan() -> None:
    buffers = [
        ("CPU", "model", 50),
        ("CPU_REPACK", "model", 50),
        ("CUDA0", "model", 1000),
        ("CUDA0", "KV", 30),
        ("CUDA0", "KV", 70),
        ("CUDA_Host", "output", 5),
        ("CUDA0", "compute", 40),
    ]
    parts = [Part(0, "model", 1010), Part(0, "chat memory", 100), Part(RAM, "model", 100), Part(RAM, "server", 300)]
    difference = compare(parts, buffers, {0: 1500})
    lines = {(line.device, line.label): (line.planned_bytes, line.real_bytes) for line in difference.lines}
    assert lines == {
        (RAM, "model"): (100, 100),
        (0, "model"): (1010, 1000),
        (0, "chat memory"): (100, 100),
        (0, "work space"): (0, 40),
    }
    assert difference.overhead_bytes == {0: 1500 - 1140}
    (line,) = [line for line in difference.lines if (line.device, line.label) == (0, "model")]
    assert line.error == pytest.approx(0.01)


def test_measure_mapped_weights_are_not_compared() -> None:
    buffers = [("CPU_Mapped", "model", 900), ("CPU_REPACK", "model", 300), ("CPU", "KV", 10)]
    assert [line.label for line in compare([Part(RAM, "model", 900)], buffers).lines] == ["chat memory"]


def test_measure_overhead_is_the_median_of_the_last_loads(tmp_path: Path) -> None:
    learned = Learned(tmp_path, MACHINE)
    assert learned.overhead_bytes("CUDA0") is None
    for overhead in (900, 300, 310, 320, 2000, 330):
        learned.observe("CUDA0", overhead * MIB)
    learned.observe("CUDA0", -5)
    learned.observe("CUDA0", 50_000 * MIB)
    assert Learned(tmp_path, MACHINE).overhead_bytes("CUDA0") == 320 * MIB
    assert learned.overhead_bytes("CUDA1") is None
    assert Learned(tmp_path, replace(MACHINE, driver="560.2")).overhead_bytes("CUDA0") is None
    assert Learned(tmp_path, replace(MACHINE, engine="other")).overhead_bytes("CUDA0") is None
    assert Learned(tmp_path, replace(MACHINE, totals="RAM 128")).overhead_bytes("CUDA0") == 320 * MIB


@pytest.mark.parametrize("changed", [{"driver": "560.2"}, {"engine": "other"}, {"totals": "RAM 128"}])
def test_measure_failures_are_forgotten_with_the_machine(tmp_path: Path, changed: dict[str, str]) -> None:
    learned = Learned(tmp_path, MACHINE)
    longer = replace(SHAPE, cells=9000, cpu_experts=3, kv_type="q8_0")
    learned.remember_failure("model", Failure(SHAPE, "killed"))
    learned.remember_failure("model", Failure(longer, "no memory"))
    learned.remember_failure("model", Failure(SHAPE, "killed again"))
    found = Learned(tmp_path, MACHINE).failures("model")
    assert [(failure.shape, failure.reason) for failure in found] == [(longer, "no memory"), (SHAPE, "killed again")]
    assert learned.failures("other") == ()
    assert Learned(tmp_path, replace(MACHINE, **changed)).failures("model") == ()
    learned.forget_failures("model")
    assert learned.failures("model") == ()


def test_measure_lessons_are_bounded(tmp_path: Path) -> None:
    learned = Learned(tmp_path, MACHINE)
    for cells in range(50):
        learned.remember_failure("model", Failure(replace(SHAPE, cells=cells), "killed"))
    assert [failure.shape.cells for failure in learned.failures("model")] == list(range(18, 50))


@pytest.mark.parametrize("damage", [b"", b"null", b'{"overheads": {"CUDA0 | 550.1 | build": ["x"]}}', b'{"failures": 3}'])
def test_measure_damaged_lessons_are_none(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "learned.json").write_bytes(damage)
    learned = Learned(tmp_path, MACHINE)
    assert learned.overhead_bytes("CUDA0") is None
    assert learned.failures("model") == ()
    learned.observe("CUDA0", MIB)
    assert learned.overhead_bytes("CUDA0") == MIB


def test_measure_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    learned = Learned(tmp_path / "file", MACHINE)
    learned.observe("CUDA0", MIB)
    assert learned.overhead_bytes("CUDA0") is None


def test_measure_machine_is_another_with_another_card_and_the_same_after_a_restart() -> None:
    card = Device(backend="CUDA", name="RTX 4070", kind="gpu", total_bytes=12 * 2**30, in_engine=True)
    hardware = Hardware(devices=(card,), ram_total_bytes=32 * 2**30, driver_version="550.1")
    machine = machine_of(hardware, "build")
    assert machine_of(replace(hardware, ram_total_bytes=32 * 2**30 - 20 * MIB), "build") == machine
    assert machine_of(replace(hardware, ram_total_bytes=64 * 2**30), "build") != machine
    assert machine_of(replace(hardware, devices=(replace(card, total_bytes=24 * 2**30),)), "build") != machine
