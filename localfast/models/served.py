"""Which models clients may ask for, by which names. Reads the store; loads nothing."""

from __future__ import annotations

from localfast.errors import InvalidRequest, ModelNotFound
from localfast.models.catalog import InstalledModel, Store
from localfast.settings import Settings


class ServedModels:
    """`pinned`: the one model to serve, named `settings.alias` if that is set; None: every installed model."""

    def __init__(self, settings: Settings, pinned: InstalledModel | None) -> None:
        self._alias = settings.alias
        self._pinned = pinned
        self._store = Store(settings)

    def all(self) -> list[tuple[str, InstalledModel]]:
        """(name, model) of each."""
        if self._pinned is not None:
            return [(self._alias or self._pinned.name, self._pinned)]
        installed = self._store.installed()
        names = [model.name for model in installed]
        return [(model.name if names.count(model.name) == 1 else str(model), model) for model in installed]

    def used(self, model: InstalledModel) -> None:
        """For `localfast prune`, which removes what nobody uses."""
        self._store.touch(model)

    def resolve(self, name: str) -> tuple[str, InstalledModel]:
        """The model that a client means. Raises ModelNotFound with near names; a missing name means the only model."""
        served = self.all()
        if not name:
            if len(served) == 1:
                return served[0]
            raise InvalidRequest(
                reason=f"'model' is missing; served are: {', '.join(n for n, _ in served) or 'none'}", param="model"
            )
        if self._pinned is None:
            model = self._store.find(name)
            if model is None:
                raise self._store.not_found(name)
            return next(entry for entry in served if entry[1] == model)
        public, model = served[0]
        known = {public, model.name, str(model), model.path.name}
        if name.lower().removesuffix(":latest") not in {other.lower() for other in known}:
            raise ModelNotFound(name=name[:200], near=(public,))
        return served[0]
