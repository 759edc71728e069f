"""A hub on 127.0.0.1 with the requests that huggingface_hub makes, serving folders by model and revision."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse


class Hub:
    """Models by id and revision; ``asked`` holds every request, ``served`` the files that were sent."""

    def __init__(self):
        self.models: dict[str, dict[str, Path]] = {}
        self.token: dict[str, str] = {}
        self.asked: list[str] = []
        self.served: list[str] = []
        self.url = ""

    def add(self, hub_id: str, folder: Path, revision: str = "main", token: str = "") -> None:
        self.models.setdefault(hub_id, {})[revision] = folder
        if token:
            self.token[hub_id] = token

    def commit(self, hub_id: str, revision: str) -> str | None:
        for name in self.models[hub_id]:
            sha = hashlib.sha1(f"{hub_id}/{name}".encode()).hexdigest()
            if revision in (name, sha):
                return sha
        return None

    def folder(self, hub_id: str, sha: str) -> Path:
        return next(f for name, f in self.models[hub_id].items() if self.commit(hub_id, name) == sha)


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def send(self, data: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(200)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def answer(self, body: bool) -> None:
            path = unquote(urlparse(self.path).path).strip("/")
            hub.asked.append(path)
            parts = path.removeprefix("api/models/").split("/")
            hub_id = "/".join(parts[:2])
            if hub_id not in hub.models:
                self.refuse(401, "RepoNotFound")
                return
            if hub.token.get(hub_id) and self.headers.get("Authorization") != f"Bearer {hub.token[hub_id]}":
                self.refuse(401, "GatedRepo")
                return
            kind, revision = parts[2:4] if len(parts) > 3 else ("revision", "main")
            sha = hub.commit(hub_id, revision)
            if sha is None:
                self.refuse(404, "RevisionNotFound")
                return
            folder = hub.folder(hub_id, sha)
            files = sorted(p for p in folder.rglob("*") if p.is_file())
            if path.startswith("api/models/") and kind == "tree":
                tree = [
                    {"type": "file", "path": str(p.relative_to(folder)), "size": p.stat().st_size, "oid": "0" * 40}
                    for p in files
                ]
                self.send(json.dumps(tree).encode(), {"Content-Type": "application/json"}, body)
            elif path.startswith("api/models/"):
                siblings = [{"rfilename": str(p.relative_to(folder))} for p in files]
                info = {
                    "id": hub_id,
                    "modelId": hub_id,
                    "sha": sha,
                    "siblings": siblings,
                    "private": False,
                    "tags": [],
                    "downloads": 0,
                }
                self.send(json.dumps(info).encode(), {"Content-Type": "application/json"}, body)
            else:
                name = "/".join(parts[4:])
                if not (folder / name).is_file():
                    self.refuse(404, "EntryNotFound")
                    return
                data = (folder / name).read_bytes()
                if body:
                    hub.served.append(name)
                etag = hashlib.sha1(data).hexdigest()
                self.send(data, {"ETag": f'"{etag}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}, body)

    return Handler


@contextlib.contextmanager
def running(hub: Hub) -> Generator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
