"""A hub of our own on 127.0.0.1: the routes that huggingface_hub uses to look at and fetch files, with faults to order."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class HubFile:
    """One file. Set a fault to see what happens: `served` other bytes than promised, `cuts` broken transfers, `gone` a 404."""

    content: bytes
    served: bytes | None = None
    cuts: int = 0
    gone: bool = False
    hashed: bool = True
    size_bytes: int = -1

    def listing(self, path: str) -> dict[str, Any]:
        size_bytes = len(self.content) if self.size_bytes < 0 else self.size_bytes
        sha256 = hashlib.sha256(self.content).hexdigest()
        lfs = {"lfs": {"sha256": sha256, "size": size_bytes, "pointerSize": 130}} if self.hashed else {}
        return {"rfilename": path, "size": size_bytes, "blobId": "0" * 40, **lfs}


@dataclass
class HubRepo:
    files: dict[str, HubFile]
    gated: bool = False
    licence: str = "apache-2.0"


@dataclass
class FakeHub:
    """Use as a context manager. `requests` holds 'METHOD path' of everything that was asked."""

    repos: dict[str, HubRepo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def add(self, repo: str, **files: bytes | HubFile) -> HubRepo:
        """Publish a repository; keys are file names without .gguf."""
        made = {f"{name}.gguf": file if isinstance(file, HubFile) else HubFile(file) for name, file in files.items()}
        self.repos[repo] = HubRepo(made)
        return self.repos[repo]

    def count(self, request: str) -> int:
        return sum(request in seen for seen in self.requests)

    def __enter__(self) -> FakeHub:
        hub = self

        class Answers(_Answers):
            pass

        Answers.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
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
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if look := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
            self._describe(look[1])
        elif fetch := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._send_file(fetch[1], fetch[2])
        else:
            self._refuse(404, "")

    def _describe(self, name: str) -> None:
        repo = self.hub.repos.get(name)
        if repo is None:
            return self._refuse(404, "RepoNotFound")
        listing = [file.listing(path) for path, file in repo.files.items()]
        card = {"license": repo.licence}
        body = {"id": name, "sha": COMMIT, "gated": "auto" if repo.gated else False, "siblings": listing, "cardData": card}
        return self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _send_file(self, name: str, path: str) -> None:
        repo = self.hub.repos.get(name)
        file = repo.files.get(path) if repo else None
        if repo and repo.gated:
            return self._refuse(403, "GatedRepo")
        if file is None or file.gone:
            return self._refuse(404, "EntryNotFound")
        content = file.content if file.served is None else file.served
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(file.content).hexdigest()}"', "Accept-Ranges": "bytes"}
        start = 0
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(asked[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.command == "GET" and file.cuts > 0
        file.cuts -= cut
        return self._send(206 if asked else 200, content[start:], headers, cut)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
        """With `cut`, all the bytes are announced and half of them come before the connection ends."""
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body)), "Connection": "close"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
