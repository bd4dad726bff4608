"""A small stand-in of the model hub's API: repositories in memory, behind HTTP as huggingface_hub speaks it."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest

TOKEN = "hf_test"
SUFFIXES = (".safetensors", ".gguf", ".png")  # of files that the hub takes as large ones


class Hub(ThreadingHTTPServer):
    """Repositories by name, each of files by path; large files are uploaded before the commit that names them.

    With `fault`, a status, every GET fails.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fault: int | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def sha_of(files: dict[str, bytes]) -> str:
    """Returns the id of the commit that holds these files."""
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        path = urlsplit(self.path).path.strip("/")
        if self.server.fault is not None:
            self.answer({"error": "no answer now"}, self.server.fault)
            return
        if kind := re.match("api/(models|datasets|spaces)/", path):
            owner, name, *rest = path.removeprefix(kind[0]).split("/")
            repository = f"{owner}/{name}"
            if repository not in self.server.repositories:
                self.answer({"error": "Repository not found"}, 404, "RepoNotFound")
            elif rest[:1] == ["tree"]:
                self.answer([entry(*file) for file in self.files_of(repository).items()])
            else:
                files = self.files_of(repository)
                siblings = [listed(*file) for file in files.items()]
                self.answer({"id": repository, "sha": sha_of(files), "siblings": siblings})
            return
        if not path:
            self.answer({})
            return
        owner, name, _, revision, *parts = re.sub("^(datasets|spaces)/", "", path).split("/")
        file = self.server.repositories.get(f"{owner}/{name}", {}).get("/".join(parts))
        if file is None:
            self.answer({"error": "Entry not found"}, 404, "EntryNotFound")
        else:
            self.answer(file, commit=revision)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self.server.large[self.path.rsplit("/", 1)[1]] = self.body()
        self.answer({})

    def do_POST(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        path, body = urlsplit(self.path).path, self.body()
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            wanted = json.loads(body)
            repository = f"{wanted['organization']}/{wanted['name']}"
            self.server.repositories.setdefault(repository, {})
            self.answer({"url": f"{self.server.address}/{repository}"})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            self.answer({"files": [mode_of(file) for file in json.loads(body)["files"]]})
        elif path.endswith("/objects/batch"):
            actions = [
                {**one, "actions": {"upload": {"href": f"{self.server.address}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self.answer({"objects": actions})
        else:
            repository = "/".join(path.split("/")[3:5])
            files = self.files_of(repository)
            for line in map(json.loads, body.splitlines()):
                self.add(files, line["key"], line["value"])
            oid = sha_of(files)
            url = f"{self.server.address}/{repository}/commit/{oid}"
            self.answer({"commitUrl": url, "commitOid": oid})

    def add(self, files: dict[str, bytes], kind: str, value: dict[str, Any]) -> None:
        """Adds a line of a commit to a repository's files."""
        if kind == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif kind == "lfsFile":
            files[value["path"]] = self.server.large[value["oid"]]

    def files_of(self, repository: str) -> dict[str, bytes]:
        return self.server.repositories[repository]

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def answer(
        self, content: Any, code: int = 200, error: str | None = None, commit: str | None = None
    ) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        if error is not None:
            self.send_header("X-Error-Code", error)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        """Prints nothing."""


def entry(path: str, content: bytes) -> dict[str, Any]:
    """Returns a file as the hub lists it."""
    digest = hashlib.sha256(content).hexdigest()
    large = {"oid": digest, "size": len(content), "pointerSize": 100}
    facts = {"type": "file", "path": path, "size": len(content), "oid": digest[:40]}
    return {**facts, "lfs": large} if path.endswith(SUFFIXES) else facts


def listed(path: str, content: bytes) -> dict[str, Any]:
    """Returns a file as the facts of a repository list it."""
    facts = {"rfilename": path, "size": len(content), "blobId": "b"}
    digest = hashlib.sha256(content).hexdigest()
    large = {"sha256": digest, "size": len(content), "pointerSize": 100}
    return {**facts, "lfs": large} if path.endswith(SUFFIXES) else facts


def mode_of(file: dict[str, Any]) -> dict[str, Any]:
    """Returns how a file is to be uploaded."""
    large = file["path"].endswith(SUFFIXES)
    return {
        "path": file["path"],
        "uploadMode": "lfs" if large else "regular",
        "shouldIgnore": False,
        "oid": None,
    }


@contextmanager
def running_hub(patch: pytest.MonkeyPatch, cache: Any, token: str | None = TOKEN) -> Iterator[Hub]:
    """Runs a hub that huggingface_hub talks to, with a cache of its own."""
    server = Hub()
    Thread(target=server.serve_forever, daemon=True).start()
    template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
    constants = "huggingface_hub.constants."
    patch.setattr(f"{constants}HF_HUB_OFFLINE", False)
    patch.setattr(f"{constants}HF_HUB_DISABLE_XET", True)
    patch.setattr(f"{constants}ENDPOINT", server.address)
    patch.setattr(f"{constants}HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(f"{constants}HF_HUB_CACHE", str(cache))
    patch.setenv("HF_TOKEN", token or "")
    yield server
    server.shutdown()
    server.server_close()
