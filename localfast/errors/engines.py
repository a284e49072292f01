"""The engine cannot answer, load or be installed."""

from __future__ import annotations

from dataclasses import dataclass

from localfast.errors.base import LocalfastError


@dataclass(eq=False)
class EngineError(LocalfastError):
    """The engine could not answer; it is restarted by the next request."""

    reason: str = ""
    code = "engine_error"
    status = 503
    sentence = "the engine could not answer: {reason}"


@dataclass(eq=False)
class EngineMissing(EngineError):
    """llama-cpp-python is not installed, or does not start. `offer` is the command that suits this machine."""

    offer: str = "run: localfast engine install"
    code = "engine_missing"
    exit_code = 4
    sentence = "the engine is not installed or does not start: {reason}"
    next_step = "{offer}; then start again"


@dataclass(eq=False)
class EngineInstallFailed(EngineError):
    """An engine build could not be fetched, built, or started on this machine."""

    name: str = ""
    code = "engine_install_failed"
    status = 502
    sentence = "the engine '{name}' was not installed: {reason}"
    next_step = "'localfast engine list' shows the builds for this machine and why each suits it or not"


@dataclass(eq=False)
class LoadFailed(EngineError):
    """The engine process could not load the model."""

    model: str = ""
    code = "model_load_failed"
    sentence = "the model '{model}' did not load: {reason}"
    next_step = "'localfast plan {model}' says what it needs, 'localfast doctor' looks at this machine"


@dataclass(eq=False)
class DoesNotFit(LoadFailed):
    """The model needs more memory than this machine, or a limit that the user set, can give."""

    code = "does_not_fit"
    status = 507
    sentence = "'{model}' does not fit: {reason}"
    next_step = "'localfast plan {model}' shows smaller quants; or raise the limit, or unload another model"


@dataclass(eq=False)
class EngineDied(EngineError):
    """The engine process ended while requests were running. The next request starts a new one."""

    model: str = ""
    code = "engine_died"
    retry_after_s = 1
    sentence = "the engine of '{model}' died ({reason}); the next request starts it again"


@dataclass(eq=False)
class QueueFull(EngineError):
    """More requests are waiting than the server promises to serve."""

    waiting: int = 0
    request_class: str = "chat"
    code = "queue_full"
    retry_after_s = 2
    sentence = "the queue is full: {waiting} requests of class {request_class} are waiting"


@dataclass(eq=False)
class Cancelled(EngineError):
    """The client closed the connection, or the caller closed the stream."""

    code = "cancelled"
    status = 499
    sentence = "the request was cancelled"


@dataclass(eq=False)
class Superseded(EngineError):
    """The same client asked for a newer completion of the same file; this one is of no use any more."""

    code = "superseded"
    status = 409
    sentence = "a newer request of the same client and file took the place of this one"


@dataclass(eq=False)
class ShuttingDown(EngineError):
    """The server is stopping."""

    code = "shutting_down"
    sentence = "the server is shutting down"
