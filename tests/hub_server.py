"""A server on this machine that speaks as much of the Hub's HTTP API as a push needs."""

from __future__ import annotations

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_very_secret"


class Hub(ThreadingHTTPServer):
    """Repositories by name, each a list of commits: path -> contents.

    `refuse`: a path part -> the status it gets; "half": weights are taken to their middle, and then refused.
    `large`: endings of the files that are sent apart from the commit (LFS).
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, list[dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.refuse: dict[str, int] = {}
        self.large: tuple[str, ...] = ()
        self.objects: dict[str, bytes] = {}  # sent, and shown by a commit or not
        self.gone: dict[str, set[str]] = {}  # by repository, what the last commit took away
        self.address = f"http://127.0.0.1:{self.server_port}"

    def show(self, name: str) -> dict[str, bytes]:
        """What a reader of the repository finds."""
        found: dict[str, bytes] = {}
        for commit in self.repositories[name]:
            found |= commit
        return {path: data for path, data in found.items() if path not in self.gone.get(name, ())}


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_PUT(self) -> None:
        oid = self.path.rpartition("/")[2]
        half = "half" in self.server.refuse
        data = self.rfile.read(int(self.headers["Content-Length"]) // (2 if half else 1))
        if half:
            return self.answer(403, {"error": "refused in the middle"})
        self.server.objects[oid] = data
        return self.answer(200, {})

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        name, _, rest = self.path.removeprefix("/api/models/").partition("/tree/main")
        if not rest or name not in self.server.repositories:
            return self.answer(404, {"error": "not found"})
        files = self.server.show(name)
        return self.answer(
            200, [{"type": "file", "path": path, "size": len(files[path]), "oid": "0"} for path in files]
        )

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid credentials"})
        for part, status in self.server.refuse.items():
            if part in self.path:
                return self.answer(status, {"error": "refused"})
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else f"me/{asked['name']}"
            if name in self.server.repositories:
                return self.answer(409, {"error": "exists", "url": f"{self.server.address}/{name}"})
            self.server.repositories[name] = []
            self.server.private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
            return self.answer(200, {"url": f"{self.server.address}/{name}", "id": name, "name": name})
        if "/preupload/" in self.path:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(self.server.large or "/") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if self.path.endswith("/info/lfs/objects/batch"):
            asked = json.loads(body)["objects"]
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.server.address}/large/{one['oid']}"}}} for one in asked
            ]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            shown = [line["value"] for line in lines if line["key"] == "lfsFile"]
            files |= {value["path"]: self.server.objects[value["oid"]] for value in shown}
            name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            self.server.repositories[name].append(files)
            gone = {line["value"]["path"] for line in lines if line["key"] == "deletedFile"}
            self.server.gone[name] = (self.server.gone.get(name, set()) - files.keys()) | gone
            return self.answer(
                200, {"commitUrl": f"{self.server.address}/{name}/commit/1", "commitOid": "1" * 40, "success": True}
            )
        return self.answer(404, {"error": f"no {self.path}"})
