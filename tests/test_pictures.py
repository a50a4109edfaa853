"""mpp/pictures.py: what the panels show, pixel by pixel, and that the files are pictures."""

import numpy as np
from PIL import Image

from mpp import pictures
from mpp.corruption import KEEP, MASK, RANDOM


def numbered():
    """Four patches of 2 x 2 pixels in the colours 10, 20, 30 and 40."""
    rows = np.repeat(np.repeat(np.array([[10, 20], [30, 40]], dtype=np.uint8), 2, 0), 2, 1)
    return np.stack([rows] * 3, -1)


def test_seen_shows_mask_donor_and_kept():
    plan = {"positions": np.array([0, 1, 3]), "actions": np.array([MASK, RANDOM, KEEP]), "donors": np.array([1, 2, 0])}
    found = pictures.seen(numbered(), plan, 2)[..., 0]
    assert found.tolist() == [[128, 128, 30, 30]] * 2 + [[30, 30, 40, 40]] * 2


def test_fill_replaces_only_what_is_named():
    patch = np.full((1, 2, 2, 3), 99, dtype=np.uint8)
    found = pictures.fill(numbered(), np.array([2]), patch)[..., 0]
    assert found.tolist() == [[10, 10, 20, 20]] * 2 + [[99, 99, 40, 40]] * 2


def colors(path):
    with Image.open(path) as picture:
        return {color[:3] for _, color in picture.convert("RGB").getcolors(10**6)}


def test_the_mosaic_holds_the_predicted_and_the_true_colors(tmp_path):
    images = numbered()[None]
    plan = {"positions": np.array([1, 2]), "actions": np.array([MASK, KEEP]), "donors": np.array([0, 0])}
    truth = np.full((1, 4, 2, 2, 3), (0, 0, 255), dtype=np.uint8)
    predicted = truth.copy()
    predicted[0, 1] = (255, 0, 255)
    pictures.draw_mosaic(tmp_path / "mosaic.png", images, [plan], predicted, truth, ["a name"])
    assert {(0, 0, 255), (255, 0, 255), (128, 128, 128), (10, 10, 10)} <= colors(tmp_path / "mosaic.png")


def test_curves_draw_with_and_without_held_out_figures(tmp_path):
    trained = [{"step": step, "loss": 5.0 / step, "accuracy": 0.1} for step in (1, 2, 3)]
    pictures.draw_curves(tmp_path / "plain.png", trained)
    held_out = {f"held_out_{key}": 0.5 for key in ("loss", "target_entropy", "accuracy", "accuracy_masked", "accuracy_random",
                                                   "accuracy_kept", "nearest_patch_accuracy_masked", "most_frequent_accuracy")}  # fmt: skip
    pictures.draw_curves(tmp_path / "full.png", [{**record, **held_out} for record in trained])
    assert len(colors(tmp_path / "full.png")) > len(colors(tmp_path / "plain.png")) > 10


def test_arms_draw(tmp_path):
    pictures.draw_arms(tmp_path / "arms.png", {"one": [0.5, 0.6], "other": [0.4]}, {"chance": 0.1})
    with Image.open(tmp_path / "arms.png") as picture:
        assert picture.width > 300
