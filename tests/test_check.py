"""mpp/check.py: what it says of a folder whose content is known."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, command, picture
from PIL import Image
from test_shards import three_parquets, three_tars, write_lists

from mpp import check, sources

DATA = ROOT / "mpp" / "data.py"


def photograph(seed, size=(40, 30)):
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8))


def encoded(image, **options):
    file = io.BytesIO()
    image.save(file, **options)
    return file.getvalue()


def turned(image):
    exif = image.getexif()
    exif[0x0112] = 6
    return encoded(image, format="JPEG", exif=exif)


@pytest.fixture
def odd(folder):
    """Twelve images in two classes: one of each kind, two broken, three the same."""
    same = encoded(photograph(1), format="PNG")
    half = encoded(photograph(9, (200, 150)), format="JPEG")
    return folder(
        {
            "train/cat/a.png": same,
            "train/cat/b.png": same,
            "train/cat/c.jpg": encoded(photograph(2), format="JPEG"),
            "train/cat/d.jpg": turned(photograph(3)),
            "train/cat/e.png": photograph(4).convert("L"),
            "train/cat/f.png": photograph(5).convert("RGBA"),
            "train/cat/g.jpg": encoded(photograph(6).convert("CMYK"), format="JPEG"),
            "train/dog/a.jpg": half[: len(half) // 2],
            "train/dog/b.jpg": b"",
            "train/dog/c.gif": encoded(
                photograph(7).quantize(16), format="GIF", save_all=True, append_images=[photograph(8).quantize(16)]
            ),
            "validation/cat/z.png": same,
            "validation/dog/y.png": photograph(10, (100, 20)),
        }
    )


def test_a_report_says_what_is_in_the_folder(odd):
    report = check.check_split(sources.open_source(odd, "train"), "train", 0)
    assert len(report.source) == 10 and (report.widths > 0).sum() == 8
    assert report.classes == {"cat": 7, "dog": 3}
    assert report.formats == {"PNG": 4, "JPEG": 3, "GIF": 1, "broken": 2}
    assert report.modes == {
        "RGB": 4, "L": 1, "RGBA with transparency": 1, "CMYK": 1, "P, several frames": 1, "broken": 2
    }  # fmt: skip
    assert report.turned == 1 and (report.widths[3], report.heights[3]) == (30, 40)  # as it is seen
    assert report.duplicates() == [[0, 1]]
    assert sorted(report.broken) == [7, 8]
    assert "dog/a.jpg can't be read as an image: image file is truncated" in report.broken[7]
    assert "dog/b.jpg can't be read as an image: it is empty" in report.broken[8]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_command_prints_it_and_leaves_with_2_where_an_image_is_broken(odd, tmp_path, workers):
    done = command(DATA, "check", odd, "--workers", workers, "--output", tmp_path / "report.json")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: 2 of 12 images can't be read; repair or remove them")
    for line in (
        "train: 10 images, 8 of them usable",
        "  classes    2; the largest is cat with 7, the smallest dog with 3",
        "  pixels     40 x 30 in the middle; width 30 to 40, height 30 to 40",
        "  formats    PNG 4, JPEG 3, broken 2, GIF 1",
        "  turned     1 by their EXIF orientation, which is applied",
        "  duplicates 1",
        f"    {tmp_path}/train/cat/a.png = {tmp_path}/train/cat/b.png",
        "  broken     2",
        "validation: 2 images, 2 of them usable",
        f"  of these 1 stand in train as well, such as {tmp_path}/validation/cat/z.png",
    ):
        assert line in done.stdout.splitlines(), done.stdout
    train, validation = json.loads((tmp_path / "report.json").read_text())
    assert [line["row"] for line in train["broken"]] == [7, 8] and validation["broken"] == []
    assert train["usable"] == 8 and train["classes"] == {"cat": 7, "dog": 3} and train["unlabelled"] is None
    assert "  labels" not in done.stdout  # one an image, which is nothing to tell


@pytest.mark.parametrize("make", [three_parquets, three_tars])
def test_sources_in_shards_are_checked_too(make, tmp_path):
    done = command(DATA, "check", make(tmp_path), "--split", "train", "--workers", "0")
    assert done.returncode == 0, done.stderr
    assert "train: 20 images, 20 of them usable" in done.stdout and "classes    3" in done.stdout


def test_a_broken_split_is_not_passed_over(tmp_path):
    source = three_parquets(tmp_path)
    (tmp_path / "validation-0.parquet").write_bytes(b"PAR1 and nothing")
    done = command(DATA, "check", source, "--workers", "0")
    assert done.returncode == 2 and "validation-0.parquet can't be read" in done.stderr


def test_labels_that_can_not_be_used_are_reported(tmp_path):
    write_lists(tmp_path / "a.parquet", [[[1]], [[2]]], name="label")
    done = command(DATA, "check", f"parquet:{tmp_path}/a.parquet", "--workers", "0")
    assert done.returncode == 0, done.stderr
    assert "classes    none that can be used: data.label_column=label: labels must be whole numbers" in done.stdout


def test_several_labels_an_image_are_counted_in_each_class(tmp_path):
    feature = {"feature": {"names": ["ape", "bee", "cat", "dog"], "_type": "ClassLabel"}, "_type": "List"}
    lists = [[2, 0, 2], [], [1, 2], [2], [], [0, 1, 2], []]
    source = write_lists(tmp_path / "a.parquet", lists, feature=feature)
    report = check.check_split(sources.open_source(source, "train"), "train", 0)
    assert report.classes == {"ape": 2, "bee": 2, "cat": 4, "dog": 0}
    assert report.label_counts.tolist() == [2, 0, 2, 1, 0, 3, 0]
    done = command(DATA, "check", source, "--workers", "0", "--output", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    for line in (
        "train: 7 images, 7 of them usable",
        "  classes    4; the largest is cat with 4, the smallest dog with 0",
        "  labels     2 an image in the mean, 3 at most; 3 images have none",
    ):
        assert line in done.stdout.splitlines(), done.stdout
    (train,) = json.loads((tmp_path / "report.json").read_text())
    assert train["classes"] == report.classes and train["unlabelled"] == 3


def test_a_flat_folder_has_one_split(folder):
    done = command(DATA, "check", folder({"a.png": picture(), "b.png": picture((1, 2, 3))}), "--workers", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("images") == 1 and "train: 2 images, 2 of them usable\n  classes    none" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "folder:/nowhere"], "error: data.source=folder:/nowhere: no such folder"),
        (["check", "photos"], "error: data.source=photos: no source of that form; there are demo, folder:PATH"),
        (
            ["check", "demo", "--split", "tests"],
            "error: data.source=demo has the splits train and validation, not tests",
        ),
    ],
)
def test_faults_are_one_message(arguments, words):
    done = command(DATA, *arguments)
    assert done.returncode == 2 and done.stderr.startswith(words) and len(done.stderr.splitlines()) == 1


def test_help_from_anywhere_and_as_a_module(tmp_path):
    done = command(DATA, "--help", cwd=tmp_path)
    assert (
        done.returncode == 0
        and "check SOURCE" in done.stdout.replace("{check} ", "check ")
        and "example:" in done.stdout
    )
    done = subprocess.run([sys.executable, "-m", "mpp.data", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == ""
