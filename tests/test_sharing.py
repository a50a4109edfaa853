"""mpp/sharing.py, with the unmodified client of the Hub and a local server in the Hub's place."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import SIGNATURE, HubServer
from huggingface_hub import constants

from mpp import sharing
from mpp.errors import UserError
from mpp.sharing import Repository

ROOT = Path(__file__).resolve().parents[1]
LAB = Repository("lab/model")
SMALL = {"config.json": b'{"a": 1}', "README.md": b"---\nlicense: mit\n---\n# A model\n"}
WEIGHTS = bytes(range(256)) * 4000


@pytest.fixture
def hub(monkeypatch):
    with HubServer() as server:
        server.home = server.patch(monkeypatch, token=HubServer.WRITER)
        server.waits = []
        monkeypatch.setattr(sharing, "sleep", server.waits.append)
        yield server


def use(monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token or "")


def fault(action, *arguments, **named):
    """The message of the UserError that an action ends with; no message may hold a secret."""
    with pytest.raises(UserError) as raised:
        action(*arguments, **named)
    message = str(raised.value)
    assert not any(token in message for token in HubServer.TOKENS)
    assert SIGNATURE not in message
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    return message


def upload(repository=LAB, files=SMALL, **named):
    return sharing.upload(repository, files, message="a message", **{"first_wait": 0.0, **named})


def below(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# Names


@pytest.mark.parametrize(
    ("text", "name", "revision"),
    [
        ("ann/mpp-b16", "ann/mpp-b16", None),
        ("ann/mpp_b.16@v1.0", "ann/mpp_b.16", "v1.0"),
        ("a/b@refs/pr/3", "a/b", "refs/pr/3"),
        (f"a/b@{'0' * 40}", "a/b", "0" * 40),
    ],
)
def test_a_repository_is_its_name_and_perhaps_a_revision(text, name, revision):
    found = sharing.parse(text)
    assert found == (name, revision)
    assert str(found) == text
    assert sharing.parse(name, revision) == found
    assert sharing.parse(text, revision) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "model",
        "/model",
        "ann/",
        "a/b/c",
        "hf-hub:a/b",
        "https://huggingface.co/a/b",
        "a/b c",
        "a/b--c",
        "a/.b",
        "a/b.git",
    ],
)
def test_what_is_no_name_of_a_repository_is_refused_with_an_example(text):
    message = fault(sharing.parse, text)
    assert repr(text) in message and "ORG/NAME" in message and "ann/mpp-b16" in message


@pytest.mark.parametrize(
    "revision",
    ["../../x", "a..b", "/a", "a/", "a b", "a\nb", "-a", "a~1", "a^", "a:b", "a//b", "x.lock", "@{1}", "a\\b"],
)
def test_a_revision_that_git_would_not_take_is_refused(revision):
    assert "no revision" in fault(sharing.parse, "a/b", revision)


def test_only_one_revision_can_be_named():
    assert "name one revision" in fault(sharing.parse, "a/b@v1", "v2")
    assert "name one revision" in fault(sharing.parse, "a/b@")


@pytest.mark.parametrize("text", [HubServer.WRITER, f"a/b/{HubServer.WRITER}", f"a b@{HubServer.WRITER}"])
def test_a_token_in_the_place_of_a_name_is_not_repeated(text):
    assert "…" in fault(sharing.parse, text)


def test_nothing_that_can_run_code_is_among_the_files_to_fetch():
    assert {Path(name).suffix for name in sharing.FILES} == {".json", ".safetensors", "", ".yaml", ".md", ".png"}
    assert [name for name in sharing.FILES if not Path(name).suffix] == ["SHA256SUMS"]


# Before a run


@pytest.mark.parametrize(("private", "name"), [(False, "lab/new"), (True, "anna/new")])
def test_a_repository_is_made_before_the_first_step(hub, private, name):
    sharing.require_write(Repository(name), private=private)
    assert hub.repositories[name].private is private
    assert hub.files(name) == {} and hub.commits(name) == []
    sharing.require_write(Repository(name), private=not private)
    assert hub.repositories[name].private is private
    assert hub.count("GET", f"{name}/auth-check/write") == 2
    assert hub.count("GET", "whoami") == 0  # which the Hub allows but seldom


def test_whether_a_repository_is_private_is_left_to_its_owner_where_nobody_asks(hub):
    sharing.require_write(LAB, private=False)
    made = next(request for request in hub.requests if request.path == "/api/repos/create")
    assert b"private" not in made.body and b"visibility" not in made.body


def test_a_fine_grained_token_may_be_enough(hub, monkeypatch):
    use(monkeypatch, HubServer.FINE)
    sharing.require_write(Repository("anna/new"), private=False)
    assert "anna/new" in hub.repositories


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(
    ("token", "name", "words"),
    [
        (None, "anna/new", ["no access token", "HF_TOKEN", "hf auth login"]),
        (HubServer.STRANGER, "anna/new", ["refused the access token", "401", "/settings/tokens"]),
        (HubServer.READER, "anna/new", ["may only read", "Write", "/settings/tokens"]),
        (HubServer.FINE, "lab/new", ["fine-grained", "repositories of lab"]),
        (HubServer.WRITER, "museum/new", ["anna may not write in museum", "anna/new"]),
        (HubServer.WRITER, "strangers/new", ["anna may not write in strangers"]),
    ],
)
def test_whoever_may_not_write_is_told_why_before_the_first_step(hub, monkeypatch, there, token, name, words):
    if there:
        hub.put(name, {"config.json": b"{}"})
    use(monkeypatch, token)
    message = fault(sharing.require_write, Repository(name), private=False)
    assert name in message and all(word in message for word in words)
    assert (name in hub.repositories) is there
    assert fault(upload, Repository(name)) == message
    assert hub.waits == []


def test_without_the_account_the_right_is_missing_all_the_same(hub, monkeypatch):
    use(monkeypatch, HubServer.READER)
    hub.fail("GET", "whoami", status=429)
    assert "may not write there" in fault(sharing.require_write, LAB, private=False)


def test_offline_mode_is_named_before_the_first_step(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for action in (lambda: sharing.require_write(LAB, private=False), upload):
        assert "unset HF_HUB_OFFLINE" in fault(action)
    assert hub.requests == []


def test_a_hub_that_is_not_there_is_named(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    message = fault(sharing.require_write, LAB, private=False)
    assert "http://127.0.0.1:9 can't be reached" in message and "HF_ENDPOINT" in message and "tried 3 times" in message
    assert hub.waits == [1.0, 2.0]


def test_a_hub_that_is_busy_for_a_while_ends_no_run(hub):
    hub.fail("POST", "/api/repos/create", status=503)
    hub.fail("GET", "/auth-check/write", status=500)
    sharing.require_write(LAB, private=False)
    assert hub.waits == [1.0, 2.0]


def test_nobody_sends_to_a_commit(hub):
    for action in (lambda to: sharing.require_write(to, private=False), upload):
        assert "name a branch" in fault(action, Repository("lab/model", "0" * 40))
    assert hub.requests == []


# Sending


def test_all_files_arrive_in_one_commit(hub, tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(WEIGHTS)
    before = file.stat()
    files = {**SMALL, "model.safetensors": file, "figures/curves.png": b"\x89PNG", "empty.json": b""}
    assert upload(files=files) == f"{hub.url}/lab/model"
    assert hub.files("lab/model") == {**files, "model.safetensors": WEIGHTS}
    assert hub.commits("lab/model") == ["a message"]
    assert file.read_bytes() == WEIGHTS and file.stat().st_mtime_ns == before.st_mtime_ns
    assert below(tmp_path) == {"weights"}


@pytest.mark.parametrize("private", [True, False])
def test_a_new_repository_may_be_private(hub, private):
    upload(private=private)
    assert hub.repositories["lab/model"].private is private


def test_a_file_of_more_than_ten_megabytes_arrives_in_one_part(hub, tmp_path):
    content = os.urandom(11_000_000)
    (tmp_path / "large").write_bytes(content)
    upload(files={"large.json": tmp_path / "large"})
    assert hub.files("lab/model") == {"large.json": content}
    assert hub.count("PUT", "/lfs/") == 1


@pytest.fixture
def hub_of_parts(hub):
    hub.part_bytes = 300_000
    return hub


def test_a_file_of_several_parts_arrives_whole(hub_of_parts, tmp_path):
    (tmp_path / "large").write_bytes(WEIGHTS)
    upload(files={"model.safetensors": tmp_path / "large", "objective.safetensors": b"few"})
    assert hub_of_parts.files("lab/model") == {"model.safetensors": WEIGHTS, "objective.safetensors": b"few"}
    assert hub_of_parts.count("PUT", "/lfs/") == 4 + 1  # 1 024 000 bytes


def test_the_storage_of_large_files_never_sees_the_token(hub):
    upload(files={"model.safetensors": WEIGHTS})
    sharing.fetch(LAB)
    asked = {request.authorization for request in hub.requests if request.path.startswith("/lfs/")}
    assert asked == {None}
    assert {request.authorization for request in hub.requests} == {None, f"Bearer {HubServer.WRITER}"}


def test_a_branch_is_made_where_it_is_missing(hub):
    hub.put("lab/model", {"old.json": b"old"})
    there = Repository("lab/model", "runs/a")
    assert upload(there) == f"{hub.url}/lab/model/tree/runs%2Fa"
    assert upload(there, {"config.json": b"2"}) == f"{hub.url}/lab/model/tree/runs%2Fa"
    assert hub.files("lab/model", "runs/a") == {"old.json": b"old", **SMALL, "config.json": b"2"}
    assert hub.files("lab/model") == {"old.json": b"old"}
    assert hub.branches("lab/model") == {"main", "runs/a"}


def test_main_can_be_named(hub):
    upload(Repository("lab/model", "main"))
    assert hub.files("lab/model") == SMALL
    assert hub.count("POST", "/branch/") == 0


def test_what_has_not_changed_makes_no_commit(hub):
    upload(files={**SMALL, "model.safetensors": WEIGHTS})
    upload(files={**SMALL, "model.safetensors": WEIGHTS})
    assert hub.commits("lab/model") == ["a message"]
    assert hub.count("PUT", "/lfs/") == 1


def test_a_missing_file_is_named_and_nothing_is_sent(hub, tmp_path):
    assert str(tmp_path / "gone") in fault(upload, files={**SMALL, "model.safetensors": tmp_path / "gone"})
    assert hub.requests == []


def test_a_file_that_goes_while_it_is_sent_is_named(hub, tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(WEIGHTS)

    class Going(type(hub.faults)):
        """Removes the file when the Hub has been told of it."""

        def __iter__(self):
            if any(request.path.endswith("/objects/batch") for request in hub.requests):
                file.unlink(missing_ok=True)
            return super().__iter__()

    hub.faults = Going()
    assert str(file) in fault(upload, files={"model.safetensors": file})
    assert hub.commits("lab/model") == [] and hub.waits == []


@pytest.mark.parametrize("status", [408, 409, 412, 429, 500, 503])
def test_what_may_pass_is_tried_again(hub, status):
    hub.fail("POST", "/commit/main", status=status, times=3)
    upload(files={**SMALL, "model.safetensors": WEIGHTS}, first_wait=1.5)
    assert hub.waits == [1.5, 3.0, 6.0]
    assert hub.files("lab/model") == {**SMALL, "model.safetensors": WEIGHTS}
    assert hub.commits("lab/model") == ["a message"]
    assert hub.count("POST", "/commit/main") == 4
    assert hub.count("PUT", "/lfs/") == 1  # not sent again


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_what_will_not_pass_is_not_tried_again(hub, status):
    hub.fail("POST", "/commit/main", status=status, message=f"no, {HubServer.WRITER} is not welcome")
    fault(upload)
    assert hub.count("POST", "/commit/main") == 1 and hub.waits == []
    assert hub.commits("lab/model") == []


@pytest.mark.parametrize(
    ("headers", "waits"),
    [
        ({"Retry-After": "7"}, [7.0]),
        ({"Retry-After": "1"}, [2.0]),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, [2.0]),
        ({"Retry-After": "99999"}, [600.0]),
        ({"RateLimit": '"api";r=0;t=55'}, [55.0]),
    ],
)
def test_the_hub_may_ask_to_wait_longer(hub, headers, waits):
    hub.fail("POST", "/commit/main", status=429, headers=headers)
    upload(first_wait=2.0)
    assert hub.waits == waits and hub.commits("lab/model") == ["a message"]


@pytest.mark.parametrize(
    "part",
    ["/api/repos/create", "/branch/v1", "/api/validate-yaml", "/preupload/v1", "/objects/batch", "/objects/verify"],
)
def test_every_step_of_sending_is_tried_again(hub, part):
    hub.fail("POST", part, status=503, times=7)
    upload(Repository("lab/model", "v1"), {**SMALL, "model.safetensors": WEIGHTS}, attempts=8)
    assert hub.files("lab/model", "v1") == {**SMALL, "model.safetensors": WEIGHTS}
    assert hub.waits and hub.count("POST", part) >= 6  # the client's own, and at least one of ours


def test_after_the_last_attempt_it_says_what_was_tried(hub):
    hub.put("lab/model", {"old.json": b"old"})
    hub.fail("POST", "/commit/main", status=503, times=99)
    message = fault(upload, attempts=3)
    assert "lab/model" in message and "503" in message and "tried 3 times" in message and "try again later" in message
    assert hub.count("POST", "/commit/main") == 3 and len(hub.waits) == 2
    assert hub.files("lab/model") == {"old.json": b"old"}


@pytest.mark.parametrize("broken", [{"drop": 1000}, {"status": 503}, {"status": 500}, {"lose": True}, {"status": 403}])
def test_a_large_file_that_broke_on_its_way_arrives_later(hub, tmp_path, broken):
    (tmp_path / "weights").write_bytes(WEIGHTS)
    hub.fail("PUT", "/lfs/", times=8, **broken)
    upload(files={**SMALL, "model.safetensors": tmp_path / "weights"}, attempts=9)
    assert hub.files("lab/model") == {**SMALL, "model.safetensors": WEIGHTS}
    assert hub.commits("lab/model") == ["a message"]
    assert hub.waits and (tmp_path / "weights").read_bytes() == WEIGHTS


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_several_parts_that_broke_on_their_way_arrive_later(hub_of_parts, method):
    hub_of_parts.fail(method, "/lfs/", skip=2 if method == "PUT" else 0, times=7, drop=1000)
    upload(files={"model.safetensors": WEIGHTS}, attempts=9)
    assert hub_of_parts.files("lab/model") == {"model.safetensors": WEIGHTS}
    assert hub_of_parts.commits("lab/model") == ["a message"] and hub_of_parts.waits


def test_a_connection_that_breaks_for_ever_is_named(hub):
    hub.fail("PUT", "/lfs/", drop=1000, times=999)
    message = fault(upload, files={"model.safetensors": WEIGHTS}, attempts=2)
    assert "tried 2 times" in message and "look at the connection" in message
    assert hub.commits("lab/model") == []


@pytest.mark.parametrize("broken", [{"drop": 10}, {"lose": True}])
def test_a_commit_is_made_once_whether_or_not_its_answer_arrives(hub, broken):
    hub.fail("POST", "/commit/main", **broken)
    upload(files={**SMALL, "model.safetensors": WEIGHTS})
    assert hub.commits("lab/model") == ["a message"]
    assert hub.files("lab/model") == {**SMALL, "model.safetensors": WEIGHTS}
    assert len(hub.waits) == 1


def test_a_hub_that_says_nothing_is_asked_again(hub, monkeypatch):
    monkeypatch.setattr(sharing, "_SILENCE_SECONDS", 0.3)
    hub.fail("POST", "/commit/main", wait=60.0)
    upload()
    assert hub.files("lab/model") == SMALL and len(hub.waits) == 1


def test_a_commit_of_somebody_else_in_between_is_kept(hub):
    hub.fail("POST", "/commit/main", status=412)
    hub.put("lab/model", {"theirs.json": b"theirs"})
    upload()
    assert hub.files("lab/model") == {"theirs.json": b"theirs", **SMALL}
    assert hub.commits("lab/model") == ["put there by a test", "a message"]


# Fetching


ALL = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "objective.safetensors": b"objective",
    "SHA256SUMS": b"sums",
    "recipe.yaml": b"seed: 0",
    "summary.json": b"{}",
    "README.md": b"# A model",
    "figures/curves.png": b"\x89PNG",
}
OTHERS = {
    "pytorch_model.bin": b"\x80\x04",
    "model.pt": b"\x80\x04",
    "train.py": b"print()",
    "figures/run.py": b"print()",
    "sub/model.safetensors": b"other",
    "state/optimizer.pt": b"\x80\x04",
}


def test_only_the_known_files_are_fetched(hub):
    commit = hub.put("lab/model", {**ALL, **OTHERS})
    folder = sharing.fetch(LAB)
    assert {name: (folder / name).read_bytes() for name in below(folder)} == ALL
    assert folder.name == commit and folder.is_relative_to(hub.home)
    asked = [request.path for request in hub.requests]
    assert not any(name in path for name in OTHERS for path in asked)


def test_fewer_files_can_be_asked_for(hub):
    hub.put("lab/model", {"config.json": b"{}"})
    assert below(sharing.fetch(LAB, files=["config.json"])) == {"config.json"}


def test_what_was_fetched_is_not_fetched_again(hub):
    hub.put("lab/model", ALL)
    first = sharing.fetch(LAB)
    gets = hub.count("GET", "/resolve/") + hub.count("GET", "/lfs/")
    assert sharing.fetch(LAB) == first
    assert hub.count("GET", "/resolve/") + hub.count("GET", "/lfs/") == gets > 0
    hub.put("lab/model", {"config.json": b"2"})
    second = sharing.fetch(LAB)
    assert second != first and (second / "config.json").read_bytes() == b"2"
    assert hub.count("GET", "/lfs/") == 2  # model and objective, once


def test_a_branch_or_a_commit_can_be_fetched(hub):
    first = hub.put("lab/model", ALL)
    hub.put("lab/model", {"config.json": b"branch"}, branch="runs/a")
    hub.put("lab/model", {"config.json": b"newest"})
    for revision, content in [(None, b"newest"), ("main", b"newest"), ("runs/a", b"branch"), (first, b"{}")]:
        folder = sharing.fetch(Repository("lab/model", revision))
        assert (folder / "config.json").read_bytes() == content
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("name", ["model.safetensors", "README.md"])
def test_a_download_that_broke_goes_on_where_it_ended(hub, monkeypatch, name):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    hub.put("lab/model", {**ALL, "README.md": WEIGHTS})
    place = f"/lfs/{hashlib.sha256(WEIGHTS).hexdigest()}" if name == "model.safetensors" else "README.md"
    hub.fail("GET", place, drop=400_000)
    hub.fail("GET", place, drop=0)
    folder = sharing.fetch(LAB)
    assert (folder / name).read_bytes() == WEIGHTS
    assert not any(path.endswith(".incomplete") for path in below(hub.home))
    assert [request.range for request in hub.requests if request.range] == ["bytes=400000-"] * 2


def test_a_download_that_breaks_for_ever_leaves_nothing_half(hub):
    hub.put("lab/model", ALL)
    hub.fail("GET", "/lfs/", drop=0, times=999)
    assert "can't be reached" in fault(sharing.fetch, LAB)
    hub.faults.clear()
    assert (sharing.fetch(LAB) / "model.safetensors").read_bytes() == WEIGHTS


def test_offline_the_cache_is_enough(hub, monkeypatch):
    hub.put("lab/model", ALL)
    first = sharing.fetch(LAB)
    asked, said = len(hub.requests), []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert sharing.fetch(LAB, warn=said.append) == first
    assert len(hub.requests) == asked and said == []


def test_offline_what_is_not_in_the_cache_is_named(hub, monkeypatch):
    commit = hub.put("lab/model", ALL)
    sharing.fetch(LAB, files=["config.json"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for missing in (LAB, Repository("lab/model", commit), Repository("lab/model", "v1"), Repository("lab/other")):
        message = fault(sharing.fetch, missing)
        assert str(missing) in message and "not whole in the cache" in message and "unset HF_HUB_OFFLINE" in message


def test_weights_that_another_library_left_out_of_the_cache_are_named(hub, monkeypatch):
    from huggingface_hub import hf_hub_download

    hub.put("lab/model", ALL)
    hf_hub_download("lab/model", "config.json")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "model.safetensors is not in the cache" in fault(sharing.fetch, LAB)


def unreachable(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def busy(hub, monkeypatch):
    hub.fail("GET", "/api/models/", status=503, times=999)


def limited(hub, monkeypatch):
    hub.fail("GET", "/api/models/", status=429, times=999)


def silent(hub, monkeypatch):
    monkeypatch.setattr(sharing, "_ANSWER_SECONDS", 0.2)
    hub.fail("GET", "/api/models/", wait=60.0, times=999)


def cut(hub, monkeypatch):
    hub.fail("GET", "/api/models/", drop=5, times=999)


@pytest.mark.parametrize("away", [unreachable, busy, limited, silent, cut])
def test_without_the_hub_the_cache_is_taken_and_said_so(hub, monkeypatch, away):
    commit = hub.put("lab/model", ALL)
    first, said = sharing.fetch(LAB), []
    away(hub, monkeypatch)
    assert sharing.fetch(LAB, warn=said.append) == first
    assert len(said) == 1 and "can't be reached" in said[0] and f"commit {commit[:8]}" in said[0]
    assert "not whole in the cache" in fault(sharing.fetch, Repository("lab/other"))


def test_a_hub_that_fails_between_two_answers_is_noted(hub):
    hub.put("lab/model", ALL)
    first, said = sharing.fetch(LAB), []
    newer = hub.put("lab/model", {"config.json": b"2"})
    hub.fail("GET", "/api/models/lab/model", status=503, skip=1, times=999)
    assert sharing.fetch(LAB, warn=said.append) == first
    assert len(said) == 1 and first.name[:8] in said[0] and newer in said[0]


@pytest.mark.parametrize("token", [HubServer.WRITER, None])
def test_a_repository_that_is_not_there_is_named(hub, monkeypatch, token):
    use(monkeypatch, token)
    message = fault(sharing.fetch, Repository("lab/other"))
    assert "lab/other" in message and "no such repository" in message and "HF_TOKEN" in message


def test_a_repository_that_is_gone_is_not_taken_from_the_cache(hub):
    hub.put("lab/model", ALL)
    sharing.fetch(LAB)
    del hub.repositories["lab/model"]
    assert "no such repository" in fault(sharing.fetch, LAB)


@pytest.mark.parametrize("token", [HubServer.WRITER, HubServer.READER])
def test_a_private_repository_takes_a_token(hub, monkeypatch, token):
    hub.put("lab/model", ALL, private=True)
    use(monkeypatch, None)
    assert "private" in fault(sharing.fetch, LAB)
    use(monkeypatch, token)
    assert (sharing.fetch(LAB) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_token_that_the_hub_does_not_know_is_named_when_fetching(hub, monkeypatch):
    hub.put("lab/model", ALL)
    use(monkeypatch, HubServer.STRANGER)
    assert "refused the access token" in fault(sharing.fetch, LAB)


def test_a_refusal_of_another_kind_is_told_in_the_hubs_words(hub):
    hub.put("lab/model", ALL)
    hub.fail("GET", "/api/models/", status=403, message="Blocked by your organisation's rules")
    message = fault(sharing.fetch, LAB)
    assert "403" in message and "Blocked by your organisation's rules" in message
    assert "write" not in message


def test_a_revision_that_is_not_there_is_named(hub):
    hub.put("lab/model", ALL)
    message = fault(sharing.fetch, Repository("lab/model", "v9"))
    assert "lab/model has no revision v9" in message


def test_a_gated_repository_says_where_to_ask(hub):
    hub.put("museum/model", ALL, gated=True)
    message = fault(sharing.fetch, Repository("museum/model"))
    assert "gated" in message and f"{hub.url}/museum/model" in message


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"pytorch_model.bin": b"", "config.json": b""}, ["pytorch_model.bin", "pickled", "can run code"]),
        ({"last.ckpt": b"", "a.pt": b"", "b.pth": b""}, ["a.pt, b.pth, last.ckpt", "pickled"]),
        ({"model-00001-of-2.safetensors": b"", "a.bin": b""}, ["no model.safetensors", "model-00001-of-2.safetensors"]),
        ({f"{number}.txt": b"" for number in range(10, 30)}, ["no model.safetensors", "10.txt", "and 13 more"]),
        ({}, ["no model.safetensors", ".gitattributes"]),
        ({f"{HubServer.WRITER}.txt": b""}, ["….txt"]),
    ],
)
def test_a_repository_without_weights_says_what_it_holds(hub, files, words):
    hub.put("lab/model", files)
    message = fault(sharing.fetch, LAB)
    assert "lab/model" in message and all(word in message for word in words)
    assert hub.count("GET", "/resolve/") == 0


def test_names_that_lead_out_of_the_folder_are_left_out(hub, tmp_path):
    inside = {"config.json": b"{}", "model.safetensors": WEIGHTS, "figures/a.png": b"a", "figures/b/c.png": b"c"}
    outside = [
        "../x.png",
        "../config.json",
        "../../figures/x.png",
        "figures/../x.png",
        "figures/../../x.png",
        "figures/../../../../../x.png",
        f"figures/../../../../../../../../../../../../..{tmp_path}/x.png",
        f"figures/{tmp_path}/y.png",
        f"{tmp_path}/config.json",
        "figures\\..\\..\\x.png",
    ]
    hub.put("lab/model", {**inside, **dict.fromkeys(outside, b"out")})
    folder = sharing.fetch(LAB)
    blobs = {path.resolve() for path in folder.rglob("*") if path.is_file()}
    assert all(path.is_relative_to(hub.home) for path in blobs)
    assert {name: (folder / name).read_bytes() for name in inside} == inside
    assert below(folder) == {*inside, f"figures{tmp_path}/y.png"}
    written = [path for path in hub.home.rglob("*.png") if not path.is_relative_to(folder)]
    assert written == [] and below(tmp_path) == set()
    assert not any(hub.folder.rglob("x.png"))


# Tokens, terminals, and many at once


def test_a_token_that_does_not_look_like_one_is_in_no_message(hub, monkeypatch):
    use(monkeypatch, None)
    (hub.home / "token").write_text("plain-secret-1")
    hub.put("lab/model", ALL)
    hub.fail("POST", "/api/repos/create", status=400, message="plain-secret-1 is bad")
    hub.fail("GET", "/api/models/", status=403, message="plain-secret-1 is bad")
    for action in (lambda: sharing.require_write(LAB, private=False), lambda: sharing.fetch(LAB)):
        message = fault(action)
        assert "… is bad" in message and "plain-secret-1" not in message
    assert hub.requests[0].authorization == "Bearer plain-secret-1"


def test_a_token_in_a_commit_message_is_hidden(hub):
    sharing.upload(LAB, SMALL, message=f"run {HubServer.WRITER}")
    assert hub.commits("lab/model") == ["run …"]


PUSH = """
import sys
from pathlib import Path
from mpp import sharing
to = sharing.parse(sys.argv[1])
sharing.require_write(to, private=False)
files = {f"{sys.argv[2]}.json": sys.argv[2].encode() * 10, "model.safetensors": Path(sys.argv[3])}
print(sharing.upload(to, files, message=sys.argv[2], first_wait=0.01))
print(sharing.fetch(to, warn=print))
"""


def test_pushes_at_once_all_arrive_and_say_nothing_but_their_address(tmp_path):
    (tmp_path / "weights").write_bytes(WEIGHTS)
    with HubServer(part_bytes=300_000) as hub:
        hub.fail("POST", "/commit/main", status=409)
        hub.fail("PUT", "/lfs/", status=503)
        environment = {**os.environ, **hub.environment(token=HubServer.WRITER), "PYTHONPATH": str(ROOT)}
        children = [
            subprocess.Popen(
                [sys.executable, "-c", PUSH, "lab/model@runs", name, str(tmp_path / "weights")],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name in ("one", "two")
        ]
        ends = [child.communicate(timeout=60) for child in children]
        assert [child.returncode for child in children] == [0, 0], ends
        assert {error for _, error in ends} == {""}
        for said, _ in ends:
            address, folder = said.splitlines()
            assert address == f"{hub.url}/lab/model/tree/runs"
            assert (Path(folder) / "model.safetensors").read_bytes() == WEIGHTS
        assert sorted(hub.commits("lab/model", "runs")) == ["one", "two"]
        assert hub.files("lab/model", "runs") == {
            "one.json": b"one" * 10,
            "two.json": b"two" * 10,
            "model.safetensors": WEIGHTS,
        }
        kept = b"".join(path.read_bytes() for path in hub.folder.rglob("*") if path.is_file())
        assert WEIGHTS in kept and b"hf_" not in kept


def test_the_clients_own_settings_are_left_as_they_were(hub):
    import huggingface_hub
    from huggingface_hub import utils

    session, level = huggingface_hub.get_session(), utils.logging.get_verbosity()
    patience = session.timeout
    upload()
    fault(upload, Repository("museum/model"))
    assert session.timeout == patience and utils.logging.get_verbosity() == level
    assert not utils.are_progress_bars_disabled()


def test_the_stand_in_checks_what_it_is_sent(hub):
    import urllib.error
    import urllib.request

    address = f"{hub.storage_url}/lfs/{'0' * 64}?{SIGNATURE}"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(address, data=b"other", method="PUT"))
    refused.value.close()
    assert refused.value.code == 400 and hub.objects == {}
