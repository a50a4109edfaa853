"""eval/compare.py: a whole small comparison, its numbers recomputed, and its refusals."""

import json
import shutil

import numpy as np
import pytest
import yaml
from conftest import ROOT, command

from eval import compare
from mpp import config
from mpp.comparison_folder import Comparison
from mpp.errors import UserError

COMPARE = ROOT / "eval" / "compare.py"


UNPUBLISHED = {"published": {}, "published_finetune": None}


def write_plan(root, **changes):
    """Small recipes on crops of photographs, and a plan of them."""
    from conftest import TINY

    small = {**TINY["data"], "source": "demo", "max_overlap": 10}
    short = {**TINY["optim"], "steps": 6, "batch_size": 16}
    recipes = {
        "mpp": {"data": small, "optim": short, "objective": {"name": "mpp"}},
        "labels": {"data": small, "optim": short, "objective": {"name": "supervised"}},
        "tune": {
            "data": {**small, "per_class": 4},
            "objective": {"name": "supervised"},
            "optim": {**short, "name": "sgd", "learning_rate": [0.01, 0.1], "weight_decay": 0.0},
            "probe": {"features": "patches", "shots": [1, 3], "seeds": [0, 1], "strengths": [0.001, 0.1]},
        },
    }
    for name, recipe in recipes.items():
        (root / f"{name}.yaml").write_text(
            yaml.safe_dump({**TINY, "runtime": {"micro_batch": 16, "log_every": 3, "workers": 0}, **recipe})
        )
    plan = {
        "tasks": {"crops": [str(root / "tune.yaml")]},
        "seeds": [0, 3],
        "choice_seeds": [3],
        "arms": {
            "self-supervised": str(root / "mpp.yaml"),
            "supervised": [str(root / "labels.yaml"), "pretraining.optim.steps=5"],
            "from scratch": "scratch",
            "twin": "scratch",
            "other steps": ["scratch", "optim.steps=5"],
            "gone": "runs/no_such_run",
            "wild": ["scratch", "optim.learning_rate=1e30"],
        },
        "baselines": ["shuffled_labels", "random_encoder", "raw_pixels", "chance"],
        "probes": ["linear", "few_shot"],
        "published": {"from scratch": 0.7791},
        "published_finetune": "finetune_b16",
    } | changes
    (root / "compare.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    return root / "compare.yaml"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    root = tmp_path_factory.mktemp("compare")
    return root, command(COMPARE, "--recipe", write_plan(root), "--output", root / "out")


def call(*arguments):
    """The entry point in this process: its status, and what it says of errors."""
    said = []
    with pytest.raises(SystemExit) as left, pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare.command_line, "_tell", said.append)
        compare.main([*map(str, arguments)])
    return left.value.code, "\n".join(said)


def records_of(root):
    return json.loads((root / "out" / "results.json").read_text())


def values(records, arm, metric):
    return [record["value"] for record in records if record["arm"] == arm and record["metric"] == metric]


def predictions(root, arm, seed):
    with np.load(root / "out" / "finetune" / arm / "crops" / f"seed_{seed}" / "predictions.npz") as found:
        return dict(found)


def row_of(text, start):
    return next(
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith(start)
    )


def test_every_arm_and_seed_is_measured_and_paired(compared):
    root, _ = compared
    records = records_of(root)
    for arm in ("self-supervised", "supervised", "from scratch", "twin", "shuffled labels"):
        rows = [record for record in records if record["arm"] == arm and record["metric"] == "accuracy"]
        assert sorted(record["seed"] for record in rows) == [0, 3]
        assert all(record["images"] == 1637 and record["train_images"] == 40 for record in rows)
        assert all(record["data_set"] == "crops" for record in rows)
    # The from-scratch arm's frozen encoder is the random one.
    random, scratch = (values(records, arm, "linear_probe_accuracy") for arm in ("random_encoder", "from scratch"))
    assert len(random) == 2 and random == scratch
    assert len(values(records, "self-supervised", "3_shot_accuracy")) == 2
    chance = values(records, "chance", "most_frequent_accuracy")[0]
    assert min(values(records, "raw_pixels", "linear_probe_accuracy")) > chance


def test_accuracies_are_those_of_the_predictions_kept(compared):
    root, _ = compared
    for arm in ("self-supervised", "supervised", "from_scratch"):
        for seed in (0, 3):
            found = predictions(root, arm, seed)
            assert found["test"].shape == (1637, 5) and found["test_labels"].shape == (1637,)
            by_hand = {
                "accuracy": (found["test"][:, 0] == found["test_labels"]).mean(),
                "top_5_accuracy": (found["test"] == found["test_labels"][:, None]).any(1).mean(),
            }
            for metric, value in by_hand.items():
                kept = json.loads((root / "out" / "finetune" / arm / "crops" / f"seed_{seed}/results.json").read_text())
                assert [r["value"] for r in kept if r["metric"] == metric] == [pytest.approx(value, abs=1e-12)]


def test_the_arms_differ_in_init_and_their_own_learning_rate_alone(compared):
    root, _ = compared
    recipes = [
        yaml.safe_load((root / "out" / "finetune" / arm / "crops" / "seed_3" / "config.yaml").read_text())
        for arm in ("self-supervised", "supervised", "from_scratch")
    ]
    assert len({recipe.pop("init") for recipe in recipes}) == 3
    assert {recipe["optim"].pop("learning_rate") for recipe in recipes} <= {0.01, 0.1}
    assert recipes[0] == recipes[1] == recipes[2]


def test_the_learning_rate_is_chosen_for_an_arm_on_the_choice_seeds_and_used_with_all(compared):
    root, _ = compared
    for arm in ("self-supervised", "supervised", "from_scratch"):
        folder = root / "out" / "finetune" / arm / "crops"
        assert [path.name for path in (folder / "choice").iterdir()] == ["seed_3"]
        tried = {
            float(file.parent.name.removeprefix("learning_rate_")): json.loads(file.read_text())
            for file in (folder / "choice" / "seed_3").glob("sweep/*/summary.json")
        }
        assert set(tried) == {0.01, 0.1}
        best = max(tried, key=lambda rate: (tried[rate]["accuracy"], -tried[rate]["loss"]))
        used = {json.loads(file.read_text())[0]["learning_rate"] for file in folder.glob("seed_*/results.json")}
        assert used == {best}


def test_the_report_says_what_was_measured(compared):
    root, done = compared
    report = (root / "out" / "report.md").read_text()
    hits = {
        arm: np.stack(
            [predictions(root, arm, s)["test"][:, 0] == predictions(root, arm, s)["test_labels"] for s in (0, 3)]
        )
        for arm in ("self-supervised", "from_scratch")
    }
    for text in (report, done.stdout):
        row = row_of(text, "| self-supervised ")
        assert row[1] == "96 images" and row[2] == f"{100 * hits['self-supervised'].mean():.1f}"
        low, high = map(float, row[3].split(" to "))
        assert low <= float(row[2]) <= high
        assert row[4] == " ".join(f"{100 * value:.1f}" for value in hits["self-supervised"].mean(1))
        gain = 100 * (hits["self-supervised"].mean() - hits["from_scratch"].mean())
        assert row_of(text, "| self-supervised − from scratch")[1] == f"{gain:+.1f}"
    for picture in ("arms", "rates", "self-supervised_mosaic", "self-supervised_curves", "supervised_curves"):
        assert f"(figures/{picture}.png)" in report and (root / "out" / "figures" / f"{picture}.png").is_file()
    assert "not object recognition" in report
    page = (root / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 5 and "figures/" not in page


def test_identical_arms_differ_by_nothing(compared):
    root, done = compared
    row = row_of(done.stdout, "| from scratch − twin")
    assert row[1:] == ["+0.0", "+0.0 to +0.0", "+0.0 +0.0", "no difference in any image"]
    for seed in (0, 3):
        one, other = predictions(root, "from_scratch", seed), predictions(root, "twin", seed)
        assert np.array_equal(one["test"], other["test"])


def test_arms_that_fail_are_named_and_the_others_finish(compared):
    root, done = compared
    assert done.returncode == 2
    assert "gone, wild failed; the report names them" in done.stderr and "Traceback" not in done.stderr
    report = (root / "out" / "report.md").read_text()
    assert "**gone failed on crops (‡):** init=runs/no_such_run: not found" in report
    assert "**wild failed on crops (‡):**" in report and "diverged" in report
    for text in (report, done.stdout):
        assert row_of(text, "| gone ")[2:5] == ["failed", "", ""]
        assert row_of(text, "| wild ")[2:5] == ["failed", "", ""]
        assert "− gone" not in text and "− wild" not in text


def test_an_arm_under_another_protocol_is_told_apart(compared):
    root, _ = compared
    report = (root / "out" / "report.md").read_text()
    assert "**other steps is not comparable (†):**" in report and "`optim.steps: 6 there, 5 here`" in report
    assert row_of(report, "| other steps †")[2] != "" and "− other steps" not in report


def test_shuffled_labels_score_at_chance(compared):
    root, done = compared
    records = records_of(root)
    control = values(records, "shuffled labels", "accuracy")
    assert np.mean(control) < min(np.mean(values(records, arm, "accuracy")) for arm in ("supervised", "from scratch"))
    assert np.mean(control) == pytest.approx(0.1, abs=0.08)  # ten classes
    assert "Control: fine-tuned on shuffled labels" in done.stdout and "leaks" not in done.stdout


def test_costs_are_those_of_the_runs(compared):
    root, _ = compared
    report = (root / "out" / "report.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.splitlines()]
    costs = {row[1]: int(row[2].replace(",", "")) for row in rows if row[:1] == ["supervised"] and len(row) == 5}
    assert costs == {
        "pre-training": 5 * 16,
        "choice of the learning rate": 2 * 6 * 16,  # two rates, one seed
        "fine-tuning": 2 * 6 * 16,  # two seeds
        "all": 5 * 16 + 4 * 6 * 16,
    }


def test_published_figures_stand_beside_ours_with_what_differs(compared):
    root, _ = compared
    report = (root / "out" / "report.md").read_text()
    ours = float(row_of(report, "| from scratch ")[2])
    rows = report[report.index("## Published figures") :]
    row = row_of(rows, "| from scratch ")
    assert (
        row[1] == "77.91"
        and row[2].startswith(f"{ours:.1f} (")
        and float(row[3]) == pytest.approx(ours - 77.91, abs=0.06)
    )
    for line in ("optim.steps: 20000 there, 6 here", "data.image_size: 384 there, 32 here"):
        assert f"- `{line}`" in rows


def test_once_more_trains_nothing_and_says_the_same(compared, tmp_path, capsys):
    root, first = compared
    shutil.copytree(root / "out", tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "self-supervised" / "checkpoints")  # of no use any more
    before = (root / "out" / "results.json").read_text()
    arms = ["--arm", "self-supervised", "--arm", "supervised", "--arm", "from scratch"]
    assert call("--recipe", root / "compare.yaml", "--output", tmp_path / "out", *arms)[0] == 0
    again = capsys.readouterr().out
    assert "fine-tuning 6/6" not in again and again.count("all of it is finished") == 3
    assert (tmp_path / "out" / "results.json").read_text() == before
    assert row_of(again, "| self-supervised ") == row_of(first.stdout, "| self-supervised ")


def test_what_is_missing_alone_is_done_again(compared, tmp_path):
    root, _ = compared
    shutil.copytree(root / "out", tmp_path / "out")
    units = sorted((tmp_path / "out" / "finetune").glob("*/crops/seed_*/results.json"))
    before = {file: file.stat().st_mtime_ns for file in units}
    gone = tmp_path / "out" / "finetune" / "from_scratch" / "crops" / "seed_0"
    expected = json.loads((gone / "results.json").read_text())
    shutil.rmtree(gone)
    assert call("--recipe", root / "compare.yaml", "--output", tmp_path / "out", "--arm", "from scratch")[0] == 0
    assert {file for file in units if file.stat().st_mtime_ns != before[file]} == {gone / "results.json"}
    assert [r["value"] for r in json.loads((gone / "results.json").read_text())] == [r["value"] for r in expected]


def test_parts_that_were_measured_apart_are_merged_to_the_same(tmp_path, capsys):
    arms = {"from scratch": "scratch", "supervised": str(tmp_path / "labels.yaml")}
    less = {"arms": arms, "baselines": ["shuffled_labels", "chance"], "probes": ["linear"], **UNPUBLISHED}
    plan = write_plan(tmp_path, **less)
    for part, arm in (("a", "from scratch"), ("b", "supervised")):
        assert call("--recipe", plan, "--output", tmp_path / part, "--arm", arm)[0] == 0
        assert capsys.readouterr().out.count("not measured") == 1
    shutil.rmtree(tmp_path / "b" / "supervised" / "checkpoints")  # as where they stay on another machine
    merge = ["--merge", tmp_path / "a", "--merge", tmp_path / "b"]
    assert call("--recipe", plan, "--output", tmp_path / "c", *merge)[0] == 0
    merged = capsys.readouterr().out
    assert "fine-tuning 6/6" not in merged and "pre-training 6/6" not in merged
    assert call("--recipe", plan, "--output", tmp_path / "whole")[0] == 0
    whole = capsys.readouterr().out
    for start in ("| from scratch ", "| supervised ", "| from scratch − supervised", "| shuffled labels", "| chance"):
        assert row_of(merged, start) == row_of(whole, start)
    rates, costs = ((tmp_path / name / "report.md").read_text() for name in ("c", "whole"))
    section = rates[rates.index("## Learning rates") : rates.index("## Cost")]
    assert section == costs[costs.index("## Learning rates") : costs.index("## Cost")]  # sweeps are merged, too
    images = [
        [line.split("|")[1:4] for line in text.splitlines() if "choice of the" in line] for text in (rates, costs)
    ]
    assert images[0] == images[1] and len(images[0]) == 2

    status, said = call("--recipe", write_plan(tmp_path, **less, seeds=[3]), "--output", tmp_path / "d", *merge)
    assert status == 2 and "holds another comparison" in said
    assert not (tmp_path / "d").exists()


def test_another_comparison_in_the_folder_is_refused(compared):
    root, _ = compared
    status, said = call("--recipe", root / "compare.yaml", "--output", root / "out", "seeds=[3]")
    assert status == 2 and "holds another plan;" in said and "--overwrite" in said


def test_fine_tunings_under_an_edited_protocol_are_not_taken_for_the_same(compared, tmp_path):
    root, _ = compared
    shutil.copytree(root, tmp_path / "copy")
    tune = tmp_path / "copy" / "tune.yaml"
    for file in (tmp_path / "copy" / "compare.yaml", tmp_path / "copy" / "out" / "config.yaml"):
        assert str(root / "tune.yaml") in file.read_text()
        file.write_text(file.read_text().replace(str(root / "tune.yaml"), str(tune)))
    tune.write_text(tune.read_text().replace("steps: 6", "steps: 4"))
    folder = tmp_path / "copy" / "out"
    status, said = call("--recipe", tmp_path / "copy" / "compare.yaml", "--output", folder, "--arm", "twin")
    assert status == 2
    assert "fine-tuned under another protocol" in said and "optim.steps: 6 there, 4 here" in said


def test_an_edited_pre_training_is_not_taken_for_the_same_and_can_be_started_again(tmp_path, capsys):
    less = {"arms": {"mpp": str(tmp_path / "mpp.yaml"), "b": "scratch"}, "baselines": [], "probes": [], **UNPUBLISHED}
    arguments = ["--recipe", write_plan(tmp_path, **less), "--output", tmp_path / "out"]
    assert call(*arguments)[0] == 0
    recipe = yaml.safe_load((tmp_path / "mpp.yaml").read_text())
    recipe["optim"]["steps"] = 7
    (tmp_path / "mpp.yaml").write_text(yaml.safe_dump(recipe))
    capsys.readouterr()
    status, said = call(*arguments)
    told = capsys.readouterr().out
    assert status == 2 and "starts from another pre-training" in said and "optim.steps: 6 there, 7 here" in said
    assert row_of(told, "| mpp ")[2] == "failed" and "mpp − b" not in told
    assert {r["arm"] for r in records_of(tmp_path)} == {"b"}
    assert call(*arguments, "--overwrite")[0] == 0
    assert row_of(capsys.readouterr().out, "| mpp ")[1] == "112 images"


def test_weights_that_have_changed_are_not_taken_for_the_same(tmp_path):
    less = {
        "arms": {"a": str(tmp_path / "made.safetensors")},
        "baselines": [],
        "probes": [],
        "seeds": [3],
        **UNPUBLISHED,
    }
    arguments = ["--recipe", write_plan(tmp_path, **less), "--output", tmp_path / "out"]
    from safetensors.numpy import load_file, save_file

    from mpp import wiring

    tuning = config.load_run(str(tmp_path / "tune.yaml"))[0]
    weights = {name: value.numpy() for name, value in wiring.build(tuning, None).state_dict().items()}
    save_file(weights, tmp_path / "made.safetensors")
    assert call(*arguments)[0] == 0
    changed = load_file(tmp_path / "made.safetensors")
    changed["cls_token"] = changed["cls_token"] + 1
    save_file(changed, tmp_path / "made.safetensors")
    status, said = call(*arguments)
    assert status == 2 and "from other weights than init=" in said


def test_an_arm_fails_on_one_task_alone(tmp_path, capsys):
    plan = {"crops": [str(tmp_path / "tune.yaml")], "more": [str(tmp_path / "tune.yaml"), "data.per_class=9999"]}
    less = {"tasks": plan, "arms": {"a": "scratch", "b": "scratch"}, "baselines": [], "probes": [], **UNPUBLISHED}
    status, said = call("--recipe", write_plan(tmp_path, **less), "--output", tmp_path / "out")
    assert status == 2 and "a on more: data.per_class=9999" in said
    told = capsys.readouterr().out
    assert row_of(told, "| a − b")[4] == "no difference in any image"
    report = (tmp_path / "out" / "report.md").read_text()
    assert "**a failed on more (‡):**" in report and "## crops" in report


def test_a_probe_that_can_t_be_had_is_told_before_training(tmp_path):
    tune = ["tune.yaml", "probe.shots=[9999]"]
    less = {"tasks": {"crops": [str(tmp_path / tune[0]), tune[1]]}, "arms": {"a": "scratch"}, **UNPUBLISHED}
    status, said = call("--recipe", write_plan(tmp_path, **less), "--output", tmp_path / "out")
    assert status == 2 and "probe.shots=[9999]: 9999 images of each class" in said
    assert not (tmp_path / "out").exists()


def test_the_dry_run_adds_up_all_that_would_be_trained(tmp_path, capsys):
    less = {"arms": {"mpp": str(tmp_path / "mpp.yaml")}, "baselines": ["shuffled_labels"], "probes": [], **UNPUBLISHED}
    assert call("--recipe", write_plan(tmp_path, **less), "--output", tmp_path / "out", "--dry-run")[0] == 0
    told = capsys.readouterr().out
    # Pre-training, two rates with one seed, two seeds, and two of the control: 6 steps of 16 each.
    assert row_of(told, "| in all")[2] == str((1 + 2 + 2 + 2) * 6 * 16)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("in_plan", "in_recipe", "words"),
    [
        ({"arms": {"a": "mpp_dmeo"}}, {}, "init=mpp_dmeo: not found"),
        ({}, {"objective": {"name": "mpp"}}, "fine-tuning needs supervised"),
        ({}, {"data": {"per_class": 5000}}, "data.per_class=5000: class"),
        ({}, {"data": {"max_overlap": 0, "per_class": None}}, "10 test images"),
        ({}, {"runtime": {"micro_batch": 7}}, "is not a multiple of runtime.micro_batch=7"),
        ({"arms": {"a": ["scratch", "pretraining.seed=1"]}}, {}, "no pre-training to override"),
        ({"tests": 1}, {}, "unknown key tests"),
        ({"arms": {"a b": "scratch", "a_b": "scratch"}}, {}, "two of its arms would have the same folder"),
        ({"arms": {"finetune": "scratch"}}, {}, "an arm can't be named finetune"),
        ({"published": {"a": 77.9}}, {}, "published.a=77.9 must be a share in (0, 1)"),
        ({"published": {"a": 0.7}, "published_finetune": "finetune_b61"}, {}, "did you mean finetune_b16?"),
        ({"choice_seeds": [5]}, {}, "choice_seeds=[5] must be some of seeds=[0, 3]"),
    ],
)
def test_what_would_stop_every_arm_stops_it_before_it_starts(tmp_path, in_plan, in_recipe, words):
    path = write_plan(tmp_path, **{"arms": {"a": "scratch"}, **UNPUBLISHED, **in_plan})
    tune = yaml.safe_load((tmp_path / "tune.yaml").read_text())
    for section, changes in in_recipe.items():
        tune[section] = {**tune.get(section, {}), **changes}
    (tmp_path / "tune.yaml").write_text(yaml.safe_dump(tune))
    status, said = call("--recipe", path, "--output", tmp_path / "out")
    assert status == 2 and words in said
    assert not (tmp_path / "out").exists()


def test_an_unknown_arm_on_the_command_line_is_refused(tmp_path):
    status, said = call("--recipe", write_plan(tmp_path), "--output", tmp_path / "out", "--arm", "twins")
    assert status == 2 and "--arm twins: no such arm" in said


def test_the_papers_comparison_resolves():
    plan = config.load_compare("compare_b16")
    assert plan.published == {"self-supervised": 0.799, "supervised": 0.8397, "from scratch": 0.7791}
    whole = Comparison(plan, ROOT / "runs" / "no_such_run")
    tunings = [whole.tuning(arm, "ImageNet", 0) for arm in whole.arms]
    assert [arm.pretraining.objective.name for arm in whole.arms] == ["mpp", "supervised", "supervised"]
    assert {tuning.optim.learning_rate for tuning in tunings} == {(0.003, 0.01, 0.03)}  # Table 4
    with pytest.raises(UserError, match="no comparison there"):
        whole.require_part(ROOT / "recipes")
