"""Settings, ports, and faults of ours."""

from __future__ import annotations

from dataclasses import dataclass

from localfast.errors.base import LocalfastError


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
