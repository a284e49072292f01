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
    │  ├─ Offline                    503
    │  └─ NoSpace                    507
    ├─ EngineError                   503  recoverable: the next request may work
    │  ├─ EngineMissing              503  the engine package is not installed; exit code 4
    │  ├─ LoadFailed                 503  the model did not load
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

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(eq=False)
class LocalfastError(Exception):
    """Base of all. To survive any of them: `except LocalfastError as error: print(error, error.hint)`."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    retry_after_s: ClassVar[int | None] = None
    sentence: ClassVar[str] = ""
    """What happened; facts in braces."""
    next_step: ClassVar[str] = ""
    """What to do now; facts in braces."""
    _by_code: ClassVar[dict[str, type[LocalfastError]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        LocalfastError._by_code[cls.code] = cls

    def __str__(self) -> str:
        return self.sentence.format(**self.facts)

    @property
    def hint(self) -> str:
        """The next step, or an empty string when there is none."""
        return self.next_step.format(**self.facts)

    @property
    def facts(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def to_wire(error: LocalfastError) -> tuple[str, dict[str, Any]]:
    return error.code, error.facts


def from_wire(code: str, facts: dict[str, Any]) -> LocalfastError:
    """Rebuild an error of the engine process; lists stand where it had tuples."""
    return LocalfastError._by_code[code](**facts)


@dataclass(eq=False)
class InvalidRequest(LocalfastError):
    """The request body is wrong. `param` is the field, in the client's spelling."""

    reason: str
    param: str | None = None
    code = "invalid_request"
    status = 400
    sentence = "{reason}"


@dataclass(eq=False)
class ContextLengthExceeded(InvalidRequest):
    """The prompt has more tokens than one request may hold. Clients recognise an overflow by these very words."""

    reason: str = ""
    prompt_tokens: int = 0
    context_tokens: int = 0
    code = "context_length_exceeded"
    sentence = (
        "This model's maximum context length is {context_tokens} tokens. However, your messages resulted in "
        "{prompt_tokens} tokens. Please reduce the length of the messages or completion."
    )
    next_step = "shorten the prompt, or start the server with a larger --ctx"


@dataclass(eq=False)
class UnsupportedParameter(InvalidRequest):
    """A parameter that would change the answer and is not offered here; refused, because ignoring it would be silent."""

    code = "unsupported_parameter"


@dataclass(eq=False)
class TemplateFailed(InvalidRequest):
    """The model's chat template raised, ran too long or grew too large."""

    code = "template_error"
    sentence = "the model's chat template refused these messages: {reason}"


@dataclass(eq=False)
class RouteNotFound(LocalfastError):
    """Nothing is served at this path."""

    method: str
    path: str
    code = "not_found"
    status = 404
    sentence = "nothing is served at {method} {path}"


@dataclass(eq=False)
class MethodNotAllowed(LocalfastError):
    """The path exists, the method does not."""

    method: str
    path: str
    code = "method_not_allowed"
    status = 405
    sentence = "{path} does not take {method}"


@dataclass(eq=False)
class Unauthorized(LocalfastError):
    """A key is configured and this request did not bring it."""

    code = "invalid_api_key"
    status = 401
    sentence = "this server needs an API key"
    next_step = "send it as 'Authorization: Bearer KEY'"


@dataclass(eq=False)
class Forbidden(LocalfastError):
    """The Host or Origin header names somebody else: a web page is trying to talk to this machine."""

    header: str
    value: str
    code = "forbidden"
    status = 403
    sentence = "the {header} header '{value}' is not allowed here"
    next_step = "if this is you, add it to the allowed_hosts or allowed_origins setting"


@dataclass(eq=False)
class BodyTooLarge(LocalfastError):
    """The request body is larger than this server reads."""

    limit_bytes: int
    code = "body_too_large"
    status = 413
    sentence = "the request body is larger than {limit_bytes} bytes"
    next_step = "send less, or raise the max_body_bytes setting"


@dataclass(eq=False)
class UnsupportedMediaType(LocalfastError):
    """Only JSON bodies are read, so that a web form cannot reach the server."""

    content_type: str
    code = "unsupported_media_type"
    status = 415
    sentence = "the body must be JSON, not '{content_type}'"
    next_step = "send the header 'Content-Type: application/json'"


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


@dataclass(eq=False)
class EngineError(LocalfastError):
    """The engine could not answer; it is restarted by the next request."""

    reason: str = ""
    code = "engine_error"
    status = 503
    sentence = "the engine could not answer: {reason}"


@dataclass(eq=False)
class EngineMissing(EngineError):
    """llama-cpp-python is not installed, or does not start."""

    code = "engine_missing"
    exit_code = 4
    sentence = "the engine is not installed or does not start: {reason}"
    next_step = 'run: pip install "localfast[engine]"  (in a source folder: pip install ".[engine]"), then start again'


@dataclass(eq=False)
class LoadFailed(EngineError):
    """The engine process could not load the model."""

    model: str = ""
    code = "model_load_failed"
    sentence = "the model '{model}' did not load: {reason}"
    next_step = "'localfast plan {model}' says what it needs, 'localfast doctor' looks at this machine"


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


@dataclass(eq=False)
class InternalError(LocalfastError):
    """A fault of localfast itself; the log has the details, the answer has none."""

    code = "internal_error"
    sentence = "localfast failed to answer this request"
    next_step = "the server's log says why"


@dataclass(eq=False)
class InvalidSetting(LocalfastError):
    """A setting has a value it cannot have; `source` says where it was set."""

    name: str
    value: str
    source: str
    reason: str
    code = "invalid_setting"
    exit_code = 2
    sentence = "setting '{name}' from {source}: '{value}' {reason}"
    next_step = "see 'localfast config show'"


@dataclass(eq=False)
class PortTaken(LocalfastError):
    """Another process listens on the port."""

    host: str
    port: int
    owner: str = "another process"
    code = "port_taken"
    exit_code = 3
    sentence = "port {port} on {host} is taken by {owner}"

    @property
    def hint(self) -> str:
        return f"stop that process, or choose another port: localfast serve --port {self.port + 1}"


@dataclass(eq=False)
class ServerUnreachable(LocalfastError):
    """No localfast server answered."""

    url: str
    code = "server_unreachable"
    sentence = "no localfast server answers at {url}"
    next_step = "start one: localfast serve"


@dataclass(eq=False)
class MeasurementFailed(LocalfastError):
    """A server under measurement answered with an error, or with nothing."""

    url: str
    reason: str
    code = "measurement_failed"
    sentence = "the server at {url} failed: {reason}"
    next_step = "its own log says more; a slower work can be left out with --only"
