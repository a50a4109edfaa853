"""mpp/data.py on real files: crops, what a run reads, and what is refused."""

import itertools
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from conftest import batches_of, picture
from PIL import Image
from test_shards import write_lists

from mpp import augmentation, data, decoding, draws, sources
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


# ---- augmentation

AUGMENTED = {"rand_augment": "rand-m9-n2-mstd0.5-inc1", "erasing": 0.5}


@pytest.mark.parametrize("crop", ["inception", "square"])
def test_augmentation_follows_the_same_crop_and_flip_and_has_words_of_its_own(crop):
    image = decoding.Pixels(skimage.data.astronaut()[::4, ::4])
    cut = {"image_size": 32, "crop": crop, "resize": None if crop == "inception" else 48}
    plain, augmented, erased = data.View(**cut), data.View(**cut, **AUGMENTED), data.View(**cut, erasing=0.5)
    assert plain.words() == data.crop_words() == 41  # as in every earlier run
    assert augmented.words() == erased.words() == 43
    changed = np.zeros(2)
    for index in range(40):
        raw = draws.words(0, "augment", 0, index, 43)
        assert np.array_equal(raw[:41], draws.words(0, "augment", 0, index, 41))
        pixels = plain.train(image, raw[:41])
        moved = augmentation.rand_augment(pixels, AUGMENTED["rand_augment"], raw[41])
        expected = augmentation.erase(moved, 0.5, raw[42])
        assert np.array_equal(augmented.train(image, raw), expected)
        assert np.array_equal(erased.train(image, raw), augmentation.erase(pixels, 0.5, raw[42]))
        changed += (moved != pixels).any(), (expected != moved).any()
    assert (changed > 10).all()


def test_evaluation_is_not_augmented():
    image = decoding.Pixels(skimage.data.astronaut()[::4, ::4])
    for cut in ({}, {"eval_crop": "center", "resize": 48}):
        expected = data.View(32, **cut).evaluate(image)
        assert np.array_equal(data.View(32, **cut, rand_augment="rand-p1.0", erasing=1.0).evaluate(image), expected)


def test_a_view_refuses_what_timm_would_not_do_and_travels_to_workers():
    with pytest.raises(UserError, match=r"data.rand_augment=rand-m15: timm would cut the magnitude of 15 to 10"):
        data.View(32, rand_augment="rand-m15")
    view = data.View(32, **AUGMENTED)
    assert pickle.loads(pickle.dumps(view)) == view


# ---- order


def samples(rows=range(10), seed=0, **view):
    source = sources.open_source("synthetic:10", "train")
    return data.TrainingSamples(
        source,
        rows,
        seed,
        data.View(16, area=(0.3, 1.0), **view),
        lambda epoch, index: {"key": np.array([epoch, index])},
    )


def read(first_step=0, steps=6, batch_size=4, micro_batch=4, processes=1, workers=0, **view):
    """What all processes read: {(step, epoch, index): pixels}."""
    found = {}
    for process in range(processes):
        batches = data.training_batches(
            samples(**view),
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


@pytest.mark.parametrize("view", [{}, AUGMENTED])
def test_workers_processes_micro_batches_and_start_change_nothing(view):
    straight = read(**view)
    assert len(straight) == 24
    assert read(workers=2, **view) == straight
    assert read(micro_batch=1, **view) == straight
    assert read(processes=2, micro_batch=2, **view) == straight
    assert read(processes=2, micro_batch=1, **view) == straight
    assert {**read(steps=3, **view), **read(first_step=3, **view)} == straight
    assert (straight == read()) == (not view)


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
def heaviest_worker(root, count):
    """Private memory of a loader process over `count` rows, in kilobytes."""
    names = sources.Names([])
    names.bytes = np.tile(np.frombuffer(b"0000000.png", np.uint8), count)
    names.ends = np.arange(1, count + 1) * 11
    labels = np.zeros(count, dtype=np.int32)
    source = sources.Folder(Path(root), [], ["a"], labels)
    object.__setattr__(source, "files", names)
    samples = Weighed(source, range(count), 0, data.View(16), lambda epoch, index: {}, labels)
    seen = list(batches_of(samples, 40, 32, workers=1))
    assert max(int(batch["index"].max()) for batch in seen) > 0.9 * count
    return max(int(batch["kilobytes"].max()) for batch in seen)


def test_a_worker_weighs_the_same_for_ten_million_images(folder):
    root = folder({"0000000.png": picture()}).removeprefix("folder:")
    few = heaviest_worker(root, 1_000)
    # The names alone are 110 MB. What a worker copies, it copies each time; the kernel may do so now and then by
    # itself, when it gathers small pages into huge ones.
    assert min(heaviest_worker(root, 10_000_000) for _ in range(3)) - few < 8_000


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


def several(lists, classes):
    """A source of images with several labels each."""
    labels = np.full((len(lists), max(map(len, lists))), -1, dtype=np.int32)
    for row, numbers in enumerate(lists):
        labels[row, : len(numbers)] = numbers
    return sources.Pictures(np.zeros((len(lists), 2, 2, 3), np.uint8), classes, labels)


def test_labelled_rows_among_some_rows():
    source = sources.open_source("demo", "train")
    rows = np.flatnonzero(np.arange(len(source)) % 3 == 0).astype(np.int32)
    fit, choice = data.labelled_rows(source, 0, 20, 0.25, rows)
    assert np.bincount(source.labels[fit]).tolist() == [15] * 10
    assert np.bincount(source.labels[choice]).tolist() == [5] * 10
    assert set(fit) | set(choice) < set(rows) and not set(fit) & set(choice)
    assert fit.dtype == choice.dtype == np.int32 and (np.diff(fit) > 0).all() and (np.diff(choice) > 0).all()
    everything = data.labelled_rows(source, 0, None, 0.0, rows)
    assert np.array_equal(everything[0], rows) and len(everything[1]) == 0
    for whole in (range(len(source)), np.arange(len(source), dtype=np.int32)):  # all rows are as none given
        fit, choice = data.labelled_rows(source, 3, 20, 0.25)
        again = data.labelled_rows(source, 3, 20, 0.25, whole)
        assert np.array_equal(again[0], fit) and np.array_equal(again[1], choice)
    assert data.labelled_rows(source, 0, None, 0.0, range(5, 9))[0].tolist() == [5, 6, 7, 8]


def test_labelled_rows_among_some_rows_refuse_by_these_rows():
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    source = sources.Pictures(np.zeros((8, 2, 2, 3), np.uint8), ["a", "b"], labels)
    with pytest.raises(UserError, match=r"data.per_class=2: class b has 1 images"):
        data.labelled_rows(source, 0, 2, 0.0, np.array([0, 1, 4]))
    with pytest.raises(UserError, match=r"data.holdout=0.5: class b has too few images"):
        data.labelled_rows(source, 0, None, 0.5, np.array([0, 1, 4]))
    with pytest.raises(UserError, match=r"data.holdout=0.5: class b has too few images"):
        data.labelled_rows(source, 0, None, 0.5, np.array([0, 1]))
    fit, choice = data.labelled_rows(source, 0, None, 0.0, np.array([0, 1]))  # without a row of b
    assert fit.tolist() == [0, 1] and choice.tolist() == []


@pytest.mark.parametrize("rows", [None, np.arange(0, 90, 3, dtype=np.int32)])
def test_labelled_rows_where_an_image_has_several_labels(rows):
    source = several([[row % 3] * (row % 4 > 0) + [3] * (row % 4 > 2) for row in range(90)], ["a", "b", "c", "d"])
    count = 90 if rows is None else 30
    fit, choice = data.labelled_rows(source, 0, None, 0.26, rows)
    assert len(choice) == round(0.26 * count) and len(fit) == count - len(choice)
    assert sorted([*fit, *choice]) == list(range(90) if rows is None else rows)
    assert (np.diff(fit) > 0).all() and (np.diff(choice) > 0).all()
    again = data.labelled_rows(source, 0, None, 0.26, rows)
    assert np.array_equal(again[0], fit) and np.array_equal(again[1], choice)
    assert not np.array_equal(data.labelled_rows(source, 1, None, 0.26, rows)[1], choice)
    assert set(data.labelled_rows(source, 0, None, 0.4, rows)[1]) > set(choice)
    assert len(data.labelled_rows(source, 0, None, 0.001, rows)[1]) == 1  # at least one
    fit, choice = data.labelled_rows(source, 0, None, 0.0, rows)
    assert len(fit) == count and len(choice) == 0
    with pytest.raises(UserError, match=r"data.per_class=5: images of this source can have several labels"):
        data.labelled_rows(source, 0, 5, 0.0, rows)
    with pytest.raises(UserError, match=r"data.holdout=0.999: .* images are too few to hold one out"):
        data.labelled_rows(source, 0, None, 0.999, rows)


# ---- a part of a split


@pytest.mark.parametrize(
    ("count", "subset", "first"),
    [
        (1000, 10, [245, 248, 309, 343, 404, 541, 588, 893, 998, 999]),
        (1000, 0.01, [245, 248, 309, 343, 404, 541, 588, 893, 998, 999]),
        (1281167, 0.01, [3, 311, 327, 429, 547, 597, 614, 646, 696, 797]),
    ],
)
def test_golden_rows_of_a_part_never_change(count, subset, first):
    # Written down once; a change here changes what every earlier run on a part of a split would read.
    assert data.subset_rows(count, subset)[:10].tolist() == first


@pytest.mark.parametrize("count", [1, 2, 7, 1000, 10007])
def test_parts_have_their_size_and_lie_within_larger_ones(count):
    inside = set()
    for size in sorted({1, count // 10, count // 3, count - 1, count} - {0}):
        rows = data.subset_rows(count, size)
        assert len(rows) == size and inside <= set(rows) <= set(range(count))
        assert all(one < other for one, other in itertools.pairwise(rows))
        assert size == count or rows.dtype == np.int32
        inside = set(rows)


def test_shares_are_rounded_and_all_is_a_range():
    assert [len(data.subset_rows(1000, share)) for share in (0.0004, 0.1234, 0.1236, 0.9999)] == [1, 123, 124, 1000]
    for whole in (None, 1.0, 1000, 0.9999):
        assert data.subset_rows(1000, whole) == range(1000)
    assert len(data.subset_rows(1000, 1)) == 1  # an image, and not the whole share
    with pytest.raises(UserError, match=r"data.subset=1001: the split has 1000 images; use at most that many"):
        data.subset_rows(1000, 1001)


def test_a_part_is_spread_evenly():
    for count in (10_007, 40_000, 1_281_167):
        for share in (0.02, 0.3):
            rows = data.subset_rows(count, share).astype(np.int64)
            for width in (2, 16):
                stretches, turns = rows * width // count, rows % width
                expected = len(rows) / width
                for places in (stretches, turns):  # of the split, and of every second or sixteenth row
                    found = np.bincount(places, minlength=width)
                    assert (abs(found - expected) < 4 * np.sqrt(expected * (1 - 1 / width) * (1 - share))).all()
            neighbours = (np.diff(rows) == 1).sum()
            assert abs(neighbours - share * len(rows)) < 4 * np.sqrt(share * (1 - share) * len(rows))


def test_a_part_is_found_in_chunks(monkeypatch):
    expected = data.subset_rows(100_000, 5_000)
    keys = draws.words(0, "part", 0, 0, 8)
    ranks = draws.permuted(keys, 100_000, np.arange(100_000))
    assert expected.tolist() == sorted(np.argsort(ranks)[:5_000].tolist())
    for chunk in (999, 25_000):
        monkeypatch.setattr(data, "_PART_CHUNK", chunk)
        assert np.array_equal(data.subset_rows(100_000, 5_000), expected)
    monkeypatch.setattr(data, "_PART_CHUNK", 4_000)
    tracemalloc.start()
    assert len(data.subset_rows(1_000_000, 1_000)) == 1_000
    assert tracemalloc.get_traced_memory()[1] < 1_000_000  # a byte a row
    tracemalloc.stop()


# ---- labels and rows on their way to a batch


@pytest.mark.parametrize("rows", [range(9), np.array([0, 1, 4, 7, 8], dtype=np.int32)])
def test_several_labels_and_some_rows_reach_the_batch(tmp_path, rows):
    lists = [[2, 0], [], [1], [5, 3, 4], [0], [0, 1], [], [2], [4, 1]]
    (tmp_path / "set").mkdir()
    for part in range(3):
        write_lists(tmp_path / "set" / f"{part}.parquet", lists[3 * part : 3 * part + 3])
    source = sources.open_source(f"parquet:{tmp_path}/set/*", "train")
    samples = data.TrainingSamples(source, rows, 0, data.View(8), lambda epoch, index: {}, source.labels, window=2)
    seen = []
    for batch in batches_of(samples, len(rows), 4, workers=2):
        assert batch["labels"].shape == (4, 3) and batch["labels"].dtype == torch.int64
        for index, labels in zip(batch["index"].tolist(), batch["labels"].tolist(), strict=True):
            assert [label for label in labels if label >= 0] == sorted(lists[index]) and min([0, *labels]) >= -1
            seen.append(index)
    assert sorted(seen) == sorted([*rows] * 4)  # four epochs, each with every row once
    held_out = data.HeldOutSamples(source, rows, data.View(8), lambda epoch, index: {}, source.labels)
    batches = data.held_out_batches(
        held_out, micro_batch=4, processes=1, process=0, workers=0, device=torch.device("cpu")
    )
    read = [(batch["index"], batch["labels"]) for batch in batches]
    assert torch.cat([index for index, _ in read]).tolist() == list(rows)
    assert torch.cat([labels for _, labels in read]).tolist() == source.labels[np.asarray(rows)].tolist()


@pytest.mark.parametrize("labels", [None, np.array([3, 1, 2], dtype=np.int32)])
def test_one_label_or_none_is_a_number_in_the_batch(labels):
    source = sources.open_source("synthetic:3", "train")
    samples = data.TrainingSamples(source, range(3), 0, data.View(8), lambda epoch, index: {}, labels)
    (batch,) = batches_of(samples, 1, 3, workers=0)
    expected = [-1] * 3 if labels is None else labels[batch["index"]].tolist()
    assert batch["labels"].dtype == torch.int64 and batch["labels"].tolist() == expected
