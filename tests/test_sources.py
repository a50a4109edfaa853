"""mpp/sources.py on real files: what is found, in which order, and what is refused."""

import io
import os

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
