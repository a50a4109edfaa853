"""mpp/wiring.py: what can't be had together is refused before anything is written, and what is odd is said."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import noise_photos

from mpp import checkpoint, config, run, run_folder, wiring
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
    found = checkpoint.find_weights(str(tmp_path / "run")).tensors
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
