"""A model cannot be found, read or fetched."""

from __future__ import annotations

from dataclasses import dataclass

from localfast.errors.base import LocalfastError


@dataclass(eq=False)
class ModelNotFound(LocalfastError):
    """No model of this name is installed or in the catalog."""

    name: str
    near: tuple[str, ...] = ()
    code = "model_not_found"
    status = 404
    next_step = "'localfast list' shows what is installed, 'localfast list --catalog' what can be pulled"

    def __str__(self) -> str:
        return f"no model '{self.name}'" + (f"; did you mean {', '.join(self.near)}?" if self.near else "")


@dataclass(eq=False)
class BadModelFile(LocalfastError):
    """The file is not a GGUF this engine reads."""

    path: str
    reason: str
    code = "bad_model_file"
    status = 422
    sentence = "{path} is not a usable GGUF file: {reason}"


@dataclass(eq=False)
class ModelInUse(LocalfastError):
    """The model is answering requests, so it is neither unloaded nor removed."""

    name: str
    requests: int
    code = "model_in_use"
    status = 409
    sentence = "'{name}' is answering {requests} requests and stays loaded"
    next_step = "wait until they have ended, or cancel them"


@dataclass(eq=False)
class DownloadFailed(LocalfastError):
    """The model could not be fetched."""

    name: str
    reason: str
    code = "download_failed"
    status = 502
    sentence = "could not download '{name}': {reason}"
    next_step = "try again: localfast pull {name}"


@dataclass(eq=False)
class HashMismatch(DownloadFailed):
    """What arrived is not what was promised; it was thrown away."""

    code = "hash_mismatch"


@dataclass(eq=False)
class GatedModel(DownloadFailed):
    """The repository wants an account that accepted its terms."""

    code = "gated_model"
    status = 403
    next_step = "accept the terms on the model's page, then set HF_TOKEN to your access token"


@dataclass(eq=False)
class HubBusy(DownloadFailed):
    """The hub refuses for now (429, 5xx), also after several tries."""

    code = "hub_busy"
    status = 503
    retry_after_s = 60
    next_step = "wait a minute, then go on where it stopped: localfast pull {name}"


@dataclass(eq=False)
class DownloadStopped(DownloadFailed):
    """Whoever asked for the download cancelled it; what arrived is kept for the next try."""

    reason: str = "it was cancelled"
    code = "download_stopped"
    status = 499
    exit_code = 130
    next_step = "go on where it stopped: localfast pull {name}"


@dataclass(eq=False)
class Offline(DownloadFailed):
    """The offline setting forbids downloads."""

    reason: str = "the offline setting is on"
    code = "offline"
    status = 503
    next_step = "turn it off with LOCALFAST_OFFLINE=0, or use an installed model ('localfast list')"


@dataclass(eq=False)
class NoSpace(DownloadFailed):
    """The disk has too little free space."""

    code = "no_space"
    status = 507
    next_step = "remove a model with 'localfast rm', or move the cache with LOCALFAST_HOME"
