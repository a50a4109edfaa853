"""eval/few_shot.py and eval/linear_probe.py: each number recomputed with timm and scikit-learn, and each refusal."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
import yaml
from accelerate import Accelerator
from conftest import ROOT, TINY, command
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from eval import few_shot, linear_probe
from mpp import checkpoint, config, data, evaluation, frozen, run, run_folder, sources
from mpp.console import Console
from mpp.errors import UserError

QUIET = Console(quiet=True)
TRAIN, TEST = {"ape": 9, "bee": 12, "cat": 10}, {"ape": 13, "bee": 9, "cat": 11}  # 33 test images
PROBE = {
    "shots": [1, 4],
    "seeds": [0, 7],
    "form": "whitened",
    "strength": 3.0,
    "neighbors": [2, 5],
    "temperature": 0.1,
    "strengths": [1e-3, 1e-2, 0.1],
}


def write_photos(root, splits):
    """Noise around a colour that differs a little by class."""
    noise = np.random.default_rng(0)
    for split, counts in splits.items():
        for label, (name, count) in enumerate(counts.items()):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                tint = np.array([110, 125, 140])[(np.arange(3) + label) % 3] + noise.normal(0, 12, 3)
                pixels = np.clip(tint + noise.normal(0, 40, (40, 50, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")


def write_recipe(path, **changes):
    recipe = yaml.safe_load(yaml.safe_dump(TINY))
    for key, value in changes.items():
        recipe[key] = {**recipe.get(key, {}), **value} if isinstance(value, dict) else value
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Photographs, a pre-training of each kind on others, and the recipe for labelled images that they name."""
    root = tmp_path_factory.mktemp("made")
    write_photos(root / "photos", {"train": TRAIN, "validation": TEST})
    supervised = {"name": "supervised"}
    tune = write_recipe(
        root / "tune.yaml",
        data={"source": f"folder:{root}/photos", "image_size": 48, "per_class": 8, "holdout": 0.5},
        objective=supervised,
        optim={"name": "sgd", "learning_rate": [0.01, 0.1]},
        runtime={"micro_batch": 4},
        probe=PROBE,
    )
    mpp = write_recipe(root / "mpp.yaml", finetune=tune)
    mlp = write_recipe(root / "mlp.yaml", finetune=tune, objective=supervised, model={"head": "mlp"})
    patches = write_recipe(root / "patches.yaml", finetune=tune, objective=supervised, model={"pool": "patches"})
    for name, recipe in {"mpp": mpp, "mlp": mlp, "patches": patches}.items():
        run.pretrain(config.load_run(recipe, ["optim.learning_rate=0.01"])[0], root / "runs" / name, QUIET)
    return SimpleNamespace(
        root=root, tune=tune, runs={name: root / "runs" / name for name in ("mpp", "mlp", "patches")}
    )


@pytest.fixture
def at(tmp_path, monkeypatch):
    """A folder to work in, and a cache, of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def resolve(made, *overrides, recipe=True, console=QUIET):
    return evaluation.resolve(made.tune if recipe else None, overrides, console)


def measure(made, door, output, *overrides, recipe=True, **flags):
    """Records and report of an evaluation, as its door makes them."""
    action = {"few_shot": evaluation.run_few_shot, "linear_probe": evaluation.run_linear_probe}[door]
    action(*resolve(made, *overrides, recipe=recipe), Path(output), QUIET, **flags)
    return json.loads((Path(output) / "results.json").read_text()), (Path(output) / "report.md").read_text()


def leave(door, *arguments):
    """Runs an entry point in this process; the status that it leaves with."""
    with pytest.raises(SystemExit) as left:
        door.main([str(argument) for argument in arguments])
    return left.value.code


# ---------------------------------------------------------------- the numbers, by timm and scikit-learn


def checkpoint_of(folder):
    return folder / "checkpoints" / "step_00000004"


def expected_features(made, run_name, split, rows, kind, block=None, image_size=32):
    """By timm's own loading of what was exported, on what `data.View` cuts."""
    there = checkpoint_of(made.runs[run_name])
    encoder = timm.create_model(f"local-dir:{there}", pretrained=True, num_classes=0).eval()
    source = sources.open_source(f"folder:{made.root}/photos", split)
    pixels = np.stack([data.View(image_size).evaluate(source.picture(int(row))) for row in rows])
    images = torch.from_numpy((pixels / 127.5 - 1).transpose(0, 3, 1, 2)).float()
    with torch.no_grad():
        tokens = encoder.forward_features(images)
        if block is not None:
            ((patches, prefix),) = encoder.forward_intermediates(
                images, [block - 1], return_prefix_tokens=True, norm=True, output_fmt="NLC", intermediates_only=True
            )
            tokens = torch.cat([prefix, patches], dim=1)
        found = tokens[:, 0] if kind in ("token", "hidden") else tokens[:, 1:].mean(1)
        if kind == "hidden":
            head = load_file(there / "objective.safetensors")
            found = torch.tanh(found @ head["pre_logits.weight"].T + head["pre_logits.bias"])
    return found.numpy().astype(np.float64), source.labels[rows]


CASES = [  # run, overrides, kind of features, block
    ("mpp", [], "patches", None),  # after masked patch prediction
    ("mpp", ["probe.features=token"], "token", None),
    ("mpp", ["probe.features=token", "probe.block=1"], "token", 1),
    ("mpp", ["probe.block=1", "probe.form=plain"], "patches", 1),
    ("mlp", [], "hidden", None),  # what the last layer reads
    ("mlp", ["probe.features=patches"], "patches", None),
    ("patches", [], "patches", None),  # by the run's own pool, which is not the recipe's
]


@pytest.mark.parametrize(("name", "overrides", "kind", "block"), CASES)
def test_few_shot_accuracy_is_that_of_ridge_regression_on_timms_features(made, at, name, overrides, kind, block):
    records, _ = measure(made, "few_shot", "out", f"init={made.runs[name]}", *overrides, recipe=False)
    train = sources.open_source(f"folder:{made.root}/photos", "train")
    tested, labels = expected_features(made, name, "validation", range(33), kind, block)
    found = {(record["shots"], record["seed"]): record["value"] for record in records}
    for (shots, seed), value in found.items():
        rows = frozen.shot_rows(train, seed, shots)
        x, known = expected_features(made, name, "train", rows, kind, block)
        test = tested
        if "probe.form=plain" not in overrides:
            mean, spread = x.mean(0), x.std(0) + 1e-5
            x, test = (np.c_[(some - mean) / spread, np.full(len(some), 100.0)] for some in (x, test))
        ridge = Ridge(alpha=3.0, fit_intercept=False).fit(x, 2.0 * np.eye(3)[known] - 1)
        assert value == (ridge.predict(test).argmax(1) == labels).mean()
    assert set(found) == {(1, 0), (1, 7), (4, 0), (4, 7)} and len(set(found.values())) > 1
    first = records[0]
    assert first["metric"] == "1_shot_accuracy" and first["images"] == 33 and first["image_size"] == 32
    assert first["weights"] == str(checkpoint_of(made.runs[name]) / "model.safetensors")


def expected_logistic(fit, choice, test):
    """Accuracy on the test rows at the strength of the best accuracy on the held-out rows; and that by strength."""

    def accuracy(fit, tested, strength):
        scaler = StandardScaler().fit(fit[0])
        model = LogisticRegression(C=strength, tol=1e-8, max_iter=10_000).fit(scaler.transform(fit[0]), fit[1])
        return float((model.predict(scaler.transform(tested[0])) == tested[1]).mean())

    tried = {strength: accuracy(fit, choice, strength) for strength in PROBE["strengths"]}
    every = tuple(np.concatenate(pair) for pair in zip(fit, choice, strict=True))
    return tried, {strength: accuracy(every, test, strength) for strength in tried}


@pytest.mark.parametrize(("name", "overrides", "kind"), [("mpp", [], "patches"), ("mlp", [], "hidden")])
@pytest.mark.parametrize("rate", ["[0.01,0.1]", "0.1"])  # one rate leaves nothing to choose, a strength does
def test_linear_probe_and_neighbours_are_those_of_scikit_learn(made, at, name, overrides, kind, rate):
    init = [f"init={made.runs[name]}", f"optim.learning_rate={rate}", "seed=3"]
    records, text = measure(made, "linear_probe", "out", *init, *overrides, recipe=False)
    train = sources.open_source(f"folder:{made.root}/photos", "train")
    fit_rows, choice_rows = data.labelled_rows(train, 3, 8, 0.5)
    parts = [expected_features(made, name, "train", rows, kind) for rows in (fit_rows, choice_rows)]
    test = expected_features(made, name, "validation", range(33), kind)
    by_metric = {record["metric"]: record for record in records}
    tried, accuracies = expected_logistic(*parts, test)
    linear = by_metric["linear_probe_accuracy"]
    assert tried[linear["strength"]] == max(tried.values()) and linear["value"] == accuracies[linear["strength"]]
    assert linear["converged"] and linear["at_edge"] == (linear["strength"] != 1e-2)
    for strength, value in tried.items():
        assert any(f"{strength:g} " in line and f" {100 * value:.1f} " in line for line in text.splitlines())
    every, known = (np.concatenate(pair) for pair in zip(*parts, strict=True))
    for count in (2, 5):
        near = KNeighborsClassifier(count, metric="cosine", weights=lambda far: np.exp((1 - far) / 0.1))
        expected = (near.fit(every, known).predict(test[0]) == test[1]).mean()
        assert by_metric[f"{count}_nn_accuracy"]["value"] == expected
    assert all(record["train_images"] == 24 and record["images"] == 33 for record in records)


def test_without_held_out_images_the_middle_strength_is_taken_and_said(made, at):
    changes = ["data.holdout=0", "optim.learning_rate=0.1"]
    records, text = measure(made, "linear_probe", "out", f"init={made.runs['mpp']}", *changes)
    assert records[0]["strength"] == 1e-2 and not records[0]["at_edge"]
    assert "Inverse regularisation 0.01, chosen on nothing, for data.holdout=0." in text


def test_a_choice_split_chooses_the_strength_whatever_else_is_held_out(made, at):
    shutil.copytree(made.root / "photos", "photos")
    shutil.copytree(made.root / "photos" / "validation", "photos/val")
    for file in Path("photos/val").rglob("*.png"):
        Image.open(file).transpose(Image.Transpose.ROTATE_180).save(file)
    changes = ["data.choice_split=val", "data.holdout=0", "data.per_class=null", "optim.learning_rate=0.1"]
    recipe, _ = resolve(made, "init=scratch", "data.source=folder:photos", *changes)
    train, test = evaluation.open_labelled(recipe)
    parts = evaluation.labelled_parts(recipe, train, test)
    assert [rows.tolist() for _, rows in parts] == [list(range(31)), list(range(31, 64)), list(range(33))]


# ---------------------------------------------------------------- what init may be, and the recipe


def features_of(made, *overrides, rows=(0, 20, 32), recipe=True):
    """Features of some test images, as the doors read them."""
    resolved, _ = resolve(made, *overrides, recipe=recipe)
    source = sources.open_source(resolved.data.source, "validation")
    return evaluation.reader(resolved, Accelerator(cpu=True))(source, np.array(rows))


@pytest.mark.parametrize(("name", "kind"), [("mpp", "patches"), ("mlp", "hidden")])
@pytest.mark.parametrize("image_size", [32, 48])
def test_run_checkpoint_and_file_are_one_model_at_any_size(made, at, name, kind, image_size):
    there = checkpoint_of(made.runs[name])
    shutil.copytree(there, "alone")  # away from its run
    size = [f"data.image_size={image_size}"]
    found = [
        features_of(made, f"init={ref}", *size)
        for ref in (made.runs[name], there, there / "model.safetensors", "alone")
    ]
    assert all(np.array_equal(one, found[0]) for one in found[1:])
    if image_size == 32:
        assert np.allclose(found[0], expected_features(made, name, "validation", [0, 20, 32], kind)[0], atol=1e-5)


def test_an_encoder_without_its_head_gives_what_its_own_pool_reads(made, at):
    there = checkpoint_of(made.runs["mpp"])
    shutil.copy(there / "model.safetensors", "encoder.safetensors")
    found = features_of(made, "init=encoder.safetensors", "data.image_size=32")
    assert np.allclose(found, expected_features(made, "mpp", "validation", [0, 20, 32], "token")[0], atol=1e-5)


def test_scratch_is_drawn_by_the_seed(made, at):
    first, again, other = (features_of(made, "init=scratch", f"seed={seed}") for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.allclose(first, other)


def test_a_class_order_other_than_the_checkpoints_changes_nothing(made, at):
    shutil.copytree(made.runs["mlp"], "other")
    file = checkpoint_of(Path("other")) / "config.json"
    settings = json.loads(file.read_text())
    settings["label_names"] = ["cat", "bee", "ape"]
    file.write_text(json.dumps(settings))
    (of_run, _), (of_other, _) = (
        measure(made, "few_shot", name, f"init={ref}", "data.image_size=32")
        for name, ref in (("a", made.runs["mlp"]), ("b", "other"))
    )
    assert [record["value"] for record in of_run] == [record["value"] for record in of_other]


def test_without_a_recipe_the_run_names_it_and_its_model_and_cut_are_taken(made, at, capsys):
    recipe, name = resolve(made, f"init={made.runs['patches']}", recipe=False, console=Console())
    told = capsys.readouterr().out
    assert f"with the recipe {made.tune}, as the run: " in told and "data.image_size=32" in told
    assert "not in the recipe, so by default: data." in told and "optim." not in told
    assert (recipe.data.image_size, recipe.model.pool, name) == (32, "patches", "patches")
    assert recipe.probe == config.load_run(made.tune)[0].probe
    given, _ = resolve(made, f"init={made.runs['patches']}", "data.image_size=64", "model.pool=token", recipe=False)
    assert (given.data.image_size, given.model.pool) == (64, "token")


def test_without_init_it_is_the_newest_finished_pretraining(made, at):
    shutil.copytree(made.root / "runs", "runs")
    for name, moment in (("mpp", "2001"), ("mlp", "2003"), ("patches", "2002")):
        file = Path("runs") / name / "summary.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "finished": moment}))
    recipe, name = resolve(made, recipe=False)
    assert (recipe.init, name) == ("runs/mlp", "mlp")
    few_shot_folder = Path("runs/few_shot/mlp")
    evaluation.run_few_shot(recipe, name, None, QUIET)
    assert {path.name for path in few_shot_folder.iterdir()} == {
        *("config.yaml", "figures", "report.html", "report.md", "results.json", "summary.json")
    }
    assert resolve(made, recipe=False)[0].init == "runs/mlp"  # what it left there is no pre-training


@pytest.mark.parametrize(
    ("own", "given", "expected"),
    [
        (("whole", None), [], ["image_size=32", "eval_crop=whole", "resize=null", "crop=inception"]),
        (("center", 40), [], ["image_size=32", "eval_crop=center", "resize=40", "crop=inception"]),
        (("center", 40), ["data.image_size=64"], ["eval_crop=center", "resize=80", "crop=inception"]),
        (("whole", 40), ["data.image_size=64"], ["eval_crop=whole", "resize=null", "crop=inception"]),
        (("center", 40), ["data.crop=square"], ["image_size=32", "eval_crop=center", "resize=40"]),
        (("center", 40), ["data.resize=50"], ["image_size=32"]),
        (("center", 40), ["data.eval_crop=whole", "data.image_size=16"], []),
    ],
)
def test_images_are_cut_as_the_run_did_where_nothing_else_is_said(made, own, given, expected):
    before, _ = config.load_run(made.tune)
    cut = dataclasses.replace(before.data, image_size=32, eval_crop=own[0], resize=own[1])
    found = run_folder.cut_overrides(dataclasses.replace(before, data=cut), given)
    assert found == [f"data.{one}" for one in expected]


# ---------------------------------------------------------------- what is kept


def forbid(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("computed again")

    monkeypatch.setattr(evaluation, "features", fail)


@pytest.mark.parametrize("door", ["few_shot", "linear_probe"])
def test_the_second_time_nothing_is_computed(made, at, monkeypatch, door):
    first = measure(made, door, "out", f"init={made.runs['mpp']}")
    forbid(monkeypatch)
    assert measure(made, door, "out", f"init={made.runs['mpp']}") == first
    with pytest.raises(AssertionError, match="computed again"):
        measure(made, door, "other", f"init={made.runs['mpp']}", "data.image_size=32")


def test_each_image_is_read_once_for_both_classifiers(made, at, monkeypatch):
    read, compute = [], evaluation.features
    monkeypatch.setattr(
        evaluation, "features", lambda model, source, rows, *more, **by: read.append(len(rows)) or compute(model, source, rows, *more, **by)
    )  # fmt: skip
    measure(made, "linear_probe", "out", f"init={made.runs['mpp']}")
    assert sorted(read) == [24, 33]


def test_other_weights_or_pixels_under_the_same_name_are_not_taken_from_the_cache(made, at, monkeypatch):
    shutil.copytree(made.runs["mpp"], "run")
    shutil.copytree(made.root / "photos", "photos")
    here = ["init=run", "data.source=folder:photos"]
    before = features_of(made, *here)
    file = checkpoint_of(Path("run")) / "model.safetensors"
    weights = load_file(file)
    weights["norm.bias"][0] += 0.5
    save_file(weights, file)
    (file.parent / "SHA256SUMS").unlink()  # which would say that they are not those that were written
    with pytest.raises(UserError, match="SHA256SUMS is missing"):
        features_of(made, *here)
    (file.parent / "SHA256SUMS").write_text(checkpoint.sums({file.name: file}))
    after = features_of(made, *here)
    expected = before.copy()
    expected[:, 0] += 0.5
    assert np.allclose(after, expected, atol=1e-6)

    first, second = sorted(Path("photos/validation/ape").iterdir())[:2]
    of_second = features_of(made, *here, rows=(1, 20, 32))
    first.write_bytes(second.read_bytes())
    changed = features_of(made, *here)
    assert np.allclose(changed, of_second, atol=1e-6) and not np.allclose(changed[0], after[0], atol=1e-3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(at / "empty"))
    assert np.array_equal(changed, features_of(made, *here))

    same = features_of(made, *here)
    forbid(monkeypatch)
    assert np.array_equal(features_of(made, *here), same)
    for change in ("probe.block=1", "probe.features=token", "data.image_size=32", "model.gelu=tanh", "seed=1"):
        if change == "seed=1":  # which weights that are read do not depend on
            assert np.array_equal(features_of(made, *here, change), same)
            continue
        with pytest.raises(AssertionError, match="computed again"):
            features_of(made, *here, change)


# ---------------------------------------------------------------- two processes


SCRIPT = """
import sys

sys.path[0] = {root!r}
from eval import linear_probe
from mpp import evaluation
from mpp.console import Console

evaluation.run_few_shot(*evaluation.resolve(None, [{init!r}], Console()), None, Console())
linear_probe.main([{init!r}])
"""


def kept_features(cache):
    return {path.name: np.load(path)["values"] for path in (cache / "mpp" / "features").glob("*.npz")}


def test_two_processes_measure_what_one_does_to_the_bit(made, at, tmp_path):
    """33 test images in micro-batches of 4: the last has one, and the second process has none for it."""
    init = f"init={made.runs['mpp']}"
    (tmp_path / "script.py").write_text(SCRIPT.format(root=str(ROOT), init=init))
    (tmp_path / "two").mkdir()
    done = command(
        tmp_path / "script.py", processes=2, cwd=tmp_path / "two", env={"XDG_CACHE_HOME": str(tmp_path / "other")}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 processes on cpu, features in float32") == 2
    assert done.stdout.count("| images a class") == done.stdout.count("| classifier") == 1
    for door in ("few_shot", "linear_probe"):
        one = measure(made, door, f"runs/{door}/mpp", init, recipe=False)
        there = tmp_path / "two" / "runs" / door / "mpp"
        assert (json.loads((there / "results.json").read_text()), (there / "report.md").read_text()) == one
    one, two = kept_features(tmp_path / "cache"), kept_features(tmp_path / "other")
    assert set(one) == set(two) and 33 in {len(values) for values in one.values()}
    assert all(np.array_equal(values, two[name]) for name, values in one.items())


# ---------------------------------------------------------------- what it says and leaves


def test_classes_with_fewer_images_are_told_in_output_record_and_report(made, at, capsys):
    given = ["--allow-fewer", "--output", "out", f"init={made.runs['mpp']}", "probe.shots=[4,10,11]"]
    assert leave(few_shot, "--recipe", made.tune, *given) == 0
    records, text = json.loads(Path("out/results.json").read_text()), Path("out/report.md").read_text()
    assert "fewer than 11 images, all of them used: ape 9, cat 10\n" in capsys.readouterr().out
    assert "Fewer than 11 images, all of them used: ape 9, cat 10." in text
    fewer = {record["shots"]: record["fewer"] for record in records}
    assert fewer == {4: {}, 10: {"ape": 9}, 11: {"ape": 9, "cat": 10}}


def test_test_images_that_are_training_images_are_told_where_they_are_allowed(made, at):
    shutil.copytree(made.root / "photos", "photos")
    for number in (0, 1):  # of 9, all of which 9 shots draw
        shutil.copy(f"photos/train/ape/{number}.png", f"photos/validation/ape/9{number}.png")
    here = [f"init={made.runs['mpp']}", "data.source=folder:photos", "probe.shots=[9]"]
    message = "2 test images are training images, too, byte for byte"
    for door, more in (("few_shot", []), ("linear_probe", ["data.per_class=9"])):
        with pytest.raises(UserError, match=message):
            measure(made, door, "out", *here, *more, "data.max_overlap=1")
        assert not Path("out").exists()
        records, text = measure(made, door, door, *here, *more, "data.max_overlap=2")
        assert {record["overlap"] for record in records} == {2}
        assert "Of them, training images, too: 2 (data.max_overlap=2)." in text
    clean, text = measure(made, "few_shot", "clean", f"init={made.runs['mpp']}")
    assert {record["overlap"] for record in clean} == {0} and "training images, too" not in text


def test_report_and_picture(made, at):
    records, text = measure(
        made, "few_shot", "out", f"init={made.runs['mpp']}", "probe.features=token", "probe.block=1"
    )
    for shots in (1, 4):
        values = [record["value"] for record in records if record["shots"] == shots]
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {shots:>14} |")]
        assert f"| {100 * np.mean(values):>8.1f} |" in row and " ".join(f"{100 * value:.1f}" for value in values) in row
    assert "33 test images" in text and "the class token after block 1" in text and "strength 3." in text
    page = Path("out/report.html").read_text()
    assert page.count("data:image/png;base64,") == 1 and "(missing)" not in page
    with Image.open("out/figures/few_shot.png") as picture:
        assert picture.size[0] > 300
    _, text = measure(made, "linear_probe", "linear", "init=scratch")
    assert "Weights: drawn by seed 0" in text and "chosen on 12 held-out training images" in text
    assert not Path("linear/figures").exists()


def test_warnings_of_the_linear_classifier_are_in_output_and_report(made, at, monkeypatch, capsys):
    fitted = evaluation.linear

    def unfinished(*arguments):
        return dataclasses.replace(fitted(*arguments), converged=False, at_edge=True)

    monkeypatch.setattr(evaluation, "linear", unfinished)
    evaluation.run_linear_probe(*resolve(made, "init=scratch"), Path("out"), Console())
    for text in (capsys.readouterr().out, Path("out/report.md").read_text()):
        assert "is at the edge of probe.strengths; widen it" in text and "did not reach its optimum" in text


@pytest.mark.parametrize("door", [few_shot, linear_probe])
def test_a_dry_run_prints_the_recipe_and_writes_nothing(made, at, capsys, door):
    assert leave(door, "--dry-run", f"init={made.runs['mpp']}", "probe.form=plain") == 0
    told = capsys.readouterr().out
    printed = yaml.safe_load(told[told.index("data:\n") :])
    assert list(at.iterdir()) == []
    assert printed["probe"]["form"] == "plain" and printed["data"]["image_size"] == 32


# ---------------------------------------------------------------- refusals


RESNET = ["model.name=resnetv2_26x1_bit", "model.layers=[1,1,1,1]", "model.width_factor=0.5"]
RESNET += [f"model.{key}=null" for key in ("patch_size", "embed_dim", "depth", "num_heads")]
BOTH = [
    (["probe.sots=[1]"], "unknown key probe.sots; did you mean probe.shots?"),
    (["probe.shots=[0]"], "probe.shots=[0] must be positive"),
    (["probe.features=class"], "probe.features must be token or patches or null"),
    (["objective.name=mpp"], "is a pre-training; name a recipe for labelled images"),
    (["data.shuffle_labels=true"], "data.shuffle_labels does nothing here"),
    (["probe.source=demo"], "probe.source does nothing here"),
    (["data.source=folder:nowhere"], "data.source=folder:nowhere: no such folder"),
    (["data.source=folder:{root}/photos/train/ape"], "no classes in split train"),
    (["data.source=folder:train_alone"], "make train_alone/validation/CLASS/*.jpg"),
    (["data.source=folder:{root}/photos/train"], "make the folders train/CLASS and validation/CLASS in it"),
    (["data.source=folder:mixed"], "the classes of train and validation differ"),
    (["data.source=parquet:{{split}}.parquet"], "an image can have several labels"),
    (["init=nowhere"], "init=nowhere: not found. It can be a run folder"),
    (["model.depth=3"], "does not fit the model of this recipe; nothing was loaded"),
    (["probe.block=3"], "probe.block=3: the encoder has blocks 1 to 2"),
    (["model.pool=gap", "init=scratch", "probe.features=token"], "this encoder has no class token"),
    ([*RESNET, "init=scratch", "probe.features=token"], "this encoder has no class token"),
    ([*RESNET, "init=scratch", "probe.block=1"], "a ResNet has no such blocks"),
    (["data.image_size=30"], "data.image_size=30 is not a multiple"),
    (["--output", "{root}/photos"], "holds files but no run"),
    (["--output", "{root}/tune.yaml"], "is a file; name a folder"),
    (["--output", "{root}/runs/mpp"], "holds another kind of run, which must stay"),
    (["--output", "{root}/runs/mpp", "--overwrite"], "holds another kind of run, which must stay"),
    (["--output", "{root}/runs"], "which must stay; name another folder"),
]
FEW_SHOT = [
    (["probe.shots=[1,10]"], "10 images of each class are asked for, but there are fewer of ape (9); ask for"),
    (["data.subset=0.5"], "data.subset does nothing here"),
    (["--recipe", "compare_demo"], "compare_demo.yaml is a comparison: eval/compare.py takes it"),
]
LINEAR = [
    (["probe.neighbors=[2,25]"], "probe.neighbors=[2, 25]: there are 24 training images; use fewer"),
    (["data.per_class=10"], "data.per_class=10: class ape has 9 images"),
    (["--allow-fewer"], "unrecognized arguments: --allow-fewer"),
]


@pytest.mark.parametrize(
    ("door", "arguments", "words"),
    [(door, *case) for door, cases in ((few_shot, BOTH + FEW_SHOT), (linear_probe, BOTH + LINEAR)) for case in cases],
)
def test_a_fault_is_one_message_and_status_2_and_nothing_is_written(
    made, at, monkeypatch, capsys, door, arguments, words
):
    shutil.copytree(made.root / "photos" / "train", "train_alone/train")
    for name in ("train/ape", "train/bee", "validation/ape", "validation/fly"):
        shutil.copytree(made.root / "photos" / "train" / "ape", f"mixed/{name}")
    image = {"bytes": (made.root / "photos/train/ape/0.png").read_bytes(), "path": ""}
    for split in ("train", "validation"):
        pq.write_table(pa.table({"image": [image] * 3, "labels": [[0, 1], [1], [2]]}), f"{split}.parquet")
    given = [argument.format(root=made.root) for argument in arguments]
    recipe = [] if "--recipe" in given else ["--recipe", made.tune]
    output = [] if "--output" in given else ["--output", "out"]
    before = {path: path.stat().st_mtime_ns for folder in (at, made.root) for path in folder.rglob("*")}
    assert leave(door, *recipe, *output, f"init={made.runs['mpp']}", *given) == 2
    told = capsys.readouterr().err
    assert told.count("error: ") == 1 and words in told and "Traceback" not in told
    assert {path: path.stat().st_mtime_ns for folder in (at, made.root) for path in folder.rglob("*")} == before


def test_what_can_not_be_had_is_refused_before_an_image_is_read(made, at, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("an image is read")

    monkeypatch.setattr("mpp.contents.hashes", fail)
    for door in ("few_shot", "linear_probe"):
        for change in ("probe.block=3", "model.depth=3", "init=nowhere"):
            with pytest.raises(UserError):
                measure(made, door, "out", f"init={made.runs['mpp']}", change)
        with pytest.raises(AssertionError, match="an image is read"):
            measure(made, door, "out", f"init={made.runs['mpp']}")


@pytest.mark.parametrize("door", ["few_shot", "linear_probe"])
def test_a_folder_takes_the_same_evaluation_again_and_another_only_by_overwrite(made, at, door):
    init = f"init={made.runs['mpp']}"
    first = measure(made, door, "out", init)
    assert measure(made, door, "out", init) == first and measure(made, door, "out", init, overwrite=True) == first
    for change, words in [
        ("probe.temperature=0.2", r"(?s)holds another evaluation.*probe.temperature: 0.1 there, 0.2 here"),
        ("data.image_size=32", r"(?s)holds another run.*data.image_size: 48 there, 32 here"),
    ]:
        with pytest.raises(UserError, match=words):
            measure(made, door, "out", init, change)
        assert json.loads(Path("out/results.json").read_text()) == first[0]
    assert measure(made, door, "out", init, "runtime.micro_batch=5", "data.max_overlap=1")[0][0]["value"] >= 0
    main = {"few_shot": few_shot, "linear_probe": linear_probe}[door]
    assert leave(main, "--recipe", made.tune, "--output", "out", init, "probe.temperature=0.2") == 2
    assert leave(main, "--recipe", made.tune, "--output", "out", init, "probe.temperature=0.2", "--overwrite") == 0
    assert yaml.safe_load(Path("out/config.yaml").read_text())["probe"]["temperature"] == 0.2
    other = {"few_shot": "linear_probe", "linear_probe": "few_shot"}[door]
    with pytest.raises(UserError, match="holds another kind of run, which must stay"):
        measure(made, other, "out", init, "probe.temperature=0.2", overwrite=True)


def test_init_that_names_no_recipe_asks_for_one(made, at):
    for init, words in [
        (checkpoint_of(made.runs["mpp"]), "is no run folder that would name one"),
        ("scratch", "--recipe is missing, and init=scratch"),
    ]:
        with pytest.raises(UserError, match=words):
            resolve(made, f"init={init}", recipe=False)
    with pytest.raises(UserError, match="no finished pre-training below"):
        resolve(made, recipe=False)
