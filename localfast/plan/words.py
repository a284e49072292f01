"""Why the plan is what it is, in sentences: the summary, the sums of every device, and what the user should know.

Reads a finished choice; changes nothing. Numbers in one sentence add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from localfast.footprint import KV_TYPE_BYTES
from localfast.hardware import Hardware
from localfast.plan.budgets import device_names, gib_of
from localfast.plan.case import Case, Choice, total_bytes
from localfast.plan.policy import quantizable
from localfast.plan.sharing import placements
from localfast.plan.speed import predicted_tokens_per_s
from localfast.plan.wishes import pinned_shares


def summary(case: Case, choice: Choice) -> str:
    everything, shape = case.everything, choice.shape
    if not case.gpus:
        return f"{everything}/{everything} layers on CPU: {without_gpu(case.hardware)}"
    if shape.gpu_layers == 0:
        every = " and ".join(device_names(case.gpus))
        why = "gpu_layers=0 was asked for" if case.wishes.gpu_layers == 0 else f"not one layer fits on {every}"
        return f"{everything}/{everything} layers on CPU: {why}"
    used = [name for name, share in zip(device_names(case.gpus), choice.shares, strict=True) if share]
    rest = everything - shape.gpu_layers
    experts = f", the experts of {shape.cpu_experts} in RAM" if shape.cpu_experts else ""
    return f"{shape.gpu_layers}/{everything} layers on {' and '.join(used)}{experts}" + (f", {rest} on CPU" if rest else "")


def without_gpu(hardware: Hardware) -> str:
    engine = hardware.engine
    if engine is None:
        return "the engine did not tell what devices it has"
    if not engine.installed:
        return "the engine is not installed"
    if engine.error:
        return f"the engine does not start ({engine.error})"
    if hardware.unused_gpus and engine.backends and not engine.supports_gpu_offload:
        names = ", ".join(device.name for device in hardware.unused_gpus)
        return f"the installed engine cannot use a GPU ({', '.join(engine.backends)} build), so {names} stays idle"
    return "no GPU that the engine can use"


def speed_words(tokens_per_s: float) -> str:
    """Whole numbers where they say enough: "28", "7.9", "unknown"."""
    if not tokens_per_s:
        return "unknown"
    return f"{tokens_per_s:.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:.1f}"


# --- reasons ------------------------------------------------------------------------------------------------------------------


def reasons(case: Case, choice: Choice) -> tuple[str, ...]:
    return (*_sums(case, choice), *_uses(case, choice))


def _sums(case: Case, choice: Choice) -> Iterator[str]:
    memory, shape = case.memory(choice), choice.shape
    yield from (device.sentence() for device in memory)
    if case.model_limit_bytes is not None:
        total = total_bytes(memory)
        verdict = "fits" if total <= case.model_limit_bytes else f"{gib_of(total - case.model_limit_bytes)} too much"
        limit = gib_of(case.model_limit_bytes)
        yield f"this model: {gib_of(total)} on all devices, of {limit} that one model may take: {verdict}"
    if case.gpus and (shape.gpu_layers < case.everything or shape.cpu_experts):
        whole = replace(shape, gpu_layers=case.everything, cpu_experts=0)
        full = replace(choice, shape=whole, shares=list(placements(case, whole))[-1])
        for device in case.memory(full)[1:]:
            if not device.fits:
                yield f"with all layers on it, {device.sentence()}"


def _uses(case: Case, choice: Choice) -> Iterator[str]:
    facts, shape = case.facts, choice.shape
    trained = f"the model was trained for {facts.train_context}" if facts.train_context else "the file does not name its limit"
    yield f"one request may use {choice.context_tokens} tokens; {trained}"
    together = (
        f"{shape.slots} requests generate at the same time and share"
        if shape.slots > 1
        else "one request generates at a time with"
    )
    yield f"{together} {shape.cells} tokens of chat memory ({shape.kv_type})"
    if facts.sliding_window:
        windowed = sum(layer.windowed for layer in facts.per_layer)
        yield f"{windowed} of {facts.layers} layers look back only {facts.sliding_window} tokens and keep no more"
    if case.wishes.kv_type == "auto" and shape.kv_type == "q8_0":
        yield "the chat memory is kept as q8_0: half of f16's size, for less loss than any step down in quant"
    if case.wishes.mmproj_bytes and case.gpus and shape.gpu_layers and not choice.projector_on_gpu:
        yield "the projector works on the CPU, so that no layer has to leave the GPU; images take longer"
    if speed := predicted_tokens_per_s(case.hardware, facts, shape, choice.shares):
        yield f"about {speed_words(speed)} tokens per second for one stream, from the bandwidth of the memory"


# --- warnings -----------------------------------------------------------------------------------------------------------------


def warnings(case: Case, choice: Choice) -> tuple[str, ...]:
    return (*_memory_warnings(case, choice), *_gpu_warnings(case, choice), *_pin_warnings(case, choice))


def _memory_warnings(case: Case, choice: Choice) -> Iterator[str]:
    memory = case.memory(choice)
    for device in memory:
        if not device.fits:
            needed, usable = gib_of(device.needed_bytes), gib_of(device.usable_bytes)
            yield f"{device.device}: {needed} needed, {usable} usable; loading may fail or be very slow"
    if case.model_limit_bytes is not None and (total := total_bytes(memory)) > case.model_limit_bytes:
        yield f"model_limit={case.wishes.model_limit}: {gib_of(total)} needed at least, more than one model may take"


def _gpu_warnings(case: Case, choice: Choice) -> Iterator[str]:
    shape, hardware = choice.shape, case.hardware
    if case.wishes.gpu_layers > 0 and not case.gpus:
        yield f"gpu_layers={case.wishes.gpu_layers} has no effect: {without_gpu(hardware)}"
    if not case.gpus and hardware.unused_gpus:
        names = " and ".join(device.name for device in hardware.unused_gpus)
        yield f"{names} is not used: {without_gpu(hardware)}; 'localfast engine install' gets a build that can use it"
    yield from (f"{gpu.name}: {gpu.warning}" for gpu in case.gpus if gpu.warning)
    if case.gpus and case.wishes.gpu_layers < 0 and case.spills(shape):
        yield _spill(case, choice)


def _spill(case: Case, choice: Choice) -> str:
    """What does not fit, and what it costs against a GPU that had the room."""
    shape, shares = choice.shape, choice.shares
    rest = case.everything - shape.gpu_layers
    layers = f"{rest} of {case.everything} layers do" if rest else f"the experts of {shape.cpu_experts} layers do"
    now = predicted_tokens_per_s(case.hardware, case.facts, shape, shares)
    whole = replace(shape, gpu_layers=case.everything, cpu_experts=0)
    then = predicted_tokens_per_s(case.hardware, case.facts, whole, shares)
    cost = f": about {speed_words(now)} tokens/s instead of {speed_words(then)}" if now and then else "; each of them costs speed"
    return f"{layers} not fit on the GPU{cost}"


def _pin_warnings(case: Case, choice: Choice) -> Iterator[str]:
    facts, wishes, shape = case.facts, case.wishes, choice.shape
    if facts.train_context and choice.context_tokens > facts.train_context:
        yield f"a context of {choice.context_tokens} is longer than the {facts.train_context} tokens of the training"
    if wishes.draft not in ("", "auto") and not wishes.draft_facts:
        yield f"draft model '{wishes.draft}' is not here, so nothing is drafted: localfast pull {wishes.draft}"
    if wishes.draft_facts and not choice.drafts:
        yield f"there is no room for the draft model '{wishes.draft or wishes.draft_facts.name}': it is left out"
    if wishes.ctx > choice.context_tokens:
        yield f"ctx={wishes.ctx} does not fit in cells={wishes.cells}: a request may use {choice.context_tokens} tokens"
    if wishes.batch and choice.batch_tokens > wishes.batch:
        yield f"batch={wishes.batch} is too small for this model and its slots: {choice.batch_tokens} is used"
    if wishes.cpu_experts > 0 and not facts.experts:
        yield f"cpu_experts={wishes.cpu_experts} has no effect: this model has no experts"
    if wishes.split and len(case.gpus) > 1 and not pinned_shares(wishes.split, len(case.gpus)):
        yield f"split={','.join(wishes.split)} is not used: it takes one number for each of {len(case.gpus)} GPUs, such as 3,1"
    if KV_TYPE_BYTES[shape.kv_type] < 2 and not quantizable(case):
        yield f"kv_type={wishes.kv_type} needs heads in multiples of 32; this model may not load with it"
