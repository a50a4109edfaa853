"""mpp/model_card.py: what a repository says of itself, read as the Hub and as people's readers read it."""

import dataclasses
import itertools
import math
import re
import shlex

import pytest
import timm
import torch
import yaml
from conftest import picture
from huggingface_hub import ModelCard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from timm.models import save_for_hf

from mpp import config
from mpp.encoders import build_encoder
from mpp.errors import UserError
from mpp.model_card import Facts, card, public

NUMBERS = {
    "step": 1200,
    "loss": 1.2868,
    "held_out_loss": 1.3779,
    "held_out_target_entropy": 3.96,
    "held_out_accuracy": 0.579,
    "held_out_accuracy_masked": 0.573,
    "held_out_accuracy_random": 0.497,
    "held_out_nearest_patch_accuracy_masked": 0.587,
    "probe_5_shot_accuracy": 0.81,
    "probe_20_nn_accuracy": 0.72,
    "images": 153600,
    "learning_rate": 0.0,
}
NASTY = "a|b `c` ``d`` *e* _f_ <script>alert(1)</script> [g](https://evil.example) ![h](x) # --- : {i} & \\| &lt; é"


def facts(name="mpp_demo", /, *overrides, **changes):
    loaded, _ = config.load_run(name, overrides)
    usual = {
        "repository": "org/name",
        "revision": None,
        "recipe": loaded,
        "kind": "finetune" if name.startswith("finetune") else "pretrain",
        "step": loaded.optim.steps,
        "numbers": NUMBERS if loaded.objective.name == "mpp" else {},
        "results": [],
        "classes": None,
        "parameters": 1_830_720,
        "license": "apache-2.0",
        "pictures": [],
        "timm_opens": True,
        "versions": {"mpp": "0.1.0", "torch": "2.14.0"},
    }
    return Facts(**(usual | changes))


def result(data_set, metric, value, **changes):
    record = {"data_set": data_set, "metric": metric, "value": value, "seed": 3, "learning_rate": 0.03}
    return record | {"images": 12345, "train_images": 200, "overlap": 0, "tried": {}} | changes


def front(text):
    """The YAML as a plain reader finds it."""
    _, head, _ = text.split("---\n", 2)
    return yaml.safe_load(head)


def scores(text):
    """What the Hub reads, by data set and metric name."""
    found = ModelCard(text).data.eval_results or []
    return {(one.dataset_name, one.metric_name): (one.metric_type, one.metric_value) for one in found}


def blocks(text, language):
    return [
        token.content
        for token in MarkdownIt("commonmark").parse(text)
        if token.type == "fence"
        if token.info == language
    ]


def rows(text):
    """Cells of all tables, by the first of each row."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {first: rest for first, *rest in cells}


def body(text):
    return ModelCard(text).text


def html(text):
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(body(text))


def test_a_finished_pretraining_tells_the_hub_what_was_measured_and_no_more():
    text = card(facts())
    found = ModelCard(text).data
    assert (found.library_name, found.pipeline_tag, found.license) == ("timm", "image-feature-extraction", "apache-2.0")
    assert found.tags == ["masked-patch-prediction", "self-supervised-learning", "vision-transformer", "timm"]
    assert found.datasets is None and found.base_model is None and found.model_name == "name"
    assert scores(text) == {
        ("demo", "held-out accuracy on masked patches"): ("accuracy", 0.573),
        ("demo", "held-out loss"): ("loss", 1.3779),
        ("demo", "5-shot accuracy of frozen features"): ("accuracy", 0.81),
        ("demo", "20-nearest-neighbour accuracy of frozen features"): ("accuracy", 0.72),
    }
    assert {one.dataset_split for one in found.eval_results} == {"validation"}
    tasks = [result["task"]["type"] for result in front(text)["model-index"][0]["results"]]
    assert tasks == ["image-feature-extraction", "image-classification"]


def test_a_finished_pretraining_tells_people_the_same_with_references():
    text = card(facts(images=153600, seconds=1800.0, devices="2 x cpu", pictures=["figures/curves.png", "x.png"]))
    table = rows(text)
    assert table["held-out accuracy on masked patches"] == [
        "0.5730",
        "share of masked patches whose mean colour class is right, among 512",
    ]
    assert table["for reference: nearest patch"][0] == "0.5870"
    assert table["held-out loss"][0] == "1.3779" and table["training loss"][0] == "1.2868"
    assert table["patch"] == ["8 x 8 pixels"] and table["image"] == ["32 x 32 pixels"]
    assert table["parameters of the encoder"] == ["1,830,720"]
    assert table["differs from it in"] == ["`embed_dim=192`, `depth=4`, `num_heads=3`"]
    assert "step 1,200 of 1,200: the end of its run" in text and "not finished" not in text
    assert "corrupts 50% of an image's patches" in text and "An Image is Worth 16x16 Words" in text
    assert "153,600 images" in text and "30.0 minutes on `2 x cpu`" in text
    assert re.findall(r"!\[.*?\]\((.*?)\)", text) == ["figures/curves.png"]
    assert "Dosovitskiy" in blocks(text, "bibtex")[0] and "2010.11929" in blocks(text, "bibtex")[0]
    assert "Made with mpp 0.1.0, torch 2.14.0." in text


def test_an_unfinished_pretraining_says_so_and_claims_nothing_that_was_not_measured():
    text = card(facts(step=200, numbers={"step": 200, "loss": 2.5, "held_out_loss": math.nan}))
    assert "step 200 of 1,200: **the run is not finished**" in text and "figures are not its last" in text
    assert "model-index" not in front(text) and "model_name" not in front(text)
    assert ModelCard(text).data.eval_results is None
    assert rows(text)["training loss"][0] == "2.5000"
    assert "nan" not in text.lower().split() and "held-out loss" not in text
    assert "Nothing was measured at this step." in card(facts(step=200, numbers={}))


def test_the_data_are_told_with_what_was_taken_of_them():
    text = card(facts("finetune_demo", "data.shuffle_labels=true", seconds=9000.0))
    assert "Trained on `demo`, `train`; held out: `validation`." in text
    assert "Of each class 20 labelled images" in text and "**The labels were shuffled" in text
    assert "That took 2.5 hours." in text
    overrides = ["data.choice_split=dev", "data.per_class=null", "data.eval_split=test"]
    assert "Trained on `demo`, `train` and `dev`; held out: `test`." in card(facts("finetune_demo", *overrides))
    assert "(`data.subset=0.1`)" in card(facts("mpp_demo", "data.subset=0.1"))


def test_pixel_statistics_are_those_of_the_checkpoint():
    pixels = {"mean": [0.485, 0.456, 0.406], "std": (0.229, 0.224, 0.225), "interpolation": "bicubic", "crop_pct": 1.0}
    table = rows(card(facts(pixels=pixels)))
    assert table["pixel mean"] == ["`0.485, 0.456, 0.406`"]
    assert table["pixel standard deviation"] == ["`0.229, 0.224, 0.225`"]
    assert table["interpolation"] == ["`bicubic`"]
    assert "pixel mean" not in rows(card(facts()))


def test_numbers_mean_what_the_target_makes_of_them():
    in_parts = rows(card(facts("mpp_demo", "objective.target=colors_4x4")))
    assert "masked parts of patches" in in_parts["held-out accuracy on masked patches"][1]
    pixels = rows(card(facts("mpp_demo", "objective.target=pixels", numbers={"held_out_loss": 0.25})))
    assert pixels["held-out loss"] == ["0.2500", "mean squared error of the pixels of corrupted patches, in [-1, 1]"]


def test_a_fine_tuning_gives_each_test_set_its_own_figures():
    overrides = ["tests.imagenet_v2=folder:/data/v2", "tests.imagenet_real=null", "data.eval_split=test"]
    results = [
        result("hub:org/pets@main", "loss", 0.31, tried={"0.03": {}}, overlap=7),
        result("hub:org/pets@main", "accuracy", 0.912),
        result("hub:org/pets@main", "top_5_accuracy", 0.995),
        result("imagenet_v2", "accuracy", 0.7),
        result("imagenet_real", "accuracy", math.nan),
        result("imagenet_real", "top_5_accuracy", 0.8),
    ]
    recipe = facts(
        "finetune_demo",
        "data.source=hub:org/pets@main",
        "init=hf-hub:other/base@v2",
        *overrides,
        results=results,
        classes=["cat", "dog"],
    )
    text = card(recipe)
    found = ModelCard(text).data
    assert (found.pipeline_tag, found.tags[0]) == ("image-classification", "supervised")
    assert (found.datasets, found.base_model) == (["org/pets"], "other/base")
    told = {(one.dataset_type, one.dataset_revision, one.dataset_name) for one in found.eval_results}
    assert told == {
        ("org/pets", "main", "org/pets"),
        ("imagenet_v2", None, "imagenet_v2"),
        ("imagenet_real", None, "imagenet_real"),
    }
    assert {one.dataset_split for one in found.eval_results} == {"test"}
    assert scores(text) == {
        ("org/pets", "test loss"): ("loss", 0.31),
        ("org/pets", "test accuracy"): ("accuracy", 0.912),
        ("org/pets", "test top-5 accuracy"): ("top_5_accuracy", 0.995),
        ("imagenet_v2", "test accuracy"): ("accuracy", 0.7),
        ("imagenet_real", "test top-5 accuracy"): ("top_5_accuracy", 0.8),
    }
    assert "| `imagenet_v2`" in text and " 0.7000 | 12,345 |" in text
    assert "200 training images, seed 3, learning rate 0.03, chosen on held-out training images." in text
    assert " 7 test images are known to be among the training images." in text
    assert "Classes: `cat`, `dog`." in text and "[org/pets](https://huggingface.co/datasets/org/pets)" in text
    assert "It started from `hf-hub:other/base@v2`." in text and "fine-tuned on labels" in text


def test_a_test_set_named_as_the_data_is_not_mixed_with_it():
    results = [result("first", "accuracy", 0.9), result("cifar10", "accuracy", 0.5)]
    text = card(facts("finetune_demo", "data.source=hub:cifar10", "tests.cifar10=folder:/x", results=results))
    assert scores(text) == {
        ("first", "test accuracy"): ("accuracy", 0.9),
        ("cifar10", "test accuracy"): ("accuracy", 0.5),
    }


def test_the_data_set_keeps_the_name_that_a_comparison_gave_it():
    results = [result("Pets", "accuracy", 0.9)]
    text = card(facts("finetune_demo", "data.source=hub:org/pets", results=results))
    (one,) = ModelCard(text).data.eval_results
    assert (one.dataset_name, one.dataset_type) == ("Pets", "org/pets")


def test_an_unfinished_fine_tuning_has_no_test_figures():
    text = card(facts("finetune_demo", step=60, classes=["a", "b"]))
    assert "The test split was not read yet." in text and "model-index" not in front(text)


def test_a_supervised_pretraining_tells_its_accuracy_on_labels():
    numbers = {"loss": 0.5, "held_out_loss": 0.6, "held_out_accuracy": 0.85, "held_out_top_5_accuracy": 0.99}
    classes = [f"class {number}" for number in range(12)]
    text = card(facts("supervised_demo", numbers=numbers, classes=classes))
    assert scores(text) == {
        ("demo", "held-out accuracy"): ("accuracy", 0.85),
        ("demo", "held-out top-5 accuracy"): ("top_5_accuracy", 0.99),
        ("demo", "held-out loss"): ("loss", 0.6),
    }
    assert front(text)["pipeline_tag"] == "image-classification"
    assert rows(text)["held-out accuracy"] == ["0.8500", "share of images whose most likely class is right"]
    assert rows(text)["held-out loss"][1] == "cross-entropy of the labels, in nats"
    assert rows(text)["head"] == ["12 classes"]
    assert "`class 9`, and so on" in text and "class 10" not in text
    assert "Masked patch prediction" not in text and "mpp/pretrain.py --recipe recipe.yaml init" not in text


def test_a_head_that_is_no_part_of_the_encoder_makes_no_classifier():
    text = card(facts("supervised_demo", "model.head=mlp", classes=["a", "b"]))
    assert front(text)["pipeline_tag"] == "image-feature-extraction" and "Classes:" not in text


def test_a_resnet_is_not_called_a_transformer():
    assert "vision-transformer" not in front(card(facts("supervised_demo_resnet")))["tags"]
    assert "vision-transformer" in front(card(facts("supervised_demo_hybrid")))["tags"]


def test_without_a_licence_the_card_says_that_it_is_not_known():
    text = card(facts(license=None))
    assert front(text)["license"] == "unknown" and "Not stated: ask" in text
    assert "## Licence\n\n`apache-2.0`\n" in card(facts())


@pytest.mark.parametrize(
    ("init", "base"),
    [
        ("scratch", None),
        ("hf-hub:org/other", "org/other"),
        ("hf-hub:org/other@v1", "org/other"),
        ("timm:vit_tiny_patch16_224.augreg_in21k", "timm/vit_tiny_patch16_224.augreg_in21k"),
        ("/home/anna/runs/first", None),
    ],
)
def test_the_base_model_is_named_where_it_lies_on_the_hub(init, base):
    recipe = facts("mpp_demo", f"init={init}")
    assert front(card(recipe)).get("base_model") == base
    assert public(recipe.recipe).init == ("…/first" if "home" in init else init)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("demo", "demo"),
        ("synthetic:64", "synthetic:64"),
        ("folder:/home/anna/secret/photos", "folder:…/photos"),
        ("folder:/home/anna/secret/photos/", "folder:…/photos"),
        ("folder:~/photos", "folder:…/photos"),
        ("folder:C:\\Users\\anna\\photos", "folder:…/photos"),
        ("folder:secret/photos", "folder:…/photos"),
        ("folder:/", "folder:…"),
        ("folder:~", "folder:…"),
        ("list:/home/anna/vtab", "list:…/vtab"),
        ("parquet:/home/anna/train-*.parquet", "parquet:…/train-*.parquet"),
        ("wds:file:///home/anna/a.tar", "wds:…/a.tar"),
        ("wds:zip://*.tar::/home/anna/all.zip", "wds:…/all.zip"),
        ("wds:s3://bucket/anna/part-?.tar", "wds:s3://bucket/anna/part-?.tar"),
        ("wds:https://example.org/a.tar?X-Amz-Signature=abc", "wds:https://example.org/a.tar"),
        ("hub:org/name", "hub:org/name"),
        ("hub:org/name@refs/convert/parquet", "hub:org/name@refs/convert/parquet"),
        ("hub:/home/anna/secret@x/copy", "hub:…/copy"),
        ("hub:~/copy", "hub:…/copy"),
        ("hub:./copy", "hub:…/copy"),
    ],
)
def test_of_a_place_on_this_machine_only_the_last_part_is_told(source, shown):
    recipe = facts("finetune_demo", "data.source=demo", results=[result(source, "accuracy", 0.5)])
    data = dataclasses.replace(recipe.recipe.data, source=source)
    probe = dataclasses.replace(recipe.recipe.probe, source=source)
    whole = dataclasses.replace(recipe.recipe, data=data, probe=probe, tests={"other": source, "imagenet_real": None})
    told = public(whole)
    assert (told.data.source, told.probe.source) == (shown, shown)
    assert told.tests == {"other": shown, "imagenet_real": None}
    assert public(told) == told
    text = card(dataclasses.replace(recipe, recipe=whole))
    assert not re.search(r"/home|secret|Users|~|X-Amz", text)
    assert front(text).get("datasets") == (["org/name"] if "org/name" in source else None)


def test_a_copy_on_this_machine_is_not_taken_for_a_data_set_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    text = card(facts("mpp_demo", "data.source=hub:org/name"))
    assert "datasets" not in front(text) and "hub:…/name" in text


def test_a_published_recipe_pushes_nowhere_and_can_be_loaded_again(tmp_path):
    overrides = ["data.source=folder:/home/anna/photos", "runtime.push_to_hub=org/name", "runtime.push_private=true"]
    recipe = facts("mpp_demo", *overrides, "finetune=/home/anna/mine.yaml", "init=runs/first").recipe
    told = public(recipe)
    assert (told.runtime.push_to_hub, told.runtime.push_private, told.finetune) == (None, False, "…/mine.yaml")
    (block,) = blocks(card(facts(recipe=recipe)), "yaml")
    assert "source: folder:…/photos" in block
    for text in (block, config.to_yaml(told)):
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        assert config.load_run(str(tmp_path / "recipe.yaml"))[0] == told
    assert public(facts().recipe) == facts().recipe


def test_the_commands_repeat_the_run_with_paths_to_fill_in(tmp_path):
    overrides = ["data.source=folder:/home/anna/photos", "init=/home/anna/first", "finetune=/home/anna/mine.yaml"]
    text = card(facts("mpp_demo", *overrides, revision="v1"))
    *_, go_on, repeat = blocks(text, "bash")
    assert shlex.split(go_on) == [
        *("accelerate", "launch", "mpp/pretrain.py", "--recipe", "recipe.yaml", "init=hf-hub:org/name@v1"),
        "data.source=folder:PATH",
    ]
    fetch, run = repeat.strip().splitlines()
    assert fetch == "hf download org/name recipe.yaml --local-dir . --revision v1"
    assert run == "accelerate launch mpp/pretrain.py --recipe recipe.yaml data.source=folder:PATH init=PATH"
    (tmp_path / "recipe.yaml").write_text(blocks(text, "yaml")[0], encoding="utf-8")
    filled = config.load_run(str(tmp_path / "recipe.yaml"), shlex.split(run)[-2:])[0]
    assert (filled.data.source, filled.init) == ("folder:PATH", "PATH")
    assert "--recipe RECIPE init=hf-hub:org/name@v1" in text
    assert card(facts()).count("PATH") == 2  # of the two commands with own images


@pytest.mark.parametrize(("recipe", "named"), [("mpp_demo", "finetune_demo"), ("finetune_demo", "recipe.yaml")])
def test_the_commands_name_the_fine_tuning_that_fits(recipe, named):
    first, *_, last = blocks(card(facts(recipe)), "bash")
    assert first.strip() == f"python eval/finetune.py --recipe {named} init=hf-hub:org/name data.source=folder:PATH"
    door = "python eval/finetune.py" if recipe == "finetune_demo" else "accelerate launch mpp/pretrain.py"
    assert last.strip().splitlines()[1] == f"{door} --recipe recipe.yaml"


def test_python_blocks_compile_and_name_the_revision():
    for revision, classes in itertools.product((None, "v1"), (None, ["a"])):
        found = blocks(card(facts("supervised_demo", revision=revision, classes=classes)), "python")
        assert len(found) == 2
        for code in found:
            compile(code, "card", "exec")
        assert f'timm.create_model("hf-hub:org/name{"@v1" if revision else ""}", pretrained=True)' in found[0]
        task = "image-classification" if classes else "image-feature-extraction"
        assert (
            f'pipeline("{task}", model="org/name"{", revision=" + chr(34) + "v1" + chr(34) if revision else ""})'
            in (found[1])
        )


@pytest.mark.parametrize(("classes", "comment"), [(None, "features [1, width]"), (["a", "b"], "logits [1, class]")])
def test_the_timm_block_runs_on_a_checkpoint_of_this_package(tmp_path, monkeypatch, classes, comment):
    encoder = build_encoder(
        name="vit_tiny_patch16_224", image_size=32, classes=len(classes or []), patch_size=8, embed_dim=48, depth=1,
        num_heads=3,
    )  # fmt: skip
    save_for_hf(encoder, str(tmp_path), safe_serialization=True)
    picture(size=(50, 40)).save(tmp_path / "image.jpg")
    monkeypatch.chdir(tmp_path)
    code = blocks(card(facts("supervised_demo", classes=classes)), "python")[0]
    assert comment in code
    found = {}
    with torch.no_grad():
        exec(code.replace("hf-hub:org/name", f"local-dir:{tmp_path}"), found)
    assert found["output"].shape == (1, 2 if classes else 48)
    assert timm.is_model(encoder.default_cfg["architecture"])


def test_a_model_that_timm_cannot_express_is_not_offered_to_it():
    text = card(facts(timm_opens=False))
    assert front(text)["library_name"] == "mpp-vit" and "timm" not in front(text)["tags"]
    assert blocks(text, "python") == [] and "timm can't express this model" in text
    assert "init=hf-hub:org/name" in text


def test_names_with_marks_of_markdown_and_yaml_stay_names():
    recipe = facts("finetune_demo", classes=[NASTY, "two\nlines", "\ud800\u202ehalf", ""]).recipe
    data = dataclasses.replace(
        recipe.data, source=f"folder:/x/{NASTY}".replace("/script", "script"), eval_split="a\n---\nb"
    )
    results = [result(NASTY.replace("/script", "script"), "accuracy", 0.5)]
    text = card(
        facts(
            "finetune_demo",
            recipe=dataclasses.replace(recipe, data=data),
            results=results,
            classes=[NASTY, "two\nlines", "\ud800\u202ehalf", ""],
            devices=NASTY,
            seconds=1.0,
            license="<b>`x`</b>",
            pixels={"interpolation": NASTY},
        )
    )
    text.encode()
    (one,) = ModelCard(text).data.eval_results
    assert one.metric_value == 0.5 and one.dataset_split == "a --- b"
    page = html(text)
    assert "<script" not in page and "<b>" not in page and 'href="https://evil' not in page and "<img" not in page
    assert page.count("<h2>") == 8 and "<em>" not in page
    assert "two lines" in page and "\u202e" not in text
    for row in re.findall(r"<tr>.*?</tr>", page, re.S):
        assert len(re.findall("<t[hd]", row)) in (2, 4)


LETTERS = st.text(st.sampled_from("ab|`\\*_<>[]()!&#~:-'\"{}\n\t é\u202e\ud800"), max_size=15)


@settings(max_examples=30)
@given(LETTERS)
@example("a\\|b")
@example("``")
@example("\\")
def test_any_class_name_is_read_back_as_code_and_nothing_else(name):
    text = card(facts("finetune_demo", classes=[name, "last"]))
    (line,) = [line for line in text.splitlines() if line.startswith("Classes: ")]
    (paragraph,) = [token for token in MarkdownIt("commonmark").parse(line) if token.type == "inline"]
    kinds = [child.type for child in paragraph.children]
    shown = "".join(letter if letter.isprintable() else " " for letter in name)
    expected = " ".join(shown.split()).replace("\\|", "\\¦")
    if expected:
        assert kinds == ["text", "code_inline", "text", "code_inline", "text"]
        assert paragraph.children[1].content == expected
    assert ModelCard(text).data.pipeline_tag == "image-classification"


def test_a_recipe_cannot_end_its_own_block():
    recipe = facts("mpp_demo", f"init=/x/{'a' * 90} ```").recipe
    (block,) = blocks(card(facts(recipe=recipe)), "yaml")
    assert yaml.safe_load(block) == yaml.safe_load(config.to_yaml(public(recipe)))


def test_probes_are_told_under_the_data_that_they_looked_at():
    text = card(facts("mpp_demo", "probe.source=hub:org/labelled", "probe.test_split=test"))
    assert ModelCard(text).data.datasets is None
    told = {(one.dataset_type, one.dataset_split, one.task_type) for one in ModelCard(text).data.eval_results}
    assert told == {
        ("demo", "validation", "image-feature-extraction"),
        ("org/labelled", "test", "image-classification"),
    }


def test_every_combination_loads():
    numbers = ({}, NUMBERS, {"held_out_loss": math.inf})
    for recipe in ("mpp_demo", "supervised_demo", "finetune_demo"):
        usual = facts(recipe)
        results = ([], [result("demo", "accuracy", 0.5)]) if usual.kind == "finetune" else ([],)
        for record, scored, classes, opens, license_name in itertools.product(
            numbers, results, (None, ["a"]), (True, False), (None, "mit")
        ):
            text = card(
                dataclasses.replace(
                    usual, numbers=record, results=scored, classes=classes, timm_opens=opens, license=license_name
                )
            )
            loaded = ModelCard(text)
            assert loaded.data.license == (license_name or "unknown")
            assert yaml.safe_load(loaded.data.to_yaml()) == front(text)
            assert all(math.isfinite(one.metric_value) for one in loaded.data.eval_results or [])
            assert text.endswith("\n") and "None" not in text and "\n\n\n" not in text


def test_a_recipe_with_a_token_comes_to_no_card():
    with pytest.raises(UserError, match="access token"):
        facts("mpp_demo", "data.source=folder:/x/hf_abcdefghijklmnopqrstuvwxyz")
    whole = facts().recipe
    source = "wds:https://anna:password1@example.org/a.tar?token=hf_abcdefghijklmnopqrst"
    text = card(facts(recipe=dataclasses.replace(whole, data=dataclasses.replace(whole.data, source=source))))
    assert "password1" not in text and "hf_abc" not in text and "example.org/a.tar" in text
