"""A hub on this machine: what huggingface_hub asks of the real one, answered for models in local folders."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_test"


@dataclass
class SmallHub:
    """The models, who may read them, and what was asked for.

    Attributes:
        models: Name -> folder; each has the branch ``main`` and the tag ``v1``.
        gated: Names of models that need ``TOKEN``.
        private: Names of models that nobody without ``TOKEN`` sees.
        asked: Method and path of every request.
        broken: Answer everything with status 500.
    """

    models: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    broken: bool = False
    url: str = ""

    def fetched(self) -> list[str]:
        """Names of the files that were sent."""
        return sorted(
            {path.rpartition("/")[2] for path in self.asked if path.startswith("GET") and "/resolve/" in path}
        )


@contextmanager
def small_hub() -> Iterator[SmallHub]:
    hub = SmallHub()

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(f"{self.command} {path}")
            status, headers, body = respond(hub, path, self.headers.get("authorization") == f"Bearer {TOKEN}")
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def respond(hub: SmallHub, path: str, known: bool) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body for a path."""
    if hub.broken:
        return 500, {}, b""
    parts = path.strip("/").removeprefix("api/models/").split("/")
    name, file = "/".join(parts[:2]), "/".join(parts[4:])
    what, revision = [*parts[2:4], "", ""][:2]
    if name not in hub.models or (name in hub.private and not known):
        return 401, {"X-Error-Code": "RepoNotFound"}, b""
    if revision not in ("", "main", "v1", COMMIT):
        return 404, {"X-Error-Code": "RevisionNotFound"}, b""
    folder = hub.models[name]
    files = {str(one.relative_to(folder)): one for one in sorted(folder.rglob("*")) if one.is_file()}
    if what != "resolve":
        if what == "tree":
            sizes = {one: (path.stat().st_size, etag(path)) for one, path in files.items()}
            tree = [{"type": "file", "path": one, "size": size, "oid": oid} for one, (size, oid) in sizes.items()]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        info: dict[str, Any] = {"id": name, "modelId": name, "sha": COMMIT, "private": False, "tags": []}
        info["siblings"] = [{"rfilename": one, "size": path.stat().st_size} for one, path in files.items()]
        return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
    if name in hub.gated and not known:
        return 403, {"X-Error-Code": "GatedRepo"}, b""
    if file not in files:
        return 404, {"X-Error-Code": "EntryNotFound"}, b""
    return 200, {"ETag": f'"{etag(files[file])}"', "X-Repo-Commit": COMMIT}, files[file].read_bytes()


def etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def use(monkeypatch: pytest.MonkeyPatch, hub: SmallHub, home: Path) -> None:
    """Let huggingface_hub, which reads its settings when it is imported, use the hub from now on."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
