"""The labelled data sets that the ViT paper fine-tunes on: their splits, sizes and preprocessing."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from mpp.errors import UserError

VTAB_GROUPS = ("natural", "specialized", "structured")


@dataclass(frozen=True)
class Task:
    """One data set, as published.

    Attributes:
        name: in recipes.
        group: of the ViT paper's Tables 5 (imagenet, transfer) and 9 (the three groups of VTAB-1k).
        title: in the paper's tables.
        hub: the data set on the Hugging Face hub; None where it has none in these splits.
        folder: of VTAB-1k in lists of files, as it is handed around; None for the others.
        train_split, test_split: the names of the splits.
        choice_split: on which the learning rate is chosen, and trained at the end; None for a share of `train_split`.
        train_images, choice_images, test_images: in each split; 0 where there is none.
        holdout: the share of the training split on which the rate is chosen where `choice_split` is None.
        classes: number of them; chance is 1 / classes.
        label_column: in `hub`; None where only one can be meant.
        crop: of training.
        flip: False where mirroring an image would change its label.
        cuts: False where cutting an image would change its label.
    """

    name: str
    group: Literal["imagenet", "transfer", "natural", "specialized", "structured"]
    title: str
    hub: str | None
    folder: str | None
    train_split: str
    choice_split: str | None
    test_split: str
    train_images: int
    choice_images: int
    test_images: int
    holdout: float
    classes: int
    label_column: str | None = None
    crop: Literal["inception", "square"] = "inception"
    flip: bool = True
    cuts: bool = True
    metric: Literal["accuracy"] = "accuracy"


def _vtab(
    name: str,
    folder: str,
    group: Literal["natural", "specialized", "structured"],
    title: str,
    classes: int,
    test_images: int,
    flip: bool = True,
    cuts: bool = True,
) -> Task:
    splits, counts = ("train800", "val200", "test"), (800, 200, test_images)
    return Task(f"vtab/{name}", group, title, None, folder, *splits, *counts, 0.0, classes, None, "square", flip, cuts)


# Sizes and held-out shares: B.1.1 and the data sets' own pages; of VTAB, google-research/task_adaptation, whose
# splits the paper takes. Which VTAB labels a flip or a cut would change: BiT (arXiv 1912.11370), appendix F.
_ROWS = (
    Task("imagenet", "imagenet", "ImageNet", "ILSVRC/imagenet-1k", None,
         "train", None, "validation", 1_281_167, 0, 50_000, 0.01, 1000),
    Task("cifar10", "transfer", "CIFAR-10", "uoft-cs/cifar10", None,
         "train", None, "test", 50_000, 0, 10_000, 0.02, 10),
    Task("cifar100", "transfer", "CIFAR-100", "uoft-cs/cifar100", None,
         "train", None, "test", 50_000, 0, 10_000, 0.02, 100, "fine_label"),
    Task("oxford_pets", "transfer", "Oxford-IIIT Pets", "timm/oxford-iiit-pet", None,
         "train", None, "test", 3_680, 0, 3_669, 0.1, 37, "label"),
    Task("oxford_flowers", "transfer", "Oxford Flowers-102", "dpdl-benchmark/oxford_flowers102", None,
         "train", "validation", "test", 1_020, 1_020, 6_149, 0.0, 102),
    _vtab("caltech101", "caltech101", "natural", "Caltech101", 102, 6_084),
    _vtab("cifar100", "cifar", "natural", "CIFAR-100", 100, 10_000),
    _vtab("dtd", "dtd", "natural", "DTD", 47, 1_880),
    _vtab("flowers102", "oxford_flowers102", "natural", "Flowers102", 102, 6_149),
    _vtab("pets", "oxford_iiit_pet", "natural", "Pets", 37, 3_669),
    _vtab("sun397", "sun397", "natural", "Sun397", 397, 21_750),
    _vtab("svhn", "svhn", "natural", "SVHN", 10, 26_032),
    _vtab("camelyon", "patch_camelyon", "specialized", "Camelyon", 2, 32_768),
    _vtab("eurosat", "eurosat", "specialized", "EuroSAT", 10, 5_400),
    _vtab("resisc45", "resisc45", "specialized", "Resisc45", 45, 6_300),
    _vtab("retinopathy", "diabetic_retinopathy", "specialized", "Retinopathy", 5, 42_670),
    _vtab("clevr_count", "clevr_count", "structured", "Clevr-Count", 8, 15_000, cuts=False),
    _vtab("clevr_distance", "clevr_dist", "structured", "Clevr-Dist", 6, 15_000, cuts=False),
    _vtab("dmlab", "dmlab", "structured", "DMLab", 6, 22_735, cuts=False),
    _vtab("dsprites_location", "dsprites_loc", "structured", "dSpr-Loc", 16, 73_728, flip=False, cuts=False),
    _vtab("dsprites_orientation", "dsprites_ori", "structured", "dSpr-Ori", 16, 73_728, flip=False),
    _vtab("kitti_distance", "kitti", "structured", "KITTI-Dist", 4, 711, cuts=False),
    _vtab("smallnorb_azimuth", "smallnorb_azi", "structured", "sNORB-Azim", 18, 12_150, flip=False),
    _vtab("smallnorb_elevation", "smallnorb_ele", "structured", "sNORB-Elev", 9, 12_150),
)  # fmt: skip
TASKS: dict[str, Task] = {task.name: task for task in _ROWS}


def find(name: str) -> Task:
    """A task by its name; raises UserError with the nearest name and all of them."""
    if name in TASKS:
        return TASKS[name]
    nearest = [task for task in TASKS if task.endswith(f"/{name}")] or difflib.get_close_matches(name, TASKS, 1)
    hint = f"; did you mean {nearest[0]}?" if nearest else "."
    raise UserError(f"data.task={name}: no such task{hint} There are {', '.join(TASKS)}")


def overrides(name: str, source: str | None, image_size: int) -> list[str]:
    """What turns a fine-tuning recipe into one on a task.

    VTAB's images are stretched to a square of 7/6 of the image size and cut at random, as BiT cuts 384 out of 448;
    where a cut would change the label, they are stretched to the image size itself.

    Args:
        name: of a task.
        source: value of `data.source`; None for the hub's data set.
        image_size: side in pixels, `data.image_size` of the recipe.

    Returns:
        `key=value` of `data`: task, source, splits, label column, and preprocessing; the rest is the recipe's.

    Raises:
        UserError: no such task, or no data set of it on the hub.

    Source: ViT paper, B.1.1; BiT (arXiv 1912.11370), section 3.3 and appendix F.
    """
    task = find(name)
    if source is None and task.hub is None:
        raise UserError(
            f"data.task={name} has no data set on the hub; give data.source=list:/data/vtab-1k/{task.folder} "
            "(docs/tasks.md says how to lay it out)"
        )
    source = source or f"hub:{task.hub}"
    has_columns = source.split(":")[0] in ("hub", "parquet")
    chosen = [
        f"data.task={name}",
        f"data.source={source}",
        f"data.train_split={task.train_split}",
        f"data.choice_split={task.choice_split or 'null'}",
        f"data.eval_split={task.test_split}",
        f"data.label_column={task.label_column if has_columns and task.label_column else 'null'}",
        f"data.crop={task.crop}",
        f"data.flip={str(task.flip).lower()}",
        "data.eval_crop=whole",
        f"data.resize={_resize(task, image_size)}",
    ]
    if task.choice_split is None:
        chosen.append(f"data.holdout={task.holdout}")
    if not (task.flip and task.cuts):  # RandAugment turns, shears and shifts, and erasing hides what is asked for
        chosen += ["data.rand_augment=null", "data.erasing=0.0"]
    return chosen


def _resize(task: Task, image_size: int) -> int | str:
    if task.crop == "inception":
        return "null"
    return round(image_size * 7 / 6) if task.cuts else image_size


def group_means(values: Mapping[str, float]) -> dict[str, float]:
    """Mean over VTAB-1k and over each of its groups, each task weighing the same.

    Args:
        values: name of a task -> its figure; tasks that are not VTAB's are left out.

    Returns:
        natural, specialized, structured, and mean (over all 19); without those of which any task is missing, for a
        mean of fewer tasks is another measure.

    Source: ViT paper, Figure 2 and Table 9.
    """
    groups = {group: [task.name for task in _ROWS if task.group == group] for group in VTAB_GROUPS}
    groups["mean"] = [name for names in groups.values() for name in names]
    return {
        group: fmean(values[name] for name in names)
        for group, names in groups.items()
        if all(name in values for name in names)
    }
