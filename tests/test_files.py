"""mpp/files.py: whole or absent, and named where damaged."""

import hashlib

import pytest

from mpp.errors import UserError
from mpp.files import fingerprint, read_json, write_text


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    write_text(path, "new ×")
    assert path.read_text(encoding="utf-8") == "new ×"
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]

    def full_disk(self, *_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "lost")
    assert path.read_bytes() == "new ×".encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "is missing"), (b"{", "is damaged"), (b"\xff", "is damaged"), (b"[1]", "holds no JSON object")],
)
def test_json_that_is_not_there_is_named(tmp_path, content, words):
    path = tmp_path / "summary.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=words) as refusal:
        read_json(path)
    assert str(path) in str(refusal.value)


def test_fingerprint_is_of_the_content(tmp_path):
    (tmp_path / "a").write_bytes(b"weights")
    assert fingerprint(tmp_path / "a") == hashlib.sha256(b"weights").hexdigest()[:12]
