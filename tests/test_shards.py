"""mpp/shards.py: Parquet, tar and hub data sets give the rows that were put in, wherever they lie."""

import io
import itertools
import json
import multiprocessing
import os
import tarfile
import time
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
from conftest import batches_of, picture
from PIL import Image

from mpp import data, shards, sources
from mpp.disk_cache import DiskCache, default_folder
from mpp.errors import UserError
from mpp.shards import Columns

NAMES = ["red", "green", "blue"]


def encoded(number):
    """A JPEG that shows its number: the shade of grey is 5 times it."""
    file = io.BytesIO()
    picture((5 * number,) * 3, size=(24, 20)).save(file, format="JPEG", quality=95)
    return file.getvalue()


def shade(source, row):
    """The number of a row's image."""
    return round(float(source.picture(row).region((2, 2, 20, 18)).mean()) / 5)


def write_parquet(path, numbers, labels=None, group=3, label="label", names=NAMES, cells=None, image="image"):
    """A file as `datasets` writes it: {bytes, path} cells, and features in the schema."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {image: cells or [{"bytes": encoded(number), "path": None} for number in numbers]}
    features = {image: {"_type": "Image"}}
    if labels is not None:
        columns[label] = labels
        if names:
            features[label] = {"names": names, "_type": "ClassLabel"}
        elif isinstance(labels[0], list):
            features[label] = {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"}
        else:
            kind = "string" if isinstance(labels[0], str) else "int64"
            features[label] = {"dtype": kind, "_type": "Value"}
    table = pyarrow.table(columns)
    note = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    parquet.write_table(table.replace_schema_metadata(note), path, row_group_size=group)
    return path


def write_tar(path, samples, mode="w"):
    """Samples as {suffix: bytes}, named by their place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for place, members in enumerate(samples):
            for suffix, content in members.items():
                info = tarfile.TarInfo(f"./{path.stem}/{place:04d}.{suffix}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


def three_parquets(tmp_path, **options):
    for part, numbers in enumerate([range(0, 7), range(7, 12), range(12, 20)]):
        write_parquet(tmp_path / f"train-{part}.parquet", numbers, [number % 3 for number in numbers], **options)
    write_parquet(tmp_path / "validation-0.parquet", range(20, 24), [0, 1, 2, 0])
    return f"parquet:{tmp_path}/*.parquet"


def three_tars(tmp_path):
    for part, numbers in enumerate([range(0, 7), range(7, 12), range(12, 20)]):
        samples = [{"jpg": encoded(number), "cls": str(number % 3).encode()} for number in numbers]
        write_tar(tmp_path / f"train-{part}.tar", samples)
    write_tar(tmp_path / "validation-0.tar", [{"cls": b"1", "jpg": encoded(20)}])
    return f"wds:{tmp_path}/*.tar"


KINDS = {"parquet": three_parquets, "wds": three_tars}


@pytest.fixture(params=KINDS)
def source(request, tmp_path):
    return KINDS[request.param](tmp_path)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


# ---- rows


def test_every_row_is_the_one_that_was_put_in(source):
    found = sources.open_source(source, "train")
    assert len(found) == 20 and found.starts.tolist() == [0, 7, 12, 20]
    assert [shade(found, row) for row in range(20)] == list(range(20))
    assert [shade(found, row) for row in (19, 0, 7, 6, 12, 11)] == [19, 0, 7, 6, 12, 11]
    assert found.labels.tolist() == [row % 3 for row in range(20)]
    assert found.classes == (NAMES if source.startswith("parquet") else ["0", "1", "2"])
    assert found.name(8).endswith(f"train-1.{'parquet' if source.startswith('parquet') else 'tar'} row 1")
    assert len(sources.open_source(source, "validation")) == (4 if source.startswith("parquet") else 1)


def test_forked_workers_do_not_move_each_others_files(source):
    found = sources.open_source(source, "train")
    assert shade(found, 3) == 3  # open before the workers are forked
    samples = data.TrainingSamples(found, range(20), 0, data.View(8), lambda epoch, index: {})
    batches = batches_of(samples, 60, 8, workers=2)
    for batch in batches:
        shades = batch["images"].float().mean((1, 2, 3)) / 5
        assert (shades.round().long() == batch["index"]).all()


def test_a_forked_process_opens_files_of_its_own(tmp_path):
    (tmp_path / "a").write_bytes(b"content")
    files = shards._OpenFiles()

    def make():
        return (tmp_path / "a").open("rb"), None

    mine, _ = files.get("a", make)
    assert files.get("a", make)[0] is mine
    child = os.fork()
    if child == 0:
        os._exit(int(files.get("a", make)[0] is mine))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and mine.read() == b"content"
    files.close()


def test_shuffling_stays_within_a_window_of_shards(source):
    found = sources.open_source(source, "train")
    samples = data.TrainingSamples(found, range(20), 0, data.View(8), lambda epoch, index: {}, window=1)
    _, order = samples.order().at(np.arange(20))
    shard = [int(row >= 7) + int(row >= 12) for row in order]
    assert len(list(itertools.groupby(shard))) == 3  # one shard after the other
    some = np.array([1, 3, 8, 13, 14, 19])  # and so does a subset of the rows
    samples = data.TrainingSamples(found, some, 0, data.View(8), lambda epoch, index: {}, window=1)
    _, order = samples.order().at(np.arange(6))
    shard = [int(row >= 7) + int(row >= 12) for row in some[order]]
    assert len(list(itertools.groupby(shard))) == 3 and sorted(order) == list(range(6))


def test_the_fingerprint_follows_the_content(source, tmp_path):
    before = sources.open_source(source, "train").fingerprint
    assert sources.open_source(source, "train").fingerprint == before
    file = next(tmp_path.glob("train-1.*"))
    if file.suffix == ".tar":
        write_tar(file, [{"jpg": encoded(number), "cls": b"0"} for number in range(5)])
    else:
        write_parquet(file, range(30, 35), [0] * 5)
    assert sources.open_source(source, "train").fingerprint != before


# ---- files elsewhere


@pytest.fixture
def elsewhere(tmp_path):
    """Puts files into fsspec's file system in memory, which is not the disk."""
    filesystem = fsspec.filesystem("memory")

    def move():
        for file in tmp_path.iterdir():
            if file.suffix in (".parquet", ".tar"):
                filesystem.pipe(f"/bucket/{file.name}", file.read_bytes())
                file.unlink()

    yield move
    filesystem.rm("/bucket", recursive=True)


def test_files_elsewhere_give_the_same_rows(source, elsewhere, monkeypatch):
    monkeypatch.setattr(shards, "_CELL_BYTES", 1000)  # images lie across the stretches
    local = sources.open_source(source, "train")
    expected, labels = [local.encoded(row) for row in range(20)], local.labels.tolist()
    elsewhere()
    kind, _, pattern = source.partition(":")
    found = sources.open_source(f"{kind}:memory://bucket/{Path(pattern).name}", "train")
    assert [found.encoded(row) for row in range(20)] == expected
    assert found.labels.tolist() == labels
    assert found.unpacked_bytes.sum() > 0


def test_what_is_fetched_stays_within_the_cache_and_is_fetched_again(source, elsewhere, monkeypatch):
    monkeypatch.setattr(shards, "_CELL_BYTES", 1000)
    monkeypatch.setattr(shards, "_OPEN_FILES", 2)
    elsewhere()
    kind, _, pattern = source.partition(":")
    limit = 3000
    found = sources.open_source(f"{kind}:memory://bucket/{Path(pattern).name}", "train", cache_gb=limit / 1e9)
    cells = default_folder() / "cells"
    for _ in range(2):
        for row in range(20):
            assert shade(found, row) == row
            assert sum(file.stat().st_size for file in cells.iterdir() if not file.name.startswith(".")) <= limit


def test_a_shaky_connection_is_tried_again_and_then_named(tmp_path, elsewhere, monkeypatch):
    source = three_parquets(tmp_path)
    elsewhere()
    found = sources.open_source(source.replace(f"{tmp_path}/", "memory://bucket/"), "train")
    filesystem, failures = fsspec.filesystem("memory"), [2]
    real = type(filesystem)._open

    def flaky(self, path, mode="rb", **options):
        if failures[0]:
            failures[0] -= 1
            raise TimeoutError("no answer")
        return real(self, path, mode, **options)

    monkeypatch.setattr(type(filesystem), "_open", flaky)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert shade(found, 0) == 0
    failures[0] = 99
    with pytest.raises(UserError, match=r"memory://bucket/train-2.parquet can't be read in 3 tries: no answer"):
        found.picture(19)


# ---- Parquet


@pytest.mark.parametrize(
    ("options", "classes"),
    [
        ({"names": None}, ["0", "1", "2"]),
        ({"label": "fine", "names": ["a", "b", "c"]}, ["a", "b", "c"]),
    ],
)
def test_labels_of_parquet_columns(tmp_path, options, classes):
    write_parquet(tmp_path / "a.parquet", range(3), [2, 0, 1], **options)
    found = sources.open_source(f"parquet:{tmp_path}/a.parquet", "train")
    assert found.classes == classes and found.labels.tolist() == [2, 0, 1]


def test_texts_become_classes_in_sorted_order(tmp_path):
    write_parquet(tmp_path / "a.parquet", range(4), ["dog", "cat", "dog", "ape"], names=None)
    write_parquet(tmp_path / "b.parquet", range(2), ["zebra", "cat"], names=None)
    found = sources.open_source(f"parquet:{tmp_path}/*.parquet", "train")
    assert found.classes == ["ape", "cat", "dog", "zebra"] and found.labels.tolist() == [2, 1, 2, 0, 3, 1]


def test_plain_binary_columns_are_images_too(tmp_path):
    table = pyarrow.table({"content": [encoded(1), encoded(2)], "id": [7, 8]})
    parquet.write_table(table, tmp_path / "a.parquet")
    found = sources.open_source(f"parquet:{tmp_path}/a.parquet", "train")
    assert [shade(found, row) for row in range(2)] == [1, 2] and found.labels is None


def cells_named(names):
    return [{"bytes": encoded(number), "path": name} for number, name in enumerate(names)]


def test_the_names_that_images_had_as_files_follow_the_rows(tmp_path, elsewhere, monkeypatch):
    names = [f"val/ILSVRC2012_val_{number:08d}.JPEG" for number in (7, 3, 50_000, 1, 2)]
    write_parquet(tmp_path / "a.parquet", range(4), cells=cells_named(names[:4]))
    write_parquet(tmp_path / "b.parquet", range(1), cells=cells_named(names[4:]))
    assert sources.open_source(f"parquet:{tmp_path}/*.parquet", "train").file_names() == names
    again = sources.open_source(f"parquet:{tmp_path}/*.parquet", "train")
    with monkeypatch.context() as patch:
        patch.setattr(parquet, "ParquetFile", None)
        assert again.file_names() == names  # what was read once is kept
    elsewhere()
    assert sources.open_source("parquet:memory://bucket/*.parquet", "train").file_names() == names


def test_images_of_which_one_has_no_name_have_none(tmp_path):
    write_parquet(tmp_path / "whole.parquet", range(2), cells=cells_named(["a.jpg", "b.jpg"]))
    for number, cells in enumerate([cells_named(["a.jpg", None]), [*cells_named(["a.jpg"]), None]]):
        write_parquet(tmp_path / f"{number}.parquet", range(2), cells=cells)
        assert sources.open_source(f"parquet:{tmp_path / str(number)}.parquet", "train").file_names() is None
    parquet.write_table(pyarrow.table({"image": [encoded(1)]}), tmp_path / "2.parquet")  # no place for a name
    assert sources.open_source(f"parquet:{tmp_path}/2.parquet", "train").file_names() is None
    assert sources.open_source(f"parquet:{tmp_path}/whole.parquet", "train").file_names() == ["a.jpg", "b.jpg"]
    both = sources.open_source(f"parquet:{tmp_path}/[w2]*.parquet", "train")
    assert len(both) == 3 and both.file_names() is None


def test_withheld_labels_are_none(tmp_path):
    write_parquet(tmp_path / "a.parquet", range(2), [-1, -1])
    assert sources.open_source(f"parquet:{tmp_path}/a.parquet", "train").labels is None


def test_columns_that_are_not_clear_have_to_be_named(tmp_path):
    cells = [{"bytes": encoded(number), "path": None} for number in range(2)]
    features = {name: {"_type": "Image"} for name in ("left", "right")}
    features |= {name: {"names": NAMES, "_type": "ClassLabel"} for name in ("fine", "coarse")}
    table = pyarrow.table({"left": cells, "right": cells[::-1], "fine": [0, 1], "coarse": [2, 2]})
    note = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    parquet.write_table(table.replace_schema_metadata(note), tmp_path / "a.parquet")
    source = f"parquet:{tmp_path}/a.parquet"
    with pytest.raises(UserError, match=r"images is not clear; say which is meant of left, right by data.image_column"):
        sources.open_source(source, "train")
    with pytest.raises(UserError, match=r"labels is not clear; say which is meant of fine, coarse by data.label_col"):
        sources.open_source(source, "train", Columns("left"))
    found = sources.open_source(source, "train", Columns("right", "coarse"))
    assert shade(found, 0) == 1 and found.labels.tolist() == [2, 2]
    with pytest.raises(UserError, match=r"data.label_column=corse: .* no such column; there are left, right"):
        sources.open_source(source, "train", Columns("right", "corse"))
    with pytest.raises(UserError, match=r"data.image_column=fine: .* holds no encoded images there"):
        sources.open_source(source, "train", Columns("fine", "coarse"))


def test_labels_that_are_no_classes_are_refused(tmp_path):
    table = pyarrow.table({"image": [encoded(0), encoded(1)], "label": [0.5, 1.0]})
    parquet.write_table(table, tmp_path / "a.parquet")
    found = sources.open_source(f"parquet:{tmp_path}/a.parquet", "train")
    with pytest.raises(UserError, match=r"data.label_column=label: labels must be whole numbers or texts"):
        assert found.labels


def test_an_empty_cell_is_named(tmp_path):
    cells = [{"bytes": encoded(0), "path": None}, {"bytes": None, "path": "/somewhere/else.jpg"}]
    write_parquet(tmp_path / "a.parquet", [], cells=cells)
    found = sources.open_source(f"parquet:{tmp_path}/a.parquet", "train")
    assert shade(found, 0) == 0
    with pytest.raises(UserError, match=r"a.parquet row 1 holds no bytes of an image"):
        found.picture(1)


def test_a_broken_shard_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but nothing behind it")
    (tmp_path / "a.tar").write_bytes(encoded(3))
    for source in ("parquet", "wds"):
        file = tmp_path / f"a.{'tar' if source == 'wds' else source}"
        with pytest.raises(UserError, match=rf"{file} can't be read: .*; repair it, or leave it out of data.source"):
            sources.open_source(f"{source}:{file}", "train")


def test_a_row_group_is_unpacked_once_for_all_workers(tmp_path, monkeypatch):
    source = three_parquets(tmp_path, group=4)
    found = sources.open_source(source, "train")
    counts = multiprocessing.get_context("fork").Array("i", 20)
    real = shards.ParquetRows._unpack

    def counted(self, shard, group, out):
        with counts.get_lock():
            counts[group + 5 * self.shards.index(shard)] += 1
        real(self, shard, group, out)

    monkeypatch.setattr(shards.ParquetRows, "_unpack", counted)
    samples = data.TrainingSamples(found, range(20), 0, data.View(8), lambda epoch, index: {})
    batches = batches_of(samples, 20, 4, workers=2)
    assert sum(len(batch["index"]) for batch in batches) == 80
    assert sorted(counts) == [0] * 14 + [1] * 6  # 2 + 2 + 2 row groups


def test_the_index_of_many_shards_is_kept(tmp_path, monkeypatch):
    # What 1.3 million images cost at start is measured by bench/start.py; this is what it counts on.
    source = three_parquets(tmp_path)
    assert sources.open_source(source, "train").labels is not None

    def unreadable(*_, **__):
        raise AssertionError("read again")

    monkeypatch.setattr(shards, "_footer", unreadable)
    monkeypatch.setattr(parquet, "read_table", unreadable)
    again = sources.open_source(source, "train")
    assert len(again) == 20 and again.labels.tolist() == [row % 3 for row in range(20)]


@pytest.mark.parametrize("spoil", [lambda content: b"", lambda content: content[: len(content) // 2]])
def test_what_is_kept_is_made_again_where_it_was_spoiled(source, spoil, elsewhere):
    kind, _, pattern = source.partition(":")
    elsewhere()
    address = f"{kind}:memory://bucket/{Path(pattern).name}"
    assert shade(sources.open_source(address, "train"), 9) == 9
    kept = [file for file in default_folder().rglob("*") if file.is_file() and not file.name.startswith(".")]
    assert {file.parent.name for file in kept} == {"index", "cells"}
    for file in kept:
        file.write_bytes(spoil(file.read_bytes()))
    found = sources.open_source(address, "train")
    assert [shade(found, row) for row in (9, 0, 19)] == [9, 0, 19]


def test_a_file_of_the_same_size_and_time_is_read_anew(source, tmp_path):
    before = sources.open_source(source, "train")
    assert shade(before, 0) == 0 and before.labels[0] == 0
    file = next(tmp_path.glob("train-0.*"))
    status = file.stat()
    if file.suffix == ".tar":
        write_tar(file, [{"jpg": encoded(20 + n), "cls": b"1"} for n in range(7)])
    else:
        write_parquet(file, range(20, 27), [1] * 7)
    content = file.read_bytes()
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = sources.open_source(source, "train")
    assert shade(after, 0) == 20 and after.labels[0] == 1


def test_class_names_that_differ_between_files_are_refused(tmp_path):
    write_parquet(tmp_path / "a.parquet", range(2), [0, 1], names=["cat", "dog"])
    write_parquet(tmp_path / "b.parquet", range(2), [0, 1], names=["dog", "cat"])
    with pytest.raises(UserError, match=r"b.parquet and .*a.parquet have other class names in label, or another order"):
        sources.open_source(f"parquet:{tmp_path}/*.parquet", "train")
    write_parquet(tmp_path / "b.parquet", range(2), image="picture")
    with pytest.raises(UserError, match=r"b.parquet has no column image, which .*a.parquet has"):
        sources.open_source(f"parquet:{tmp_path}/*.parquet", "train")


def test_a_column_of_a_kind_that_nobody_knows_is_no_matter(tmp_path):
    odd = pyarrow.array([[("a", 1)], [("b", 2)]], type=pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    table = pyarrow.table({"image": [encoded(1), encoded(2)], "odd": odd, "label": [1, 0]})
    parquet.write_table(table, tmp_path / "a.parquet")
    found = sources.open_source(f"parquet:{tmp_path}/a.parquet", "train")
    assert shade(found, 1) == 2 and found.labels.tolist() == [1, 0]


def test_labels_that_can_not_count_classes_are_refused(tmp_path):
    write_parquet(tmp_path / "a.parquet", range(2), [2**32, 2**32 + 1], names=None)
    found = sources.open_source(f"parquet:{tmp_path}/a.parquet", "train")
    with pytest.raises(UserError, match=r"data.label_column=label: 4294967297 can't be the number of a class"):
        assert found.labels


def test_a_short_answer_is_asked_for_again_and_not_kept(tmp_path, elsewhere, monkeypatch):
    source = three_tars(tmp_path)
    elsewhere()
    found = sources.open_source(source.replace(f"{tmp_path}/", "memory://bucket/"), "train")
    real, short = shards.Shard.open, [1]

    def cut(self, *options):
        file = real(self, *options)
        return io.BytesIO(file.read()[:700]) if short and short.pop() else file

    monkeypatch.setattr(shards.Shard, "open", cut)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert shade(found, 5) == 5


def test_dropped_cells_give_their_room_back(tmp_path, elsewhere):
    source = three_parquets(tmp_path)
    elsewhere()
    address = source.replace(f"{tmp_path}/", "memory://bucket/")
    found = sources.open_source(address, "train", cache_gb=3000 / 1e9)
    for row in range(20):
        assert shade(found, row) == row
    open_files = [os.fstat(file.fileno()) for file, _ in found._open.files.values()]
    assert sum(status.st_size for status in open_files if status.st_nlink == 0) <= 6000


# ---- tar


def test_a_compressed_or_oddly_ordered_tar(tmp_path):
    many = [{"json": b'{"label": "cat"}', "png": b"x"}, {"png": b"y", "json": b'{"label": "ape"}'}]
    path = write_tar(tmp_path / "a.tar", many)
    found = sources.open_source(f"wds:{path}", "train", Columns(None, "json.label"))
    assert found.classes == ["ape", "cat"] and found.labels.tolist() == [1, 0]
    assert [found.encoded(row) for row in range(2)] == [b"x", b"y"]
    packed = write_tar(tmp_path / "a.tar.gz", many, mode="w:gz")
    with pytest.raises(UserError, match=r"a.tar.gz can't be read"):
        sources.open_source(f"wds:{packed}", "train")


def archive(path, *members):
    """Members as (name, content or link)."""
    with tarfile.open(path, "w") as out:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                out.addfile(info)
            else:
                info.size = len(content)
                out.addfile(info, io.BytesIO(content))
    return path


def test_no_sample_of_a_tar_is_lost_without_a_word(tmp_path):
    ten = [(f"{number}.jpg", encoded(number)) for number in range(10)]
    whole = archive(tmp_path / "a.tar", *ten).read_bytes()
    offset = sources.open_source(f"wds:{tmp_path}/a.tar", "train").offsets[5] - 512

    def refused(content, words):
        (tmp_path / "b.tar").write_bytes(content)
        with pytest.raises(UserError, match=words):
            sources.open_source(f"wds:{tmp_path}/b.tar", "train")

    end = r"b.tar: what follows byte \d+ is not the end of a tar file"
    refused(whole[:offset] + b"x" * 512 + whole[offset + 512 :], end)  # a damaged header
    refused(whole[:offset], end)  # cut between two members
    refused(whole + whole, end)  # two in one
    archive(tmp_path / "c.tar", ten[0], ("1.jpg", "0.jpg"))
    refused((tmp_path / "c.tar").read_bytes(), r"b.tar: 1.jpg is a link or a sparse file")
    archive(tmp_path / "c.tar", ten[0], ("0.JPG", encoded(1)))
    refused((tmp_path / "c.tar").read_bytes(), r"b.tar: sample /0 has jpg twice")


def test_what_is_no_sample_of_a_tar_is_passed_over(tmp_path):
    path = archive(tmp_path / "a.tar", ("._1.jpg", b"resource"), ("1.jpg", encoded(1)), ("README", b"text"))
    found = sources.open_source(f"wds:{path}", "train")
    assert len(found) == 1 and shade(found, 0) == 1


@pytest.mark.parametrize(
    ("labels", "classes", "numbers"),
    [
        ([b"10", b"9\n"], [str(number) for number in range(11)], [10, 9]),
        ([b"-1", b"-1"], None, None),
        ([b"10", b"x"], ["10", "x"], [0, 1]),
    ],
)
def test_labels_of_tar_members(tmp_path, labels, classes, numbers):
    path = write_tar(tmp_path / "a.tar", [{"jpg": encoded(0), "cls": label} for label in labels])
    found = sources.open_source(f"wds:{path}", "train")
    assert found.classes == classes
    assert (found.labels is None) if numbers is None else (found.labels.tolist() == numbers)


def test_labels_that_some_samples_lack(tmp_path):
    members = [{"jpg": encoded(0), "json": b'{"label": null}'}] * 2
    found = sources.open_source(f"wds:{write_tar(tmp_path / 'a.tar', members)}", "train", Columns(None, "json.label"))
    assert found.labels is None
    path = write_tar(tmp_path / "b.tar", [{"jpg": encoded(0), "cls": b"1"}, {"jpg": encoded(0)}])
    with pytest.raises(UserError, match=r"b.tar row 1 has no label, but others have"):
        assert sources.open_source(f"wds:{path}", "train").labels
    path = write_tar(tmp_path / "c.tar", [{"jpg": encoded(0), "cls": b"\xff"}])
    with pytest.raises(UserError, match=r"c.tar: sample ./c/0000 has jpg, cls, and its cls is no text in UTF-8"):
        sources.open_source(f"wds:{path}", "train")


@pytest.mark.parametrize(
    ("members", "columns", "words"),
    [
        ({"txt": b"no image"}, Columns(), "has txt: which is its image is not clear"),
        ({"a.jpg": b"1", "b.jpg": b"2"}, Columns(), r"has a.jpg, b.jpg: which is its image is not clear; say it by"),
        ({"jpg": b"1"}, Columns(None, "cls"), "has jpg, but nothing of data.label_column=cls"),
        ({"jpg": b"1", "json": b"{}"}, Columns(None, "json.label"), "but no label in the JSON of json"),
    ],
)
def test_samples_that_are_not_clear_are_named(tmp_path, members, columns, words):
    path = write_tar(tmp_path / "a.tar", [{"jpg": encoded(0), "cls": b"1", "json": b'{"label": 1}'}, members])
    with pytest.raises(UserError, match=rf"a.tar: sample ./a/0001 .*{words}"):
        sources.open_source(f"wds:{path}", "train", columns if columns.image or columns.label else Columns())


def test_one_of_several_images_can_be_named(tmp_path):
    path = write_tar(tmp_path / "a.tar", [{"a.jpg": encoded(1), "b.jpg": encoded(2)}])
    assert shade(sources.open_source(f"wds:{path}", "train", Columns("b.jpg")), 0) == 2


# ---- several labels an image


def write_lists(path, lists, kind=None, feature=None, name="labels"):
    """A file of images with a column of lists, of an Arrow type, and as the datasets library describes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = pyarrow.array(lists, type=kind)
    table = pyarrow.table({"image": [encoded(number) for number in range(len(lists))], name: labels})
    if feature:
        features = {"image": {"dtype": "binary", "_type": "Value"}, name: feature}
        table = table.replace_schema_metadata({b"huggingface": json.dumps({"info": {"features": features}}).encode()})
    parquet.write_table(table, path, row_group_size=2)
    return f"parquet:{path}"


INT, TEXT = pyarrow.int64(), pyarrow.string()
CLASSES = {"names": NAMES, "_type": "ClassLabel"}
NUMBERS = [[2, 0, 2], [], [1], [0, 1, 2]]  # a class twice, none, one, and all of them
PADDED = [[0, 2, -1], [-1, -1, -1], [1, -1, -1], [0, 1, 2]]
TEXTS = [["dog", "cat"], [], ["ape"], ["cat", "cat"]]
TEXTS_PADDED = [[1, 2], [-1, -1], [0, -1], [1, -1]]


@pytest.mark.parametrize(
    ("kind", "feature", "lists", "classes", "padded"),
    [
        (pyarrow.list_(INT), {"feature": CLASSES, "_type": "List"}, NUMBERS, NAMES, PADDED),
        (pyarrow.list_(INT), {"feature": CLASSES, "length": -1, "_type": "Sequence"}, NUMBERS, NAMES, PADDED),
        (pyarrow.large_list(INT), {"feature": CLASSES, "_type": "LargeList"}, NUMBERS, NAMES, PADDED),
        (pyarrow.list_(INT, 2), {"feature": CLASSES, "length": 2, "_type": "List"}, [[2, 0], [1, 1]], NAMES, [[0, 2], [1, -1]]),
        (pyarrow.list_(INT), None, NUMBERS, ["0", "1", "2"], PADDED),
        (pyarrow.list_(pyarrow.uint8()), None, [[7, 3]], [str(number) for number in range(8)], [[3, 7]]),
        (pyarrow.large_list(pyarrow.int16()), None, NUMBERS, ["0", "1", "2"], PADDED),
        (pyarrow.list_(INT, 2), None, [[2, 0], [1, 1]], ["0", "1", "2"], [[0, 2], [1, -1]]),
        (pyarrow.list_(TEXT), None, TEXTS, ["ape", "cat", "dog"], TEXTS_PADDED),
        (pyarrow.large_list(pyarrow.large_string()), None, TEXTS, ["ape", "cat", "dog"], TEXTS_PADDED),
        (pyarrow.list_(pyarrow.dictionary(pyarrow.int32(), TEXT)), None, TEXTS, ["ape", "cat", "dog"], TEXTS_PADDED),
        (pyarrow.list_(INT), None, [[1], [0]], ["0", "1"], [[1], [0]]),  # a list is one even where each holds one label
    ],
)  # fmt: skip
def test_lists_are_several_labels(tmp_path, kind, feature, lists, classes, padded):
    found = sources.open_source(write_lists(tmp_path / "a.parquet", lists, kind, feature), "train")
    assert isinstance(found, shards.ParquetRows) and found.classes == classes
    assert found.labels.tolist() == padded and found.labels.dtype == np.int32
    assert [shade(found, row) for row in range(len(lists))] == list(range(len(lists)))


@pytest.mark.parametrize(
    ("first", "second", "classes", "labels"),
    [
        ([[5, 1]], [[], [0], [3, 2, 4]], "012345", [[1, 5, -1], [-1] * 3, [-1] * 3, [-1] * 3, [0, -1, -1], [2, 3, 4]]),
        ([["b"]], [["c"], ["a", "b"], []], "abc", [[1, -1], [-1, -1], [-1, -1], [2, -1], [0, 1], [-1, -1]]),
    ],
)
def test_lists_of_several_files(tmp_path, monkeypatch, first, second, classes, labels):
    write_lists(tmp_path / "a.parquet", first)
    write_lists(tmp_path / "b.parquet", [[], []])  # without a single label, which Arrow writes as lists of null
    write_lists(tmp_path / "c.parquet", second)
    source = f"parquet:{tmp_path}/*.parquet"
    found = sources.open_source(source, "train")
    assert found.classes == list(classes) and found.labels.tolist() == labels

    def unreadable(*_, **__):
        raise AssertionError("read again")

    monkeypatch.setattr(shards, "_footer", unreadable)
    monkeypatch.setattr(parquet, "read_table", unreadable)
    assert sources.open_source(source, "train").labels.tolist() == labels


def test_what_earlier_versions_kept_is_not_taken_for_lists(tmp_path):
    source = write_lists(tmp_path / "a.parquet", NUMBERS, feature={"feature": CLASSES, "_type": "List"})
    single = write_parquet(tmp_path / "b.parquet", range(2), [1, 2])
    listed, plain = shards._described([str(tmp_path / "a.parquet"), str(single)])
    footer = {"groups": [[2, 9], [2, 9]], "columns": {"image": "", "labels": ""}}
    shards._kept(listed, "footer", lambda _: np.frombuffer(json.dumps(footer).encode(), dtype=np.uint8))
    shards._kept(listed, "labels labels", lambda _: np.array([9, 9, 9, 9]))
    assert sources.open_source(source, "train").labels.tolist() == PADDED
    shards._kept(plain, "labels label", lambda _: np.array([0, 1]))  # and single labels are still those that were kept
    assert sources.open_source(f"parquet:{single}", "train").labels.tolist() == [0, 1]
    path = write_tar(tmp_path / "a.tar", [{"jpg": encoded(0), "json": b'{"label": [3, 1]}'}])
    (tar,) = shards._described([str(path)])
    kind = [("offset", np.int64), ("size", np.int64), ("label", "S6")]
    shards._kept(tar, "members None json.label", lambda _: np.array([(512, 9, b"[3, 1]")], dtype=kind))
    found = sources.open_source(f"wds:{path}", "train", Columns(None, "json.label"))
    assert found.labels.tolist() == [[1, 3]]


@pytest.mark.parametrize(
    ("lists", "kind", "words"),
    [
        ([[1, -1]], None, "-1 in a list; labels count from 0, and the list of an image without a label is empty"),
        ([[2**31, 0]], None, "2147483648 can't be the number of a class; labels count from 0"),
        ([[2**64 - 1]], pyarrow.list_(pyarrow.uint64()), "18446744073709551615 can't be the number of a class"),
        ([[1, None]], None, "labels must be whole numbers or texts, or lists of them, not null in a list"),
        ([["a", None]], None, "labels must be whole numbers or texts, or lists of them, not null in a list"),
        ([[1], None], None, "or lists of them, not null; write an empty list where an image has no label"),
        ([[1, 0], None], pyarrow.list_(INT, 2), "or lists of them, not null; write an empty list"),
        ([[[1]], [[2]]], None, "or lists of them, not lists of list<element: int64>"),
        ([[{"a": 1}]], None, "or lists of them, not lists of struct<a: int64>"),
        ([[0.5]], None, "or lists of them, not float"),
        ([[True]], None, "or lists of them, not bool"),
        ([[1, 0, 1], [0, 0, 1]], None, r"each list holds 3 zeros and ones, which looks like one a class; write the numbers"),
    ],
)  # fmt: skip
def test_lists_that_are_no_labels_are_refused(tmp_path, lists, kind, words):
    found = sources.open_source(write_lists(tmp_path / "a.parquet", lists, kind), "train")
    for _ in range(2):  # and nothing of it was kept
        with pytest.raises(UserError, match=rf"data.label_column=labels: .*{words}"):
            _ = found.labels
        with pytest.raises(UserError, match=rf"data.label_column=labels: .*{words}"):
            _ = found.classes


def test_lists_with_a_number_past_the_names_are_refused(tmp_path):
    feature = {"feature": CLASSES, "_type": "List"}
    found = sources.open_source(write_lists(tmp_path / "a.parquet", [[0], [1, 3]], feature=feature), "train")
    with pytest.raises(UserError, match=r"data.label_column=labels: label 3, but there are 3 class names"):
        _ = found.labels


def test_two_flags_or_the_lists_of_two_classes_are_labels(tmp_path):
    found = sources.open_source(write_lists(tmp_path / "a.parquet", [[0, 1], [1], [0]]), "train")
    assert found.labels.tolist() == [[0, 1], [1, -1], [0, -1]]
    found = sources.open_source(write_lists(tmp_path / "b.parquet", [["x", "y", "x"], ["y", "y", "x"]]), "train")
    assert found.classes == ["x", "y"] and found.labels.tolist() == [[0, 1], [0, 1]]


def test_lists_without_a_single_label_are_withheld(tmp_path):
    feature = {"feature": CLASSES, "_type": "List"}
    for kind, described in ((INT, feature), (INT, None), (pyarrow.float64(), None), (pyarrow.null(), None)):
        source = write_lists(tmp_path / "a.parquet", [[], []], pyarrow.list_(kind), described)
        found = sources.open_source(source, "train")
        assert found.labels is None and found.classes is None


def test_a_column_of_lists_of_class_labels_is_the_labels(tmp_path):
    feature = {"feature": CLASSES, "_type": "List"}
    found = sources.open_source(write_lists(tmp_path / "a.parquet", NUMBERS, feature=feature, name="seen"), "train")
    assert found.columns == Columns("image", "seen") and found.labels.tolist() == PADDED
    found = sources.open_source(write_lists(tmp_path / "b.parquet", NUMBERS, name="seen"), "train")
    assert found.columns == Columns("image", None)  # plain numbers may be anything
    table = pyarrow.table({"image": [encoded(0)], "fine": [[0, 1]], "coarse": [2]})
    features = {"image": {"dtype": "binary", "_type": "Value"}, "fine": feature, "coarse": CLASSES}
    note = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    parquet.write_table(table.replace_schema_metadata(note), tmp_path / "c.parquet")
    with pytest.raises(UserError, match=r"labels is not clear; say which is meant of fine, coarse by data.label_col"):
        sources.open_source(f"parquet:{tmp_path}/c.parquet", "train")
    for name, labels in (("fine", [[0, 1]]), ("coarse", [2])):
        found = sources.open_source(f"parquet:{tmp_path}/c.parquet", "train", Columns(None, name))
        assert found.classes == NAMES and found.labels.tolist() == labels


def test_files_of_which_some_hold_lists_or_other_names_are_refused(tmp_path):
    feature = {"feature": CLASSES, "_type": "List"}
    write_lists(tmp_path / "a.parquet", NUMBERS, feature=feature)
    for lists, kind in (([0, 1], CLASSES), ([0, 1], None)):
        write_lists(tmp_path / "b.parquet", lists, INT, kind)
        with pytest.raises(UserError, match=r"a.parquet holds lists in labels, and .*b.parquet one value an image"):
            sources.open_source(f"parquet:{tmp_path}/*.parquet", "train")
    other = {"feature": {"names": NAMES[::-1], "_type": "ClassLabel"}, "_type": "List"}
    write_lists(tmp_path / "b.parquet", NUMBERS, feature=other)
    with pytest.raises(
        UserError, match=r"b.parquet and .*a.parquet have other class names in labels, or another order"
    ):
        sources.open_source(f"parquet:{tmp_path}/*.parquet", "train")


def test_lists_of_hub_data_sets(tmp_path):
    import datasets

    feature = {"feature": CLASSES, "_type": "List"}
    write_lists(tmp_path / "set" / "train-0.parquet", NUMBERS, feature=feature, name="seen")
    found = sources.open_source(f"hub:{tmp_path / 'set'}", "train")
    assert isinstance(found, shards.ParquetRows) and found.classes == NAMES and found.labels.tolist() == PADDED
    images = [Image.open(io.BytesIO(encoded(number))) for number in range(4)]
    for number, (kind, lists, classes, padded) in enumerate(
        [
            (datasets.List(datasets.ClassLabel(names=NAMES)), NUMBERS, NAMES, PADDED),
            (datasets.LargeList(datasets.ClassLabel(names=NAMES)), NUMBERS, NAMES, PADDED),
            (datasets.List(datasets.Value("int32")), NUMBERS, ["0", "1", "2"], PADDED),
            (datasets.List(datasets.Value("string")), TEXTS, ["ape", "cat", "dog"], TEXTS_PADDED),
        ]
    ):
        features = datasets.Features({"image": datasets.Image(), "labels": kind})
        rows = datasets.Dataset.from_dict({"image": images, "labels": lists}, features=features)
        rows.save_to_disk(tmp_path / f"saved {number}", num_shards=2)
        found = sources.open_source(f"hub:{tmp_path}/saved {number}", "train")
        assert isinstance(found, shards.ArrowRows) and found.classes == classes and found.labels.tolist() == padded
        order = [3, 2, 0]
        found = shards.ArrowRows(rows.select(order), "some", Columns("image", "labels"))
        assert found.labels.tolist() == [padded[row] for row in order]
    features["labels"] = datasets.List(datasets.Value("int8"))
    rows = datasets.Dataset.from_dict({"image": images[:1], "labels": [[1, -1]]}, features=features)
    with pytest.raises(UserError, match=r"data.label_column=labels: -1 in a list"):
        _ = shards.ArrowRows(rows, "some", Columns("image", "labels")).labels


def tar_of(tmp_path, name, labels, suffix="cls"):
    """A tar file of a label a sample; None for a sample without."""
    samples = [{"jpg": encoded(number), suffix: label} for number, label in enumerate(labels)]
    samples = [{key: content for key, content in sample.items() if content is not None} for sample in samples]
    return f"wds:{write_tar(tmp_path / f'{name}.tar', samples)}"


@pytest.mark.parametrize(
    ("labels", "classes", "padded"),
    [
        ([b"3,1", b"2\n", b" 0 , 3,3", b""], "0123", [[1, 3], [2, -1], [0, 3], [-1, -1]]),
        ([b"10,9"], [str(number) for number in range(11)], [[9, 10]]),
        (["Käfer,ape".encode(), b"ape"], ["Käfer", "ape"], [[0, 1], [1, -1]]),
        ([b"x,1", b"x,1"], ["1", "x"], [[0, 1], [0, 1]]),
    ],
)
def test_commas_separate_the_labels_of_tar_members(tmp_path, labels, classes, padded):
    found = sources.open_source(tar_of(tmp_path, "a", labels), "train")
    assert found.classes == list(classes) and found.labels.tolist() == padded and found.labels.dtype == np.int32
    assert [shade(found, row) for row in range(len(labels))] == list(range(len(labels)))


def test_one_comma_in_any_file_makes_several_labels(tmp_path):
    tar_of(tmp_path, "a", [b"1", b"0"])
    assert sources.open_source(f"wds:{tmp_path}/*.tar", "train").labels.tolist() == [1, 0]
    tar_of(tmp_path, "b", [b"2,0"])
    assert sources.open_source(f"wds:{tmp_path}/*.tar", "train").labels.tolist() == [[1, -1], [0, -1], [0, 2]]


@pytest.mark.parametrize(
    ("labels", "classes", "found"),
    [
        ([[3, 1], [], [2]], "0123", [[1, 3], [-1, -1], [2, -1]]),
        ([[1], [0], []], "01", [[1], [0], [-1]]),
        ([["a, b", "c"], "d, e"], ["a, b", "c", "d, e"], [[0, 1], [2, -1]]),
        (["a, b", "c"], ["a, b", "c"], [0, 1]),  # a text in JSON is one label, with commas or without
        ([[], []], None, None),
        ([None, None], None, None),
    ],
)
def test_lists_in_the_json_of_tar_members(tmp_path, labels, classes, found):
    members = [json.dumps({"label": label}).encode() for label in labels]
    opened = sources.open_source(tar_of(tmp_path, "a", members, "json"), "train", Columns(None, "json.label"))
    assert opened.classes == (classes and list(classes))
    assert (None if opened.labels is None else opened.labels.tolist()) == found


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([b"1,2", None], r"a.tar row 1 has no label, but others have"),
        ([b"1", b""], r"a.tar row 1 has no label, but others have"),
        ([b"1,2", b"3,"], r"data.label_column=cls: 3, holds an empty label; leave it out"),
        ([b"1,2", b"-1"], r"data.label_column=cls: -1 in a list; labels count from 0"),
        ([b"1,2000000"], r"data.label_column=cls: 2000000 can't be the number of a class"),
        ([b"0,1,1", b"1,0,0"], r"data.label_column=cls: each list holds 3 zeros and ones"),
    ],
)
def test_labels_of_tar_members_that_are_refused(tmp_path, labels, words):
    found = sources.open_source(tar_of(tmp_path, "a", labels), "train")
    with pytest.raises(UserError, match=words):
        _ = found.labels


@pytest.mark.parametrize("label", [[1, None], [[1]], [0.5], [True], [{}]])
def test_lists_in_json_that_are_no_labels_are_refused(tmp_path, label):
    source = tar_of(tmp_path, "a", [json.dumps({"label": label}).encode()], "json")
    with pytest.raises(
        UserError, match=r"a/0000 has jpg, json, and label in the JSON of json is \[.*; labels must be whole"
    ):
        sources.open_source(source, "train", Columns(None, "json.label"))


# ---- splits of a glob


def test_splits_are_found_in_names_or_by_a_placeholder(tmp_path):
    source = three_parquets(tmp_path)
    assert len(sources.open_source(f"parquet:{tmp_path}/{{split}}-*.parquet", "validation")) == 4
    assert len(sources.open_source(f"parquet:{tmp_path}/train-{{0..1}}.parquet", "train")) == 12
    assert sources.has_held_out_split(source, "train", "validation")
    assert not sources.has_held_out_split(f"parquet:{tmp_path}/train-*.parquet", "train", "validation")
    with pytest.raises(UserError, match=r"no file of split test, but of train, validation"):
        sources.open_source(source, "test")
    with pytest.raises(UserError, match=r"no file matches for split test"):
        sources.open_source(f"parquet:{tmp_path}/{{split}}-*.parquet", "test")
    with pytest.raises(UserError, match=r"data.source=parquet:.*nothing: no file matches"):
        sources.open_source(f"parquet:{tmp_path}/nothing", "train")
    with pytest.raises(UserError, match=r"train-3.parquet is missing, which \{0..3\} names"):
        sources.open_source(f"parquet:{tmp_path}/train-{{0..3}}.parquet", "train")
    assert len(sources.open_source(f"parquet:{tmp_path}/train-{{0..1}}*.parquet", "train")) == 12
    for split in ("train", "validation"):
        write_parquet(tmp_path / "deep" / split / "0.parquet", range(3 if split == "train" else 2))
    assert len(sources.open_source(f"parquet:{tmp_path}/deep/*/*.parquet", "train")) == 3
    assert sources.split_names(f"parquet:{tmp_path}/deep/*/*.parquet") == ["train", "validation"]
    (tmp_path / "gone.parquet").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no file matches"):
        sources.open_source(f"parquet:{tmp_path}/gone.parquet", "train")
    write_parquet(tmp_path / "a[1]" / "0.parquet", range(2))
    assert len(sources.open_source(f"parquet:{tmp_path}/a[1]/0.parquet", "train")) == 2
    write_parquet(tmp_path / "other" / "a.parquet", range(2))
    with pytest.raises(UserError, match=r"no file is named after a split, so all of them are the training split"):
        sources.open_source(f"parquet:{tmp_path}/other/*", "validation")


# ---- Hugging Face data sets


def test_a_local_copy_of_a_hub_data_set_is_read_where_it_lies(tmp_path):
    write_parquet(tmp_path / "set" / "train-0.parquet", range(4), [0, 1, 2, 0], label="kind")
    write_parquet(tmp_path / "set" / "test-0.parquet", range(2), [0, 1], label="kind")
    found = sources.open_source(f"hub:{tmp_path / 'set'}", "train")
    assert isinstance(found, shards.ParquetRows)
    assert [shade(found, row) for row in range(4)] == [0, 1, 2, 3]
    assert found.classes == NAMES and found.labels.tolist() == [0, 1, 2, 0]
    with pytest.raises(UserError, match=r"split validation can't be loaded"):
        sources.open_source(f"hub:{tmp_path / 'set'}", "validation")
    assert sources.has_held_out_split(f"hub:{tmp_path / 'set'}", "train", "test")
    write_parquet(tmp_path / "alone" / "train-0.parquet", range(4))
    assert not sources.has_held_out_split(f"hub:{tmp_path / 'alone'}", "train", "validation")


def test_a_hub_data_set_of_tar_files(tmp_path):
    write_tar(tmp_path / "set" / "train-0.tar", [{"jpg": encoded(number), "cls": b"1"} for number in range(3)])
    found = sources.open_source(f"hub:{tmp_path / 'set'}", "train")
    assert isinstance(found, shards.TarRows) and [shade(found, row) for row in range(3)] == [0, 1, 2]


def test_other_data_sets_and_saved_ones_go_through_the_library(tmp_path):
    import datasets

    for name, number in (("ape", 3), ("cat", 4)):
        (tmp_path / "set" / "train" / name).mkdir(parents=True)
        (tmp_path / "set" / "train" / name / "1.jpg").write_bytes(encoded(number))
    found = sources.open_source(f"hub:{tmp_path / 'set'}", "train")
    assert isinstance(found, shards.ArrowRows)
    assert found.classes == ["ape", "cat"] and [shade(found, row) for row in range(2)] == [3, 4]
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    rows = datasets.Dataset.from_dict(
        {"img": [Image.open(io.BytesIO(encoded(n))) for n in (7, 8)], "label": [2, 1]}, features=features
    )
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "saved")
    found = sources.open_source(f"hub:{tmp_path / 'saved'}", "train")
    assert found.classes == NAMES and found.labels.tolist() == [2, 1]
    assert [shade(found, row) for row in range(2)] == [7, 8]
    with pytest.raises(UserError, match=r"no split test, but train"):
        sources.open_source(f"hub:{tmp_path / 'saved'}", "test")
    rows.select([1, 0]).save_to_disk(tmp_path / "single")  # one data set is one split, not every split
    found = sources.open_source(f"hub:{tmp_path / 'single'}", "train")
    assert found.labels.tolist() == [1, 2] and [shade(found, row) for row in range(2)] == [8, 7]
    with pytest.raises(UserError, match=r"no split validation, but train"):
        sources.open_source(f"hub:{tmp_path / 'single'}", "validation")


def test_the_cache_is_a_folder_of_its_own():
    assert isinstance(sources.open_source("synthetic:3", "train"), sources.Pictures)
    assert DiskCache(default_folder()).limit is None
