"""mpp/contents.py against hashlib and plain comparison of bytes, and what is kept on disk."""

import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
from conftest import picture
from hypothesis import given
from hypothesis import strategies as st
from test_shards import encoded, three_parquets, three_tars, write_parquet, write_tar

from mpp import shards, sources
from mpp.contents import digest, hashes, require_disjoint, shared
from mpp.disk_cache import default_folder
from mpp.errors import ImageError, UserError
from mpp.shards import Columns


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def first_bytes(content):
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


def files_of(root, contents):
    """A source of files with these bytes, in the order of their numbers."""
    root.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(contents):
        (root / f"{number:04d}.jpg").write_bytes(content)
    return sources.open_source(f"folder:{root}", "train")


def kept():
    folder = default_folder() / "contents"
    return sorted(path for path in folder.iterdir() if path.name[0] != ".") if folder.is_dir() else []


@pytest.fixture
def reads(monkeypatch):
    """Names of the files whose bytes are read in this process."""
    names, read = [], sources.Folder.encoded

    def note(self, row):
        names.append(os.path.basename(self.name(row)))
        return read(self, row)

    monkeypatch.setattr(sources.Folder, "encoded", note)
    return names


# ---- hashes


@pytest.mark.parametrize("workers", [0, 2])
def test_hashes_are_those_of_the_files_in_the_order_of_the_rows(tmp_path, workers):
    source = files_of(tmp_path / "set", [b"no image %d" % number for number in range(100)])
    rows = np.random.default_rng(0).permutation(100)[:70].astype(np.int32)
    found = hashes(source, rows, workers=workers)
    assert found.dtype == np.uint64
    assert found.tolist() == [first_bytes(b"no image %d" % row) for row in rows]
    assert hashes(source, [3, 3, 0]).tolist() == [first_bytes(b"no image %d" % row) for row in (3, 3, 0)]
    assert hashes(source, range(2, 5)).tolist() == [first_bytes(b"no image %d" % row) for row in (2, 3, 4)]


def test_no_rows_have_no_hashes(tmp_path):
    source = files_of(tmp_path / "set", [b"a"])
    assert hashes(source, [], workers=2).shape == (0,)
    assert digest(source, []) == hashlib.sha256(b"").hexdigest()[:32]
    assert shared(source, [], source, [0]) == shared(source, [0], source, []) == []


def test_only_the_rows_that_are_asked_for_are_read_and_only_once(tmp_path, reads):
    source = files_of(tmp_path / "set", [b"%d" % number for number in range(50)])
    before = hashes(source, [7, 31])
    assert reads == ["0007.jpg", "0031.jpg"]
    assert np.array_equal(hashes(source, np.array([7, 31])), before)
    again = sources.open_source(f"folder:{tmp_path / 'set'}", "train")  # as a later run does
    assert np.array_equal(hashes(again, [7, 31]), before) and len(reads) == 2
    assert hashes(source, [31, 7]).tolist() == before[::-1].tolist()  # not what another order has left
    assert len(kept()) == 2


def rewrite(path):
    path.write_bytes(b"other")


def rewrite_with_the_old_times(path):
    status = path.stat()
    path.write_bytes(b"other")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def put_in_its_place(path):
    draft = path.with_name("draft")
    draft.write_bytes(b"other")
    os.utime(draft, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    draft.replace(path)


@pytest.mark.parametrize("change", [rewrite, rewrite_with_the_old_times, put_in_its_place])
def test_a_file_with_other_bytes_has_another_hash_though_its_name_and_size_are_the_same(tmp_path, change):
    source = files_of(tmp_path / "set", [b"first", b"untouched"])
    before = digest(source, [0, 1]), digest(source, [1])
    change(tmp_path / "set" / "0000.jpg")
    assert hashes(source, [0, 1]).tolist() == [first_bytes(b"other"), first_bytes(b"untouched")]
    assert digest(source, [0, 1]) != before[0] and digest(source, [1]) == before[1]


@pytest.mark.parametrize("stamp", ["st_size", "st_mtime_ns", "st_ctime_ns", "st_ino"])
def test_whatever_a_file_system_tells_of_a_file_changes_its_version(tmp_path, monkeypatch, stamp):
    source, told = files_of(tmp_path / "set", [b"a", b"b"]), os.stat

    class Other:
        def __init__(self, status):
            self.status = status

        def __getattr__(self, name):
            return getattr(self.status, name) + (name == stamp)

    before = [source.version(np.array([1])) for _ in range(2)]
    with monkeypatch.context() as patch:  # but not while an assertion reports
        patch.setattr(os, "stat", lambda name: Other(told(name)))
        after = source.version(np.array([1]))
    assert before[0] == before[1] != after


def test_files_and_folders_of_other_names_do_not_share_what_is_kept(tmp_path, monkeypatch):
    one, two = (files_of(tmp_path / name, [b"a", b"b"]) for name in ("one", "two"))
    status = os.stat(one.name(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda _: status)
        found = {source.version(np.array([row])) for source in (one, two) for row in (0, 1)}
    assert len(found) == 4
    monkeypatch.chdir(tmp_path)
    assert sources.Folder("one", ["0000.jpg"], None, None).version(np.array([0])) == one.version(np.array([0]))


def test_what_can_not_be_read_is_named(tmp_path):
    source = files_of(tmp_path / "set", [b"a", b"b", b"c"])
    (tmp_path / "set" / "0001.jpg").unlink()
    (tmp_path / "set" / "0001.jpg").mkdir()
    (tmp_path / "set" / "0002.jpg").unlink()
    for workers in (0, 2):
        with pytest.raises(ImageError, match=r"set/0001.jpg can't be read: Is a directory; repair or remove it"):
            hashes(source, [0, 1], workers=workers)
    with pytest.raises(ImageError, match=r"set/0002.jpg can't be read: No such file or directory; repair or remove"):
        hashes(source, [0, 2])
    assert hashes(source, [0]).tolist() == [first_bytes(b"a")] and len(kept()) == 1


def test_a_shard_that_vanishes_is_not_taken_for_a_fault_of_the_cache(tmp_path):
    source = sources.open_source(three_tars(tmp_path), "train")
    (tmp_path / "train-1.tar").unlink()
    with pytest.raises(ImageError, match=r"train-1.tar row 2 can't be read: No such file or directory"):
        hashes(source, [0, 9])


@pytest.mark.parametrize("damage", [b"", b"half", None])
def test_what_a_crash_has_spoiled_is_read_again(tmp_path, reads, damage):
    source = files_of(tmp_path / "set", [b"a", b"b"])
    before = hashes(source, [0, 1])
    (file,) = kept()
    file.write_bytes(file.read_bytes()[:-8] if damage is None else damage)
    assert np.array_equal(hashes(source, [0, 1]), before) and len(reads) == 4
    np.save(file, np.zeros(1, dtype=np.uint64))
    assert np.array_equal(hashes(source, [0, 1]), before)
    np.save(file, np.zeros(2))
    assert np.array_equal(hashes(source, [0, 1]), before)


def test_pictures_in_memory_are_hashed_by_their_pixels_and_nothing_is_kept():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 6, 4, 3), dtype=np.uint8)
    source = sources.Pictures(pixels, None, None)
    expected = [first_bytes(b"(6, 4, 3)" + pixels[row].tobytes()) for row in (5, 39, 0)]
    for workers in (0, 2):
        assert hashes(source, [5, 39, 0], workers=workers).tolist() == expected
    assert not np.isin(hashes(sources.Pictures(pixels.reshape(40, 4, 6, 3), None, None), range(40)), expected).any()
    assert kept() == []


def test_a_border_that_is_not_to_be_seen_is_not_hashed(tmp_path):
    files = [tmp_path / f"{name}.png" for name in "ab"]
    for file, color in zip(files, ((255, 0, 0), (0, 0, 255)), strict=True):
        image = picture(color, size=(12, 10))
        image.paste((1, 2, 3), (1, 1, 11, 9))
        image.save(file)
    whole = sources.open_source(f"folder:{tmp_path}", "train")
    first, second = hashes(sources.Bordered(whole, 1), [0, 1])
    assert first == second == first_bytes(b"(8, 10, 3)" + bytes([1, 2, 3] * 80))
    assert len(set(hashes(whole, [0, 1]).tolist())) == 2


def test_joined_sources_have_the_hashes_of_their_parts(tmp_path, reads):
    one, two = files_of(tmp_path / "one", [b"a", b"b", b"c"]), files_of(tmp_path / "two", [b"b", b"d"])
    rows = [4, 0, 3, 2, 4]
    expected = [first_bytes(letter) for letter in (b"d", b"a", b"b", b"c", b"d")]
    assert hashes(sources.Joined(one, two), rows).tolist() == expected
    assert hashes(sources.Joined(one, two), rows).tolist() == expected and len(reads) == 5
    memory = sources.open_source("synthetic:2", "train")
    memory = sources.Pictures(memory.pixels, None, None)
    assert hashes(sources.Joined(one, memory), [3, 0]).tolist() == [*hashes(memory, [0]), first_bytes(b"a")]


def test_no_more_loader_processes_begin_than_there_is_work_for(tmp_path):
    # torch warns of more processes than cores, and a warning is an error.
    assert hashes(files_of(tmp_path / "set", [b"a"]), [0], workers=1000).tolist() == [first_bytes(b"a")]
    memory = sources.Pictures(np.zeros((32 * 1000, 1, 1, 3), dtype=np.uint8), None, None)
    assert set(hashes(memory, range(len(memory)), workers=1000).tolist()) == {first_bytes(b"(1, 1, 3)" + bytes(3))}


@pytest.mark.parametrize("workers", [0, 1])
def test_no_random_number_is_drawn(tmp_path, workers):
    source = files_of(tmp_path / "set", [b"a", b"b"])
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    hashes(source, [0, 1], workers=workers)
    assert torch.equal(torch.get_rng_state(), drawn[0]) and random.getstate() == drawn[1]
    assert np.array_equal(np.random.get_state()[1], drawn[2])


# ---- shards


def saved(root, numbers, fingerprint=None):
    """A data set as `save_to_disk` leaves it, with a fingerprint of our choice."""
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    cells = [{"bytes": encoded(number), "path": None} for number in numbers]
    rows = datasets.Dataset.from_dict({"image": cells, "label": [0] * len(cells)}, features=features)
    shutil.rmtree(root, ignore_errors=True)
    rows.save_to_disk(root)
    state = json.loads((root / "state.json").read_text())
    (root / "state.json").write_text(json.dumps(state | {"_fingerprint": fingerprint or state["_fingerprint"]}))
    shards._saved.cache_clear()
    return sources.open_source(f"hub:{root}", "train")


SIDES = {"left": 10, "right": 20}
SHARDS = {
    "parquet": lambda root: sources.open_source(three_parquets(root), "train"),
    "wds": lambda root: sources.open_source(three_tars(root), "train"),
    "hub": lambda root: saved(root / "set", range(20)),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", SHARDS)
def test_rows_in_shards_are_hashed_by_their_encoded_bytes_and_kept(kind, workers, tmp_path, monkeypatch):
    source, rows = SHARDS[kind](tmp_path), [19, 0, 8, 7]
    expected = [first_bytes(encoded(row)) for row in rows]
    assert hashes(source, rows, workers=workers).tolist() == expected
    monkeypatch.setattr(type(source), "encoded", lambda *_: pytest.fail("an image is read again"))
    assert hashes(source, rows).tolist() == expected


@pytest.mark.parametrize("kind", SHARDS)
def test_other_rows_of_the_same_shards_are_not_what_was_kept(kind, tmp_path):
    source = SHARDS[kind](tmp_path)
    for rows in ([3, 4], [4, 3], [11, 19], range(2)):
        assert hashes(source, rows).tolist() == [first_bytes(encoded(row)) for row in rows]


@pytest.mark.parametrize("kind", SHARDS)
def test_shards_that_are_written_anew_are_read_anew(kind, tmp_path):
    def write(first):
        if kind == "hub":
            return saved(tmp_path / "set", [first, 2, 3], fingerprint="0123456789abcdef")
        cells = [{"bytes": bytes([first]) * 9, "path": None}, {"bytes": b"same", "path": None}]
        if kind == "parquet":
            write_parquet(tmp_path / "a.parquet", [], cells=cells)
            return sources.open_source(f"parquet:{tmp_path}/a.parquet", "train")
        write_tar(tmp_path / "a.tar", [{"jpg": cell["bytes"]} for cell in cells])
        return sources.open_source(f"wds:{tmp_path}/a.tar", "train")

    before = write(1)
    old = hashes(before, [0, 1]).tolist()
    after = write(7)
    assert before.fingerprint == after.fingerprint  # which does not tell
    new = hashes(after, [0, 1]).tolist()
    assert new[0] != old[0] and new[1] == old[1]
    assert new[0] == first_bytes(after.encoded(0))


def test_another_column_is_another_image(tmp_path):
    table = pyarrow.table({name: [{"bytes": name.encode(), "path": ""}] for name in ("left", "right")})
    parquet.write_table(table, tmp_path / "a.parquet")
    for name in ("left", "right"):
        source = sources.open_source(f"parquet:{tmp_path}/a.parquet", "train", Columns(image=name))
        assert hashes(source, [0]).tolist() == [first_bytes(name.encode())]


def test_rows_whose_files_lie_elsewhere_are_read_each_time(tmp_path):
    (tmp_path / "set" / "train" / "ape").mkdir(parents=True)
    file = tmp_path / "set" / "train" / "ape" / "1.jpg"
    file.write_bytes(encoded(3))
    source = sources.open_source(f"hub:{tmp_path / 'set'}", "train")
    assert isinstance(source, shards.ArrowRows)
    assert hashes(source, [0]).tolist() == [first_bytes(encoded(3))]
    file.write_bytes(encoded(4))
    assert hashes(source, [0]).tolist() == [first_bytes(encoded(4))]


def test_an_arrow_file_is_kept_by_column_and_order_and_not_at_all_in_memory(tmp_path):
    import datasets

    features = datasets.Features({"left": datasets.Image(), "right": datasets.Image()})
    cells = {side: [{"bytes": encoded(first + row), "path": None} for row in range(2)] for side, first in SIDES.items()}
    rows = datasets.Dataset.from_dict(cells, features=features)
    rows.save_to_disk(tmp_path / "set")
    on_disk = datasets.load_from_disk(tmp_path / "set")
    for table, order in ((on_disk, [0, 1]), (on_disk.select([1, 0]), [1, 0])):
        for side, first in SIDES.items():
            source = shards.ArrowRows(table, "some", Columns(image=side))
            assert hashes(source, [0, 1]).tolist() == [first_bytes(encoded(first + row)) for row in order]
    assert len(kept()) == 4
    assert len(hashes(shards.ArrowRows(rows, "some", Columns(image="left")), [0])) == 1 and len(kept()) == 4


# ---- several processes


def hash_noting_reads(root, note, workers, queue, arrive):
    source = sources.open_source(f"parquet:{root}/*.parquet", "train")
    read = type(source).encoded

    def slowly(self, row):
        with note.open("a") as file:
            file.write(f"{row}\n")
        return read(self, row)

    type(source).encoded = slowly
    arrive.wait(60)
    queue.put(digest(source, range(len(source)), workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_one_of_several_processes_reads_and_the_others_wait(tmp_path, workers):
    for part in range(2):  # its loader processes make files in another cache, of unpacked rows
        write_parquet(tmp_path / f"train-{part}.parquet", range(40 * part, 40 * part + 40), group=10)
    context = multiprocessing.get_context("fork")
    queue, arrive = context.Queue(), context.Barrier(3)
    arguments = (tmp_path, tmp_path / "note", workers, queue, arrive)
    processes = [context.Process(target=hash_noting_reads, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    expected = np.array([first_bytes(encoded(row)) for row in range(80)], dtype=np.uint64)
    assert found == [hashlib.sha256(expected.tobytes()).hexdigest()[:32]] * 3
    assert sorted(map(int, (tmp_path / "note").read_text().split())) == list(range(80))


# ---- digests


def test_a_digest_tells_images_and_their_order_but_neither_names_nor_labels(folder, tmp_path):
    red, blue = picture((255, 0, 0)), picture((0, 0, 255))
    folder({"one/a/1.png": red, "one/b/2.png": blue, "two/a/3.png": red, "two/a/4.png": blue})
    one, two = (sources.open_source(f"folder:{tmp_path / name}", "train") for name in ("one", "two"))
    assert one.labels.tolist() != two.labels.tolist()
    assert re.fullmatch("[0-9a-f]{32}", digest(one, [0, 1]))
    assert digest(one, [0, 1]) == digest(two, [0, 1]) != digest(one, [1, 0])
    assert len({digest(one, rows) for rows in ([0], [1], [0, 0], [0, 1])}) == 4


# ---- what stands in two splits


def in_memory(values):
    pixels = np.repeat(np.array(values, dtype=np.uint8), 12).reshape(-1, 2, 2, 3)
    return sources.Pictures(pixels, None, None)


letters = st.lists(st.integers(0, 6), max_size=12)


@given(letters, letters, st.randoms(use_true_random=False))
def test_shared_images_are_those_with_equal_bytes(train, test, dice):
    train_rows = sorted(dice.sample(range(len(train)), dice.randint(0, len(train))))
    test_rows = dice.sample(range(len(test)), dice.randint(0, len(test)))
    expected = [
        (next(row for row in train_rows if train[row] == test[copy]), copy)
        for copy in sorted(test_rows)
        if any(train[row] == test[copy] for row in train_rows)
    ]
    found = shared(in_memory(train), train_rows, in_memory(test), test_rows)
    assert found == expected
    assert all(type(row) is int for pair in found for row in pair)


def test_more_shared_images_than_are_known_are_refused_with_names_and_remedy(tmp_path):
    train = files_of(tmp_path / "train", [b"a", b"b", b"c", b"d", b"e"])
    test = files_of(tmp_path / "test", [b"x", b"e", b"b", b"b", b"a"])
    everything = (train, range(5), test, range(5))
    assert require_disjoint(*everything, allowed=4, where="data.source=folder:set") == 4
    assert require_disjoint(*everything, allowed=9, where="") == 4
    assert require_disjoint(train, [2, 3], test, range(5), allowed=0, where="") == 0
    with pytest.raises(UserError) as refusal:
        require_disjoint(*everything, allowed=3, where="data.source=folder:set")
    assert str(refusal.value) == (
        "data.source=folder:set: 4 test images are training images, too, byte for byte "
        f"({tmp_path}/test/0001.jpg = {tmp_path}/train/0004.jpg, {tmp_path}/test/0002.jpg = {tmp_path}/train/0001.jpg, "
        f"{tmp_path}/test/0003.jpg = {tmp_path}/train/0001.jpg, ...), so that what is measured on them would be too "
        "good; remove them from one of the splits, or say that so many are known with data.max_overlap=4"
    )
    with pytest.raises(UserError, match=r"0001.jpg = \S+0004.jpg\), so that"):
        require_disjoint(train, [4], test, [0, 1], allowed=0, where="")


def test_ten_test_crops_of_the_demo_are_black_corners_that_are_trained_on():
    train, test = sources.demo("train"), sources.demo("validation")
    seen = {crop.tobytes() for crop in train.pixels}
    assert sum(crop.tobytes() in seen for crop in test.pixels) == 10
    pairs = shared(train, range(len(train)), test, range(len(test)))
    assert len(pairs) == 10 and all(test.pixels[copy].max() < 8 for _, copy in pairs)
    assert all(np.array_equal(train.pixels[row], test.pixels[copy]) for row, copy in pairs)
    for count in (64, 300):
        splits = [sources.open_source(f"synthetic:{count}", split) for split in ("train", "validation")]
        assert shared(splits[0], range(count), splits[1], range(count)) == []
