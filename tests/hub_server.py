"""A local stand-in of the Hugging Face Hub, which the unmodified client talks to.

    with HubServer() as hub:
        hub.put("lab/model", {"config.json": b"{}"})
        hub.fail("PUT", "/lfs/", status=503, times=2)
        command(..., env=hub.environment(hub.WRITER))  # a child process
        hub.patch(monkeypatch, token=hub.WRITER)  # or this process
        hub.files("lab/model"), hub.commits("lab/model"), hub.requests

It follows what the client sends and needs (huggingface_hub 1.22 to 2.4): who the caller is, creating repositories and
branches, the LFS protocol with one part or several, commits, listings, and downloads with redirects and ranges. Large
files lie on a second server with an origin of its own, as on the Hub, to which no access token may be sent. Xet, whose
client is compiled and speaks with servers of its own, is switched off by its official setting, HF_HUB_DISABLE_XET=1.

The user `anna` may write in her own namespace and in the organisation `lab`, and only read in `museum`. Her access
tokens are WRITER, READER (which may only read) and FINE (fine-grained: it may write in `anna`, nowhere else); STRANGER
is unknown to the Hub.
"""

import base64
import hashlib
import json
import shutil
import tempfile
import threading
import time
import types
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

USER = "anna"
RIGHTS = {"anna": "admin", "lab": "write", "museum": "read"}
SIGNATURE = "X-Amz-Signature=5ecret"  # of addresses of the storage, which open it to whoever knows them


@dataclass
class Request:
    """What was asked; `body` without the content of large files."""

    method: str
    path: str
    authorization: str | None
    range: str | None
    body: bytes = b""


@dataclass
class Fault:
    method: str
    part: str
    times: int
    skip: int
    status: int | None = None
    headers: dict | None = None
    message: str | None = None
    drop: int | None = None
    lose: bool = False
    wait: float = 0.0


@dataclass
class Commit:
    oid: str
    parent: str | None
    message: str
    files: dict


@dataclass
class Repository:
    private: bool
    gated: bool
    known: dict = field(default_factory=dict)  # commits by their id
    branches: dict = field(default_factory=dict)  # id of the last commit by the branch's name


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status, message, code=None, **more):
        self.status, self.message, self.code, self.more = status, message, code, more


class HubServer:
    """Serves until the end of a `with` block; all state is in memory.

    Args:
        part_bytes: size of the parts in which large files have to be sent; None for one part whatever the size.
    """

    WRITER, READER, FINE, STRANGER = (f"hf_{name}{'0' * 30}" for name in ("writer", "reader", "fine", "stranger"))
    TOKENS = (WRITER, READER, FINE, STRANGER)
    ROLES = {WRITER: "write", READER: "read", FINE: "fineGrained"}  # noqa: RUF012

    def __init__(self, part_bytes=None):
        self.part_bytes = part_bytes
        self.repositories, self.objects, self.parts = {}, {}, {}
        self.requests, self.faults = [], []
        self.lock = threading.RLock()
        self.ended = threading.Event()
        self.folder = Path(tempfile.mkdtemp(prefix="mpp_hub_"))
        self.patched = False
        self.servers = [_server(self, handler) for handler in (_Hub, _Storage)]
        self.url = f"http://127.0.0.1:{self.servers[0].server_port}"
        self.storage_url = f"http://localhost:{self.servers[1].server_port}"  # some clients look at the host alone

    def __enter__(self):
        for server in self.servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        if self.patched:
            import huggingface_hub

            huggingface_hub.close_session()
        for server in self.servers:
            server.shutdown()
            server.server_close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # What tests set up

    def put(self, name, files, branch="main", *, message="put there by a test", private=False, gated=False):
        """Adds files to a repository, whatever their names, and makes it where there is none; the commit's id."""
        with self.lock:
            repository = self.repositories.get(name) or self.create(name, private, gated)
            repository.branches.setdefault(branch, repository.branches["main"])
            return self.commit(repository, branch, message, {**self.head(repository, branch).files, **files})

    def fail(self, method, part, *, times=1, skip=0, **fault):
        """Faults of the next requests of a method whose path holds `part`; those that are set first come first.

        Args:
            times: requests that fail.
            skip: requests that pass before.
            status, headers, message: an answer in place of the true one.
            drop: bytes after which the connection breaks, of what is sent (PUT, POST) or of the answer (GET).
            lose: do what is asked, and break the connection instead of an answer.
            wait: seconds before the true answer.
        """
        self.faults.append(Fault(method, part, times, skip, **fault))

    def environment(self, token=None, home=None):
        """Variables for a child process that talks to this server.

        Args:
            token: None for none.
            home: the folder in which the client keeps all that it keeps; a fresh one by default.
        """
        home = home or Path(tempfile.mkdtemp(dir=self.folder))
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": token or "",
            "HUGGING_FACE_HUB_TOKEN": "",
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_ASSETS_CACHE": str(home / "assets"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1,localhost",
        }

    def patch(self, monkeypatch, home=None, token=None):
        """The same for this process, whose client has read its environment already; it then waits for nothing.

        Returns:
            The folder in which the client keeps all that it keeps.
        """
        import huggingface_hub
        from huggingface_hub import constants, file_download, hf_api
        from huggingface_hub.utils import _http

        environment = self.environment(token, home)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        home = Path(environment["HF_HOME"])
        values = {
            "ENDPOINT": self.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HUGGINGFACE_HUB_CACHE": str(home / "hub"),
            "HF_ASSETS_CACHE": str(home / "assets"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
        }
        for name, value in values.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(hf_api.api, "endpoint", self.url)
        impatient = types.SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
        for module in (_http, file_download):
            monkeypatch.setattr(module, "time", impatient)
        huggingface_hub.close_session()  # its connections, and what it knows of proxies
        self.patched = True
        return home

    # What tests look at

    def files(self, name, revision="main"):
        """Content of every file of a branch or a commit, by name, but for the .gitattributes that the Hub makes."""
        found = self.head(self.repositories[name], revision).files
        return {file: content for file, content in found.items() if file != ".gitattributes"}

    def commits(self, name, branch="main"):
        """Messages of a branch's commits, oldest first, without the Hub's own."""
        repository, messages = self.repositories[name], deque()
        oid = repository.branches[branch]
        while repository.known[oid].parent:
            messages.appendleft(repository.known[oid].message)
            oid = repository.known[oid].parent
        return list(messages)

    def branches(self, name):
        return set(self.repositories[name].branches)

    def count(self, method, part):
        """How many requests of a method had a path that holds `part`."""
        return sum(request.method == method and part in request.path for request in self.requests)

    # What the servers do

    def create(self, name, private, gated=False):
        made = self.repositories[name] = Repository(private, gated)
        self.commit(made, "main", "initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})
        return made

    def commit(self, repository, branch, message, files):
        parent = repository.branches.get(branch)
        oid = hashlib.sha1(f"{parent} {message} {time.time_ns()} {len(repository.known)}".encode()).hexdigest()
        repository.known[oid] = Commit(oid, parent, message, dict(files))
        repository.branches[branch] = oid
        return oid

    def head(self, repository, revision):
        found = repository.known.get(repository.branches.get(revision, revision))
        if found is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    def fault(self, method, path):
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.method == method and fault.part in path:
                    if fault.skip:
                        fault.skip -= 1
                        return None
                    fault.times -= 1
                    return fault
        return None


def is_large(name, size):
    """What the Hub keeps beside git: what .gitattributes names, and all that is large."""
    return name.endswith((".safetensors", ".bin")) or size > 10_000_000


def git_oid(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def _server(hub, handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.hub = hub
    server.handle_error = lambda *_: None  # connections that a test broke
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.serve()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def serve(self):
        self.hub = self.server.hub
        self.route = unquote(urlsplit(self.path).path)
        request = Request(self.command, self.path, self.headers["Authorization"], self.headers["Range"])
        with self.hub.lock:
            self.hub.requests.append(request)
        fault = self.hub.fault(self.command, self.path) or Fault("", "", 0, 0)
        if fault.wait:
            self.hub.ended.wait(fault.wait)
        if fault.drop is not None and self.command in ("PUT", "POST"):
            self.rfile.read1(fault.drop)
            return self.cut()
        self.content = self.read_body()
        request.body = self.content if len(self.content) < 100_000 else b""
        self.limit = fault.drop
        try:
            if fault.status:
                return self.answer(fault.status, *_broken(fault))
            status, body, headers = self.respond()
        except Refused as refused:
            headers = {"X-Error-Message": refused.message}
            if refused.code:
                headers["X-Error-Code"] = refused.code
            status, body = refused.status, {"error": refused.message, **refused.more}
        if fault.lose:
            return self.cut()
        self.answer(status, body, headers)

    def read_body(self):
        if self.headers["Transfer-Encoding"] == "chunked":
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def answer(self, status, body, headers):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers = {"Content-Type": "application/json", **headers}
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if self.limit is None else body[: self.limit])
        if self.limit is not None:
            self.cut()

    def cut(self):
        self.wfile.flush()
        self.close_connection = True

    def piece(self, content, headers):
        """A whole file, or the part of it that is asked for."""
        first, _, last = (self.headers["Range"] or "").removeprefix("bytes=").partition("-")
        headers = {"Accept-Ranges": "bytes", **headers}
        if not first or int(first) >= len(content):
            return 200, content, headers
        part = content[int(first) : int(last) + 1 if last else None]
        place = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        return 206, part, {**headers, "Content-Range": place}


def _broken(fault):
    """Body and headers of an answer in place of the true one; a server's own faults are no JSON, as a proxy's."""
    if fault.message is None and fault.status >= 500:
        return b"<html>Service Unavailable</html>", {"Content-Type": "text/html", **(fault.headers or {})}
    return {"error": fault.message or "a fault that a test set"}, fault.headers or {}


class _Storage(_Handler):
    """Where large files lie: addresses are signed, and nobody is asked who they are."""

    def respond(self):
        oid, _, part = self.route.removeprefix("/lfs/").partition("/")
        if SIGNATURE not in self.path:
            raise Refused(403, "AccessDenied")
        if self.command == "PUT":
            if part:
                with self.hub.lock:
                    self.hub.parts[oid, int(part)] = self.content
                return 200, b"", {"ETag": f'"{hashlib.md5(self.content).hexdigest()}"'}
            return self.keep(oid, self.content)
        if oid not in self.hub.objects:
            raise Refused(404, "NoSuchKey")
        return self.piece(self.hub.objects[oid], {"ETag": f'"{oid}"'})

    def keep(self, oid, content):
        if sha256(content) != oid:
            raise Refused(400, "the content's sha256 is another one")
        with self.hub.lock:
            self.hub.objects[oid] = content
        return 200, b"", {"ETag": f'"{oid}"'}


class _Hub(_Storage):
    def respond(self):
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ")
        if token and token not in self.hub.ROLES:
            raise Refused(401, "Invalid credentials in Authorization header")
        self.role = self.hub.ROLES.get(token)
        parts = self.route.strip("/").split("/")
        method = "get" if self.command == "HEAD" else self.command.lower()
        if parts[:2] == ["api", "models"]:
            self.name = "/".join(parts[2:4])
            action = getattr(self, f"{method}_{(parts[4:5] or ['info'])[0].replace('-', '_')}", None)
            if action:
                return action(parts[5:])
        elif parts[0] == "api":
            action = getattr(self, f"{method}_{'_'.join(parts[1:]).replace('-', '_')}", None)
            if action:
                return action()
        elif parts[0] == "lfs":
            return self.join_parts(parts[1])
        elif len(parts) > 2:
            self.name = "/".join(parts[:2]).removesuffix(".git")
            if parts[2] == "info":
                return self.batch() if parts[-1] == "batch" else self.verify()
            if parts[2] == "resolve":
                revision = parts[3]
                return self.resolve(revision, self.route.split(f"/resolve/{revision}/", 1)[1])
        raise Refused(404, "Not Found")

    # Who may do what

    def may_write(self):
        owner = self.name.partition("/")[0]
        if self.role == "fineGrained":
            return owner == USER
        return self.role == "write" and RIGHTS.get(owner) in ("admin", "write")

    def repository(self):
        found = self.hub.repositories.get(self.name)
        hidden = found is None or (found.private and not (self.role and self.name.partition("/")[0] in RIGHTS))
        if hidden and not self.role:
            raise Refused(401, "Invalid username or password.")
        if hidden:
            raise Refused(404, "Repository not found", "RepoNotFound")
        return found

    def writable(self):
        found = self.repository()
        if not self.role:
            raise Refused(401, "Invalid username or password.")
        if not self.may_write():
            raise Refused(403, "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request")
        return found

    def get_whoami_v2(self):
        if not self.role:
            raise Refused(401, "Invalid username or password.")
        organisations = [{"name": name, "roleInOrg": role} for name, role in RIGHTS.items() if name != USER]
        token = {"displayName": "a token", "role": self.role}
        return 200, {"type": "user", "name": USER, "orgs": organisations, "auth": {"accessToken": token}}, {}

    def get_auth_check(self, rest):
        found = self.writable() if rest == ["write"] else self.repository()
        if found.gated and not self.may_write():
            raise Refused(403, f"Access to model {self.name} is restricted", "GatedRepo")
        return 200, {}, {}

    # Making repositories and branches

    def post_repos_create(self):
        asked = json.loads(self.content)
        self.name = f"{asked.get('organization') or USER}/{asked['name']}"
        if not self.role:
            raise Refused(401, "Invalid username or password.")
        if not self.may_write():
            owner = self.name.partition("/")[0]
            raise Refused(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        with self.hub.lock:
            if self.name in self.hub.repositories:
                raise Refused(409, "You already created this model repo", url=f"{self.hub.url}/{self.name}")
            self.hub.create(self.name, bool(asked.get("private")) or asked.get("visibility") == "private")
        return 200, {"url": f"{self.hub.url}/{self.name}", "name": self.name}, {}

    def post_branch(self, rest):
        with self.hub.lock:
            found, branch = self.writable(), "/".join(rest)
            if branch in found.branches:
                raise Refused(409, "Reference already exists")
            start = json.loads(self.content or b"{}").get("startingPoint", "main")
            found.branches[branch] = self.hub.head(found, start).oid
        return 201, {}, {}

    # Looking

    def get_agent_harnesses(self):
        return 200, {"standardEnvVars": [], "harnesses": {}}, {}

    def get_info(self, _):
        return self.get_revision(["main"])

    def get_revision(self, rest):
        found = self.repository()
        head = self.hub.head(found, "/".join(rest))
        told = {"_id": "0", "id": self.name, "modelId": self.name, "sha": head.oid, "private": found.private}
        siblings = [{"rfilename": name} for name in sorted(head.files)]
        return 200, {**told, "gated": "manual" if found.gated else False, "siblings": siblings, "tags": []}, {}

    def get_refs(self, _):
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid}
            for name, oid in self.repository().branches.items()
        ]
        return 200, {"branches": branches, "tags": [], "converts": []}, {}

    def get_tree(self, rest):
        head = self.hub.head(self.repository(), rest[0])
        below = "".join(f"{part}/" for part in rest[1:])
        listed = [entry(name, content) for name, content in sorted(head.files.items()) if name.startswith(below)]
        if below and not listed:
            raise Refused(404, f"{below} does not exist", "EntryNotFound")
        return 200, listed, {}

    def resolve(self, revision, name):
        found = self.repository()
        if found.gated and not self.may_write():
            raise Refused(403, f"Access to model {self.name} is restricted", "GatedRepo")
        head = self.hub.head(found, revision)
        if name not in head.files:
            raise Refused(404, "Entry not found", "EntryNotFound")
        content = head.files[name]
        told = {"X-Repo-Commit": head.oid, "ETag": f'"{git_oid(content)}"'}
        if not is_large(name, len(content)):
            return self.piece(content, told)
        oid = sha256(content)
        with self.hub.lock:
            self.hub.objects[oid] = content
        linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content))}
        return 302, b"", {**told, **linked, "Location": f"{self.hub.storage_url}/lfs/{oid}?{SIGNATURE}"}

    # Sending

    def post_validate_yaml(self):
        return 200, {"errors": [], "warnings": []}, {}

    def post_preupload(self, rest):
        there = self.hub.head(self.writable(), "/".join(rest)).files
        answers = []
        for file in json.loads(self.content)["files"]:
            name, large = file["path"], is_large(file["path"], file["size"])
            told = {"path": name, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if name in there:
                told["oid"] = sha256(there[name]) if large else git_oid(there[name])
            answers.append(told)
        return 200, {"files": answers}, {}

    def batch(self):
        self.writable()
        objects = []
        for wanted in json.loads(self.content)["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            actions = {}
            if oid not in self.hub.objects:
                upload = {"href": f"{self.hub.storage_url}/lfs/{oid}?{SIGNATURE}"}
                if self.hub.part_bytes and size > self.hub.part_bytes:
                    parts = range(1, -(-size // self.hub.part_bytes) + 1)
                    places = {f"{part:05d}": f"{self.hub.storage_url}/lfs/{oid}/{part}?{SIGNATURE}" for part in parts}
                    upload = {
                        "href": f"{self.hub.url}/lfs/{oid}/complete",
                        "header": {"chunk_size": str(self.hub.part_bytes), **places},
                    }
                verify = {"href": f"{self.hub.url}/{self.name}.git/info/lfs/objects/verify"}
                actions = {"actions": {"upload": upload, "verify": verify}}
            objects.append({"oid": oid, "size": size, **actions})
        return 200, {"transfer": "basic", "objects": objects}, {}

    def join_parts(self, oid):
        told = json.loads(self.content)
        pieces = [self.hub.parts.get((oid, part["partNumber"]), b"") for part in told["parts"]]
        if [f'"{hashlib.md5(piece).hexdigest()}"' for piece in pieces] != [part["etag"] for part in told["parts"]]:
            raise Refused(400, "a part is another one")
        return self.keep(oid, b"".join(pieces))

    def verify(self):
        self.writable()
        told = json.loads(self.content)
        if len(self.hub.objects.get(told["oid"], b"")) != told["size"]:
            raise Refused(404, "Object does not exist")
        return 200, {}, {}

    def post_commit(self, rest):
        branch = "/".join(rest)
        lines = [json.loads(line) for line in self.content.splitlines()]
        with self.hub.lock:
            found = self.writable()
            if branch not in found.branches:
                raise Refused(404, f"Invalid rev id: {branch}", "RevisionNotFound")
            files, message = dict(self.hub.head(found, branch).files), ""
            for line in lines:
                value = line["value"]
                if line["key"] == "header":
                    message = value["summary"]
                    if value.get("parentCommit") not in (None, found.branches[branch]):
                        raise Refused(412, "A commit has happened since. Please refresh and try again.")
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"], validate=True)
                elif line["key"] == "lfsFile":
                    if value["oid"] not in self.hub.objects:
                        raise Refused(400, f"{value['path']}: the LFS object was not sent")
                    files[value["path"]] = self.hub.objects[value["oid"]]
                elif line["key"] == "deletedFile" and files.pop(value["path"], None) is None:
                    raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
            oid = self.hub.commit(found, branch, message, files)
        address = f"{self.hub.url}/{self.name}/commit/{quote(oid)}"
        return 200, {"success": True, "commitOid": oid, "commitUrl": address, "hookOutput": ""}, {}


def entry(name, content):
    """What a listing says of a file."""
    told = {"type": "file", "path": name, "size": len(content), "oid": git_oid(content)}
    if is_large(name, len(content)):
        told["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 134}
    return told
