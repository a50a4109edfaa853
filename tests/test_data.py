"""mpp/data.py on real files: crops, what a run reads, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from conftest import batches_of, picture
from PIL import Image

from mpp import data, decoding, draws, sources
from mpp.errors import UserError

# ---- crops


def test_a_crop_stays_inside_and_keeps_area_and_aspect():
    rng = np.random.default_rng(0)
    areas = []
    for _ in range(3000):
        raw = rng.integers(0, 2**64, data.crop_words(), dtype=np.uint64)
        left, top, right, bottom = data._crop_box(500, 375, (0.05, 1.0), draws.uniforms(raw)[1:].tolist())
        assert 0 <= left < right <= 500 and 0 <= top < bottom <= 375
        width, height = right - left, bottom - top
        areas.append(width * height / (500 * 375))
        assert 0.04 < areas[-1] <= 1.0
        assert 0.70 < width / height < 1.42
    assert min(areas) < 0.08 and max(areas) > 0.85


def test_a_crop_that_never_fits_takes_the_middle():
    # Ten draws of the whole area at aspect 4/3 do not fit an upright picture.
    chance = [1.0, 1.0, 0.5, 0.5] * 10
    assert data._crop_box(30, 90, (0.05, 1.0), chance) == (0, 25, 30, 65)


def every_draw(value):
    return np.full(data.crop_words(), value, dtype=np.uint64)


def test_crop_and_flip_are_the_pixels_of_the_box():
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    image, view = decoding.Pixels(pixels), data.View(32, area=(0.5, 1.0))
    raw = every_draw(2**63)  # every draw is 0.5: no flip, aspect 1
    raw[1] = 2**64 - 1  # the whole area
    assert np.array_equal(view.train(image, raw), pixels)
    raw[0] = 0
    assert np.array_equal(view.train(image, raw), pixels[:, ::-1])
    assert np.array_equal(data.View(32, area=(0.5, 1.0), flip=False).train(image, raw), pixels)


def test_the_inception_crop_is_pillows_resize_of_its_box():
    photograph = Image.open(Path(skimage.__file__).parent / "data" / "coffee.png").convert("RGB")
    view = data.View(96)
    for seed in range(5):
        raw = draws.words(seed, "augment", 0, 0, data.crop_words())
        box = data._crop_box(*photograph.size, (0.05, 1.0), draws.uniforms(raw)[1:].tolist())
        expected = np.asarray(photograph.resize((96, 96), Image.Resampling.BILINEAR, box=box)).astype(int)
        expected = expected[:, ::-1] if draws.uniforms(raw)[0] < 0.5 else expected
        # Pillow looks one filter width past the box, which is seen in the outermost pixels only.
        found = view.train(decoding.Pixels(np.array(photograph)), raw).astype(int)
        assert np.abs(found - expected)[3:-3, 3:-3].max() <= 1


def test_the_other_crops_against_pillow():
    pixels = np.random.default_rng(1).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    image, pillow = decoding.Pixels(pixels), Image.fromarray(pixels)
    square = np.asarray(pillow.resize((48, 48), Image.Resampling.BILINEAR)).astype(int)
    short = np.asarray(pillow.resize((72, 48), Image.Resampling.BILINEAR)).astype(int)  # the short side is 48
    raw = every_draw(2**63)  # half of the free way: 8 of 16 pixels down, and 8 or 20 of 16 or 40 to the right
    found = data.View(32, crop="square", resize=48).train(image, raw).astype(int)
    assert np.abs(found - square[8:40, 8:40]).max() <= 1
    found = data.View(32, crop="short_side", resize=48).train(image, raw).astype(int)
    assert np.abs(found - short[8:40, 20:52]).max() <= 1
    center = data.View(32, eval_crop="center", resize=48).evaluate(image).astype(int)
    assert np.abs(center - short[8:40, 20:52]).max() <= 1
    whole = np.asarray(pillow.resize((32, 32), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(data.View(32).evaluate(image).astype(int) - whole).max() <= 1


def test_random_places_reach_every_corner():
    pixels = np.zeros((48, 48, 3), dtype=np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(48)[:, None], np.arange(48)[None]
    view = data.View(32, crop="square", resize=48, flip=False)
    corners = [
        view.train(decoding.Pixels(pixels), draws.words(0, "augment", 0, index, data.crop_words()))[0, 0, :2].tolist()
        for index in range(2000)
    ]
    downs, rights = zip(*corners, strict=True)
    assert set(downs) == set(rights) == set(range(17))


def test_normalize_against_numpy():
    images = np.random.default_rng(0).integers(0, 256, (2, 5, 4, 3), dtype=np.uint8)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = ((images / 255 - mean) / std).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(data.normalize(torch.from_numpy(images), mean, std).numpy(), expected, atol=2e-6)
    paper = data.normalize(torch.from_numpy(images), (0.5,) * 3, (0.5,) * 3).numpy()
    np.testing.assert_array_equal(paper, ((images.astype(np.float32) - 127.5) / 127.5).transpose(0, 3, 1, 2))


# ---- order


def samples(rows=range(10), seed=0):
    source = sources.open_source("synthetic:10", "train")
    return data.TrainingSamples(
        source, rows, seed, data.View(16, area=(0.3, 1.0)), lambda epoch, index: {"key": np.array([epoch, index])}
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
    held_out = data.HeldOutSamples(source, range(10), data.View(16), lambda epoch, index: {})
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
    broken = data.TrainingSamples(source, range(2), 0, data.View(16), lambda epoch, index: {})
    batches = data.load(broken, lambda: iter([[(0, 0), (0, 1)]]), workers, torch.device("cpu"))
    with pytest.raises(UserError) as stop:
        next(batches)
    assert str(stop.value).startswith(str(source.root / "bad.png")) and "Traceback" not in str(stop.value)


# ---- broken images


def broken_folder(folder):
    """Twelve images, each of one colour, of which the third and the eighth are broken."""
    files = {f"train/a/{row:02d}.png": picture((row, row, row)) for row in range(12)}
    return sources.open_source(folder(files | {"train/a/02.png": b"nothing", "train/a/07.png": b""}), "train")


def read_replaced(source, rows=range(12), workers=0, processes=1):
    """Rows that six steps of four read, in their order, and the broken ones that were told of."""
    found, told = {}, []
    for process in range(processes):
        batches = data.training_batches(
            data.TrainingSamples(
                source, rows, 3, data.View(8), lambda epoch, index: {"asked": np.int64(index)}, replace=True
            ),
            first_step=0,
            steps=6,
            batch_size=4,
            micro_batch=2,
            processes=processes,
            process=process,
            workers=workers,
            device=torch.device("cpu"),
            found_broken=told.extend,
        )
        for count, batch in enumerate(batches):
            assert (batch["images"][:, 0, 0, 0] == batch["index"]).all()  # the pixels are those of the index
            step, micro = divmod(count, 2 // processes)
            pairs = zip(batch["index"].tolist(), batch["asked"].tolist(), strict=True)
            found[step, micro * processes + process] = list(pairs)
    return [pair for key in sorted(found) for pair in found[key]], told


@pytest.mark.parametrize("rows", [range(12), np.array([1, 2, 3, 7, 9])])
def test_a_broken_image_is_replaced_by_the_same_other_one_everywhere(folder, rows):
    source = broken_folder(folder)
    found, told = read_replaced(source, rows)
    assert len(found) == 24  # never a shorter epoch
    assert {index for index, _ in found} <= set(rows) - {2, 7}
    assert all(index == asked for index, asked in found if asked not in (2, 7))
    replaced = [asked for index, asked in found if asked in (2, 7)]
    assert len(told) == len(replaced) > 2 and sorted(sample[0][0] for sample in told) == sorted(replaced)
    rows_told = dict(row for sample in told for row in sample)  # a replacement can be broken itself
    assert set(rows_told) == {2, 7}
    assert all(source.name(row) in what for row, what in rows_told.items())
    again, _ = read_replaced(source, rows, workers=2)
    assert again == found
    assert read_replaced(source, rows, processes=2)[0] == found


def test_a_source_of_broken_images_alone_stops(folder):
    source = sources.open_source(folder({f"{row}.png": b"nothing" for row in range(3)}), "train")
    samples = data.TrainingSamples(source, range(3), 0, data.View(8), lambda epoch, index: {}, replace=True)
    with pytest.raises(UserError, match="20 samples drawn in its place are broken, too"):
        next(data.load(samples, lambda: iter([[(0, 0)]]), 0, torch.device("cpu")))


def test_held_out_images_are_not_replaced(folder):
    source = broken_folder(folder)
    held_out = data.HeldOutSamples(source, range(12), data.View(8), lambda epoch, index: {})
    batches = data.held_out_batches(
        held_out, micro_batch=12, processes=1, process=0, workers=0, device=torch.device("cpu")
    )
    with pytest.raises(UserError, match=r"02.png can't be read"):
        next(batches)


# ---- memory


def private_kilobytes():
    """Memory of this process that it shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


class Weighed(data.TrainingSamples):
    """Samples that carry what the worker that reads them weighs."""

    def __getitem__(self, key):
        sample = super().__getitem__(key)
        weighs = key[1] % 16 == 0  # asking takes a while
        return {**sample, "kilobytes": np.int64(private_kilobytes() if weighs else 0)}


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="asks the kernel of Linux")
def test_a_worker_weighs_the_same_for_ten_million_images(folder):
    root = folder({"0000000.png": picture()}).removeprefix("folder:")
    weights = {}
    for count in (1_000, 10_000_000):
        names = sources.Names([])
        names.bytes = np.tile(np.frombuffer(b"0000000.png", np.uint8), count)
        names.ends = np.arange(1, count + 1) * 11
        labels = np.zeros(count, dtype=np.int32)
        source = sources.Folder(Path(root), [], ["a"], labels)
        object.__setattr__(source, "files", names)
        samples = Weighed(source, range(count), 0, data.View(16), lambda epoch, index: {}, labels)
        batches = batches_of(samples, 40, 32, workers=1)
        seen = [batch for batch in batches]
        assert max(int(batch["index"].max()) for batch in seen) > 0.9 * count
        weights[count] = max(int(batch["kilobytes"].max()) for batch in seen)
    assert weights[10_000_000] - weights[1_000] < 8_000  # the names alone are 110 MB


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
        data.labelled_rows(sources.Pictures(np.zeros((1, 2, 2, 3), np.uint8), None, None), 0, None, 0.0)
