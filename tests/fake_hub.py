"""A hub of our own on 127.0.0.1: the routes that look at and fetch files, with faults to order. Counts what it sends."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
PIECE_BYTES = 1 << 16
PATIENCE_S = 60


class Hold:
    """Stops a body at a place in the file until the test lets it go on; once."""

    def __init__(self, at_byte: int) -> None:
        self.at_byte = at_byte
        self.reached, self.free = threading.Event(), threading.Event()

    def wait_until_reached(self) -> None:
        assert self.reached.wait(PATIENCE_S), "nobody came to fetch that far"


@dataclass
class HubFile:
    """One file. Set a fault to see what happens: `served` other bytes than promised, `cuts` broken transfers, `gone` a 404."""

    content: bytes
    served: bytes | None = None
    cuts: int = 0
    cut_at: int | None = None
    """Where a cut body ends, as a place in the file; in its middle if it is not given."""
    gone: bool = False
    hashed: bool = True
    size_bytes: int = -1
    """What the listing says; the truth if it is negative, nothing if it is None."""
    etag: str | None = None
    """The ETag; the sha256 if it is None, none at all if it is empty."""
    refusals: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Statuses, with headers, that the next GETs get instead of the file."""
    ignores_range: bool = False
    length_error: int = 0
    """Added to the Content-Length."""
    chunked: bool = False
    """Answers without saying how long the body is."""
    shift: int = 0
    """Added to where a range begins: the bytes are not those that were asked for."""
    kind: str = "application/octet-stream"
    redirect: FakeHub | None = None
    """The hub that really has it; the address carries a signature."""
    hold: Hold | None = None

    def listing(self, path: str) -> dict[str, Any]:
        size_bytes = len(self.content) if self.size_bytes is not None and self.size_bytes < 0 else self.size_bytes
        sha256 = hashlib.sha256(self.content).hexdigest()
        lfs = {"lfs": {"sha256": sha256, "size": size_bytes, "pointerSize": 130}} if self.hashed else {}
        return {"rfilename": path, "size": size_bytes, "blobId": "0" * 40, **lfs}


@dataclass
class HubRepo:
    files: dict[str, HubFile]
    gated: bool = False
    licence: str = "apache-2.0"
    token: str = ""
    """Opens a gated repository."""
    commit: str = COMMIT


@dataclass
class FakeHub:
    """Use as a context manager. `requests` holds 'METHOD path' of everything that was asked, `asked` the headers with it."""

    repos: dict[str, HubRepo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of bodies, by the path of the file."""
    refusals: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """For the questions about repositories."""
    prefix: str = ""
    """A mirror may live under a path."""

    def add(self, repo: str, **files: bytes | HubFile) -> HubRepo:
        """Publish a repository; keys are file names without .gguf."""
        made = {f"{name}.gguf": file if isinstance(file, HubFile) else HubFile(file) for name, file in files.items()}
        self.repos[repo] = HubRepo(made)
        return self.repos[repo]

    def count(self, request: str) -> int:
        return sum(request in seen for seen in self.requests)

    def header(self, name: str, of: str = "resolve") -> list[str | None]:
        """What this header said, in every request whose path has `of` in it."""
        return [headers.get(name.lower()) for path, headers in self.asked if of in path]

    def __enter__(self) -> FakeHub:
        hub = self

        class Answers(_Answers):
            pass

        Answers.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}{self.prefix}"
        return self

    def __exit__(self, *_: object) -> None:
        for repo in self.repos.values():
            for file in repo.files.values():
                if file.hold:
                    file.hold.free.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Answers(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).removeprefix(self.hub.prefix)
        self.hub.requests.append(f"{self.command} {path}")
        self.hub.asked.append((path, {key.lower(): value for key, value in self.headers.items()}))
        with contextlib.suppress(ConnectionError):
            if look := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
                self._describe(look[1])
            elif fetch := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
                self._give(fetch[1], fetch[2])
            else:
                self._refuse(404, {})

    def _describe(self, name: str) -> None:
        if self.hub.refusals:
            return self._refuse(*self.hub.refusals.pop(0))
        repo = self.hub.repos.get(name)
        if repo is None:
            return self._refuse(404, {"X-Error-Code": "RepoNotFound"})
        listing = [file.listing(path) for path, file in repo.files.items()]
        card = {"license": repo.licence}
        body = {"id": name, "sha": repo.commit, "gated": "auto" if repo.gated else False, "siblings": listing, "cardData": card}
        return self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _give(self, name: str, path: str) -> None:
        repo = self.hub.repos.get(name)
        file = repo.files.get(path) if repo else None
        if repo and repo.gated and (not repo.token or self.headers.get("Authorization") != f"Bearer {repo.token}"):
            return self._refuse(403, {"X-Error-Code": "GatedRepo"})
        if repo is None or file is None or file.gone:
            return self._refuse(404, {"X-Error-Code": "EntryNotFound"})
        if self.command == "GET" and file.refusals:
            return self._refuse(*file.refusals.pop(0))
        if file.redirect:
            sha256 = hashlib.sha256(file.content).hexdigest()
            linked = {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(file.content))}
            there = f"{file.redirect.endpoint}/{name}/resolve/{repo.commit}/{path}?signature=secret"
            return self._refuse(302, {"Location": there, **linked})
        return self._send_file(path, file, repo.commit)

    def _send_file(self, path: str, file: HubFile, commit: str) -> None:
        content = file.content if file.served is None else file.served
        etag = f'"{hashlib.sha256(content).hexdigest()}"' if file.etag is None else file.etag
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes", "Content-Type": file.kind}
        headers |= {"ETag": etag} if etag else {}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if file.ignores_range or self.headers.get("If-Range", etag) != etag:
            asked = None
        start, end = 0, len(content)
        if asked:
            start, end = int(asked[1]) + file.shift, min(int(asked[2] or len(content)) + (asked[2] != ""), len(content))
            if start >= len(content):
                return self._refuse(416, {"Content-Range": f"bytes */{len(content)}"})
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        headers["Content-Length"] = str(end - start + file.length_error)
        if file.chunked:
            del headers["Content-Length"]
        self._begin(206 if asked else 200, headers)
        if self.command == "GET":
            self._send_body(path, file, content[:end], start)
        return None

    def _send_body(self, path: str, file: HubFile, content: bytes, start: int) -> None:
        """To the end; to a cut; and with a stop where the test wants one."""
        end = len(content)
        if file.cuts > 0:
            file.cuts -= 1
            end = (start + end) // 2 if file.cut_at is None else max(start, min(file.cut_at, end))
        while start < end:
            hold = file.hold
            if hold and start == hold.at_byte and not hold.reached.is_set():
                hold.reached.set()
                hold.free.wait(PATIENCE_S)
            stop = hold.at_byte if hold and start < hold.at_byte else end
            piece = content[start : min(start + PIECE_BYTES, stop, end)]
            self.wfile.write(piece)
            self.hub.sent_bytes[path] += len(piece)
            start += len(piece)

    def _refuse(self, status: int, headers: dict[str, str]) -> None:
        self._send(status, b"{}", headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._begin(status, {**headers, "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Connection": "close"}.items():
            self.send_header(key, value)
        self.end_headers()
