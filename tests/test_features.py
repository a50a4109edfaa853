"""mpp/features.py against timm, in one process and in two, and what is kept on disk."""

import json
import os
import random
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, command, noise_photos

from mpp import data, disk_cache, sources
from mpp.encoders import build_encoder
from mpp.errors import ImageError, UserError
from mpp.features import cached, features, pixels
from mpp.model import MaskedPatchModel, represent

MEAN, STD = (0.4, 0.5, 0.6), (0.25, 0.2, 0.3)


def make_encoder(**changes):
    torch.manual_seed(0)
    shape = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "dropout": 0.5, **changes}
    return build_encoder("vit_tiny_patch16_224", image_size=16, **shape)


def make_source():
    return sources.Pictures(np.random.default_rng(0).integers(0, 256, (23, 16, 16, 3), dtype=np.uint8), None, None)


def read(model, rows, **more):
    return features(model, make_source(), rows, data.View(16), MEAN, STD, **more)


def normalised(rows):
    images = (make_source().pixels[rows] / 255 - np.array(MEAN)) / np.array(STD)
    return torch.from_numpy(images.transpose(0, 3, 1, 2)).float()


def test_raw_pixels_are_the_evaluation_pixels():
    source = sources.open_source("synthetic:4", "train")
    found = pixels(source, np.array([2, 0]), data.View(16))
    assert np.array_equal(found[0], data.whole_image(source.picture(2), 16)) and found.shape == (2, 16, 16, 3)


@pytest.mark.parametrize("micro_batch", [2, 5, 256])
def test_features_are_in_the_order_of_the_rows_whatever_the_batch(micro_batch):
    encoder = make_encoder().train()  # dropout must not reach the features
    rows = np.array([5, 0, 6, 1, 2])
    found = read(encoder, rows, micro_batch=micro_batch)
    tokens = encoder.eval().forward_features(normalised(rows)).detach().numpy()
    assert found.dtype == np.float32 and found.shape == (5, 24)
    assert np.allclose(found, tokens[:, 0], atol=1e-5)
    assert np.array_equal(found, read(encoder, rows, micro_batch=micro_batch))


@pytest.mark.parametrize("kind", [None, "token", "patches"])
@pytest.mark.parametrize("block", [None, 1])
def test_kind_and_block_are_what_represent_gives(kind, block):
    model = MaskedPatchModel(make_encoder(), 8).eval()
    rows = [3, 1]
    expected = represent(model, normalised(rows), kind, block).detach().numpy()
    assert np.allclose(read(model, rows, kind=kind, block=block), expected, atol=1e-5)
    assert np.array_equal(read(model, rows, kind=kind, block=2), read(model, rows, kind=kind))


def test_no_rows_have_a_width():
    assert read(make_encoder(position="relative"), []).shape == (0, 24)


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_of_the_model_changes_and_no_random_number_is_drawn(workers):
    encoder = make_encoder().train()
    encoder.blocks[1].eval()
    modes = [module.training for module in encoder.modules()]
    assert len(set(modes)) == 2
    state = {name: value.clone() for name, value in encoder.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    read(encoder, range(5), micro_batch=2, workers=workers)
    assert torch.equal(torch.get_rng_state(), drawn[0]) and random.getstate() == drawn[1]
    assert np.array_equal(np.random.get_state()[1], drawn[2])
    with pytest.raises(UserError, match="blocks 1 to 2"):
        read(encoder, range(5), block=7)
    assert [module.training for module in encoder.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in encoder.state_dict().items())
    assert all(value.requires_grad and value.grad is None for value in encoder.parameters())


def test_a_broken_image_is_named(tmp_path):
    noise_photos(tmp_path / "photos", 3, broken=[1])
    source = sources.open_source(f"folder:{tmp_path / 'photos'}", "train")
    with pytest.raises(ImageError, match=r"01\.png"):
        features(make_encoder(), source, range(3), data.View(16), MEAN, STD)


# ---------------------------------------------------------------- kept arrays


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mpp" / "features"


class Made:
    """Makes one array after another, and counts them."""

    def __init__(self, *shape):
        self.shape, self.count = shape or (4, 3), 0

    def __call__(self):
        self.count += 1
        return np.random.default_rng(self.count).normal(size=self.shape).astype(np.float32)


def kept(folder):
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def test_an_array_is_computed_once_for_all_that_it_depends_on(folder):
    make = Made()
    first = cached(["weights", "images"], make)
    again = cached(("weights", "images"), make)
    assert make.count == 1 and np.array_equal(first, again) and again.dtype == np.float32
    again += 1  # it is the caller's own
    assert np.array_equal(cached(["weights", "images"], make), first)
    for parts in (["images", "weights"], ["weightsimages"], ["weights", "images", ""], ["weights,images"]):
        before = make.count
        assert not np.array_equal(cached(parts, make), first) and make.count == before + 1
    assert len(kept(folder)) == 5 and all(len(path.stem) >= 32 for path in kept(folder))


def test_an_empty_array_is_kept_too(folder):
    make = Made(0, 24)
    assert cached(["a"], make).shape == cached(["a"], make).shape == (0, 24) and make.count == 1


def cut_short(content):
    return content[: len(content) // 2]


def without_content(content):
    return b""


def zeros(content):
    return bytes(len(content))


def one_bit(content):
    middle = len(content) // 2  # among the numbers
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [cut_short, without_content, zeros, one_bit])
def test_what_a_crash_spoiled_is_made_again(folder, damage):
    make = Made(100, 30)
    cached(["a"], make)
    (file,) = kept(folder)
    file.write_bytes(damage(file.read_bytes()))
    second = cached(["a"], make)
    assert make.count == 2 and np.array_equal(second, cached(["a"], make)) and make.count == 2
    assert np.array_equal(second, np.random.default_rng(2).normal(size=(100, 30)).astype(np.float32))


def test_arrays_that_were_not_read_for_long_go_past_the_limit(folder):
    make = Made(1000, 10)  # 40 kB
    for moment, name in enumerate("abc"):
        cached([name], make, limit_gb=1e-4)
        for path in kept(folder):
            if path.stat().st_mtime > 1000:
                os.utime(path, (moment, moment))
    assert len(kept(folder)) == 2 and make.count == 3
    cached(["c"], make, limit_gb=1e-4)
    assert make.count == 3
    cached(["a"], make, limit_gb=1e-4)
    assert make.count == 4


def test_an_error_while_computing_is_told_as_it_is_and_leaves_nothing(folder):
    def fail():
        raise OSError("of another disk")

    with pytest.raises(OSError, match="of another disk"):
        cached(["a"], fail)
    assert kept(folder) == []
    make = Made()
    assert np.array_equal(cached(["a"], make), cached(["a"], make)) and make.count == 1


def test_the_folder_is_this_packages():
    cached(["a folder of its own"], Made())
    assert len(kept(disk_cache.default_folder() / "features")) >= 1


# ---------------------------------------------------------------- two processes


SHARED_ROWS = np.array([5, 0, 6, 1, 2, 22, 13, 8, 17, 3])
SHARED = [  # rows, micro-batch, workers
    (10, 3, 1),  # the second process has a whole batch, and the one row that is left
    (10, 4, 0),  # the first has two batches, of which the last is short, and the second has one
    (10, 16, 0),  # the second has none
    (1, 1, 0),
    (0, 4, 0),
]


def in_two_processes(out):
    """Runs in each process of the script below."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    process, told = accelerator.process_index, {}
    for number, (count, micro_batch, workers) in enumerate(SHARED):
        more = {"kind": "patches", "block": 1, "workers": workers, "micro_batch": micro_batch}
        found = read(make_encoder(), SHARED_ROWS[:count], accelerator=accelerator, **more)
        np.save(f"{out}/{number}_{process}.npy", found)

    try:
        read(make_encoder(pool="gap"), SHARED_ROWS[:1], kind="token", accelerator=accelerator)
    except UserError as error:
        told["refusal"] = str(error)

    counts = []

    def compute():
        counts.append(1)
        accelerator.wait_for_everyone()  # stands for what needs all of them
        return np.full(3, float(accelerator.gather(torch.tensor([process + 1])).sum()))

    def sums_and_calls(*parts):
        counts.clear()
        found = cached(parts, compute, accelerator=accelerator)
        return [found.tolist(), len(counts)]

    if process == 0:  # the second process must not look for a file before the first has written it
        at_once = disk_cache.DiskCache.open
        disk_cache.DiskCache.open = lambda *arguments: time.sleep(0.3) or at_once(*arguments)
    told["first"], told["again"] = sums_and_calls("a"), sums_and_calls("a")
    accelerator.wait_for_everyone()
    if process == 1:
        os.environ["XDG_CACHE_HOME"] = f"{out}/elsewhere"  # as on another machine, where nothing is kept
    told["elsewhere"], told["elsewhere_again"] = sums_and_calls("a"), sums_and_calls("a")
    with open(f"{out}/told_{process}.json", "w") as file:
        json.dump(told, file)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    script = root / "script.py"
    script.write_text(
        f"import os, sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import test_features\n\n"
        f"os.environ['XDG_CACHE_HOME'] = {str(root / 'cache')!r}  # conftest.py gave each process its own\n"
        f"test_features.in_two_processes({str(root)!r})\n"
    )
    done = command(script, processes=2)
    assert done.returncode == 0, done.stderr
    return root, [json.loads((root / f"told_{process}.json").read_text()) for process in (0, 1)]


@pytest.mark.parametrize("number", range(len(SHARED)))
def test_two_processes_both_have_the_features_of_one_to_the_bit(finished, number):
    count, micro_batch, _ = SHARED[number]
    expected = read(make_encoder(), SHARED_ROWS[:count], kind="patches", block=1, micro_batch=micro_batch)
    assert expected.shape == (count, 24)
    for process in (0, 1):
        assert np.array_equal(np.load(finished[0] / f"{number}_{process}.npy"), expected)


def test_both_processes_refuse_features_that_can_not_be_had_though_one_has_no_image(finished):
    assert all("no class token" in told["refusal"] for told in finished[1])


def test_both_processes_compute_what_either_lacks_and_the_first_keeps_it(finished):
    root, (first, second) = finished
    for told in (first, second):
        assert told["first"] == [[3.0] * 3, 1] and told["again"] == [[3.0] * 3, 0]
        assert told["elsewhere"] == told["elsewhere_again"] == [[3.0] * 3, 1]
    assert len(kept(root / "cache" / "mpp" / "features")) == 1
    assert kept(root / "elsewhere" / "mpp" / "features") == []
