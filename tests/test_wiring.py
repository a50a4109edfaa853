"""mpp/wiring.py: what can't be had together is refused before anything is written, and what is odd is said."""

import dataclasses
import hashlib
import json
from importlib import resources
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import noise_photos
from PIL import Image, ImageOps
from timm.data import ImageNetInfo

from mpp import config, data, imagenet, references, run, run_folder, sources, tasks, wiring
from mpp.console import Console
from mpp.errors import UserError

QUIET = Console(quiet=True)
SMALL = ["model.embed_dim=32", "model.depth=2", "model.num_heads=2", "optim.steps=2", "optim.warmup_steps=0"]
SYNTHETIC = [*SMALL, "data.source=synthetic:20", "optim.batch_size=4", "runtime.micro_batch=4", "runtime.eval_every=0"]
RESNET = ["model.name=resnetv2_26x1_bit", "model.layers=[1,1,1,1]", "model.width_factor=0.5"]
RESNET += [f"model.{key}=null" for key in ("patch_size", "embed_dim", "depth", "num_heads")]


def recipe_of(name, *overrides):
    return config.load_run(name, [*SYNTHETIC, *overrides])[0]


def refusal(recipe, folder, action=run.pretrain):
    with pytest.raises(UserError) as found:
        action(recipe, folder, QUIET)
    assert not folder.exists()
    return str(found.value)


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("mpp_demo", ["model.patch_size=14", "data.image_size=56", "objective.target=colors_4x4"], "14"),
        ("mpp_demo", RESNET, "resnetv2_26x1_bit has no patches to predict"),
        ("mpp_demo", ["data.image_size=36", "model.drop_border=true"], "objective.name=mpp needs whole patches"),
        ("mpp_demo", ["model.name=vit_base_patch16_rpn_224"], "is not"),
        ("supervised_demo", [*RESNET, "optim.layer_decay=0.7"], "has no layers of a Vision Transformer; use 1"),
        ("supervised_demo", [*RESNET, "model.position=relative"], "is a ResNet and has no such thing"),
        ("supervised_demo", ["data.rand_augment=rand-m15-n2"], "data.rand_augment=rand-m15-n2"),
        ("supervised_demo", ["data.subset=21"], "data.subset=21"),
        ("supervised_demo", ["init=nowhere.npz"], "init=nowhere.npz: not found"),
    ],
)
def test_what_cannot_be_had_together_is_refused_before_training(name, overrides, words, tmp_path):
    if overrides == ["model.name=vit_base_patch16_rpn_224"]:
        words = "timm makes it in `vision_transformer_relpos`"
        overrides = ["model.name=vit_relpos_base_patch16_224"]
    assert words in refusal(recipe_of(name, *overrides), tmp_path / "run")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["objective.mixup=0.2"], "masked patch prediction has no labels: use 0"),
        (["data.subset=1"], "written with a point, or a number of images above 1"),
        (["data.subset=1.5"], "data.subset=1.5"),
        (["optim.layer_decay=0"], "optim.layer_decay=0.0 must lie in (0, 1]"),
        (["optim.average=1"], "optim.average=1.0 must lie in [0, 1)"),
        (["optim.milestones=[1]"], "go with optim.schedule=staircase, and only with it"),
        (["optim.schedule=staircase"], "go with optim.schedule=staircase"),
        (["optim.schedule=staircase", "optim.milestones=[1, 1]"], "must rise within 1 .. optim.steps - 1"),
        (["data.erasing=2"], "data.erasing=2.0"),
        (["model.layers=[]"], "model.layers=[] must be positive numbers"),
        (["model.head=mlp"], "model.head=mlp belongs to objective.name=supervised"),
        (["objective.loss=sigmoid"], "objective.loss=sigmoid belongs to objective.name=supervised"),
        (["optim.schedule=linear", "optim.end_learning_rate=1.0"], "is above optim.learning_rate"),
        (["model.pool=map"], "model.pool must be token or gap or patches or null"),
    ],
)
def test_values_out_of_range_are_refused_by_the_recipe(overrides, words):
    with pytest.raises(UserError) as found:
        recipe_of("mpp_demo", *overrides)
    assert words in str(found.value)


def test_mixing_needs_pairs():
    with pytest.raises(UserError, match="runtime.micro_batch=1 must be even"):
        recipe_of("supervised_demo", "objective.cutmix=1.0", "runtime.micro_batch=1")


def test_masked_patch_prediction_on_a_hybrid_warns_and_runs(tmp_path, capsys):
    shape = ["model.name=vit_tiny_r26_s16_224", "model.patch_size=null", "model.layers=[1,1,1]"]
    recipe = recipe_of("mpp_demo", *shape, "model.width_factor=0.5", "data.image_size=64")
    summary = run.pretrain(recipe, tmp_path / "run", Console())
    assert "warning: vit_tiny_r26_s16_224 is a hybrid" in capsys.readouterr().out
    assert summary["figures"]["loss"] > 0


def parquet_of_labels(tmp_path, labels, test=None):
    photos = sorted(noise_photos(tmp_path / "photos", len(labels)).iterdir())
    images = [{"bytes": file.read_bytes(), "path": ""} for file in photos]
    for split, chosen in [("train", labels), ("validation", test or labels)]:
        pq.write_table(pa.table({"image": images, "labels": chosen}), tmp_path / f"{split}.parquet")
    return f"data.source=parquet:{tmp_path}/{{split}}.parquet"


def test_softmax_on_several_labels_is_refused_and_sigmoid_learns_them(tmp_path):
    source = parquet_of_labels(tmp_path, [[0, 2], [1], [], [2, 1], [0], [1], [2], [0, 1]])
    softmax = recipe_of("supervised_demo", source)
    assert "can have several labels; use objective.loss=sigmoid" in refusal(softmax, tmp_path / "run")
    summary = run.pretrain(recipe_of("supervised_demo", source, "objective.loss=sigmoid"), tmp_path / "run", QUIET)
    assert 0 <= summary["figures"]["held_out_accuracy"] <= 1
    tuning = recipe_of("finetune_demo", source, "objective.loss=sigmoid", "data.per_class=null", "data.holdout=0.25")
    results = run.finetune(tuning, tmp_path / "tuned", QUIET)
    assert {record["metric"] for record in results} == {"loss", "accuracy"}


def test_several_labels_in_the_test_split_alone_are_seen_before_training(tmp_path):
    source = parquet_of_labels(tmp_path, [0, 1, 2] * 2, [[0, 1], [1], [2], [], [0], [2]])
    for action, name in [(run.pretrain, "supervised_demo"), (run.finetune, "finetune_demo")]:
        recipe = recipe_of(name, source, "data.per_class=null", "data.holdout=0.5")
        assert "use objective.loss=sigmoid" in refusal(recipe, tmp_path / "run", action)
    with pytest.raises(UserError, match="classifiers on frozen features need one"):
        wiring.require_one_label(recipe)


def test_images_that_are_mixed_come_in_pairs():
    recipe = recipe_of("supervised_demo", "objective.mixup=0.2", "optim.batch_size=12", "runtime.micro_batch=8")
    with pytest.raises(UserError, match="use runtime.micro_batch=6"):
        wiring.micro_batches(recipe, 1)
    with pytest.raises(UserError, match="use a batch size that 4"):
        wiring.micro_batches(recipe_of("supervised_demo", "objective.mixup=0.2", "optim.batch_size=6"), 4)


def test_a_border_that_is_dropped_is_told(tmp_path, capsys):
    run.pretrain(
        recipe_of("supervised_demo", "data.image_size=35", "model.drop_border=true"), tmp_path / "a", Console()
    )
    assert "3 of 35 pixels at the right and at the bottom are not seen" in capsys.readouterr().out


def test_sigmoid_targets_stay_apart():
    with pytest.raises(UserError, match="smaller than 0.5 for the sigmoid loss"):
        recipe_of("supervised_demo", "objective.loss=sigmoid", "objective.label_smoothing=0.5")


def test_a_class_token_does_not_go_with_gap(tmp_path):
    run.pretrain(recipe_of("mpp_demo"), tmp_path / "run", QUIET)
    tuning = recipe_of("finetune_demo", f"init={tmp_path / 'run'}", "model.pool=gap", "data.per_class=null")
    message = refusal(tuning, tmp_path / "tuned", run.finetune)
    assert "unexpected: cls_token" in message and "use model.pool=token, or patches" in message


def test_a_head_of_other_classes_is_dropped_and_named(tmp_path, capsys):
    run.pretrain(recipe_of("supervised_demo"), tmp_path / "run", QUIET)
    source = parquet_of_labels(tmp_path, [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2])
    recipe = recipe_of("supervised_demo", source, f"init={tmp_path / 'run'}")
    run.pretrain(recipe, tmp_path / "other", Console())
    assert "dropped head.bias, head.weight; the new head has 3 classes" in capsys.readouterr().out


def official_arrays(recipe):
    """Arrays of the official layout for a recipe's encoder of two blocks, made from its weights by hand."""
    encoder = wiring.build(recipe, None)
    torch.manual_seed(1)
    state = {name: torch.randn_like(value).numpy() * 0.1 for name, value in encoder.state_dict().items()}
    heads = encoder.blocks[0].attn.num_heads
    arrays = {
        "cls": state["cls_token"],
        "embedding/kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "Transformer/posembed_input/pos_embedding": state["pos_embed"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
        "head/kernel": np.ones((32, 7), dtype=np.float32),
        "head/bias": np.ones(7, dtype=np.float32),
    }
    for block in range(2):
        at, ours = f"Transformer/encoderblock_{block}/", f"blocks.{block}."
        for there, here in [("LayerNorm_0", "norm1"), ("LayerNorm_2", "norm2")]:
            arrays[f"{at}{there}/scale"] = state[f"{ours}{here}.weight"]
            arrays[f"{at}{there}/bias"] = state[f"{ours}{here}.bias"]
        attention = f"{at}MultiHeadDotProductAttention_1/"
        kernels = np.split(state[f"{ours}attn.qkv.weight"], 3)
        biases = np.split(state[f"{ours}attn.qkv.bias"], 3)
        for name, kernel, bias in zip(("query", "key", "value"), kernels, biases, strict=True):
            arrays[f"{attention}{name}/kernel"] = kernel.T.reshape(32, heads, -1)
            arrays[f"{attention}{name}/bias"] = bias.reshape(heads, -1)
        arrays[f"{attention}out/kernel"] = state[f"{ours}attn.proj.weight"].T.reshape(heads, -1, 32)
        arrays[f"{attention}out/bias"] = state[f"{ours}attn.proj.bias"]
        for number, layer in enumerate(("fc1", "fc2")):
            arrays[f"{at}MlpBlock_3/Dense_{number}/kernel"] = state[f"{ours}mlp.{layer}.weight"].T
            arrays[f"{at}MlpBlock_3/Dense_{number}/bias"] = state[f"{ours}mlp.{layer}.bias"]
    return arrays, state


def test_official_weights_are_an_init(tmp_path, capsys):
    recipe = recipe_of("supervised_demo", f"init={tmp_path / 'official.npz'}", "optim.learning_rate=1e-30")
    arrays, state = official_arrays(recipe)
    np.savez(tmp_path / "official.npz", **arrays)
    run.pretrain(recipe, tmp_path / "run", Console())
    assert "dropped head.weight, head.bias; the new head has 10 classes" in capsys.readouterr().out
    found = references.find_weights(str(tmp_path / "run")).tensors
    for name, value in state.items():
        np.testing.assert_allclose(found[name].numpy(), value, atol=1e-7)

    larger = recipe_of(
        "finetune_demo", f"init={tmp_path / 'official.npz'}", "data.image_size=48", "data.per_class=null"
    )
    run.finetune(larger, tmp_path / "tuned", Console())
    assert "position embeddings resized from 4 x 4 to 6 x 6 (bilinear_corners)" in capsys.readouterr().out


def test_official_weights_that_do_not_fit_are_refused_by_every_array(tmp_path):
    recipe = recipe_of("supervised_demo", f"init={tmp_path / 'official.npz'}")
    arrays, _ = official_arrays(recipe)
    del arrays["cls"]
    arrays["embedding/bias"] = np.ones(5, dtype=np.float32)
    arrays["extra"] = np.ones(1, dtype=np.float32)
    np.savez(tmp_path / "official.npz", **arrays)
    message = refusal(recipe, tmp_path / "run")
    for words in ("missing: cls", "shape of embedding/bias: [5] there, [32] in the model", "unexpected: extra"):
        assert words in message


def test_the_model_of_a_run_becomes_that_of_its_fine_tuning():
    large = config.load_run("supervised_i21k_l16")[0]
    assert run_folder.model_overrides(large, "finetune_b16") == ['model.name="vit_large_patch16_224"']
    assert run_folder.model_overrides(large, "finetune_b16", ["model.name=other"]) == []
    pooled = config.load_run("supervised_i1k_b16", ["model.pool=gap", "model.position=learned_2d"])[0]
    found = run_folder.model_overrides(pooled, "finetune_b16")
    assert found == ['model.pool="gap"', 'model.position="learned_2d"']
    assert config.load_run("finetune_b16", found)[0].model.pool == "gap"
    assert run_folder.model_overrides(config.load_run("mpp_b16")[0], "finetune_mae_b16") == []


def test_compute_of_the_papers_recipe():
    found = wiring.count_cost(config.load_run("mpp_b16")[0], None)
    assert wiring.exaflops(found, 4_096_000_000) == pytest.approx(432.6, rel=1e-3)


# ---- splits, tasks and labels


def labelled_photos(root, counts, first=0):
    """SPLIT/CLASS/NUMBER.png, no two alike; counts: {"train": {"cat": 3}}."""
    number = first
    for split, classes in counts.items():
        for name, count in classes.items():
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for _ in range(count):
                pixels = np.random.default_rng(number).integers(0, 256, (12, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number:03d}.png")
                number += 1
    return root


COUNTS = {"train": {"a": 4, "b": 3, "c": 2}, "val": {"a": 1, "b": 2, "c": 1}, "test": {"a": 2, "b": 2, "c": 2}}
SPLITS = ["data.train_split=train", "data.choice_split=val", "data.eval_split=test"]


def photos_with_a_choice_split(root, kind):
    """The same images as folders, or as lists in another order; and the source."""
    labelled_photos(root, COUNTS)
    if kind == "list":
        for split in COUNTS:
            files = sorted((root / split).glob("*/*.png"), key=lambda file: file.stem[::-1])
            lines = [f"{file.relative_to(root)} {'abc'.index(file.parent.name)}\n" for file in files]
            (root / f"{split}.txt").write_text("".join(lines))
    return f"data.source={kind}:{root}"


@pytest.mark.parametrize("kind", ["folder", "list"])
def test_a_choice_split_is_chosen_on_and_then_trained_on(tmp_path, kind, monkeypatch):
    source = photos_with_a_choice_split(tmp_path / "set", kind)
    overrides = [source, *SPLITS, "data.per_class=null", "optim.steps=9", "runtime.log_inputs=true"]
    recipe = recipe_of("finetune_demo", *overrides, "optim.learning_rate=[0.1, 0.01]")
    measured, measure_rows = [], run.measure_rows

    def noted(one, held_out):
        measured.append([held_out[0].name(row) for row in held_out[1]])
        return measure_rows(one, held_out)

    monkeypatch.setattr(run, "measure_rows", noted)
    results = run.finetune(recipe, tmp_path / "run", QUIET)
    files = {split: {str(file) for file in (tmp_path / "set" / split).glob("*/*.png")} for split in COUNTS}
    assert len(measured) == 2 and all(sorted(names) == sorted(files["val"]) for names in measured)
    joined, both = wiring.open_training(recipe, QUIET), files["train"] | files["val"]

    def read(folder):
        lines = [json.loads(line) for line in (folder / "inputs" / "process_0.jsonl").read_text().splitlines()]
        return {joined.name(row) for line in lines for row in line["index"]}

    for rate in ("0.1", "0.01"):
        assert read(tmp_path / "run" / "sweep" / f"learning_rate_{rate}") == files["train"]
    assert read(tmp_path / "run") == both  # 36 samples of 13 images
    assert {(record["images"], record["train_images"]) for record in results} == {(6, 13)}
    for row, label in enumerate(joined.labels):
        assert "abc"[label] == Path(joined.name(row)).parent.name
    one_rate = dataclasses.replace(recipe, optim=dataclasses.replace(recipe.optim, learning_rate=0.1))
    fit, choice = wiring.labelled_rows(one_rate, joined)
    assert {joined.name(row) for row in fit} == both and len(choice) == 0


def test_a_choice_split_of_other_classes_is_refused_by_its_name(tmp_path):
    labelled_photos(tmp_path / "set", COUNTS | {"val": {"a": 1, "d": 1}})
    recipe = recipe_of("finetune_demo", f"data.source=folder:{tmp_path / 'set'}", *SPLITS, "data.per_class=null")
    message = refusal(recipe, tmp_path / "run", run.finetune)
    assert r"the classes of train and val differ (only in the first: ['b', 'c'], only in the second: ['d'])" in message
    assert message == refusal(recipe, tmp_path / "run", run.sweep)


def test_a_choice_split_counts_for_the_cache(tmp_path):
    source = parquet_of_labels(tmp_path, [0, 1] * 4)
    (tmp_path / "train.parquet").rename(tmp_path / "tried.parquet")
    pq.write_table(pq.read_table(tmp_path / "tried.parquet").slice(0, 2), tmp_path / "train.parquet")
    recipe = recipe_of(
        "finetune_demo", source, "data.per_class=null", "data.choice_split=tried", "data.eval_split=test"
    )
    room = 1.1 * pq.read_metadata(tmp_path / "train.parquet").row_group(0).total_byte_size / 1e9
    tight = dataclasses.replace(recipe, runtime=dataclasses.replace(recipe.runtime, cache_gb=room))
    with pytest.raises(UserError, match=r"can't hold two windows of data.shuffle_shards=8"):
        wiring.open_training(tight, QUIET)
    alone = dataclasses.replace(tight.data, choice_split=None)
    assert len(wiring.open_training(dataclasses.replace(tight, data=alone), QUIET)) == 2


SMALL_TASK = tasks.Task("small", "transfer", "Small", None, None, "train", "val", "test", 9, 4, 6, 0.0, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"train_images": 10}, "split train of {source} holds 9 images in 3 classes, and 10 in 3 were published"),
        ({"choice_images": 5}, "split val of {source} holds 4 images in 3 classes, and 5 in 3 were published"),
        ({"test_images": 1}, "split test of {source} holds 6 images in 3 classes, and 1 in 3 were published"),
        ({"classes": 4}, "split train of {source} holds 9 images in 3 classes, and 9 in 4 were published"),
    ],
)
def test_a_task_must_have_its_published_numbers(tmp_path, monkeypatch, changes, words):
    source = photos_with_a_choice_split(tmp_path / "set", "folder")
    monkeypatch.setitem(tasks.TASKS, "small", dataclasses.replace(SMALL_TASK, **changes))
    options = [source, *SPLITS, "data.task=small", "data.per_class=null", "optim.learning_rate=[0.1, 0.01]"]
    recipe = recipe_of("finetune_demo", *options)
    if words is None:
        assert run.finetune(recipe, tmp_path / "run", QUIET)[0]["train_images"] == 13
    else:
        message = refusal(recipe, tmp_path / "run", run.finetune)
        assert f"data.task=small: {words.format(source=source)}" in message and "leave out data.task" in message


def test_a_task_that_is_not_in_the_table_is_refused(tmp_path):
    message = refusal(
        recipe_of("finetune_demo", "data.task=dtd", "data.per_class=null"), tmp_path / "run", run.finetune
    )
    assert "data.task=dtd: no such task; did you mean vtab/dtd?" in message


@pytest.mark.parametrize("labels", [np.arange(60) % 7, np.arange(120).reshape(60, 2) % 11])
def test_shuffled_labels_are_a_permutation_among_the_rows_that_are_used(labels):
    source = sources.Pictures(np.zeros((60, 2, 2, 3), np.uint8), [str(label) for label in range(11)], labels)
    rows = np.flatnonzero(np.arange(60) % 3)
    recipe = recipe_of("supervised_demo", "data.shuffle_labels=true")
    found = [wiring.training_labels(dataclasses.replace(recipe, seed=seed), source, rows) for seed in (0, 0, 1)]
    untouched = np.setdiff1d(np.arange(60), rows)
    for one in found:
        assert np.array_equal(one[untouched], labels[untouched])
        assert sorted(one[rows].tolist()) == sorted(labels[rows].tolist())
    assert np.array_equal(found[0], found[1]) and not np.array_equal(found[0], found[2])
    # Of 40 labels in 7 kinds, chance leaves 40 / 7 in their place; 3 standard deviations are 6.6.
    assert sum((found[0] == labels).reshape(60, -1).all(1)[rows]) <= 12
    plain = recipe_of("supervised_demo")
    assert wiring.training_labels(plain, source, rows) is source.labels is labels


def test_a_control_trains_on_shuffled_labels_and_is_measured_on_the_true_ones(tmp_path, monkeypatch):
    trained, measured = [], []

    def note(found, kind):
        def make(source, rows, *parts, **named):
            made = kind(source, rows, *parts, **named)
            found.append((source, np.asarray(rows), made.labels))
            return made

        return make

    monkeypatch.setattr(data, "TrainingSamples", note(trained, data.TrainingSamples))
    monkeypatch.setattr(data, "HeldOutSamples", note(measured, data.HeldOutSamples))
    options = ["data.shuffle_labels=true", "data.per_class=null", "data.holdout=0.5", "optim.learning_rate=[0.1, 0.2]"]
    run.finetune(recipe_of("finetune_demo", *options), tmp_path / "run", QUIET)
    assert [len(rows) for _, rows, _ in trained] == [10, 10, 20]
    for source, rows, labels in trained:
        assert sorted(labels[rows]) == sorted(source.labels[rows]) and (labels != source.labels).any()
    assert [len(rows) for _, rows, _ in measured] == [10, 10, 20]
    assert all(np.array_equal(labels, source.labels) for source, _, labels in measured)
    splits = [sources.open_source("synthetic:20", split).fingerprint for split in ("train", "train", "validation")]
    assert [source.fingerprint for source, _, _ in measured] == splits


def test_images_that_are_trained_on_and_tested_are_refused_unless_their_number_is_known(tmp_path):
    root = labelled_photos(tmp_path / "set", {"train": {"a": 4, "b": 4}, "test": {"a": 3, "b": 3}})
    for number, name in enumerate(("000", "005")):
        copy = root / "test" / "ab"[number] / f"copy_{number}.png"
        copy.write_bytes((root / "train" / "ab"[number] / f"{name}.png").read_bytes())
    options = [f"data.source=folder:{root}", "data.eval_split=test", "data.per_class=null", "optim.learning_rate=0.1"]
    message = refusal(recipe_of("finetune_demo", *options, "data.max_overlap=1"), tmp_path / "run", run.finetune)
    assert "2 test images are training images, too, byte for byte" in message
    assert f"{root}/test/a/copy_0.png = {root}/train/a/000.png" in message
    assert f"{root}/test/b/copy_1.png = {root}/train/b/005.png" in message
    assert "data.max_overlap=2" in message
    with pytest.raises(UserError, match="2 test images are training images"):
        wiring.rehearse_arm(None, [recipe_of("finetune_demo", *options, "data.max_overlap=0")])
    results = run.finetune(recipe_of("finetune_demo", *options, "data.max_overlap=2"), tmp_path / "run", QUIET)
    assert {(record["overlap"], record["images"]) for record in results} == {(2, 8)}
    assert "2 test images are among them (data.max_overlap=2)" in (tmp_path / "run" / "report.md").read_text()


def test_only_images_that_are_used_can_overlap(tmp_path):
    root = labelled_photos(tmp_path / "set", {"train": {"a": 4, "b": 4}, "test": {"a": 3, "b": 3}})
    options = [f"data.source=folder:{root}", "data.eval_split=test", "data.per_class=3", "optim.learning_rate=0.1"]
    recipe = recipe_of("finetune_demo", *options, "data.max_overlap=0")
    source = wiring.open_training(recipe, QUIET)
    used = np.concatenate(wiring.labelled_rows(recipe, source))
    for row in range(8):  # a copy of each training image in turn
        copy = root / "test" / "a" / "copy.png"
        copy.write_bytes(source.encoded(row))
        if row in used:
            assert f"copy.png = {source.name(row)}" in refusal(recipe, tmp_path / "run", run.finetune)
        else:
            results = run.finetune(recipe, tmp_path / f"run_{row}", QUIET)
            assert results[0]["overlap"] == 0 and results[0]["train_images"] == 6
    assert len(list(tmp_path.glob("run_*"))) == 2


# ---- further test sets


SYNSETS = imagenet.synsets()


def image_files(root, names):
    """Unlike images with these names below a folder."""
    for number, name in enumerate(names):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        seed = int.from_bytes(hashlib.sha256(f"{root} {number}".encode()).digest()[:4])
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)).save(file, "PNG")
    return root


def opened(recipe_tests, test=None, classes=SYNSETS):
    recipe = dataclasses.replace(recipe_of("finetune_demo"), tests=recipe_tests)
    return wiring.open_further_tests(recipe, test, classes)


def folder_source(root, files):
    return sources.Folder(root, files, None, None)


def test_real_labels_come_by_the_names_of_the_files_and_in_the_models_order(tmp_path):
    # timm's file says [970, 795] of the second image, none of the first, and [230, 231] of the third.
    names = [f"n0/ILSVRC2012_val_{number:08d}.JPEG" for number in (2, 1, 3)]
    found = opened({"imagenet_real": None}, folder_source(tmp_path, names))["imagenet_real"]
    assert found.source is None and found.labels.tolist() == [[795, 970], [-1, -1], [230, 231]]
    backwards = opened({"imagenet_real": None}, folder_source(tmp_path, names), SYNSETS[::-1])["imagenet_real"]
    assert backwards.labels.tolist() == [[999 - 795, 999 - 970], [-1, -1], [999 - 230, 999 - 231]]
    with pytest.raises(UserError, match=r"n0/a.png: ReaL labels belong .* must hold ILSVRC2012_val_00000001 to"):
        opened({"imagenet_real": None}, folder_source(tmp_path, ["n0/a.png"]))
    with pytest.raises(
        UserError, match=r"tests.imagenet_real=demo: its images are those of the test split; write null"
    ):
        opened({"imagenet_real": "demo"}, folder_source(tmp_path, names))
    with pytest.raises(UserError, match=r"997 of the 1000 classes"):
        opened({"imagenet_real": None}, folder_source(tmp_path, names), SYNSETS[:3])


def test_real_labels_come_by_the_names_that_parquet_files_keep(tmp_path):
    cells = [{"bytes": b"", "path": f"ILSVRC2012_val_{number:08d}_n01751748.JPEG"} for number in (3, 2)]
    pq.write_table(pa.table({"image": cells, "label": [0, 1]}), tmp_path / "named.parquet")
    pq.write_table(pa.table({"image": [{**cell, "path": ""} for cell in cells]}), tmp_path / "unnamed.parquet")
    named, unnamed = (
        sources.open_source(f"parquet:{tmp_path}/{name}.parquet", "train") for name in ("named", "unnamed")
    )
    assert opened({"imagenet_real": None}, named)["imagenet_real"].labels.tolist() == [[230, 231], [795, 970]]
    with pytest.raises(UserError, match=r"unnamed.parquet row 0: ReaL labels belong .* file names must hold"):
        opened({"imagenet_real": None}, unnamed)


def test_folders_of_imagenet_v2_are_numbers(tmp_path):
    root = image_files(tmp_path / "v2", ["10/a.jpeg", "2/b.jpeg", "2/c.jpeg", "999/d.jpeg"])
    found = opened({"imagenet_v2": f"folder:{root}"})["imagenet_v2"]
    names = [found.source.name(row).removeprefix(f"{root}/") for row in range(4)]
    assert dict(zip(names, found.labels[:, 0].tolist(), strict=True)) == {
        "10/a.jpeg": 10, "2/b.jpeg": 2, "2/c.jpeg": 2, "999/d.jpeg": 999
    }  # fmt: skip
    by_name = opened({"v2": f"folder:{root}"}, classes=[SYNSETS[999], SYNSETS[2], SYNSETS[10], SYNSETS[5]])["v2"]
    assert dict(zip(names, by_name.labels[:, 0].tolist(), strict=True)) == {
        "10/a.jpeg": 2, "2/b.jpeg": 1, "2/c.jpeg": 1, "999/d.jpeg": 0
    }  # fmt: skip
    with pytest.raises(UserError, match=r"1 of the 3 classes of the test set are not among .*'999'"):
        opened({"v2": f"folder:{root}"}, classes=SYNSETS[:999])


def objectnet(root):
    """Three of ObjectNet's folders with a red border of one pixel, and its mappings, whose lines run backwards."""
    image_files(root / "images", ["alarm_clock/1.png", "alarm_clock/2.png", "air_freshener/3.png", "backpack/4.png"])
    for file in (root / "images").glob("*/*.png"):
        ImageOps.expand(Image.open(file), border=1, fill=(255, 0, 0)).save(file)
    texts = ImageNetInfo("imagenet-1k").label_descriptions()
    mappings = {
        "folder_to_objectnet_label.json": {
            "air_freshener": "Air freshener", "alarm_clock": "Alarm clock", "backpack": "Backpack"
        },
        "objectnet_to_imagenet_1k.json": {
            "Alarm clock": "analog clock; digital clock",
            "Backpack": "backpack, back pack, knapsack, packsack, rucksack, haversack",
        },
        "pytorch_to_imagenet_2012_id.json": {str(number): 999 - number for number in range(1000)},
    }  # fmt: skip
    (root / "mappings").mkdir()
    for name, content in mappings.items():
        (root / "mappings" / name).write_text(json.dumps(content))
    (root / "mappings" / "imagenet_to_label_2012_v2").write_text("".join(f"{text}\n" for text in texts[::-1]))
    return root


def test_objectnet_is_seen_without_its_border_and_has_the_labels_of_its_mappings(tmp_path):
    root = objectnet(tmp_path / "objectnet-1.0")
    found = opened({"objectnet": f"folder:{root}/images"}, classes=SYNSETS[::-1])["objectnet"]
    names = [Path(found.source.name(row)).stem for row in range(4)]
    labels = {name: sorted(label for label in row if label >= 0) for name, row in zip(names, found.labels, strict=True)}
    clock = [999 - 530, 999 - 409]  # digital and analog
    assert labels == {"1": clock, "2": clock, "3": [], "4": [999 - 414]}
    for row in range(4):
        bordered = np.asarray(Image.open(found.source.name(row)).convert("RGB"))
        inside, picture = bordered[1:-1, 1:-1], found.source.picture(row)
        assert (bordered[0] == [255, 0, 0]).all() and (picture.height, picture.width) == inside.shape[:2] == (9, 12)
        assert np.array_equal(picture.region((0, 0, 12, 9)), inside)
        assert np.array_equal(picture.region((3, 2, 7, 9)), inside[2:9, 3:7])
        whole = sources.Pictures(inside[None], None, None).picture(0)
        for view in (data.View(8), data.View(8, eval_crop="center", resize=9)):
            assert np.array_equal(view.evaluate(picture), view.evaluate(whole))
    with pytest.raises(UserError, match=r"folder_to_objectnet_label.json can't be read"):
        opened({"objectnet": f"folder:{image_files(tmp_path / 'b' / 'images', ['backpack/1.png'])}"})


def test_a_test_set_of_the_same_classes_in_another_order(tmp_path):
    root = image_files(tmp_path / "more", ["cat/1.png", "dog/2.png", "emu/3.png"])
    found = opened({"more": f"folder:{root}"}, classes=["emu", "dog", "ant", "cat"])["more"]
    assert found.labels.tolist() == [[3], [1], [0]]
    assert [Path(found.source.name(row)).name for row in range(3)] == ["1.png", "2.png", "3.png"]


def test_the_split_of_a_further_test_set_is_the_test_split_where_it_has_any(tmp_path):
    root = labelled_photos(tmp_path / "more", {"validation": {"a": 2}, "train": {"b": 3}})
    found = opened({"more": f"folder:{root}"}, classes=["b", "a"])["more"]
    assert found.labels.tolist() == [[1], [1]]


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ({"more": "folder:{root}"}, " of the 3 classes of the test set are not among the 2 of the model: "),
        ({"more": None}, "tests.more=null: only imagenet_real has no images of its own; name a source"),
        ({"objectnet": None}, "tests.objectnet=null: only imagenet_real"),
        ({"more": "folder:{root}/nowhere"}, "folder:{root}/nowhere: no such folder"),
        ({"more": "folder:{root}/cat"}, "tests.more=folder:{root}/cat: no classes"),
        ({"more": "{root}"}, "no source of that form"),
        ({"test": "folder:{root}"}, "tests.test: this name is the test split's own"),
        ({"cat_labels": "folder:{root}"}, "tests.cat_labels: this name"),
        ({"synthetic:20": "folder:{root}"}, "tests.synthetic:20: this name"),
    ],
)
def test_further_test_sets_that_cannot_be_had(tmp_path, tests, words):
    root = image_files(tmp_path / "more", ["cat/1.png", "dog/2.png", "emu/3.png"])
    with pytest.raises(UserError) as found:
        opened({name: where and where.format(root=root) for name, where in tests.items()}, classes=["cat", "ant"])
    assert words.format(root=root) in str(found.value)


def test_further_test_sets_are_refused_before_training(tmp_path):
    recipe = recipe_of("finetune_demo", "data.per_class=null", "tests.more=folder:/nowhere")
    assert "folder:/nowhere: no such folder" in refusal(recipe, tmp_path / "run", run.finetune)
    with pytest.raises(UserError, match="folder:/nowhere: no such folder"):
        wiring.rehearse_arm(None, [recipe])


def expected_hits(best, allowed, k=1):
    return [bool(set(row[:k].tolist()) & set(some)) for row, some in zip(best, allowed, strict=True)]


def test_a_model_of_imagenets_classes_is_measured_on_every_further_test_set(tmp_path):
    root = tmp_path / "set"
    numbers = np.random.default_rng(5).permutation(50_000)[:1000] + 1  # of the validation images, one a class
    for label, synset in enumerate(SYNSETS):
        files = [f"train/{synset}/a.png", f"validation/{synset}/ILSVRC2012_val_{numbers[label]:08d}.JPEG"]
        for number, file in enumerate(files):
            (root / file).parent.mkdir(parents=True)
            pixels = np.random.default_rng(2 * label + number).integers(0, 256, (2, 2, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / file, "PNG")
    v2 = image_files(tmp_path / "v2", [f"{number}/{one}.jpeg" for number in (10, 2, 999) for one in range(5)])
    shown = objectnet(tmp_path / "objectnet-1.0")
    recipe = recipe_of(
        "finetune_demo", f"data.source=folder:{root}", "data.per_class=null", "data.image_size=8", "optim.steps=1",
        "optim.learning_rate=0.5", "tests.imagenet_real=null", f"tests.v2=folder:{v2}",
        f"tests.objectnet=folder:{shown}/images",
    )  # fmt: skip
    results = run.finetune(recipe, tmp_path / "run", QUIET)
    found = run_folder.read_arrays(tmp_path / "run" / "predictions.npz")
    assert set(found) == {
        f"{name}{end}" for name in ("test", "imagenet_real", "v2", "objectnet") for end in ("", "_labels")
    }
    assert {name: found[name].shape for name in ("test", "v2", "objectnet")} == {
        "test": (1000, 5), "v2": (15, 5), "objectnet": (4, 5)
    }  # fmt: skip
    assert np.array_equal(found["imagenet_real"], found["test"])
    real = json.loads((resources.files("timm.data") / "_info" / "imagenet_real_labels.json").read_text())
    allowed = {
        "test": [[label] for label in range(1000)],
        "imagenet_real": [real[number - 1] for number in numbers],
        "v2": [[number] for number in (10, 2, 999) for _ in range(5)],  # as folders sort
        "objectnet": [[], [409, 530], [409, 530], [414]],
    }
    names = {"test": f"folder:{root}", "imagenet_real": "imagenet_real", "v2": "v2", "objectnet": "objectnet"}
    records = {(record["data_set"], record["metric"]): record for record in results}
    assert {name for name, _ in records} == set(names.values()) and len(records) == 3 + 2 + 2 + 2
    for name, some in allowed.items():
        counted = [bool(one) for one in some]
        for metric, k in (("accuracy", 1), ("top_5_accuracy", 5)):
            record = records[names[name], metric]
            right = np.array(expected_hits(found[name], some, k))
            assert record["value"] == right[counted].mean() and record["images"] == sum(counted)
    assert sum(expected_hits(found["imagenet_real"], allowed["imagenet_real"], 5)) > 0  # of 1000 guesses
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["figures"]
    assert summary["v2_accuracy"] == records["v2", "accuracy"]["value"] and "test_loss" in summary
    rows = [line.split() for line in (tmp_path / "run" / "report.md").read_text().splitlines()]
    shown = f"{records['imagenet_real', 'accuracy']['value']:.4f}"
    assert [
        "|",
        "imagenet_real",
        "|",
        "accuracy",
        "|",
        shown,
        "|",
        str(sum(map(bool, allowed["imagenet_real"]))),
        "|",
    ] in rows


def test_a_further_test_set_is_measured_by_its_own_images(tmp_path):
    colors = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220)}
    shown = {"train": list(colors) * 3, "validation": list(colors), "more": ["blue", "red", "red", "green", "blue"]}
    folders = {"more": ["blue", "green", "red", "green", "red"]}  # two of five lie in another's folder
    number = 0
    for split, pictures in shown.items():
        root = tmp_path / "more" if split == "more" else tmp_path / "set" / split
        for color, name in zip(pictures, folders.get(split, pictures), strict=True):
            number += 1
            (root / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), tuple(part - number for part in colors[color])).save(
                root / name / f"{number}.png"
            )
    options = [
        f"data.source=folder:{tmp_path / 'set'}",
        "data.per_class=null",
        f"tests.more=folder:{tmp_path / 'more'}",
    ]
    recipe = recipe_of("finetune_demo", *options, "optim.learning_rate=0.1", "optim.steps=60")
    results = run.finetune(recipe, tmp_path / "run", QUIET)
    found = {(Path(record["data_set"]).name, record["metric"]): record["value"] for record in results}
    assert (found["set", "accuracy"], found["more", "accuracy"]) == (1.0, 3 / 5)
    best = run_folder.read_arrays(tmp_path / "run" / "predictions.npz")["more"][:, 0]
    assert [sorted(colors)[label] for label in best] == ["blue", "red", "green", "red", "blue"]  # by folder and name


# ---- probes


PROBES = ["probe.every=1", "probe.shots=[1]", "probe.neighbors=[1]", "runtime.log_every=1"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.source=folder:{flat}"], "probe.every=1: folder:{flat} has no classes to probe on; name a source that has, in probe.source"),
        (["probe.source=folder:{flat}"], "folder:{flat} has no classes"),
        (["probe.source=folder:/nowhere"], "folder:/nowhere: no such folder"),
        (["probe.test_split=elsewhere"], "not elsewhere"),
        (["probe.shots=[3]"], "3 images of each class are asked for, but there are fewer of class 0 (2)"),
        (["probe.neighbors=[11]"], "probe.neighbors=[11]: 1 images of each class are 10 in all"),
    ],
)  # fmt: skip
def test_probes_that_cannot_be_had_are_refused_before_training(tmp_path, overrides, words):
    for split in ("train", "validation"):
        image_files(tmp_path / "flat" / split, ["1.png", "2.png"])
    filled = [override.format(flat=tmp_path / "flat") for override in overrides]
    message = refusal(recipe_of("mpp_demo", *PROBES, *filled), tmp_path / "run")
    assert words.format(flat=tmp_path / "flat") in message


def test_probes_have_a_source_of_their_own_and_its_splits(tmp_path):
    def probes(*overrides):
        return wiring.probes_of(recipe_of("mpp_demo", *PROBES, *overrides), (0.5,) * 3, (0.5,) * 3, 1)

    assert wiring.probes_of(recipe_of("mpp_demo"), (0.5,) * 3, (0.5,) * 3, 1) is None
    own = probes("probe.test_images=7")
    assert own.train.fingerprint == sources.open_source("synthetic:20", "train").fingerprint
    assert own.test.fingerprint == sources.open_source("synthetic:20", "validation").fingerprint
    assert len(own.test_rows) == len(set(own.test_rows)) == 7 and max(own.test_rows) < 20
    other = probes("probe.source=synthetic:60", "probe.train_split=validation", "probe.test_split=test")
    assert other.train.fingerprint == sources.open_source("synthetic:60", "validation").fingerprint
    assert other.test.fingerprint == sources.open_source("synthetic:60", "test").fingerprint
    assert other.test_rows.tolist() == list(range(60))
    labelled_photos(tmp_path / "set", {"train": {"a": 2, "b": 2}, "validation": {"a": 1, "c": 1}})
    with pytest.raises(UserError, match="the classes of train and validation differ"):
        probes(f"probe.source=folder:{tmp_path / 'set'}")


def test_the_runs_of_a_comparison_are_not_sent_to_one_repository():
    tuning = config.load_run("finetune_demo", ["optim.learning_rate=0.1"])[0]
    sent = dataclasses.replace(tuning, runtime=dataclasses.replace(tuning.runtime, push_to_hub="anna/vit"))
    for pretraining, tunings in [(None, [sent]), (sent, [tuning])]:
        with pytest.raises(UserError, match="all runs of a comparison would go to one repository"):
            wiring.rehearse_arm(pretraining, tunings)
