"""A local Hub: the endpoints that huggingface_hub calls to publish and to fetch a model repository.

It keeps repositories in memory: commits with whole file trees, branches, and large files under their SHA-256, which
arrive before a commit names them. `fail_next` and `drop_next` make it fail.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

# token → namespaces that it may write to
TOKENS: dict[str, set[str]] = {"hf_writer": {"user", "other"}, "hf_reader": set()}
LFS = (".safetensors", ".bin", ".parquet")


@dataclass
class Repository:
    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # hash → path → content
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], branch: str, message: str) -> str:
        content = repr(sorted((name, sha256(data)) for name, data in files.items()))
        name = hashlib.sha1(f"{len(self.commits)} {branch} {message} {content}".encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        self.messages.append(message)
        return name

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


class HubServer:
    """`with HubServer() as hub:` hub.endpoint is its address; hub.repositories, hub.requests what it holds and saw."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}  # SHA-256 → content
        self.requests: list[tuple[str, str]] = []
        self.uploaded: list[str] = []  # SHA-256 of each large file that was sent, in order
        self.failing: list[tuple[re.Pattern[str], int, int]] = []  # what, status, how often still
        self.dropping: list[tuple[re.Pattern[str], int, int]] = []  # what, how many to let through, how often then
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.server.daemon_threads = True

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def elsewhere(self) -> str:
        """The same under another name, as the Hub's large files are: clients must not send their token there."""
        return self.endpoint.replace("127.0.0.1", "localhost")

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add(self, repo: str, files: dict[str, bytes], **options: bool) -> str:
        """A repository that is there already, with one commit."""
        self.repositories[repo] = Repository(**options)
        return self.repositories[repo].commit(files, "main", "first")

    def fail_next(self, what: str, status: int, times: int = 1) -> None:
        """Answer the next requests whose `METHOD /path` matches with this status."""
        self.failing.append((re.compile(what), status, times))

    def drop_next(self, what: str, times: int = 1, skip: int = 0) -> None:
        """Close the connection of the next requests that match, but for the first few, in the middle of what they
        send."""
        self.dropping.append((re.compile(what), skip, times))

    def mend(self) -> None:
        self.failing.clear()
        self.dropping.clear()

    def planned_failure(self, request: str) -> int | None:
        for place, (what, status, times) in enumerate(self.failing):
            if times and what.search(request):
                self.failing[place] = (what, status, times - 1)
                return status
        return None

    def planned_drop(self, request: str) -> bool:
        for place, (what, skip, times) in enumerate(self.dropping):
            if times and what.search(request):
                self.dropping[place] = (what, skip - 1, times) if skip else (what, 0, times - 1)
                return not skip
        return False


class Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = ""):
        self.status, self.code, self.message = status, code, message


class Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def handle_any(self) -> None:
        parts = urlsplit(self.path)
        self.route, self.query = unquote(parts.path), parse_qs(parts.query)
        request = f"{self.command} {self.route}"
        self.hub.requests.append((self.command, self.route))
        size = int(self.headers.get("Content-Length") or 0)
        if self.hub.planned_drop(request):
            self.rfile.read(size // 2)
            self.close_connection = True
            self.connection.close()
            return
        self.body = self.read_chunks() if self.headers.get("Transfer-Encoding") == "chunked" else self.rfile.read(size)
        try:
            if status := self.hub.planned_failure(request):
                raise Refused(status, message="as planned")
            for method, pattern, answer in ROUTES:
                if method == self.command and (found := re.fullmatch(pattern, self.route)):
                    return answer(self, *found.groups())
            raise Refused(404, message=f"no such endpoint: {request}")
        except Refused as refused:
            # `X-Error-Message`, `X-Error-Code`: what huggingface_hub tells kinds of failure by.
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            self.reply({"error": refused.message}, refused.status, {k: v for k, v in headers.items() if v})

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def read_chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def reply(self, value: Any = None, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # --- who may do what

    @property
    def token(self) -> str | None:
        said = self.headers.get("Authorization", "")
        return said.removeprefix("Bearer ") if said.startswith("Bearer ") else None

    def may_write(self, repo: str) -> None:
        if self.token not in TOKENS:
            raise Refused(401, message="Invalid username or password.")
        if repo.partition("/")[0] not in TOKENS[self.token]:
            raise Refused(403, message="You don't have the rights to write here")

    def repository(self, repo: str) -> Repository:
        """As the Hub: a stranger is told 401 whether or not it is there, and one who is known 404."""
        found = self.hub.repositories.get(repo)
        if found is None or (found.private and repo.partition("/")[0] not in TOKENS.get(self.token or "", set())):
            raise Refused(404 if self.token in TOKENS else 401, "RepoNotFound", "Repository not found")
        if found.gated and self.token is None:
            raise Refused(401, "GatedRepo", "Access to this model is restricted")
        return found

    def commit_of(self, repository: Repository, revision: str) -> str:
        if (commit := repository.resolve(revision)) is None:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    # --- publishing

    def create_repo(self) -> None:
        said = json.loads(self.body)
        repo = f"{said['organization']}/{said['name']}"
        self.may_write(repo)
        if repo in self.hub.repositories:
            return self.reply(
                {"error": "You already created this model repo", "url": f"{self.hub.endpoint}/{repo}"}, 409
            )
        self.hub.repositories[repo] = Repository(private=said.get("visibility") == "private" or said.get("private", 0))
        self.hub.repositories[repo].commit({".gitattributes": b"*.safetensors filter=lfs\n"}, "main", "initial commit")
        self.reply({"url": f"{self.hub.endpoint}/{repo}", "name": repo, "id": repo})

    def create_branch(self, repo: str, branch: str) -> None:
        self.may_write(repo)
        repository = self.repository(repo)
        if branch in repository.branches:
            raise Refused(409, message="Reference already exists")
        repository.branches[branch] = repository.branches["main"]
        self.reply({})

    def validate_yaml(self) -> None:
        errors = card_errors(json.loads(self.body)["content"])
        self.reply({"errors": [{"message": error} for error in errors], "warnings": []}, 400 if errors else 200)

    def preupload(self, repo: str, revision: str) -> None:
        self.may_write(repo)
        repository = self.repository(repo)
        there = repository.commits[self.commit_of(repository, revision)]
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LFS) else "regular",
                "shouldIgnore": False,
                **({"oid": oid(file["path"], there[file["path"]])} if file["path"] in there else {}),
            }
            for file in json.loads(self.body)["files"]
        ]
        self.reply({"files": files})

    def lfs_batch(self, repo: str) -> None:
        self.may_write(repo)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            sha, size = wanted["oid"], wanted["size"]
            target = {"upload": {"href": f"{self.hub.endpoint}/lfs/{sha}", "header": {}}}
            target["verify"] = {"href": f"{self.hub.endpoint}/lfs/{sha}/verify"}
            objects.append({"oid": sha, "size": size, **({} if sha in self.hub.large else {"actions": target})})
        self.reply({"transfer": "basic", "objects": objects})

    def lfs_upload(self, sha: str) -> None:
        if sha256(self.body) != sha:
            raise Refused(400, message="checksum mismatch")
        self.hub.large[sha] = self.body
        self.hub.uploaded.append(sha)
        self.reply(b"", headers={"ETag": f'"{sha}"'})

    def lfs_verify(self, sha: str) -> None:
        said = json.loads(self.body)
        if said["oid"] != sha or said["size"] != len(self.hub.large.get(sha, b"")):
            raise Refused(400, message="not what was uploaded")
        self.reply({})

    def commit(self, repo: str, branch: str) -> None:
        self.may_write(repo)
        repository = self.repository(repo)
        if branch not in repository.branches:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {branch}")
        files, message = dict(repository.commits[repository.branches[branch]]), ""
        for line in self.body.splitlines():
            key, value = (said := json.loads(line))["key"], said["value"]
            if key == "header":
                message = value["summary"]
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.hub.large:
                    raise Refused(400, message=f"{value['path']} was never uploaded")
                files[value["path"]] = self.hub.large[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                raise Refused(400, message=f"unknown operation {key}")
        name = repository.commit(files, branch, message)
        self.reply({"success": True, "commitUrl": f"{self.hub.endpoint}/{repo}/commit/{name}", "commitOid": name})

    # --- fetching

    def info(self, repo: str, revision: str | None = None) -> None:
        repository = self.repository(repo)
        commit = self.commit_of(repository, revision or "main")
        siblings = [{"rfilename": name} for name in sorted(repository.commits[commit])]
        self.reply({"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "private": repository.private})

    def tree(self, repo: str, revision: str, folder: str | None = None) -> None:
        repository = self.repository(repo)
        files = repository.commits[self.commit_of(repository, revision)]
        if folder:  # repositories here have none that anybody asks for
            raise Refused(404, "EntryNotFound", f"{folder} does not exist")
        rows = []
        for name, data in sorted(files.items()):
            row: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": git_hash(data)}
            if name.endswith(LFS):
                row["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 134}
            rows.append(row)
        self.reply(rows)

    def resolve(self, repo: str, revision: str, path: str) -> None:
        repository = self.repository(repo)
        commit = self.commit_of(repository, revision)
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        data = repository.commits[commit].get(path)
        if data is None:
            return self.reply({"error": "Entry not found"}, 404, {**headers, "X-Error-Code": "EntryNotFound"})
        headers["ETag"] = f'"{oid(path, data)}"'
        if path.endswith(LFS):
            self.hub.large[sha256(data)] = data
            linked = {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": str(len(data))}
            return self.reply(b"", 302, {**headers, **linked, "Location": f"{self.hub.elsewhere}/cdn/{sha256(data)}"})
        self.send_data(data, headers)

    def cdn(self, sha: str) -> None:
        if self.token is not None:
            raise Refused(400, message="Only one auth mechanism allowed")
        self.send_data(self.hub.large[sha], {"ETag": f'"{sha}"'})

    def send_data(self, data: bytes, headers: dict[str, str]) -> None:
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            first = int(wanted[1])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            return self.reply(data[first:], 206, headers)
        self.reply(data, headers=headers)


REPO = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    ("POST", "/api/repos/create", Handler.create_repo),
    ("POST", "/api/validate-yaml", Handler.validate_yaml),
    ("POST", f"/api/models/{REPO}/branch/(.+)", Handler.create_branch),
    ("POST", f"/api/models/{REPO}/preupload/(.+)", Handler.preupload),
    ("POST", f"/api/models/{REPO}/commit/(.+)", Handler.commit),
    ("POST", f"/{REPO}\\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", "/lfs/([0-9a-f]{64})", Handler.lfs_upload),
    ("POST", "/lfs/([0-9a-f]{64})/verify", Handler.lfs_verify),
    ("GET", f"/api/models/{REPO}", Handler.info),
    ("GET", f"/api/models/{REPO}/revision/(.+)", Handler.info),
    ("GET", f"/api/models/{REPO}/tree/([^/]+)(?:/(.+))?", Handler.tree),
    ("HEAD", f"/{REPO}/resolve/([^/]+)/(.+)", Handler.resolve),
    ("GET", f"/{REPO}/resolve/([^/]+)/(.+)", Handler.resolve),
    ("GET", "/cdn/([0-9a-f]{64})", Handler.cdn),
    ("HEAD", "/cdn/([0-9a-f]{64})", Handler.cdn),
]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def oid(path: str, data: bytes) -> str:
    """What the Hub tells a file by: the hash of a large one's content, git's of any other."""
    return sha256(data) if path.endswith(LFS) else git_hash(data)


def card_errors(text: str) -> list[str]:
    """What is wrong with a model card's metadata, by the Hub's specification (hub-docs, modelcard.md)."""
    found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if not found:
        return ["no metadata"]
    data = yaml.safe_load(found[1])
    errors = []
    for name in ("library_name", "license"):  # both of a list on the real Hub
        if not re.fullmatch(r"[a-z0-9.-]+", str(data.get(name, "none"))):
            errors.append(f"{name} must be one of a list")
    for name in ("tags", "datasets", "base_model"):
        value = data.get(name, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            errors.append(f"{name} must be a list of texts")
        elif name == "base_model" and not all(re.fullmatch(REPO, each) for each in value):
            errors.append("base_model must be names of models")
    for index in data.get("model-index", []):
        if not isinstance(index.get("name"), str):
            errors.append("model-index must have a name")
        for result in index.get("results", []):
            if not isinstance(result["task"].get("type"), str):
                errors.append("task must have a type")
            if not all(isinstance(result["dataset"].get(key), str) for key in ("type", "name")):
                errors.append("dataset must have type and name")
            if not result["metrics"] or not all("type" in m and "value" in m for m in result["metrics"]):
                errors.append("metrics must have type and value")
    return errors
