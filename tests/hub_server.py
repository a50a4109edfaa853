# NOTE (to be removed): to the helper with the task /tmp/plan/hub.md. Your mpp/sharing.py stands and works with
# mpp/publishing.py. But this file was written over your first version of tests/hub_server.py by accident. Please go on
# with this one, extended in place as you need, or write yours again; in either case keep what others use by now:
# HubServer as a context manager; url, put(name, files, branch=), files(name, revision=), commits(name),
# count(method, path), fail(method, path, status=, times=, headers=, message=), requests, WRITER/READER/STRANGER,
# environment(token, home) and patch(monkeypatch, home, token). Then tests/test_sharing.py. Remove this note.
"""A stand-in for the Hugging Face Hub on this machine, for the unmodified client of huggingface_hub.

It speaks the part of the Hub's HTTP interface that publishing and fetching a model need, keeps everything in memory,
and can be told to fail. Xet storage is not stood in for; `environment` switches it off by its official setting.

    with HubServer() as hub:
        hub.patch(monkeypatch, token=hub.WRITER)        # the client in this process
        command(..., env=hub.environment(hub.WRITER, tmp_path))  # the client in another
        hub.fail("PUT", "/lfs/", status=503, times=2)
        hub.files("anna/vit")["README.md"]
"""

import base64
import hashlib
import json
import re
import threading
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DROP = 0  # the status of a fault that closes the connection instead of answering
_LARGE = 10_000  # bytes from which a file is large here, so that tests need not be slow
_PART = 100_000  # bytes of a part, for what is larger


@dataclass
class Repository:
    private: bool
    commits: list[dict] = field(default_factory=list)  # oid, title, files: name -> content
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch, files, title):
        number = (
            f"{len(self.commits)}{title}{branch}{sorted((n, hashlib.sha1(c).hexdigest()) for n, c in files.items())}"
        )
        oid = hashlib.sha1(number.encode()).hexdigest()
        self.commits.append({"oid": oid, "title": title, "files": files})
        self.branches[branch] = oid
        return oid

    def find(self, revision):
        oid = self.branches.get(revision, revision)
        return next((commit for commit in self.commits if commit["oid"] == oid), None)


@dataclass
class Fault:
    method: str
    path: str
    status: int
    times: int
    headers: dict
    message: str


class HubServer:
    """The server in a thread of its own; a context manager."""

    WRITER, READER, STRANGER = "hf_writerwriterwriter", "hf_readerreaderreader", "hf_strangerstranger"
    USER, READ_ONLY = "anna", "museum"  # an organisation in which anna may only read

    def __init__(self):
        self.repositories, self.large, self.parts = {}, {}, {}
        self.faults, self.requests = [], []
        self.lock = threading.RLock()
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def fail(self, method, path, *, status, times=1, headers=None, message="made to fail"):
        """The next requests of a method whose path holds some text get another answer."""
        self.faults.append(Fault(method, path, status, times, headers or {}, message))

    def put(self, name, files, branch="main", title="put there by a test", private=False):
        """A commit that did not come through the interface; files of earlier ones stay."""
        with self.lock:
            repository = self.repositories.setdefault(name, Repository(private))
            before = repository.find(branch)
            return repository.commit(branch, {**(before["files"] if before else {}), **files}, title)

    def files(self, name, revision="main"):
        return self.repositories[name].find(revision)["files"]

    def commits(self, name):
        return [commit["title"] for commit in self.repositories[name].commits]

    def count(self, method, path):
        return sum(one["method"] == method and path in one["path"] for one in self.requests)

    def environment(self, token, home):
        """Variables for another process; without a token where it is None."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN": token or "",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def patch(self, monkeypatch, home, token):
        """Points the client of this process, which has read its settings already, to this server."""
        import importlib
        import pkgutil

        import huggingface_hub
        from huggingface_hub import constants

        constants_now = {
            "ENDPOINT": self.url,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HOME": str(home),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_DISABLE_XET": True,
        }
        for name, value in constants_now.items():
            monkeypatch.setattr(constants, name, value)
        for module in pkgutil.iter_modules(huggingface_hub.__path__, "huggingface_hub."):
            if module.name in ("huggingface_hub.hf_api", "huggingface_hub.file_download"):
                loaded = importlib.import_module(module.name)
                for name, value in constants_now.items():
                    if hasattr(loaded, name):
                        monkeypatch.setattr(loaded, name, value)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", self.url)
        if token is None:
            monkeypatch.delenv("HF_TOKEN", raising=False)
        else:
            monkeypatch.setenv("HF_TOKEN", token)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.handle_request()

    do_HEAD = do_POST = do_PUT = do_GET

    def handle_request(self):
        hub = self.server_hub
        url = urllib.parse.urlsplit(self.path)
        self.route = urllib.parse.unquote(url.path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        hub.requests.append({"method": self.command, "path": self.route, "token": token})
        fault = next((f for f in hub.faults if f.method == self.command and f.path in self.route and f.times), None)
        if fault is not None:
            fault.times -= 1
            if fault.status == DROP:
                return self.drop()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) if not self.chunked() else self.chunks()
        if fault is not None:
            code = {404: "RevisionNotFound"} if "revision" in fault.message else {}
            headers = {**fault.headers, "X-Error-Message": fault.message}
            headers |= {"X-Error-Code": code[fault.status]} if fault.status in code else {}
            return self.answer(fault.status, {"error": fault.message}, headers)
        with hub.lock:
            return self.dispatch(token, body)

    def drop(self):
        """Reads or sends a part, then closes the connection."""
        if self.command in ("POST", "PUT"):
            self.rfile.read(min(1000, int(self.headers.get("Content-Length") or 1)))
        else:
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(b"x" * 100)
        self.close_connection = True
        self.connection.close()

    def chunked(self):
        return "chunked" in (self.headers.get("Transfer-Encoding") or "")

    def chunks(self):
        content = b""
        while size := int(self.rfile.readline().strip(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def answer(self, status, content=None, headers=None):
        body = content if isinstance(content, bytes) else json.dumps(content if content is not None else {}).encode()
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, str(value))
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code, message):
        self.answer(status, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message})

    def role(self, token):
        return {self.server_hub.WRITER: "write", self.server_hub.READER: "read"}.get(token)

    def may_write(self, token, name):
        return self.role(token) == "write" and name.split("/")[0] == self.server_hub.USER

    def dispatch(self, token, body):
        hub, route = self.server_hub, self.route
        if token and self.role(token) is None:
            return self.refuse(401, "", "Invalid credentials in Authorization header")
        if route == "/api/whoami-v2":
            if not token:
                return self.refuse(401, "", "no token")
            organisation = {"name": hub.READ_ONLY, "type": "org", "roleInOrg": "read"}
            access = {"accessToken": {"displayName": "test", "role": self.role(token)}}
            return self.answer(200, {"type": "user", "name": hub.USER, "orgs": [organisation], "auth": access})
        if route == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if route == "/api/repos/create":
            return self.create(token, json.loads(body))
        if route.startswith("/lfs/"):
            return self.store(body)
        for pattern, action in (
            (r"/api/models/([^/]+/[^/]+)/auth-check(/write)?", self.check),
            (r"/api/models/([^/]+/[^/]+)/preupload/(.+)", self.preupload),
            (r"/api/models/([^/]+/[^/]+)/commit/(.+)", self.commit),
            (r"/api/models/([^/]+/[^/]+)/branch/(.+)", self.branch),
            (r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", self.tree),
            (r"/api/models/([^/]+/[^/]+?)(?:/revision/(.+))?", self.info),
            (r"/([^/]+/[^/]+)\.git/info/lfs/objects/(batch|verify)", self.lfs),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.resolve),
        ):
            found = re.fullmatch(pattern, route)
            if found:
                name = found[1]
                repository = hub.repositories.get(name)
                if repository is None or (repository.private and self.role(token) is None):
                    return self.refuse(404 if token else 401, "RepoNotFound", "Repository not found")
                return action(token, body, name, repository, *found.groups()[1:])
        return self.refuse(404, "", f"no such route: {self.command} {route}")

    def create(self, token, wanted):
        hub = self.server_hub
        name = f"{wanted.get('organization') or hub.USER}/{wanted['name']}"
        if not self.may_write(token, name):
            return self.refuse(403 if token else 401, "", "You don't have the rights to create a model there")
        if name in hub.repositories:
            return self.answer(409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"})
        repository = hub.repositories[name] = Repository(bool(wanted.get("private")))
        repository.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        return self.answer(200, {"url": f"{hub.url}/{name}", "name": name})

    def check(self, token, _, name, repository, write):
        if write and not self.may_write(token, name):
            return self.refuse(403, "", "You have no write access to this repo")
        return self.answer(200)

    def preupload(self, token, body, name, repository, revision):
        if not self.may_write(token, name):
            return self.refuse(403, "", "You have no write access to this repo")
        if repository.find(revision) is None:
            return self.refuse(404, "RevisionNotFound", "Invalid rev id")
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["size"] > _LARGE or file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        return self.answer(200, {"files": files})

    def lfs(self, token, body, name, repository, action):
        hub, wanted = self.server_hub, json.loads(body)
        if not self.may_write(token, name):
            return self.refuse(403, "", "You have no write access to this repo")
        if action == "verify":
            return self.answer(200 if wanted["oid"] in hub.large else 404)
        found = []
        for one in wanted["objects"]:
            entry = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in hub.large:
                upload = {"href": f"{hub.url}/lfs/{one['oid']}"}
                if one["size"] > _PART:
                    count = -(-one["size"] // _PART)
                    links = {str(i): f"{hub.url}/lfs/{one['oid']}/{i}" for i in range(1, count + 1)}
                    upload["header"] = {"chunk_size": str(_PART), **links}
                verify = {"href": f"{hub.url}/{name}.git/info/lfs/objects/verify"}
                entry["actions"] = {"upload": upload, "verify": verify}
            found.append(entry)
        return self.answer(200, {"objects": found, "transfer": "basic"})

    def store(self, body):
        hub, (oid, *part) = self.server_hub, self.route.removeprefix("/lfs/").split("/")
        if part:
            hub.parts[oid, int(part[0])] = body
            return self.answer(200, headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        if self.command == "POST":  # all parts are there
            order = [part["partNumber"] for part in json.loads(body)["parts"]]
            body = b"".join(hub.parts[oid, number] for number in order)
        if hashlib.sha256(body).hexdigest() != oid:
            return self.answer(400, {"error": "the content is not that of its sum"})
        hub.large[oid] = body
        return self.answer(200)

    def commit(self, token, body, name, repository, revision):
        hub = self.server_hub
        if not self.may_write(token, name):
            return self.refuse(403, "", "You have no write access to this repo")
        before = repository.find(revision)
        if before is None:
            return self.refuse(404, "RevisionNotFound", "Invalid rev id")
        files, title = dict(before["files"]), ""
        for line in body.splitlines():
            kind, value = (json.loads(line)[key] for key in ("key", "value"))
            if kind == "header":
                title = value["summary"]
                if value.get("parentCommit") not in (None, before["oid"]):
                    return self.refuse(412, "", "A commit has happened since")
            elif kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                if value["oid"] not in hub.large:
                    return self.refuse(400, "", "this large file was not uploaded")
                files[value["path"]] = hub.large[value["oid"]]
            elif kind == "deletedFile":
                files.pop(value["path"], None)
        oid = repository.commit(revision, files, title)
        return self.answer(200, {"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{name}/commit/{oid}"})

    def branch(self, token, body, name, repository, branch):
        if not self.may_write(token, name):
            return self.refuse(403, "", "You have no write access to this repo")
        if branch in repository.branches:
            return self.refuse(409, "", "this branch is there already")
        repository.branches[branch] = repository.branches["main"]
        return self.answer(200)

    def info(self, token, _, name, repository, revision):
        commit = repository.find(revision or "main")
        if commit is None:
            return self.refuse(404, "RevisionNotFound", "Invalid rev id")
        siblings = [{"rfilename": file} for file in commit["files"]]
        known = {"id": name, "modelId": name, "sha": commit["oid"], "private": repository.private}
        return self.answer(200, {**known, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0})

    def tree(self, token, _, name, repository, revision):
        commit = repository.find(revision)
        if commit is None:
            return self.refuse(404, "RevisionNotFound", "Invalid rev id")
        entries = []
        for path, content in commit["files"].items():
            entry = {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            if self.is_large(path, content):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
            entries.append(entry)
        return self.answer(200, entries)

    @staticmethod
    def is_large(path, content):
        return len(content) > _LARGE or path.endswith(".safetensors")

    def resolve(self, token, _, name, repository, revision, path):
        commit = repository.find(revision)
        if commit is None:
            return self.refuse(404, "RevisionNotFound", "Invalid rev id")
        content = commit["files"].get(path)
        if content is None:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        kind = hashlib.sha256 if self.is_large(path, content) else hashlib.sha1
        headers = {"X-Repo-Commit": commit["oid"], "ETag": f'"{kind(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if begin:
            rest = content[int(begin[1]) :]
            headers["Content-Range"] = f"bytes {begin[1]}-{len(content) - 1}/{len(content)}"
            return self.answer(206, rest, headers)
        if self.command == "HEAD":
            headers["Content-Length"] = len(content)
        return self.answer(200, content, headers)
