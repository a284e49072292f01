"""One GET at a time, which whoever waits for it can give up at any moment: a thread of its own reads, the waiting one looks up.

Owns what the network may do to us, in words: what is worth another try (`Broken`), how long to wait for it (`Retries`), and what
is final. A token goes to the address it is meant for and never into a sentence. Proxies and certificates are the environment's.
"""

from __future__ import annotations

import contextlib
import queue
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from localfast import __version__
from localfast.errors import DownloadFailed, DownloadStopped, GatedModel, HubBusy, LocalfastError

if TYPE_CHECKING:
    import httpx2

TICK_S = 0.1
"""How soon a waiting thread sees that it should stop."""
MAX_REDIRECTS = 8
_QUEUED_CHUNKS = 16
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


@dataclass(frozen=True, slots=True)
class Patience:
    """How much is tried. `attempts` are failures in a row without progress worth speaking of; waits double up to the longest."""

    attempts: int = 8
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    stall_s: float = 30.0


PATIENCE = Patience()


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file at an address. `model` names it in errors, `page` is where a person reads about it, the token goes to `url` only."""

    model: str
    url: str
    page: str = ""
    token: str = ""


class Broken(Exception):
    """What was under way ended early and may work at the next try. `busy`: the other side asked for peace."""

    def __init__(self, reason: str, busy: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.busy, self.retry_after_s = busy, retry_after_s


class Retries:
    """Counts the failures of one work, and waits between them."""

    def __init__(self, model: str, patience: Patience, halt: threading.Event) -> None:
        self._model, self._patience, self._halt, self._failures = model, patience, halt, 0

    def failed(self, broken: Broken, progressed: bool = False) -> None:
        """Wait for the next try. Raises HubBusy or DownloadFailed when there is none, DownloadStopped when it was cancelled."""
        self._failures = 1 if progressed else self._failures + 1
        wait_s = min(self._patience.longest_wait_s, self._patience.first_wait_s * 2 ** (self._failures - 1))
        wait_s *= random.uniform(0.5, 1.0)  # many who were cut off at once must not come back at once
        if broken.retry_after_s is not None:
            wait_s = broken.retry_after_s
        if self._failures >= self._patience.attempts or wait_s > self._patience.longest_wait_s:
            kind = HubBusy if broken.busy else DownloadFailed
            tries = f", also at the {self._failures}th try" if self._failures > 3 else ""
            raise kind(name=self._model, reason=f"{broken}{tries}")
        if self._halt.wait(wait_s):
            raise DownloadStopped(name=self._model)


@contextlib.contextmanager
def web_client(patience: Patience) -> Iterator[httpx2.Client]:
    """Follows redirects, and takes the token off when one leads to another host."""
    import httpx2

    timeout = httpx2.Timeout(patience.stall_s, connect=min(15.0, patience.stall_s), pool=None)
    headers = {"User-Agent": f"localfast/{__version__}", "Accept-Encoding": "identity"}
    client = httpx2.Client(
        follow_redirects=True,
        max_redirects=MAX_REDIRECTS,
        timeout=timeout,
        headers=headers,
        limits=httpx2.Limits(max_keepalive_connections=0),  # an answer that is given up shuts its connection: it has its own
    )
    with client:
        yield client


class Answer:
    """What a server says to a GET. Use as a context manager; iterate over `chunks()`. `status` is 200, 206 or 416.

    Raises Broken, DownloadStopped, or a final DownloadFailed or GatedModel, from the start and from every chunk.
    """

    def __init__(
        self, client: httpx2.Client, source: Source, headers: dict[str, str], *, patience: Patience, halt: threading.Event
    ) -> None:
        self._client, self._source, self._patience, self._halt = client, source, patience, halt
        self._items: queue.Queue[Any] = queue.Queue(_QUEUED_CHUNKS)
        self._abandoned = threading.Event()
        self._sockets: list[socket.socket] = []
        if source.token:
            headers = headers | {"Authorization": f"Bearer {source.token}"}
        threading.Thread(target=self._read, args=(headers,), daemon=True, name="download").start()

    def __enter__(self) -> Answer:
        try:
            response: httpx2.Response = self._next()
            self._check(response)
        except BaseException:
            self.close()
            raise
        self.status: int = response.status_code
        self.start_byte: int | None = 0
        self.total_bytes: int | None = None
        if self.status == 200:
            length = response.headers.get("Content-Length", "")
            self.total_bytes = int(length) if length.isdecimal() else None
        elif found := _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "")):
            self.start_byte = int(found[1]) if found[1] else None
            self.total_bytes = int(found[3]) if found[3] != "*" else None
        elif self.status == 206:
            self.start_byte = None
        etag = response.headers.get("ETag", "")
        self.etag: str = "" if etag.startswith("W/") else etag
        chain = [*response.history, response]
        self.linked_etag: str = next((r.headers["X-Linked-Etag"].strip('"') for r in chain if "X-Linked-Etag" in r.headers), "")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def chunks(self) -> Iterator[bytes]:
        """The body as it arrives; ends when the server ended it in an orderly way."""
        while (chunk := self._next()) is not None:
            yield chunk

    def close(self) -> None:
        """The reading thread ends now: a blocked read returns when its socket is shut."""
        self._abandoned.set()
        for sock in self._sockets:
            with contextlib.suppress(OSError, ValueError):
                sock.shutdown(socket.SHUT_RDWR)

    def _note_socket(self, event: str, facts: dict[str, Any]) -> None:
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            self._sockets.append(facts["return_value"].get_extra_info("socket"))
            if self._abandoned.is_set():
                self.close()

    def _read(self, headers: dict[str, str]) -> None:
        try:
            extensions = {"trace": self._note_socket}
            with self._client.stream("GET", self._source.url, headers=headers, extensions=extensions) as response:
                self._put(response)
                for chunk in response.iter_raw():
                    if not self._put(chunk):
                        return
            self._put(None)
        except Exception as error:
            self._put(error)

    def _put(self, item: object) -> bool:
        """False when nobody waits for it any more."""
        while not self._abandoned.is_set():
            with contextlib.suppress(queue.Full):
                self._items.put(item, timeout=TICK_S)
                return True
        return False

    def _next(self) -> Any:
        deadline = time.monotonic() + self._patience.stall_s
        while True:
            if self._halt.is_set():
                raise DownloadStopped(name=self._source.model)
            with contextlib.suppress(queue.Empty):
                item = self._items.get(timeout=TICK_S)
                if isinstance(item, Exception):
                    raise _in_words(item, self._source.model) from None
                return item
            if time.monotonic() > deadline:
                raise Broken(f"nothing came for {self._patience.stall_s:.0f} seconds")

    def _check(self, response: httpx2.Response) -> None:
        """Raises for every answer that holds no part of the file."""
        import httpx2

        status, model, asked = response.status_code, self._source.model, httpx2.URL(self._source.url)
        at_hub = (response.url.host, response.url.port) == (asked.host, asked.port)
        if asked.scheme == "https" and response.url.scheme != "https":
            raise DownloadFailed(name=model, reason="the hub sends us to an address without encryption")
        if status in (408, 429) or status >= 500 or (status in (401, 403) and not at_hub):  # a signed address that ran out
            words = {429: "too many requests", 503: "it is overloaded"}.get(status, "it has a fault")
            raise Broken(f"the hub answered {status} ({words})", True, _retry_after_s(response.headers.get("Retry-After", "")))
        if status in (401, 403):
            if response.headers.get("X-Error-Code") == "RepoNotFound":
                raise DownloadFailed(name=model, reason="the repository is not there, or is private")
            reason = f"its owner wants an account that accepted the terms at {self._source.page}"
            raise GatedModel(name=model, reason=reason)
        if status in (404, 410):
            raise DownloadFailed(name=model, reason="a file of it is no longer in the repository")
        if status not in (200, 206, 416):
            raise DownloadFailed(name=model, reason=f"the hub answered {status}")
        if status == 200 and response.headers.get("Content-Type", "").startswith("text/html"):
            raise DownloadFailed(name=model, reason="a web page came instead of the file (the login page of this network?)")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise DownloadFailed(name=model, reason="the file arrives compressed, which nobody asked for")


def _retry_after_s(text: str) -> float | None:
    """Seconds, or a date."""
    if text.strip().isdecimal():
        return float(text[:9])
    with contextlib.suppress(ValueError, TypeError):
        date = parsedate_to_datetime(text)
        return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    return None


def _in_words(error: Exception, model: str) -> Broken | LocalfastError:
    """Whether it is worth another try. The client's own words may hold signed addresses, so they are not repeated."""
    import httpx2

    if isinstance(error, httpx2.ConnectError) and "CERTIFICATE" in str(error).upper():
        return DownloadFailed(name=model, reason="the hub's certificate is not trusted (a proxy, or a wrong clock?)")
    if isinstance(error, httpx2.TimeoutException):
        return Broken("it did not answer in time")
    if isinstance(error, httpx2.ProxyError):
        return Broken("the proxy does not let it through")
    if isinstance(error, httpx2.ConnectError):
        return Broken("the server cannot be reached")
    if isinstance(error, httpx2.NetworkError | httpx2.RemoteProtocolError):
        return Broken("the connection broke")
    if isinstance(error, httpx2.TooManyRedirects):
        return DownloadFailed(name=model, reason="the hub sends us round in circles")
    return DownloadFailed(name=model, reason=f"the address cannot be used ({type(error).__name__})")
