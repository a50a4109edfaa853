"""eval/scaling.py: a whole study in small, its records, and what it refuses."""

import json

import pytest
import yaml
from conftest import command

from mpp import config
from mpp.errors import UserError

SMALL = [
    *("model.embed_dim=24", "model.depth=1", "data.source=synthetic:40", "data.image_size=16", "optim.steps=3"),
    *("optim.warmup_steps=1", "optim.batch_size=8", "runtime.micro_batch=8", "runtime.eval_every=0"),
]


@pytest.fixture
def study(tmp_path):
    def write(**changes):
        tuning = yaml.safe_load(
            config.to_yaml(
                config.load_run(
                    "finetune_demo",
                    [key for key in SMALL if not key.startswith(("model.", "data.image_size"))]
                    + ["data.per_class=3", "data.holdout=0.34", "data.image_size=24"],
                )[0]
            )
        )
        (tmp_path / "tuning.yaml").write_text(yaml.safe_dump(tuning))
        plan = {
            "models": {"labels": ["supervised_demo", *SMALL], "colours": ["mpp_demo", *SMALL, "model.embed_dim=48"]},
            "subsets": [0.5, None],
            "measures": ["few_shot", "finetune"],
            "shots": 2,
            "seeds": [0, 1],
            "finetune": str(tmp_path / "tuning.yaml"),
        }
        (tmp_path / "study.yaml").write_text(yaml.safe_dump(plan | changes))
        return tmp_path / "study.yaml"

    return write


def test_a_study_measures_every_point_alike_and_redoes_nothing(study, tmp_path):
    arguments = ["eval/scaling.py", "--recipe", study(), "--output", tmp_path / "out"]
    done = command(*arguments)
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(records) == 2 * 2 * 2 * 2  # models, subsets, measures, seeds
    assert {(r["arm"], r["train_images"]) for r in records} == {
        ("labels", 20), ("labels", 40), ("colours", 20), ("colours", 40)
    }  # fmt: skip
    assert {r["images"] for r in records} == {24}
    assert all(0 <= r["value"] <= 1 for r in records)
    by_arm = {r["arm"]: (r["parameters"], r["exaflops"]) for r in records}
    assert by_arm["colours"] > by_arm["labels"]
    assert (tmp_path / "out" / "figures" / "scaling.png").stat().st_size > 10_000
    rows = [line.split() for line in (tmp_path / "out" / "report.md").read_text().splitlines()]
    assert ["|", "labels", "|", "20", "|"] in [row[:5] for row in rows]
    again = command(*arguments)
    assert again.returncode == 0 and again.stdout.count("this run is finished") == 4 + 8
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == records

    kept = next((tmp_path / "out" / "pretrain" / "labels").glob("all/few_shot.json"))
    measured = json.loads(kept.read_text())
    measured["accuracy"]["0"] = 0.123
    kept.write_text(json.dumps(measured))
    assert command(*arguments).returncode == 0
    assert 0.123 in [r["value"] for r in json.loads((tmp_path / "out" / "results.json").read_text())]

    other = command(*arguments, "shots=1")
    assert other.returncode == 2 and "holds another plan" in other.stderr


def test_the_papers_subsets_cost_the_same_and_are_printed(study):
    models = {"ViT-B/16": ["supervised_jft_b16"], "ResNet50x1": ["supervised_jft_r50x1"]}
    path = study(models=models, subsets=[9_000_000, 30_000_000, 90_000_000, None], finetune="finetune_b16")
    shown = command("eval/scaling.py", "--recipe", path, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    rows = [line.split() for line in shown.stdout.splitlines()[1:]]
    assert [row[1] for row in rows] == ["9000000", "30000000", "90000000", "all"] * 2
    assert {row[4] for row in rows if row[0] == "ViT-B/16"} == {"223.5"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": {}}, "needs at least one of models"),
        ({"models": {"a": []}}, "models.a names no recipe"),
        ({"models": {"a b": ["mpp_demo"], "a_b": ["mpp_demo"]}}, "have the same name"),
        ({"models": {"a": ["mpp_demoo"]}}, "no such recipe; did you mean mpp_demo?"),
        ({"seeds": [0, 0]}, "names one twice"),
        ({"finetune": None, "models": {"a": ["mpp_demo", "finetune=null"]}}, "so the study must"),
        ({"shots": 9}, "9 images of each class are asked for, but there are fewer of class 0 (4)"),
        ({"subsets": [50]}, "data.subset=50"),
        ({"measures": ["k_nn"]}, "measures must be"),
    ],
)
def test_what_a_study_refuses_before_training(study, tmp_path, changes, words):
    failed = command("eval/scaling.py", "--recipe", study(**changes), "--output", tmp_path / "out")
    assert failed.returncode == 2, failed.stderr
    assert words in failed.stderr
    assert not (tmp_path / "out").exists()


def test_a_study_is_no_run():
    with pytest.raises(UserError, match=r"scaling_demo.yaml is a study: eval/scaling.py takes it"):
        config.load_run("scaling_demo")
    with pytest.raises(UserError, match=r"mpp_demo.yaml is a run: mpp/pretrain.py or eval/finetune.py takes it"):
        config.load_study("mpp_demo")
    with pytest.raises(UserError, match=r"compare_demo.yaml is a comparison"):
        config.load_study("compare_demo")
