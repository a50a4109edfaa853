"""mpp/pictures.py: what the panels show, pixel by pixel, and that the files are pictures."""

import numpy as np
import pytest
from PIL import Image

from mpp import pictures
from mpp.corruption import KEEP, MASK, RANDOM
from mpp.intervals import Interval


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


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws a picture, and returns the panels that have axes."""
    close = pictures.plt.close

    def draw(function, *arguments):
        figures = []
        monkeypatch.setattr(pictures.plt, "close", figures.append)
        function(tmp_path / "picture.png", *arguments)
        with Image.open(tmp_path / "picture.png") as picture:
            assert picture.format == "PNG" and picture.width > 300
        (figure,) = figures
        close(figure)
        return [axis for axis in figure.axes if axis.axison]

    return draw


def points(axis, label=None):
    """Of the lines of a panel, or of those of one label: (x, y) of each point."""
    lines = [line for line in axis.lines if label is None or line.get_label() == label]
    return [tuple(point) for line in lines for point in np.column_stack(line.get_data()).tolist()]


def texts(legend):
    return [text.get_text() for text in legend.get_texts()]


def test_curves_have_a_panel_of_probes_where_there_are_any(drawn):
    trained = [{"step": step, "loss": 5.0 / step, "accuracy": 0.1} for step in (10, 20, 30)]
    assert len(drawn(pictures.draw_curves, trained)) == 2
    trained[0] |= {"probe_1_shot_accuracy": 0.25, "probe_20_nn_accuracy": 0.5}
    trained[2] |= {"probe_1_shot_accuracy": 0.75, "probe_20_nn_accuracy": 0.625}
    loss, _, probes = drawn(pictures.draw_curves, trained)
    assert points(probes, "1-shot") == [(10, 0.25), (30, 0.75)]
    assert points(probes, "20-NN") == [(10, 0.5), (30, 0.625)]
    assert texts(probes.get_legend()) == ["1-shot", "20-NN"]
    assert probes.get_ylim() == (0, 1) and probes.get_xlim() == loss.get_xlim()
    assert points(loss, "training") == [(10, 0.5), (20, 0.25), (30, 5 / 30)]


ARMS = {
    "crops": {
        "from scratch": (Interval(0.5, 0.25, 0.625), [0.375, 0.625]),
        "self-supervised": (Interval(0.75, 0.75, 1.0), [0.75]),
    },
    "other images": {"from scratch": (Interval(0.125, 0.0, 0.25), [0.125, 0.125])},
}


def test_arms_are_bars_with_intervals_and_a_dot_a_seed(drawn):
    crops, other = drawn(pictures.draw_arms, ARMS, {})
    assert (crops.get_title(), other.get_title()) == ("crops", "other images")
    assert [bar.get_height() for bar in crops.patches] == [0.5, 0.75]
    assert [bar.get_height() for bar in other.patches] == [0.125]
    bars = [collection.get_segments()[0][:, 1].tolist() for collection in crops.collections]
    assert bars == [[0.25, 0.625], [0.75, 1.0]]  # the ends of the intervals
    dots = [line for line in crops.lines if line.get_marker() == "."]
    assert [line.get_ydata().tolist() for line in dots] == [[0.375, 0.625], [0.75]]
    assert abs(dots[0].get_xdata()).max() < 0.3 and dots[1].get_xdata().tolist() == [1.0]
    assert [text.get_text() for text in crops.texts] == ["50.0", "75.0"]
    assert [tick.get_text() for tick in crops.get_xticklabels()] == ["from\nscratch", "self-\nsupervised"]
    assert crops.get_legend() is None


def test_baselines_are_lines_across_the_arms(drawn):
    (panel,) = drawn(pictures.draw_arms, {"crops": ARMS["crops"]}, {"chance": 0.125, "raw pixels": 0.25})
    assert texts(panel.get_legend()) == ["chance, 12.5", "raw pixels, 25.0"]
    for label, height in (("chance, 12.5", 0.125), ("raw pixels, 25.0", 0.25)):
        assert points(panel, label) == [(0, height), (1, height)]  # from the left to the right end


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_every_test_set_and_task_has_a_panel(drawn, count):
    arms = {f"set {number}": ARMS["crops"] for number in range(count)}
    assert [axis.get_title() for axis in drawn(pictures.draw_arms, arms, {})] == list(arms)
    curves = {f"task {number}": {"a": ({0.1: 0.5, 1.0: 0.6}, 1.0)} for number in range(count)}
    assert [axis.get_title() for axis in drawn(pictures.draw_rates, curves)] == list(curves)


def test_rates_are_lines_with_a_ring_at_the_chosen_and_a_cross_where_one_diverged(drawn):
    curves = {
        "crops": {
            "self-supervised": ({0.1: 0.75, 0.01: 0.5, 1.0: None}, 0.1),
            "from scratch": ({0.01: 0.25, 0.1: 0.125}, 0.01),
            "failed": ({0.01: None, 0.1: None}, None),
            "chosen elsewhere": ({0.1: 0.25}, 0.3),
        }
    }
    (panel,) = drawn(pictures.draw_rates, curves)
    assert panel.get_xscale() == "log" and panel.get_ylim() == (0, 1)
    assert points(panel, "self-supervised") == [(0.01, 0.5), (0.1, 0.75)]  # rising, whatever the order of the list
    assert points(panel, "from scratch") == [(0.01, 0.25), (0.1, 0.125)]
    of = {line.get_label(): line.get_color() for line in panel.lines if not line.get_label().startswith("_")}
    assert len(set(of.values())) == 4
    rings = {
        (line.get_color(), *points(panel, line.get_label())[0])
        for line in panel.lines
        if line.get_fillstyle() == "none"
    }
    assert rings == {(of["self-supervised"], 0.1, 0.75), (of["from scratch"], 0.01, 0.25)}
    crosses = {(line.get_color(), line.get_xdata()[0]) for line in panel.lines if line.get_marker() == "x"}
    assert crosses == {(of["self-supervised"], 1.0), (of["failed"], 0.01), (of["failed"], 0.1)}
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["0.01", "0.1", "1"]


def test_shots_are_dots_with_a_line_through_their_means(drawn):
    measured = [(5, 0.5), (1, 0.125), (5, 0.75), (25, 0.875), (1, 0.375)]
    (panel,) = drawn(pictures.draw_shots, [{"shots": shots, "value": value, "seed": 0} for shots, value in measured])
    line, *dots = panel.lines
    assert np.column_stack(line.get_data()).tolist() == [[1, 0.25], [5, 0.625], [25, 0.875]]
    found = [tuple(point) for line in dots for point in np.column_stack(line.get_data()).tolist()]
    assert sorted(found) == sorted(measured)
    assert panel.get_xscale() == "log" and panel.get_ylim() == (0, 1)
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["1", "5", "25"]
