"""mpp/data.py on real files: what is read, in which order, and what is refused."""

import io
import os
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from mpp import data, draws, sources
from mpp.errors import UserError


def picture(color=(200, 100, 50), size=(40, 30)):
    return Image.new("RGB", size, color)


@pytest.fixture
def folder(tmp_path):
    """Writes files below a folder: {"train/cat/a.png": picture, ...}."""

    def write(files):
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                content.save(path, format="JPEG" if name.lower().endswith(("jpg", "jpeg")) else "PNG")
        return f"folder:{tmp_path}"

    return write


# ---- sources


def test_the_demo_has_the_measured_size_and_disjoint_pixels():
    train, test = sources.open_source("demo", "train"), sources.open_source("demo", "validation")
    assert (len(train), len(test)) == (4887, 1637)
    assert train.classes == test.classes and len(train.classes) == 10
    assert set(train.labels) == set(test.labels) == set(range(10))
    assert sources._demo.__wrapped__("", "train").fingerprint == train.fingerprint
    # No test crop of the coffee picture, which is rich in detail, stands anywhere among its training crops.
    label = train.classes.index("coffee")
    seen = {train.pixels[row].tobytes() for row in np.flatnonzero(train.labels == label)}
    assert not any(test.pixels[row].tobytes() in seen for row in np.flatnonzero(test.labels == label))


def test_the_demos_cells_are_disjoint_by_construction(monkeypatch):
    # Each pixel of this picture tells its own place, so crops show which cell they come from.
    rows, columns = np.mgrid[0:256, 0:256]
    places = np.stack([rows, columns, np.zeros_like(rows)], -1).astype(np.uint8)
    monkeypatch.setattr(sources, "_read_image", lambda *_: Image.fromarray(places))
    cells = {}
    for split in ("train", "validation"):
        crops = sources._demo.__wrapped__("", split).pixels.astype(int)
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
    assert found.files == ["cat/2.png", "dog/1.png", "dog/deep/3.png"]


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


def test_links_are_followed_but_no_folder_is_read_twice(folder, tmp_path):
    source = folder({"train/a/1.png": picture(), "elsewhere/2.png": picture()})
    (tmp_path / "train" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "train" / "a" / "loop").symlink_to(tmp_path / "train")
    found = sources.open_source(source, "train")
    assert found.files == ["a/1.png", "b/2.png"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list every folder")
def test_a_folder_that_cannot_be_listed_is_named(folder, tmp_path):
    source = folder({"train/a/1.png": picture(), "train/b/1.png": picture()})
    (tmp_path / "train" / "b").chmod(0)
    with pytest.raises(UserError, match="train/b can't be listed"):
        sources.open_source(source, "train")


def test_hub_columns_that_are_not_clear_are_refused_and_withheld_labels_are_none(tmp_path):
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["red", "blue"])
    for folder, columns in [("two", {"fine": [0], "coarse": [1]}), ("withheld", {"label": [-1]})]:
        features = datasets.Features({"img": datasets.Image(), **{name: names for name in columns}})
        (tmp_path / folder).mkdir()
        rows = datasets.Dataset.from_dict({"img": [picture()], **columns}, features=features)
        rows.to_parquet(tmp_path / folder / "train-0.parquet")
    with pytest.raises(
        UserError, match=r"which columns are meant is not clear \(images: \['img'\], labels: \['fine', 'coarse'\]\)"
    ):
        sources.open_source(f"hub:{tmp_path / 'two'}", "train")
    assert sources.open_source(f"hub:{tmp_path / 'withheld'}", "train").labels is None


def test_a_local_copy_of_a_hub_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["red", "blue"])})
    colors = [(255, 0, 0), (0, 0, 255), (255, 0, 0)]
    rows = {"img": [picture(color) for color in colors], "label": [0, 1, 0]}
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "set" / "train-0.parquet")
    found = sources.open_source(f"hub:{tmp_path / 'set'}", "train")
    assert found.classes == ["red", "blue"] and found.labels.tolist() == [0, 1, 0]
    assert [found.image(row).getpixel((0, 0)) for row in range(3)] == colors


# ---- decoding


def saved(image, **options):
    file = io.BytesIO()
    image.save(file, **options)
    file.seek(0)
    return file


def oriented():
    image = picture()
    exif = image.getexif()
    exif[0x0112] = 6
    return saved(image, format="JPEG", exif=exif)


def bad_metadata():
    """An XMP block that is not UTF-8, with the checksum that belongs to it."""
    info = PngImagePlugin.PngInfo()
    info.add(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0<x:xmpmeta>\xff\xfe\xba\xad</x:xmpmeta>")
    return saved(picture(), format="PNG", pnginfo=info)


@pytest.mark.parametrize(
    ("file", "color", "size"),
    [
        (lambda: saved(picture().convert("L"), format="PNG"), (124, 124, 124), (40, 30)),
        (lambda: saved(picture().convert("CMYK"), format="JPEG"), (200, 100, 50), (40, 30)),
        (lambda: saved(picture().convert("RGBA"), format="PNG"), (200, 100, 50), (40, 30)),
        (lambda: saved(Image.new("RGBA", (40, 30), (9, 9, 9, 0)), format="PNG"), (255, 255, 255), (40, 30)),
        (lambda: saved(Image.new("LA", (40, 30), (9, 0)), format="PNG"), (255, 255, 255), (40, 30)),
        (lambda: saved(picture().convert("P"), format="PNG"), (204, 102, 51), (40, 30)),
        (lambda: saved(Image.fromarray(np.full((30, 40), 0x8040, np.uint16)), format="PNG"), (128, 128, 128), (40, 30)),
        (oriented, (200, 100, 50), (30, 40)),
        (bad_metadata, (200, 100, 50), (40, 30)),
    ],
    ids=["grey", "cmyk", "opaque alpha", "transparent", "grey alpha", "palette", "16 bit", "orientation", "metadata"],
)
def test_odd_encodings_become_the_rgb_they_show(file, color, size):
    found = sources._read_image(file(), "a file")
    assert found.mode == "RGB" and found.size == size
    assert np.abs(np.array(found.getpixel((5, 5))) - color).max() <= 3


def test_malformed_metadata_does_not_cost_an_image():
    exif = b"Exif\x00\x00MM\x00\x2a\x00\x00\x00\x08\x00\x01\x01\x12\x00\x05\x00\x00\x00\x01\x00\x00\xff\xff"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sources._read_image(saved(picture(), format="JPEG", exif=exif), "a file").size == (40, 30)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_unknown_range_are_refused(mode):
    with pytest.raises(UserError, match="32-bit pixels have no known range"):
        sources._read_image(saved(Image.new(mode, (4, 4)), format="TIFF"), "a file")


@pytest.mark.parametrize("content", [b"", b"not an image", None])
def test_a_broken_file_is_named(folder, tmp_path, content):
    whole = saved(Image.effect_noise((80, 80), 90).convert("RGB"), format="JPEG").getvalue()
    source = folder(
        {"train/a/ok.jpg": picture(), "train/a/bad.jpg": whole[: len(whole) // 2] if content is None else content}
    )
    found = sources.open_source(source, "train")
    with pytest.raises(UserError, match=r"train/a/bad.jpg can't be read as an image: .*; repair or remove it"):
        found.image(0)
    assert found.image(1).size == (40, 30)


# ---- crops


def test_a_crop_stays_inside_and_keeps_area_and_aspect():
    rng = np.random.default_rng(0)
    areas = []
    for _ in range(3000):
        raw = rng.integers(0, 2**64, data.crop_words(), dtype=np.uint64)
        left, top, right, bottom = data._crop_box(500, 375, (0.05, 1.0), draws.uniforms(raw)[1:])
        assert 0 <= left < right <= 500 and 0 <= top < bottom <= 375
        width, height = right - left, bottom - top
        areas.append(width * height / (500 * 375))
        assert 0.04 < areas[-1] <= 1.0
        assert 0.70 < width / height < 1.42
    assert min(areas) < 0.08 and max(areas) > 0.85


def test_a_crop_that_never_fits_takes_the_middle():
    # Ten draws of the whole area at aspect 4/3 do not fit an upright picture.
    chance = np.tile([1.0, 1.0, 0.5, 0.5], 10)
    assert data._crop_box(30, 90, (0.05, 1.0), chance) == (0, 25, 30, 65)


def test_crop_and_flip_are_the_pixels_of_the_box():
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    raw = np.full(data.crop_words(), 2**63, dtype=np.uint64)  # every draw is 0.5: no flip, aspect 1
    raw[1] = 2**64 - 1  # the whole area
    image = Image.fromarray(pixels)
    assert np.array_equal(data.training_crop(image, 32, (0.5, 1.0), True, raw), pixels)
    raw[0] = 0
    assert np.array_equal(data.training_crop(image, 32, (0.5, 1.0), True, raw), pixels[:, ::-1])
    assert np.array_equal(data.training_crop(image, 32, (0.5, 1.0), False, raw), pixels)


def test_normalize_against_numpy():
    images = np.random.default_rng(0).integers(0, 256, (2, 5, 4, 3), dtype=np.uint8)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = ((images / 255 - mean) / std).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(data.normalize(torch.from_numpy(images), mean, std).numpy(), expected, atol=2e-6)
    paper = data.normalize(torch.from_numpy(images), (0.5,) * 3, (0.5,) * 3).numpy()
    np.testing.assert_array_equal(paper, ((images.astype(np.float32) - 127.5) / 127.5).transpose(0, 3, 1, 2))


# ---- order


@settings(deadline=None)
@given(
    processes=st.sampled_from([1, 2, 4]),
    micro=st.sampled_from([1, 2, 4]),
    accumulation=st.integers(1, 3),
    step=st.integers(0, 50),
)
def test_a_step_reads_the_same_places_on_any_number_of_processes(processes, micro, accumulation, step):
    batch = processes * micro * accumulation
    read = [
        place
        for process in range(processes)
        for places in data.read_order(step, batch, micro, processes, process)
        for place in places
    ]
    assert sorted(read) == list(range(step * batch, (step + 1) * batch))


def samples(rows=range(10), seed=0):
    source = sources.open_source("synthetic:10", "train")
    return data.TrainingSamples(
        source, np.array(rows), seed, 16, (0.3, 1.0), True, lambda epoch, index: {"key": np.array([epoch, index])}
    )


def read(first_step=0, steps=6, batch_size=4, micro_batch=4, processes=1, workers=0):
    """What all processes read: {(step, epoch, index): pixels}."""
    found = {}
    for process in range(processes):
        batches = data.training_batches(
            samples(),
            first_step=first_step,
            steps=steps,
            batch_size=batch_size,
            micro_batch=micro_batch,
            processes=processes,
            process=process,
            workers=workers,
            device=torch.device("cpu"),
        )
        micro_batches = batch_size // (micro_batch * processes)
        for count, batch in enumerate(batches):
            for key, image in zip(batch["key"].tolist(), batch["images"], strict=True):
                found[(first_step + count // micro_batches, *key)] = image.numpy().tobytes()
    return found


def test_workers_processes_micro_batches_and_start_change_nothing():
    straight = read()
    assert len(straight) == 24
    assert read(workers=2) == straight
    assert read(micro_batch=1) == straight
    assert read(processes=2, micro_batch=2) == straight
    assert read(processes=2, micro_batch=1) == straight
    assert {**read(steps=3), **read(first_step=3)} == straight


def test_an_epoch_reads_every_row_once_and_the_next_in_another_order():
    indices = [index for _, epoch, index in read(steps=5) if epoch == 0]
    assert sorted(indices) == list(range(10))  # 20 samples are two epochs of 10
    again = [index for _, epoch, index in read(steps=5) if epoch == 1]
    assert sorted(again) == list(range(10)) and again != indices


def test_fewer_images_than_a_batch_still_fill_it():
    found = read(steps=1, batch_size=16, micro_batch=16)
    assert len(found) == 16 and {epoch for _, epoch, _ in found} == {0, 1}


@pytest.mark.parametrize("processes", [1, 2, 3, 16])
def test_held_out_images_are_read_once_over_processes(processes):
    source = sources.open_source("synthetic:10", "validation")
    held_out = data.HeldOutSamples(source, np.arange(10), 16, lambda epoch, index: {})
    seen, batches = [], []
    for process in range(processes):
        batches.append(0)
        for batch in data.held_out_batches(
            held_out, micro_batch=3, processes=processes, process=process, workers=0, device=torch.device("cpu")
        ):
            seen += batch["index"].tolist()
            batches[-1] += 1
            assert batch["images"].shape[1:] == (16, 16, 3)
    assert sorted(seen) == list(range(10))
    assert min(batches) >= 1  # a process without images still has counts to reduce


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_stops_the_loader_by_name(folder, workers):
    source = sources.open_source(folder({"a.png": picture(), "bad.png": b"nothing"}), "train")
    broken = data.TrainingSamples(source, np.arange(2), 0, 16, (0.5, 1.0), True, lambda epoch, index: {})
    batches = data.load(broken, lambda: iter([[0, 1]]), workers, torch.device("cpu"))
    with pytest.raises(UserError) as stop:
        next(batches)
    assert str(stop.value).startswith(str(source.root / "bad.png")) and "Traceback" not in str(stop.value)


# ---- labelled subsets


def test_labelled_rows_are_drawn_in_each_class():
    source = sources.open_source("demo", "train")
    fit, choice = data.labelled_rows(source, 0, 20, 0.25)
    assert np.bincount(source.labels[fit]).tolist() == [15] * 10
    assert np.bincount(source.labels[choice]).tolist() == [5] * 10
    assert not set(fit) & set(choice)
    together = set(fit) | set(choice)
    assert set(data.labelled_rows(source, 0, 20, 0.0)[0]) == together
    assert set(data.labelled_rows(source, 0, 30, 0.0)[0]) > together  # a larger subset holds the smaller
    assert set(data.labelled_rows(source, 1, 20, 0.0)[0]) != together


def test_labelled_rows_refuse_what_they_cannot_give(folder):
    source = sources.open_source(
        folder({"train/a/1.png": picture(), "train/b/1.png": picture(), "train/b/2.png": picture()}), "train"
    )
    with pytest.raises(UserError, match="data.per_class=2: class a has 1 images"):
        data.labelled_rows(source, 0, 2, 0.0)
    with pytest.raises(UserError, match=r"data.holdout=0.5: class a has too few images"):
        data.labelled_rows(source, 0, None, 0.5)
    with pytest.raises(UserError, match="the source has no classes"):
        data.labelled_rows(sources.Pictures(source.image(0), None, None), 0, None, 0.0)
