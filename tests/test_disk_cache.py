"""mpp/disk_cache.py: made once, shared by processes, never past its limit, never half."""

import multiprocessing
import os
import time

import pytest

from mpp.disk_cache import DiskCache, default_folder
from mpp.errors import UserError


def put(cache, name, size=10):
    with cache.open(name, lambda out: out.write(name.encode() * size)) as file:
        return file.read()


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_a_file_is_made_once(tmp_path):
    cache, made = DiskCache(tmp_path / "deep" / "er"), []

    def make(out):
        made.append(1)
        out.write(b"content")

    for _ in range(3):
        with cache.open("a", make) as file:
            assert file.read() == b"content"
    assert made == [1]


def test_the_least_recently_opened_files_go_first(tmp_path):
    cache = DiskCache(tmp_path, limit_bytes=35)
    for moment, name in enumerate("abc"):
        put(cache, name)
        os.utime(tmp_path / name, (moment, moment))
    put(cache, "a")  # opened again: now b is the oldest
    put(cache, "d")
    assert names(tmp_path) == ["a", "c", "d"]
    put(cache, "e", size=30)
    assert names(tmp_path) == ["e"]
    assert put(cache, "b") == b"b" * 10  # and comes back when it is asked for


def test_a_file_that_was_dropped_stays_readable_for_who_has_it_open(tmp_path):
    cache = DiskCache(tmp_path, limit_bytes=15)
    with cache.open("a", lambda out: out.write(b"0123456789")) as file:
        put(cache, "b")
        assert names(tmp_path) == ["b"] and file.read() == b"0123456789"


def slowly(folder, queue):
    def make(out):
        queue.put("made")
        time.sleep(0.5)
        out.write(b"whole")

    with DiskCache(folder).open("a", make) as file:
        queue.put(file.read())


def test_processes_wait_for_the_one_that_makes_it(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=slowly, args=(tmp_path, queue)) for _ in range(4)]
    for worker in workers:
        worker.start()
    said = [queue.get(timeout=30) for _ in range(5)]
    for worker in workers:
        worker.join()
    assert sorted(map(str, said)) == ["b'whole'"] * 4 + ["made"]


def test_what_fails_leaves_nothing_that_looks_whole(tmp_path):
    def fail(out):
        out.write(b"half")
        raise UserError("the shard can't be read")

    with pytest.raises(UserError, match="the shard can't be read"):
        DiskCache(tmp_path).open("a", fail)
    assert names(tmp_path) == []
    assert put(DiskCache(tmp_path), "a") == b"a" * 10


def test_a_full_disk_is_told_with_what_to_do(tmp_path):
    def full(out):
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"No space left on device.*lower runtime.cache_gb, or name another folder"):
        DiskCache(tmp_path).open("a", full)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't be used"):
        put(DiskCache(tmp_path / "file"), "a")


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "mpp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(default_folder()) == "/home/someone/.cache/mpp"
