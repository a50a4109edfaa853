"""mpp/shards.py: Parquet, tar and hub data sets give the rows that were put in, wherever they lie."""

import io
import itertools
import json
import multiprocessing
import tarfile
import time
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
from conftest import picture
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
    batches = data.training_batches(
        samples,
        first_step=0,
        steps=60,
        batch_size=8,
        micro_batch=8,
        processes=1,
        process=0,
        workers=2,
        device=torch.device("cpu"),
    )
    for batch in batches:
        shades = batch["images"].float().mean((1, 2, 3)) / 5
        assert (shades.round().long() == batch["index"]).all()


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


@pytest.mark.parametrize("labels", [[[1, 2], [0]], [0.5, 1.0]])
def test_labels_that_are_no_classes_are_refused(tmp_path, labels):
    table = pyarrow.table({"image": [encoded(0), encoded(1)], "label": labels})
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
    batches = data.training_batches(
        samples,
        first_step=0,
        steps=20,
        batch_size=4,
        micro_batch=4,
        processes=1,
        process=0,
        workers=2,
        device=torch.device("cpu"),
    )
    assert sum(len(batch["index"]) for batch in batches) == 80
    assert sorted(counts) == [0] * 14 + [1] * 6  # 2 + 2 + 2 row groups


def test_the_index_of_many_shards_is_kept(tmp_path):
    # A scaled measure of what 1.3 million images cost at start stands in bench/loader.py; this is what it counts on.
    source = three_parquets(tmp_path)
    first = sources.open_source(source, "train")
    assert first.labels is not None
    for file in tmp_path.glob("train-*"):  # what is kept is known by path, size and time, not read again
        status = file.stat()
        file.write_bytes(b"x" * status.st_size)
        import os

        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    again = shards.ParquetRows(first.shards, first.columns, first.class_names, first.cache)
    assert len(again) == 20 and again.labels.tolist() == first.labels.tolist()


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


def test_the_cache_is_a_folder_of_its_own():
    assert isinstance(sources.open_source("synthetic:3", "train"), sources.Pictures)
    assert DiskCache(default_folder()).limit is None
