"""Which quant of a model to fetch for this machine, found out before the download: the hub's list, one header, a plan for each.

Brings `models.hub`, `models.remote`, `fit` and `plan` together; decides nothing itself. Slow: not for the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from localfast.errors import DoesNotFit, DownloadFailed
from localfast.fit import Fitter
from localfast.hardware import Hardware
from localfast.measure import HeaderSource
from localfast.models.catalog import InstalledModel, ModelName, Store
from localfast.models.gguf import ModelFacts, facts_of, read_facts
from localfast.models.hub import Offers, offers
from localfast.models.remote import read_remote_headers, remote_header_bytes
from localfast.plan import Plan, Quant, QuantTable, Wishes, plan_quants, scaled_facts
from localfast.settings import Settings

MAX_ROUNDS = 4
"""The choice rests on scaled sizes first; the header of what was chosen may change it so many times."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The plans of all quants on offer, and the one that would be fetched; `plan` is None when none is worth it unasked."""

    hardware: Hardware
    table: QuantTable
    plan: Plan | None


def plan_model(wanted: ModelName, installed: InstalledModel | None, fitter: Fitter, wishes: Wishes) -> Choice:
    """Plans of a model in every quant of its source, fetched or not; without the source, of those that are here.

    Raises what `models.hub.offers` and `plan_offers` raise, for a model that is not here.
    """
    settings = fitter.settings
    quant = wanted.quant or settings.quant.upper()
    asks_source = installed is None or (not quant and installed.source.startswith("hf:") and not settings.offline)
    if asks_source:
        try:
            return plan_offers(offers(str(wanted), settings), fitter, wishes, quant)
        except DownloadFailed:
            if installed is None:
                raise
    assert installed is not None
    return _plan_installed([installed] if quant else _quants_here(installed, settings), fitter, wishes, quant)


def _plan_installed(models: Sequence[InstalledModel], fitter: Fitter, wishes: Wishes, pinned: str) -> Choice:
    hardware = fitter.hardware()
    facts = {model.quant: read_facts(model.path) for model in models}
    facts = {label or known.quant: known for label, known in facts.items()}
    paths = {label: model.path for label, model in zip(facts, models, strict=True)}
    quants = [Quant(label, known.size_bytes, known, installed=True) for label, known in facts.items()]
    table = plan_quants(hardware, quants, wishes, fitter.oracle, pinned=pinned)
    label = table.chosen or quants[0].label  # what is here can be tried, also where a smaller model would be better
    plan = fitter.plan(hardware, facts[label], wishes, source=lambda: HeaderSource.on_disk(paths[label]), exact=True)
    return Choice(hardware, table, plan)


def _quants_here(installed: InstalledModel, settings: Settings) -> list[InstalledModel]:
    same = [model for model in Store(settings).installed() if model.name == installed.name] if installed.removable else []
    return list({model.quant: model for model in same}.values()) or [installed]


def plan_offers(found: Offers, fitter: Fitter, wishes: Wishes, pinned: str = "") -> Choice:
    """Raises BadModelFile for a model that the engine does not read, DownloadFailed and its kin when the header does not come."""
    hardware, store = _once_installed(fitter.hardware()), Store(fitter.settings)
    first = found.preview(pinned or None).quant
    facts, settled = {first: _own_facts(found, first, fitter)}, dict[str, Plan]()
    here = {label for label in found.quants if store.find(f"{found.name}:{label}")}
    while True:
        quants = []
        for label in found.quants:
            size_bytes = found.size_bytes(label) or facts[first].size_bytes
            known = facts.get(label) or scaled_facts(facts[first], size_bytes, label)
            quants.append(Quant(label, size_bytes, known, installed=label in here))
        table = plan_quants(hardware, quants, wishes, fitter.oracle, pinned=pinned)
        label = table.chosen
        if not label or label in settled or len(settled) == MAX_ROUNDS:
            return Choice(hardware, table, settled.get(label))
        facts[label] = facts.get(label) or _own_facts(found, label, fitter)
        settled[label] = fitter.plan(hardware, facts[label], wishes, source=partial(_source, found, label, fitter), exact=True)


def chooser(fitter: Fitter, wishes: Wishes, tell: Callable[[Sequence[str]], None]) -> Callable[[Offers], str]:
    """What `models.hub.pull` asks for a quant; `tell` gets the reasons. Raises DoesNotFit when none is worth fetching unasked."""

    def choose(found: Offers) -> str:
        if len(found.quants) == 1 or found.packages:
            return found.default
        table = plan_offers(found, fitter, wishes).table
        if not table.chosen:
            raise DoesNotFit(model=found.name, reason="; ".join(table.sentences))
        tell(table.sentences)
        return table.chosen

    return choose


def _once_installed(hardware: Hardware) -> Hardware:
    """Without any engine, what a model could use with the one that will be installed: the GPUs that the driver sees."""
    if hardware.engine is not None and hardware.engine.installed:
        return hardware
    return replace(hardware, devices=tuple(replace(device, in_engine=True) for device in hardware.devices))


def _own_facts(found: Offers, label: str, fitter: Fitter) -> ModelFacts:
    here = Store(fitter.settings).find(f"{found.name}:{label}")
    facts = read_facts(here.path) if here else facts_of(read_remote_headers(found.preview(label), fitter.settings))
    return replace(facts, quant=label)


def _source(found: Offers, label: str, fitter: Fitter) -> HeaderSource:
    preview = found.preview(label)
    headers = read_remote_headers(preview, fitter.settings)
    paths = [remote_header_bytes(preview, file, fitter.settings) for file in preview.files]
    return HeaderSource.of(headers, paths, [file.name for file in preview.files])
