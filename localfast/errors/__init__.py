"""Every error a user, a file or a machine can cause.

    LocalfastError
    ├─ InvalidRequest                400  the body is wrong; `param` names the field
    │  ├─ ContextLengthExceeded      400  the prompt does not fit the context
    │  ├─ UnsupportedParameter       400  known, but not offered here
    │  └─ TemplateFailed             400  the model's chat template refused the messages
    ├─ RouteNotFound                 404
    ├─ MethodNotAllowed              405
    ├─ Unauthorized                  401  a key is configured and was not sent
    ├─ Forbidden                     403  Host or Origin is not ours
    ├─ BodyTooLarge                  413
    ├─ UnsupportedMediaType          415
    ├─ ModelNotFound                 404  no such model; `near` names similar ones
    ├─ BadModelFile                  422  not a GGUF we can read
    ├─ DownloadFailed                502
    │  ├─ HashMismatch               502
    │  ├─ GatedModel                 403
    │  ├─ HubBusy                    503  the hub asks to wait; with Retry-After
    │  ├─ DownloadStopped            499  whoever asked for it cancelled it; exit code 130
    │  ├─ Offline                    503
    │  └─ NoSpace                    507
    ├─ ModelInUse                    409  it answers requests now and stays
    ├─ EngineError                   503  recoverable: the next request may work
    │  ├─ EngineMissing              503  the engine package is not installed; exit code 4
    │  ├─ EngineInstallFailed        502  an engine build could not be fetched, built or started
    │  ├─ LoadFailed                 503  the model did not load
    │  │  └─ DoesNotFit              507  it needs more memory than this machine or its limits give
    │  ├─ EngineDied                 503  the engine process ended in the middle of work
    │  ├─ QueueFull                  503  with Retry-After
    │  ├─ Cancelled                  499  the client went away
    │  ├─ Superseded                 409  a newer completion of the same file took its place
    │  └─ ShuttingDown               503
    ├─ InternalError                 500  a fault of ours
    ├─ InvalidSetting                     exit code 2
    ├─ PortTaken                          exit code 3
    ├─ ServerUnreachable                  the command line found no running server
    └─ MeasurementFailed                  a server under measurement did not answer as it should

Each class carries facts as fields, a stable `code`, an HTTP `status` and the `exit_code` of the command line; `str(error)` is
one sentence and `hint` says what to do next. Only dialects and the command line render them. `to_wire` and `from_wire` carry an
error across the engine's pipe.
"""

from __future__ import annotations

from localfast.errors.base import LocalfastError, from_wire, to_wire
from localfast.errors.engines import (
    Cancelled,
    DoesNotFit,
    EngineDied,
    EngineError,
    EngineInstallFailed,
    EngineMissing,
    LoadFailed,
    QueueFull,
    ShuttingDown,
    Superseded,
)
from localfast.errors.machine import (
    InternalError,
    InvalidSetting,
    MeasurementFailed,
    PortTaken,
    ServerUnreachable,
)
from localfast.errors.models import (
    BadModelFile,
    DownloadFailed,
    DownloadStopped,
    GatedModel,
    HashMismatch,
    HubBusy,
    ModelInUse,
    ModelNotFound,
    NoSpace,
    Offline,
)
from localfast.errors.requests import (
    BodyTooLarge,
    ContextLengthExceeded,
    Forbidden,
    InvalidRequest,
    MethodNotAllowed,
    RouteNotFound,
    TemplateFailed,
    Unauthorized,
    UnsupportedMediaType,
    UnsupportedParameter,
)

__all__ = [
    "BadModelFile",
    "BodyTooLarge",
    "Cancelled",
    "ContextLengthExceeded",
    "DoesNotFit",
    "DownloadFailed",
    "DownloadStopped",
    "EngineDied",
    "EngineError",
    "EngineInstallFailed",
    "EngineMissing",
    "Forbidden",
    "GatedModel",
    "HashMismatch",
    "HubBusy",
    "InternalError",
    "InvalidRequest",
    "InvalidSetting",
    "LoadFailed",
    "LocalfastError",
    "MeasurementFailed",
    "MethodNotAllowed",
    "ModelInUse",
    "ModelNotFound",
    "NoSpace",
    "Offline",
    "PortTaken",
    "QueueFull",
    "RouteNotFound",
    "ServerUnreachable",
    "ShuttingDown",
    "Superseded",
    "TemplateFailed",
    "Unauthorized",
    "UnsupportedMediaType",
    "UnsupportedParameter",
    "from_wire",
    "to_wire",
]
