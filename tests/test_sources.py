"""mpp/sources.py on real files: what is found, in which order, and what is refused."""

import hashlib
import io
import os
import pickle

import numpy as np
import pytest
from conftest import picture
from PIL import Image

from mpp import sources
from mpp.errors import UserError


def test_the_demo_has_the_measured_size_and_disjoint_pixels():
    train, test = sources.open_source("demo", "train"), sources.open_source("demo", "validation")
    assert (len(train), len(test)) == (4887, 1637)
    assert train.classes == test.classes and len(train.classes) == 10
    assert set(train.labels) == set(test.labels) == set(range(10))
    assert sources.demo.__wrapped__("train").fingerprint == train.fingerprint
    # No test crop of the coffee picture, which is rich in detail, stands anywhere among its training crops.
    label = train.classes.index("coffee")
    seen = {train.pixels[row].tobytes() for row in np.flatnonzero(train.labels == label)}
    assert not any(test.pixels[row].tobytes() in seen for row in np.flatnonzero(test.labels == label))


def test_the_demos_cells_are_disjoint_by_construction(monkeypatch):
    # Each pixel of this picture tells its own place, so crops show which cell they come from.
    rows, columns = np.mgrid[0:256, 0:256]
    places = np.stack([rows, columns, np.zeros_like(rows)], -1).astype(np.uint8)
    monkeypatch.setattr(sources.decoding, "read_rgb", lambda *_: Image.fromarray(places))
    cells = {}
    for split in ("train", "validation"):
        crops = sources.demo.__wrapped__(split).pixels.astype(int)
        first, last = crops[:, 0, 0, :2] // 64, crops[:, -1, -1, :2] // 64
        assert (first == last).all()  # wholly inside one cell
        cells[split] = {tuple(cell) for cell in first}
    assert cells["validation"] == {(i, j) for i in range(4) for j in range(4) if (i + 2 * j) % 4 == 0}
    assert cells["train"] == {(i, j) for i in range(4) for j in range(4)} - cells["validation"]


def test_every_spelling_of_an_image_suffix_counts(folder):
    names = ["a.jpg", "b.JPG", "c.JPEG", "d.PnG"]
    source = folder({f"train/one/{name}": picture() for name in names} | {"train/one/notes.txt": b"no image"})
    assert len(sources.open_source(source, "train")) == 4


def test_class_folders_give_labels_in_sorted_order(folder):
    source = folder({"train/dog/1.png": picture(), "train/cat/2.png": picture(), "train/dog/deep/3.png": picture()})
    found = sources.open_source(source, "train")
    assert found.classes == ["cat", "dog"]
    assert found.labels.tolist() == [0, 1, 1]
    assert list(found.files) == ["cat/2.png", "dog/1.png", "dog/deep/3.png"]


@pytest.mark.parametrize("files", [["a.png", "b.png"], ["a.png", "deeper/b.png"]])
def test_a_folder_without_classes_has_no_labels(folder, files):
    found = sources.open_source(folder({name: picture() for name in files}), "train")
    assert len(found) == 2
    assert found.labels is None and found.classes is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("folder:/nowhere/at/all", "data.source=folder:/nowhere/at/all: no such folder"),
        ("imagenet", "no source of that form; there are demo, folder:PATH"),
        ("folder:", "no source of that form"),
        ("demo:small", "no source of that form"),
        ("synthetic:none", "give a positive number of images"),
        ("hub:/nowhere/at/all", "data.source=hub:/nowhere/at/all: split train can't be loaded"),
    ],
)
def test_sources_that_are_not_there(source, words):
    with pytest.raises(UserError) as refusal:
        sources.open_source(source, "train")
    assert words in str(refusal.value)


def test_an_empty_folder_and_a_missing_split_are_named(folder, tmp_path):
    source = folder({"train/one/a.png": picture()})
    with pytest.raises(UserError, match="no folder validation in it, but train"):
        sources.open_source(source, "validation")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"split train holds no image \(.jpg"):
        sources.open_source(f"folder:{empty}", "train")
    with pytest.raises(UserError, match="the splits train and validation, not test"):
        sources.open_source("demo", "test")


def test_links_are_followed_but_not_in_circles_and_what_is_hidden_is_not(folder, tmp_path):
    source = folder({"train/a/1.png": picture(), "elsewhere/2.png": picture()})
    (tmp_path / "train" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "train" / "a" / "loop").symlink_to(tmp_path / "train")
    found = sources.open_source(source, "train")
    assert list(found.files) == ["a/1.png", "b/2.png"]
    (tmp_path / "train" / "c").symlink_to(tmp_path / "elsewhere")  # two classes of the same images
    (tmp_path / "train" / ".thumbnails").mkdir()
    picture().save(tmp_path / "train" / ".thumbnails" / "3.png")
    assert list(sources.open_source(source, "train").files) == ["a/1.png", "b/2.png", "c/2.png"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list every folder")
def test_a_folder_that_cannot_be_listed_is_named(folder, tmp_path):
    source = folder({"train/a/1.png": picture(), "train/b/1.png": picture()})
    (tmp_path / "train" / "b").chmod(0)
    with pytest.raises(UserError, match="train/b can't be listed"):
        sources.open_source(source, "train")


@pytest.mark.parametrize("content", [b"", b"not an image", None])
def test_a_broken_file_is_named(folder, tmp_path, content):
    file = io.BytesIO()
    Image.effect_noise((80, 80), 90).convert("RGB").save(file, format="JPEG")
    whole = file.getvalue()
    source = folder(
        {"train/a/ok.jpg": picture(), "train/a/bad.jpg": whole[: len(whole) // 2] if content is None else content}
    )
    found = sources.open_source(source, "train")
    with pytest.raises(UserError, match=r"train/a/bad.jpg can't be read as an image: .*; repair or remove it"):
        found.picture(0)
    assert (found.picture(1).width, found.picture(1).height) == (40, 30)


# ---------------------------------------------------------------- lists


def lists(folder, **contents):
    """A folder of lists, and of every image that they name."""
    names = [line.rsplit(maxsplit=1)[0].strip() for text in contents.values() for line in text.splitlines() if line]
    texts = {f"{split}.txt": text.encode() for split, text in contents.items()}
    return folder({name: picture() for name in names} | texts).replace("folder:", "list:")


def test_a_list_keeps_its_order_and_its_labels(folder, tmp_path):
    source = lists(
        folder, train800="images/b.jpg 2\nimages/a 1.jpg 0\n\n", val200="other/c.jpg\t1\r\n", test="b.jpg 4\n"
    )
    found = sources.open_source(source, "train800")
    assert list(found.files) == ["images/b.jpg", "images/a 1.jpg"]
    assert found.labels.tolist() == [2, 0]
    assert found.classes == ["0", "1", "2", "3", "4"]  # the largest label is the test list's
    assert found.name(1) == f"{tmp_path}/images/a 1.jpg" and found.picture(1).width == 40
    assert sources.open_source(source, "val200").labels.tolist() == [1]
    assert sources.open_source(source, "val200").classes == found.classes


def test_another_label_or_another_order_is_another_source(folder, tmp_path):
    source, found = lists(folder, train="a.jpg 0\nb.jpg 1\n"), []
    for text in ("a.jpg 0\nb.jpg 1\n", "b.jpg 1\na.jpg 0\n", "a.jpg 1\nb.jpg 0\n", "a.jpg  0\nb.jpg 1"):
        (tmp_path / "train.txt").write_text(text)
        found.append(sources.open_source(source, "train").fingerprint)
    assert found[3] == found[0] and len(set(found)) == 3


def test_a_folders_fingerprint_has_not_changed(folder):
    source = folder({"train/dog/1.png": picture(), "train/cat/2.png": picture()})
    expected = hashlib.sha256(b"cat/2.png\ndog/1.png").hexdigest()[:12]
    assert sources.open_source(source, "train").fingerprint == expected


def test_the_splits_of_a_list_are_its_files(folder):
    source = lists(folder, train800="a.jpg 0\n", val200="b.jpg 0\n", test="c.jpg 1\n", **{".hidden": "no list\n"})
    assert sources.split_names(source) == ["test", "train800", "val200"]
    assert sources.has_held_out_split(source, "train800", "test")
    assert len(sources.open_source(source, "test")) == 1  # the hidden file is not read


def test_a_single_list_has_no_held_out_split(folder):
    source = lists(folder, train="a.jpg 0\n")
    assert not sources.has_held_out_split(source, "train", "test")


def test_lists_that_are_not_there_are_told_with_those_that_are(folder, tmp_path):
    source = lists(folder, train800="a.jpg 0\n", val200="b.jpg 0\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as refusal:
        sources.open_source(source, "test")
    assert f"{source}: no list test.txt in it, but train800, val200; it needs {tmp_path}/test.txt" in str(refusal.value)
    with pytest.raises(UserError, match=r"no list test.txt in it, but none at all; it needs .*/test.txt, with lines"):
        sources.open_source(f"list:{tmp_path}/empty", "test")
    with pytest.raises(UserError, match=r"data.source=list:/nowhere: no such folder \(looked in /nowhere\)"):
        sources.open_source("list:/nowhere", "test")


@pytest.mark.parametrize("line", ["b.jpg", "b.jpg -1", "b.jpg 1.5", "b.jpg cat", "7", "b.jpg ²", "b.jpg 1000000"])
def test_a_line_that_cannot_be_read_is_told_with_its_place(folder, tmp_path, line):
    source = lists(folder, train="a.jpg 0\n", test="a.jpg 0\n")
    (tmp_path / "test.txt").write_text(f"a.jpg 0\n\n{line}\n", encoding="utf-8")
    for split in ("test", "train"):  # whose classes come from all lists
        with pytest.raises(UserError) as refusal:
            sources.open_source(source, split)
        assert f"{tmp_path}/test.txt:3: {line!r} is no path and label" in str(refusal.value)


@pytest.mark.parametrize("missing", ["images/b.jpg", "nowhere/b.jpg"])
def test_a_file_that_a_list_names_must_be_there(folder, tmp_path, missing):
    source = lists(folder, train="images/a.jpg 0\n", test="images/a.jpg 1\n")
    (tmp_path / "train.txt").write_text(f"images/a.jpg 0\n{missing} 1\n")
    with pytest.raises(UserError, match=rf"{tmp_path}/{missing} is missing, which {tmp_path}/train.txt names"):
        sources.open_source(source, "train")
    assert len(sources.open_source(source, "test")) == 1


def test_a_folder_is_listed_once_and_its_files_are_not_asked_for(folder, monkeypatch):
    source, listed = lists(folder, train="images/a.jpg 0\nimages/b.jpg 1\nc.jpg 0\n"), []
    listing = os.listdir
    monkeypatch.setattr(sources.os, "listdir", lambda path: listed.append(os.path.basename(path)) or listing(path))
    monkeypatch.setattr(sources.Path, "is_file", lambda _: False)
    assert len(sources.open_source(source, "train")) == 3
    assert len(listed) == 2 and "images" in listed


def test_files_in_a_folder_that_may_not_be_listed_are_found_one_by_one(folder, monkeypatch):
    source = lists(folder, train="images/a.jpg 0\nimages/b.jpg 1\n")

    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sources.os, "listdir", refuse)
    assert len(sources.open_source(source, "train")) == 2


# ---------------------------------------------------------------- two sources as one


class Rows:
    """A source of two shards; a row's image is its own name."""

    classes = ("one", "two", "three")

    def __init__(self, labels, classes=classes):
        self.labels, self.classes = labels, list(classes)
        self.fingerprint, self.starts = str(labels), np.array([0, 1, len(labels)])

    def __len__(self):
        return len(self.labels)

    def name(self, row):
        assert 0 <= row < len(self)
        return f"{self.labels[row]} at {row}"

    picture = name

    def encoded(self, row):
        return self.name(row).encode()


def test_joined_sources_follow_on_each_other():
    first, second = Rows(np.array([2, 0, 1])), Rows(np.array([1, 1]))
    joined = sources.Joined(first, second)
    assert len(joined) == 5 and joined.classes == ["one", "two", "three"]
    assert joined.labels.tolist() == [2, 0, 1, 1, 1]
    assert joined.starts.tolist() == [0, 1, 3, 4, 5]
    names = ["2 at 0", "0 at 1", "1 at 2", "1 at 0", "1 at 1"]
    assert [joined.name(row) for row in range(5)] == [joined.picture(row) for row in range(5)] == names
    assert [joined.encoded(row).decode() for row in range(5)] == names
    others = [
        sources.Joined(second, first),
        sources.Joined(first, first),
        sources.Joined(first, Rows(np.array([1, 0]))),
    ]
    assert len({joined.fingerprint, *[other.fingerprint for other in others]}) == 4
    assert joined.fingerprint == sources.Joined(first, second).fingerprint


def test_joined_label_lists_are_as_wide_as_the_wider():
    one, wide, wider = np.array([1, 2]), np.array([[0, 1], [2, -1]]), np.array([[0, 1, 2], [1, -1, -1]])
    for first, second, expected in [
        (wide, wider, [[0, 1, -1], [2, -1, -1], [0, 1, 2], [1, -1, -1]]),
        (wider, wide, [[0, 1, 2], [1, -1, -1], [0, 1, -1], [2, -1, -1]]),
        (one, wide, [[1, -1], [2, -1], [0, 1], [2, -1]]),
        (wide, one, [[0, 1], [2, -1], [1, -1], [2, -1]]),
    ]:
        assert sources.Joined(Rows(first), Rows(second)).labels.tolist() == expected


def test_joined_sources_without_labels_or_bytes_have_none():
    first = Rows(np.array([0, 1]))
    plain = sources.Pictures(np.zeros((2, 4, 4, 3), dtype=np.uint8), None, None)
    for joined in (sources.Joined(first, plain), sources.Joined(plain, plain)):
        assert joined.labels is None and not hasattr(joined, "encoded")
    assert hasattr(sources.Joined(first, first), "encoded")


def test_sources_of_other_classes_are_not_joined():
    first = Rows(np.array([0, 1]))
    assert sources.Joined(first, Rows(np.array([0, 1]), ["one", "two"])).classes == first.classes
    for classes in (["two", "one", "three"], ["one", "two", "three", "four"]):
        with pytest.raises(ValueError, match="can't be joined"):
            sources.Joined(first, Rows(np.array([0, 1]), classes))


def test_the_union_of_two_lists_can_be_read_by_its_rows(folder):
    source = lists(folder, train800="a.jpg 0\nb.jpg 1\n", val200="c.jpg 2\n")
    joined = sources.Joined(*[sources.open_source(source, split) for split in ("train800", "val200")])
    assert joined.labels.tolist() == [0, 1, 2] and joined.starts.tolist() == [0, 2, 3]
    assert [os.path.basename(joined.name(row)) for row in range(3)] == ["a.jpg", "b.jpg", "c.jpg"]
    assert joined.picture(2).width == 40
    assert pickle.loads(pickle.dumps(joined)).encoded(2) == joined.encoded(2)  # as loader processes are sent it
