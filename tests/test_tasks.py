"""mpp/tasks.py against a second copy of the published numbers, and the recipes that its overrides make."""

import re
from pathlib import Path

import pytest

from mpp import config, tasks
from mpp.errors import UserError

ROOT = Path(__file__).resolve().parents[1]

# Classes and images: train, choice, test. ImageNet: Russakovsky et al. 2015; CIFAR: Krizhevsky 2009; Pets: Parkhi et
# al. 2012; Flowers: Nilsback and Zisserman 2008, whose training and validation sets have 10 images a class each.
SIZES = {
    "imagenet": (1000, 1281167, 0, 50000),
    "cifar10": (10, 50000, 0, 10000),
    "cifar100": (100, 50000, 0, 10000),
    "oxford_pets": (37, 3680, 0, 3669),
    "oxford_flowers": (102, 10 * 102, 10 * 102, 6149),
}
# VTAB-1k: classes and test images, where they come from a share of a data set as that share.
VTAB = {
    "caltech101": (102, 6084),
    "cifar100": (100, 10000),
    "dtd": (47, 47 * 40),
    "flowers102": (102, 6149),
    "pets": (37, 3669),
    "sun397": (397, 21750),
    "svhn": (10, 26032),
    "camelyon": (2, 2**15),
    "eurosat": (10, 27000 // 5),
    "resisc45": (45, 45 * 700 // 5),
    "retinopathy": (5, 42670),
    "clevr_count": (8, 15000),
    "clevr_distance": (6, 15000),
    "dmlab": (6, 22735),
    "dsprites_location": (16, 3 * 6 * 40 * 32 * 32 // 10),
    "dsprites_orientation": (16, 3 * 6 * 40 * 32 * 32 // 10),
    "kitti_distance": (4, 711),
    "smallnorb_azimuth": (18, 24300 // 2),
    "smallnorb_elevation": (9, 24300 // 2),
}
# BiT, appendix F.
NO_FLIP = {"dsprites_orientation", "smallnorb_azimuth", "dsprites_location"}
NO_CUT = {"clevr_count", "clevr_distance", "dmlab", "kitti_distance", "dsprites_location"}
# ViT paper, Table 9, in per cent: H/14 and L/16 after JFT, L/16 after ImageNet-21k.
TABLE_9 = {
    "caltech101": (95.3, 95.4, 90.8), "cifar100": (85.5, 81.9, 84.1), "dtd": (75.2, 74.3, 74.1),
    "flowers102": (99.7, 99.7, 99.3), "pets": (97.2, 96.7, 92.7), "sun397": (65.0, 63.5, 61.0),
    "svhn": (88.9, 87.4, 80.9), "camelyon": (83.3, 83.6, 82.5), "eurosat": (96.7, 96.5, 95.6),
    "resisc45": (91.4, 89.7, 85.2), "retinopathy": (76.6, 77.1, 75.3), "clevr_count": (91.7, 86.4, 70.3),
    "clevr_distance": (63.8, 63.1, 56.1), "dmlab": (53.1, 49.7, 41.9), "dsprites_location": (79.4, 74.5, 74.7),
    "dsprites_orientation": (63.3, 60.5, 64.9), "kitti_distance": (84.5, 82.2, 79.9),
    "smallnorb_azimuth": (33.2, 36.2, 30.5), "smallnorb_elevation": (51.2, 51.1, 41.7),
}  # fmt: skip
# The layout in which VTAB-1k is handed around (NOAH's data/vtab-source/get_vtab1k.py).
FOLDERS = {
    "caltech101", "cifar", "dtd", "oxford_flowers102", "oxford_iiit_pet", "patch_camelyon", "sun397", "svhn",
    "resisc45", "eurosat", "dmlab", "kitti", "smallnorb_azi", "smallnorb_ele", "dsprites_loc", "dsprites_ori",
    "clevr_dist", "clevr_count", "diabetic_retinopathy",
}  # fmt: skip


def names(group):
    return [name for name, task in tasks.TASKS.items() if task.group == group]


def settings(overrides):
    return dict(override.removeprefix("data.").split("=", 1) for override in overrides)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_the_published_ones(name):
    task = tasks.TASKS[name]
    assert (task.classes, task.train_images, task.choice_images, task.test_images) == SIZES[name]
    assert bool(task.choice_images) == (task.choice_split is not None)


@pytest.mark.parametrize("name", VTAB)
def test_a_task_of_vtab_has_1000_training_images_and_the_published_test_set(name):
    task = tasks.TASKS[f"vtab/{name}"]
    assert (task.classes, task.test_images) == VTAB[name]
    assert (task.train_split, task.choice_split, task.test_split) == ("train800", "val200", "test")
    assert (task.train_images, task.choice_images) == (800, 200)
    assert (task.flip, task.cuts) == (name not in NO_FLIP, name not in NO_CUT)
    assert task.crop == "square" and task.hub is None


def test_there_are_no_other_tasks_and_the_groups_are_those_of_table_9():
    assert list(tasks.TASKS) == [*SIZES, *[f"vtab/{name}" for name in VTAB]]
    assert [len(names(group)) for group in tasks.VTAB_GROUPS] == [7, 4, 8]
    order = [name for group in tasks.VTAB_GROUPS for name in names(group)]
    assert order == [f"vtab/{name}" for name in TABLE_9]
    assert names("imagenet") == ["imagenet"] and len(names("transfer")) == 4
    assert all(name == task.name for name, task in tasks.TASKS.items())


def test_each_task_of_vtab_has_one_folder_of_the_lists():
    found = [task.folder for task in tasks.TASKS.values() if task.folder]
    assert len(found) == 19 and set(found) == FOLDERS
    for name, folder in [
        ("cifar100", "cifar"),
        ("clevr_distance", "clevr_dist"),
        ("smallnorb_azimuth", "smallnorb_azi"),
    ]:
        assert tasks.TASKS[f"vtab/{name}"].folder == folder
    for name in ("clevr_count", "dsprites_location", "dsprites_orientation", "smallnorb_elevation", "kitti_distance"):
        folder = tasks.TASKS[f"vtab/{name}"].folder
        assert all(there.startswith(here) for here, there in zip(folder.split("_"), name.split("_"), strict=False))


@pytest.mark.parametrize(
    ("model", "mean", "groups"),
    [(0, 77.6, (86.69, 87.00, 65.03)), (1, 76.3, (85.56, 86.72, 62.96)), (2, 72.7, (83.27, 84.65, 57.50))],
)
def test_group_means_are_those_of_table_9(model, mean, groups):
    found = tasks.group_means({f"vtab/{name}": row[model] for name, row in TABLE_9.items()} | {"cifar10": 99.0})
    assert list(found) == ["natural", "specialized", "structured", "mean"]
    assert round(found.pop("mean"), 1) == mean
    assert tuple(found.values()) == pytest.approx(groups, abs=0.005)


def test_a_mean_of_fewer_tasks_is_no_mean():
    values = {f"vtab/{name}": row[0] for name, row in TABLE_9.items()}
    del values["vtab/dmlab"]
    assert set(tasks.group_means(values)) == {"natural", "specialized"}
    assert tasks.group_means({"imagenet": 88.55, "cifar100": 94.55}) == {}


def test_overrides_of_a_task_with_a_holdout():
    assert tasks.overrides("cifar100", None, 384) == [
        "data.task=cifar100",
        "data.source=hub:uoft-cs/cifar100",
        "data.train_split=train",
        "data.choice_split=null",
        "data.eval_split=test",
        "data.label_column=fine_label",
        "data.crop=inception",
        "data.flip=true",
        "data.eval_crop=whole",
        "data.resize=null",
        "data.holdout=0.02",
    ]
    shares = {name: settings(tasks.overrides(name, None, 384)).get("holdout") for name in SIZES}
    assert shares == {  # B.1.1
        "imagenet": "0.01", "cifar10": "0.02", "cifar100": "0.02", "oxford_pets": "0.1", "oxford_flowers": None
    }  # fmt: skip
    assert "data.choice_split=validation" in tasks.overrides("oxford_flowers", None, 384)


def test_columns_are_named_only_where_there_are_any():
    for source, column in [("folder:/data", "null"), ("list:/data", "null"), ("hub:/data", "label")]:
        assert settings(tasks.overrides("oxford_pets", source, 224))["label_column"] == column
        assert settings(tasks.overrides("oxford_pets", source, 224))["source"] == source


@pytest.mark.parametrize(("image_size", "resize"), [(384, 448), (224, 261), (96, 112), (36, 42)])
def test_vtab_is_cut_in_the_ratio_of_bit_unless_the_label_forbids_it(image_size, resize):
    for name in VTAB:
        found = settings(tasks.overrides(f"vtab/{name}", "list:/data", image_size))
        assert found["flip"] == ("false" if name in NO_FLIP else "true")
        assert found["resize"] == str(image_size if name in NO_CUT else resize)
        spoiled = name in NO_FLIP | NO_CUT
        assert (found.get("rand_augment"), found.get("erasing")) == (("null", "0.0") if spoiled else (None, None))


@pytest.mark.parametrize("recipe", ["finetune_b16", "finetune_vtab", "finetune_mae_b16", "finetune_r50x1_bit"])
@pytest.mark.parametrize("image_size", [32, 384])
def test_every_recipe_stays_valid_on_every_task(recipe, image_size):
    for name, task in tasks.TASKS.items():
        chosen = tasks.overrides(name, "list:/data/some set", image_size)
        found, _ = config.load_run(recipe, [*chosen, f"data.image_size={image_size}"])
        data = found.data
        assert (data.task, data.source, data.choice_split) == (name, "list:/data/some set", task.choice_split)
        assert (data.train_split, data.eval_split) == (task.train_split, task.test_split)
        assert (data.crop, data.flip, data.eval_crop) == (task.crop, task.flip, "whole")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dsprites_location", "did you mean vtab/dsprites_location?"),
        ("dtd", "did you mean vtab/dtd?"),
        ("imagnet", "did you mean imagenet?"),
        ("vtab/clevr_distence", "did you mean vtab/clevr_distance?"),
        ("zzz", "no such task. There are imagenet, cifar10,"),
    ],
)
def test_an_unknown_task_is_refused_with_the_nearest_name_and_all_of_them(name, words):
    with pytest.raises(UserError) as refusal:
        tasks.overrides(name, None, 384)
    assert f"data.task={name}: no such task" in str(refusal.value) and words in str(refusal.value)
    assert all(task in str(refusal.value) for task in tasks.TASKS)


def test_a_task_that_the_hub_does_not_have_needs_a_source():
    with pytest.raises(UserError, match=r"vtab/cifar100 has no data set on the hub; .*list:/data/vtab-1k/cifar "):
        tasks.overrides("vtab/cifar100", None, 384)


def test_the_table_in_the_docs_says_the_same():
    def number(text):
        return int(text.replace(",", "") or 0)

    rows = [line.strip("| ").split(" | ") for line in (ROOT / "docs" / "tasks.md").read_text().splitlines()]
    rows = {row[0].strip("`"): row for row in rows if re.fullmatch(r"`[a-z0-9_/]+`", row[0]) and len(row) == 8}
    assert list(rows) == list(tasks.TASKS)
    for name, task in tasks.TASKS.items():
        _, group, classes, train, choice, test, preprocessing, where = rows[name]
        splits = [
            task.train_split,
            task.choice_split or f"{task.holdout:.0%} of it".replace("%", " %"),
            task.test_split,
        ]
        assert (group, number(classes)) == (task.group, task.classes)
        counts = [task.train_images, task.choice_images, task.test_images]
        for cell, split, count in zip((train, choice, test), splits, counts, strict=True):
            assert cell == (f"{split}: {count:,}" if count else split)
        whole = {True: "square, cut", False: "square"}[task.cuts] if task.crop == "square" else "inception"
        assert preprocessing == whole + (", flip" if task.flip else "")
        assert where.strip("`") == (task.hub or task.folder)
