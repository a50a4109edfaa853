"""eval/compare.py: a whole small comparison, its numbers recomputed, and its refusals."""

import json

import numpy as np
import pytest
import yaml
from conftest import ROOT, command

from eval import compare

COMPARE = ROOT / "eval" / "compare.py"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Three arms, two seeds, on crops of photographs; and the same command once more."""
    from conftest import TINY

    root = tmp_path_factory.mktemp("compare")
    small = {**TINY["data"], "source": "demo"}
    short = {**TINY["optim"], "steps": 6, "batch_size": 16}
    recipes = {
        "mpp": {"data": small, "optim": short, "objective": {"name": "mpp"}},
        "labels": {"data": small, "optim": short, "objective": {"name": "supervised"}},
        "tune": {
            "data": {**small, "per_class": 4},
            "objective": {"name": "supervised"},
            "optim": {**short, "name": "sgd", "learning_rate": [0.01, 0.1], "weight_decay": 0.0},
        },
    }
    for name, recipe in recipes.items():
        (root / f"{name}.yaml").write_text(
            yaml.safe_dump({**TINY, "runtime": {"micro_batch": 16, "log_every": 3, "workers": 0}, **recipe})
        )
    plan = {
        "finetune": str(root / "tune.yaml"),
        "seeds": [0, 3],
        "arms": {
            "self-supervised": str(root / "mpp.yaml"),
            "supervised": str(root / "labels.yaml"),
            "from scratch": "scratch",
        },
        "baselines": ["random_encoder", "raw_pixels", "chance"],
    }
    (root / "compare.yaml").write_text(yaml.safe_dump(plan))
    first = command(COMPARE, "--recipe", root / "compare.yaml", "--output", root / "out")
    assert first.returncode == 0, first.stderr
    return root, first


def values(records, arm, metric):
    return [record["value"] for record in records if record["arm"] == arm and record["metric"] == metric]


def test_every_arm_and_seed_is_measured_and_paired(compared):
    root, _ = compared
    records = json.loads((root / "out" / "results.json").read_text())
    for arm in ("self-supervised", "supervised", "from scratch"):
        rows = [record for record in records if record["arm"] == arm and record["metric"] == "accuracy"]
        assert [record["seed"] for record in rows] == [0, 3]
        assert all(record["images"] == 1637 and record["train_images"] == 40 for record in rows)
        assert len(values(records, arm, "linear_probe_accuracy")) == 2
    # The from-scratch arm's frozen encoder is the random one.
    assert values(records, "random_encoder", "linear_probe_accuracy") == values(
        records, "from scratch", "linear_probe_accuracy"
    )
    assert (
        values(records, "raw_pixels", "linear_probe_accuracy")[0]
        > values(records, "chance", "most_frequent_accuracy")[0]
    )


def test_the_arms_differ_in_init_alone(compared):
    root, _ = compared
    recipes = [
        yaml.safe_load(file.read_text()) for file in sorted((root / "out" / "finetune").glob("*/seed_3/config.yaml"))
    ]
    assert len({recipe.pop("init") for recipe in recipes}) == 3
    assert recipes[0] == recipes[1] == recipes[2]


def test_the_table_is_mean_and_standard_deviation(compared):
    root, first = compared
    records = json.loads((root / "out" / "results.json").read_text())
    found = np.array(values(records, "self-supervised", "accuracy"))
    expected = f"{found.mean():.3f} ± {found.std(ddof=1):.3f}"
    report = (root / "out" / "report.md").read_text()
    for text in (first.stdout, report):
        row = next(line for line in text.splitlines() if line.startswith("| self-supervised"))
        assert expected in row and "96 images" in row
    gain = 100 * (found - values(records, "from scratch", "accuracy"))
    assert f"**self-supervised** against from scratch: {gain.mean():+.1f} points" in report
    for name in ("arms.png", "self-supervised_mosaic.png", "self-supervised_curves.png", "supervised_curves.png"):
        assert f"figures/{name}" in report and (root / "out" / "figures" / name).is_file()
    assert "not object recognition" in report


def test_once_more_trains_nothing_and_says_the_same(compared):
    root, _ = compared
    before = (root / "out" / "results.json").read_text()
    again = command(COMPARE, "--recipe", root / "compare.yaml", "--output", root / "out")
    assert again.returncode == 0, again.stderr
    assert "pre-training 6/6" not in again.stdout and again.stdout.count("is finished") == 8
    assert (root / "out" / "results.json").read_text() == before


def test_another_comparison_in_the_folder_is_refused(compared):
    root, _ = compared
    other = command(COMPARE, "--recipe", root / "compare.yaml", "--output", root / "out", "seeds=[0]")
    assert other.returncode == 2 and "holds another plan;" in other.stderr and "--overwrite" in other.stderr


def test_what_would_stop_it_later_stops_it_before_it_starts(compared, tmp_path):
    root, _ = compared
    plan = yaml.safe_load((root / "compare.yaml").read_text())
    tune = yaml.safe_load((root / "tune.yaml").read_text())
    faults = {
        "arm": ({"arms": {"a": "mpp_dmeo"}}, {}, "init=mpp_dmeo: not found"),
        "objective": ({}, {"objective": {"name": "mpp"}}, "fine-tuning needs supervised"),
        "classes": ({}, {"data": {**tune["data"], "per_class": 5000}}, "data.per_class=5000: class"),
        "batch": ({}, {"runtime": {"micro_batch": 7}}, "is not a multiple of runtime.micro_batch=7"),
        "model": ({}, {"model": {**tune["model"], "depth": 1}}, "unexpected: blocks.1.norm1.weight"),
    }
    for name, (in_plan, in_recipe, words) in faults.items():
        (tmp_path / f"{name}_tune.yaml").write_text(yaml.safe_dump({**tune, **in_recipe}))
        (tmp_path / f"{name}.yaml").write_text(
            yaml.safe_dump({**plan, "finetune": str(tmp_path / f"{name}_tune.yaml"), **in_plan})
        )
        with pytest.raises(SystemExit) as left, pytest.MonkeyPatch.context() as patch:
            said = []
            patch.setattr(compare.command_line, "_tell", said.append)
            compare.main(["--recipe", str(tmp_path / f"{name}.yaml"), "--output", str(tmp_path / "out")])
        assert left.value.code == 2 and words in said[0]
        assert not (tmp_path / "out").exists()


def test_sentences_say_plainly_what_was_measured():
    def records(arm, accuracies):
        return [{"arm": arm, "metric": "accuracy", "value": value} for value in accuracies]

    arms = [compare.Arm("a", None, "runs/a"), compare.Arm("scratch", None, "scratch")]
    base = records("scratch", [0.5, 0.5])
    assert "+10.0 points" in compare._differences(arms, records("a", [0.6, 0.6]) + base)[0]
    assert "helps in every seed" in compare._differences(arms, records("a", [0.6, 0.55]) + base)[0]
    assert "hurts in every seed" in compare._differences(arms, records("a", [0.4, 0.4]) + base)[0]
    assert "does not show that it helps" in compare._differences(arms, records("a", [0.6, 0.5]) + base)[0]
