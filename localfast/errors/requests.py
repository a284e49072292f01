"""What a client sent is wrong, or not allowed."""

from __future__ import annotations

from dataclasses import dataclass

from localfast.errors.base import LocalfastError


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
